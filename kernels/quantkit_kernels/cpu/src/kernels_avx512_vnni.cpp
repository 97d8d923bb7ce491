// The kernels for AVX-512 with VNNI.
#include "simd_avx512.h"
//
#define QK_BASE kAvx512Kernels
#include "kernels.inl"

extern const KernelSet kAvx512VnniKernels = kKernels;
