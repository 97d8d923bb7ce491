// The kernels for AVX-512 F, BW, DQ and VL.
#include "simd_avx512.h"
//
#include "kernels.inl"

extern const KernelSet kAvx512Kernels = kKernels;
