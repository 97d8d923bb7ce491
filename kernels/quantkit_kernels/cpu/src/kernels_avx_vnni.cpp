// The kernels for AVX2 with 256-bit VNNI.
#include "simd_avx2.h"
//
#include "kernels.inl"

extern const KernelSet kAvxVnniKernels = kKernels;
