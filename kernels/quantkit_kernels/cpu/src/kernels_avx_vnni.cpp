// The kernels for AVX2 with 256-bit VNNI.
#include "simd_avx2.h"
//
#define QK_BASE kAvx2Kernels
#include "kernels.inl"

extern const KernelSet kAvxVnniKernels = kKernels;
