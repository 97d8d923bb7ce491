// The kernels for AVX2, FMA and F16C.
#include "simd_avx2.h"
//
#include "kernels.inl"

extern const KernelSet kAvx2Kernels = kKernels;
