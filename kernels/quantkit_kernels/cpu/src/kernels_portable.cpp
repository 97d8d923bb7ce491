// The kernels without any instruction-set flag.
#include "simd_portable.h"
//
#include "kernels.inl"

extern const KernelSet kPortableKernels = kKernels;
