// Which instruction sets this processor has and its operating system has enabled.
#pragma once
#include <cstdint>

enum IsaBit : int32_t { kIsaPortable = 1, kIsaAvx2 = 2, kIsaAvx512 = 4 };

int32_t isa_mask();
