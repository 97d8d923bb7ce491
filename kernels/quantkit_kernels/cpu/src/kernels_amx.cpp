// The kernels for AVX-512 with VNNI and AMX tiles of int8.
#include "simd_avx512.h"
//
#define QK_BASE kAvx512Kernels
#include "kernels.inl"

extern const KernelSet kAmxKernels = kKernels;
