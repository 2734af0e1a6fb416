#define LONGSHORE_KERNEL_TABLE kAvx512Kernels
#include "kernels.inl"
