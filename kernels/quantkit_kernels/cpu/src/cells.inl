// Cells of the cache, one position of one head: how keys and values are stored and read back. quantkit_kernels/ops/kv_cells.py
// has the same arithmetic; both give the same bytes and, without the calibrated scales, the same floats.
//
// A kI4 cell holds its channels in groups of cell_group: first the codes, in each group's bytes those of its first half in
// the low nibbles and of its second in the high ones, then a scale and a minimum a group, halves. A channel is
// code · scale + minimum, which rounds once as the product is exact.

namespace {

constexpr float kMostHalf = 65504.0f;
constexpr int kMostGroup = 32;

inline void store_bytes_of(const float* x, const float* scale, int size, int8_t* out) {
    over_row(size, [&](int at, auto n) {
        const F ratio = Simd::div(load_part(x + at, n), load_part(scale + at, n));
        const F code = Simd::min(Simd::set(127.0f), Simd::max(Simd::set(-127.0f), ratio));
        int8_t lanes[W];
        Simd::store_bytes(lanes, Simd::to_int(code));
        std::memcpy(out + at, lanes, static_cast<size_t>(count_of(n)));
    });
}

// A group of y as codes in `out` and {scale, minimum} in `pair`. The minimum is rounded down and the scale up, so that all
// of y lies within the codes' range; a group with a NaN is all NaN.
template <int G>
inline void store_group(float* y, uint8_t* out, uint16_t* pair) {
    if (magnitude(y, G).poison != 0.0f) {
        std::memset(out, 0, G / 2);
        pair[0] = 0;
        pair[1] = 0x7e00;
        return;
    }
    for (int j = G; j < W; ++j) y[j] = y[0];
    F low = Simd::load(y), high = low;
    for (int j = W; j < G; j += W) {
        low = Simd::min(low, Simd::load(y + j));
        high = Simd::max(high, Simd::load(y + j));
    }
    // + 0: neither is -0, as which of the two zeros a minimum finds is left open.
    pair[1] = half_below(-Simd::highest(Simd::sub(Simd::zero(), low)) + 0.0f);
    const float minimum = half_to_float(pair[1]);
    pair[0] = half_above((Simd::highest(high) - minimum + 0.0f) / 15.0f);
    const float unit = pair[0] ? half_to_float(pair[0]) : 1.0f;
    int8_t codes[kMostGroup];
    for (int j = 0; j < G; j += W) {
        const F steps = Simd::div(Simd::sub(Simd::load(y + j), Simd::set(minimum)), Simd::set(unit));
        Simd::store_bytes(codes + j, Simd::to_int(Simd::min(Simd::set(15.0f), steps)));
    }
    for (int j = 0; j < G / 2; ++j) out[j] = static_cast<uint8_t>(codes[j] | codes[j + G / 2] << 4);
}

template <int G>
void store_nibbles(const float* x, const float* scale, int size, uint8_t* cell) {
    for (int g = 0; g < size / G; ++g) {
        float y[kMostGroup];
        over_row(G, [&](int at, auto n) {
            const F ratio = Simd::div(load_part(x + g * G + at, n), load_part(scale + g * G + at, n));
            store_part(y + at, Simd::min(Simd::set(kMostHalf), Simd::max(Simd::set(-kMostHalf), ratio)), n);
        });
        uint16_t pair[2];
        store_group<G>(y, cell + g * G / 2, pair);
        std::memcpy(cell + size / 2 + 4 * g, pair, sizeof pair);
    }
}

template <int G>
void load_nibbles(const uint8_t* cell, int size, float* out) {
    constexpr int kHalf = G / 2;
    for (int g = 0; g < size / G; ++g, out += G) {
        uint16_t pair[2];
        std::memcpy(pair, cell + size / 2 + 4 * g, sizeof pair);
        const F unit = Simd::set_f16(pair[0]), minimum = Simd::set_f16(pair[1]);
        const uint8_t* packed = cell + g * kHalf;
        uint8_t room[W] = {};
        if constexpr (kHalf < W) packed = static_cast<uint8_t*>(std::memcpy(room, packed, kHalf));
        over_row(kHalf, [&](int j, auto n) {
            F low, high;
            Simd::from_nibbles(packed + j, &low, &high);
            store_part(out + j, Simd::fma(low, unit, minimum), n);
            store_part(out + kHalf + j, Simd::fma(high, unit, minimum), n);
        });
    }
}

inline void load_f8(const uint8_t* codes, int size, float* out) {
    int i = 0;
    for (; i + W <= size; i += W) Simd::store(out + i, Simd::from_f8(codes + i));
    for (; i < size; ++i) out[i] = f8_to_float(codes[i]);
}

// Stores one head's channels: a cast to a float type, else of x / scale (float [size]): kI8 and kF8 round half to even and
// saturate at 127 and 448, kI4 as above.
inline void store_cell(const float* x, const float* scale, int dtype, int size, uint8_t* cell) {
    int i = 0;
    uint16_t* halves = reinterpret_cast<uint16_t*>(cell);
    switch (dtype) {
        case kF32: std::memcpy(cell, x, sizeof(float) * static_cast<size_t>(size)); break;
        case kF16:
            for (; i + W <= size; i += W) Simd::to_f16(halves + i, Simd::load(x + i));
            for (; i < size; ++i) halves[i] = float_to_half(x[i]);
            break;
        case kBF16:
            for (; i < size; ++i) halves[i] = float_to_bf16(x[i]);
            break;
        case kF8:
            for (; i < size; ++i) cell[i] = float_to_f8(x[i] / scale[i]);
            break;
        case kI4:
            switch (cell_group(size)) {
                case 32: store_nibbles<32>(x, scale, size, cell); break;
                case 16: store_nibbles<16>(x, scale, size, cell); break;
                default: store_nibbles<8>(x, scale, size, cell);
            }
            break;
        default: store_bytes_of(x, scale, size, reinterpret_cast<int8_t*>(cell));
    }
}

// Channels of `count` adjoining cells as floats, without their calibrated scales.
inline void load_cells(const void* cells, int dtype, int size, int count, float* out) {
    const auto* cell = static_cast<const uint8_t*>(cells);
    if (dtype == kF8) return load_f8(cell, count * size, out);
    if (dtype != kI4) return to_float(cells, dtype, 0, count * size, out);
    for (int i = 0; i < count; ++i, cell += cell_bytes(dtype, size), out += size) {
        switch (cell_group(size)) {
            case 32: load_nibbles<32>(cell, size, out); break;
            case 16: load_nibbles<16>(cell, size, out); break;
            default: load_nibbles<8>(cell, size, out);
        }
    }
}

}  // namespace
