#define LONGSHORE_KERNEL_TABLE kBaselineKernels
#include "kernels.inl"
