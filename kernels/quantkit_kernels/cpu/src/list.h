// Shared by what runs kernels: lists, samplers and benchmarks.
#pragma once
#include <string>

#include "kernels.h"

// The kernels of one instruction set (a bit of qk_isa_mask()), null where it cannot run here.
const KernelSet* kernels_of(int32_t isa);

extern thread_local std::string last_error;  // see qk_last_error()
