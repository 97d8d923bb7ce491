// Packed weights. A panel holds kPanel = 32 output rows; inside it the input channels follow one another, so that
// a kernel adds products to 32 accumulators in channel order and a row's bits depend on nothing else.
//   kF32, kF16, kBF16, kI8:  [panel][k][32]
//   kI4:  [panel][group][ceil(group_size / 8)][32] words of 32 bits; nibble i of a word is channel 8·j + i of that
//         output row, stored as code + 8 (0..15). The tail of a group and of the last panel is zero codes.
#include <cstring>

#include "args.h"

static int64_t element_bytes(int32_t dtype) { return dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

QK_API int64_t qk_packed_bytes(int32_t dtype, int64_t n, int64_t k, int64_t groups) {
    const int64_t panels = (n + kPanel - 1) / kPanel;
    if (dtype == kI4) return panels * groups * ((k / groups + 7) / 8) * kPanel * 4;
    return panels * k * kPanel * element_bytes(dtype);
}

template <class T>
static void pack_rows(const T* weight, int64_t n, int64_t k, T* packed) {
    for (int64_t row0 = 0; row0 < n; row0 += kPanel) {
        const int64_t rows = n - row0 < kPanel ? n - row0 : kPanel;
        T* panel = packed + row0 * k;
        if (rows < kPanel) std::memset(panel, 0, sizeof(T) * k * kPanel);
        constexpr int64_t kBlock = 64;  // keeps both sides of the transposition in cache
        for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
            const int64_t k1 = k0 + kBlock < k ? k0 + kBlock : k;
            for (int64_t r = 0; r < rows; ++r) {
                const T* source = weight + (row0 + r) * k;
                for (int64_t c = k0; c < k1; ++c) panel[c * kPanel + r] = source[c];
            }
        }
    }
}

static void pack_nibbles(const int8_t* codes, int64_t n, int64_t k, int64_t groups, uint32_t* packed) {
    const int64_t group = k / groups, words = (group + 7) / 8;
    const int64_t panels = (n + kPanel - 1) / kPanel;
    for (int64_t p = 0; p < panels; ++p) {
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t w = 0; w < words; ++w) {
                uint32_t* out = packed + ((p * groups + g) * words + w) * kPanel;
                for (int64_t r = 0; r < kPanel; ++r) {
                    uint32_t word = 0x88888888u;
                    const int64_t row = p * kPanel + r;
                    if (row < n) {
                        const int64_t count = group - w * 8 < 8 ? group - w * 8 : 8;
                        const int8_t* source = codes + row * k + g * group + w * 8;
                        for (int64_t i = 0; i < count; ++i) {
                            word &= ~(15u << (4 * i));
                            word |= static_cast<uint32_t>((source[i] + 8) & 15) << (4 * i);
                        }
                    }
                    out[r] = word;
                }
            }
        }
    }
}

QK_API void qk_pack(int32_t dtype, const void* weight, int64_t n, int64_t k, int64_t groups, void* packed) {
    if (dtype == kI4) {
        pack_nibbles(static_cast<const int8_t*>(weight), n, k, groups, static_cast<uint32_t*>(packed));
    } else if (dtype == kI8) {
        pack_rows(static_cast<const int8_t*>(weight), n, k, static_cast<int8_t*>(packed));
    } else if (dtype == kF32) {
        pack_rows(static_cast<const float*>(weight), n, k, static_cast<float*>(packed));
    } else {
        pack_rows(static_cast<const uint16_t*>(weight), n, k, static_cast<uint16_t*>(packed));
    }
}
