// The kernels for Advanced SIMD with products of 2 by 8 and 8 by 2 bytes.
#include "simd_neon.h"
//
#define QK_BASE kNeonKernels
#include "kernels.inl"

extern const KernelSet kNeonI8mmKernels = kKernels;
