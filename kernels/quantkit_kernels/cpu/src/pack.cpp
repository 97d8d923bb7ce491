// Packed weights. A panel holds kPanel = 32 output rows; inside it the input channels follow one another, so that
// a kernel adds products to 32 accumulators in channel order and a row's bits depend on nothing else.
//   kF32, kF16, kBF16:  [panel][k][32]
//   kI8:  [panel][group][ceil(group_size / 4)][32] words of 32 bits; byte i of a word is channel 4·j + i of that row.
//   kI4:  [panel][group][ceil(group_size / 8)][32] words of 32 bits; the low nibble of byte i is channel 8·j + i, the
//         high one channel 8·j + 4 + i, stored as code + 8 (0..15).
// The tail of a group and of the last panel is zero codes. A word of four bytes is what integer dot products take.
#include <cstring>

#include "args.h"

static int64_t element_bytes(int32_t dtype) { return dtype == kF32 ? 4 : 2; }
static int64_t channels_per_word(int32_t dtype) { return dtype == kI4 ? 8 : 4; }

QK_API int64_t qk_packed_bytes(int32_t dtype, int64_t n, int64_t k, int64_t groups) {
    const int64_t panels = (n + kPanel - 1) / kPanel;
    if (dtype == kF32 || dtype == kF16 || dtype == kBF16) return panels * k * kPanel * element_bytes(dtype);
    const int64_t channels = channels_per_word(dtype);
    return panels * groups * ((k / groups + channels - 1) / channels) * kPanel * 4;
}

template <class T>
static void pack_rows(const T* weight, int64_t n, int64_t k, T* packed) {
    for (int64_t row0 = 0; row0 < n; row0 += kPanel) {
        const int64_t rows = n - row0 < kPanel ? n - row0 : kPanel;
        T* panel = packed + row0 * k;
        if (rows < kPanel) std::memset(panel, 0, sizeof(T) * k * kPanel);
        constexpr int64_t kTile = 64;  // keeps both sides of the transposition in cache
        for (int64_t k0 = 0; k0 < k; k0 += kTile) {
            const int64_t k1 = k0 + kTile < k ? k0 + kTile : k;
            for (int64_t r = 0; r < rows; ++r) {
                const T* source = weight + (row0 + r) * k;
                for (int64_t c = k0; c < k1; ++c) panel[c * kPanel + r] = source[c];
            }
        }
    }
}

// One word of codes: `count` channels from `source`, the rest zero codes.
static uint32_t word_of(int32_t dtype, const int8_t* source, int64_t count) {
    uint32_t word = dtype == kI4 ? 0x88888888u : 0u;
    for (int64_t i = 0; i < count; ++i) {
        if (dtype == kI4) {
            const int64_t shift = i < 4 ? 8 * i : 8 * (i - 4) + 4;
            word = (word & ~(15u << shift)) | static_cast<uint32_t>((source[i] + 8) & 15) << shift;
        } else {
            word |= static_cast<uint32_t>(static_cast<uint8_t>(source[i])) << (8 * i);
        }
    }
    return word;
}

static void pack_codes(int32_t dtype, const int8_t* codes, int64_t n, int64_t k, int64_t groups, uint32_t* packed) {
    const int64_t channels = channels_per_word(dtype), group = k / groups, words = (group + channels - 1) / channels;
    for (int64_t row0 = 0; row0 < n; row0 += kPanel) {
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t w = 0; w < words; ++w, packed += kPanel) {
                const int64_t at = g * group + w * channels;
                const int64_t count = group - w * channels < channels ? group - w * channels : channels;
                for (int64_t r = 0; r < kPanel; ++r) {
                    packed[r] = row0 + r < n ? word_of(dtype, codes + (row0 + r) * k + at, count) : word_of(dtype, codes, 0);
                }
            }
        }
    }
}

QK_API void qk_pack(int32_t dtype, const void* weight, int64_t n, int64_t k, int64_t groups, void* packed) {
    if (dtype == kI4 || dtype == kI8) {
        pack_codes(dtype, static_cast<const int8_t*>(weight), n, k, groups, static_cast<uint32_t*>(packed));
    } else if (dtype == kF32) {
        pack_rows(static_cast<const float*>(weight), n, k, static_cast<float*>(packed));
    } else {
        pack_rows(static_cast<const uint16_t*>(weight), n, k, static_cast<uint16_t*>(packed));
    }
}
