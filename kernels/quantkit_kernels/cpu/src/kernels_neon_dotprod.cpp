// The kernels for Advanced SIMD with the dot product of bytes.
#include "simd_neon.h"
//
#define QK_BASE kNeonKernels
#include "kernels.inl"

extern const KernelSet kNeonDotprodKernels = kKernels;
