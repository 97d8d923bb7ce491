// The kernels for Advanced SIMD, which every 64-bit Arm processor has.
#include "simd_neon.h"
//
#include "kernels.inl"

extern const KernelSet kNeonKernels = kKernels;
