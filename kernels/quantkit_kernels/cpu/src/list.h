// Shared by what runs kernels: lists and benchmarks.
#pragma once
#include "kernels.h"

// The kernels of one instruction set (a bit of qk_isa_mask()), null where it cannot run here.
const KernelSet* kernels_of(int32_t isa);
