#define LONGSHORE_KERNEL_TABLE kAvx2Kernels
#include "kernels.inl"
