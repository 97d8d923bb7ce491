// Which instruction sets this processor has and its operating system has enabled.
#pragma once
#include <cstdint>

enum IsaBit : int32_t {
    kIsaPortable = 1,
    kIsaAvx2 = 2,
    kIsaAvx512 = 4,
    kIsaAvxVnni = 8,      // AVX2 with 256-bit VNNI
    kIsaAvx512Vnni = 16,  // AVX-512 with VNNI
    kIsaAmx = 32,         // the same and AMX tiles of int8
    kIsaNeon = 64,
    kIsaNeonDotprod = 128,  // with the dot product of bytes
    kIsaNeonI8mm = 256,     // and with products of 2 by 8 and 8 by 2 bytes
};

int32_t isa_mask();
