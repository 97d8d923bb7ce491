// Products of many quantized rows on AMX: 16 rows by 16 outputs by 64 channels in one instruction.
//
// A panel's weights are widened once to int8, zero points subtracted, as [k / 4][32] words; a tile of sums is then made
// for each block of channels and added to the totals as dot_outputs does, with the same roundings.

namespace {

constexpr int kTileRows16 = 16;
constexpr int kBatch = 4;  // tiles of sums on their way at once: one instruction takes 52 cycles, a new one starts every 16

struct alignas(64) TileShape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// INT8 zero points may not fit a byte once subtracted; 4-bit ones do.
inline bool use_tiles(const LinearArgs& a, int rows) { return rows >= kFewestTileRows && !(a.dtype == kI8 && a.zero); }

// [stride / 4][kPanel] words of widened weights, the sums of a batch, [blocks][kPanel] scales.
inline int64_t tile_scratch(const LinearArgs& a) {
    return static_cast<int64_t>(a.stride()) / 4 * kPanel + kBatch * 256 + static_cast<int64_t>(a.blocks()) * kPanel;
}

// One panel's codes as signed bytes less their zero points.
inline void widen_panel(const LinearArgs& a, int panel, uint32_t* out) {
    const auto* source = reinterpret_cast<const uint32_t*>(a.data + panel * a.panel_bytes);
    const int64_t group_words = a.group_bytes() / 4;
    for (int g = 0; g < a.groups; ++g, source += group_words, out += a.group_stride() / 4 * kPanel) {
        if (a.dtype == kI8) {
            std::memcpy(out, source, static_cast<size_t>(group_words) * 4);
            continue;
        }
        __m512i zero[kVectors];
        for (int c = 0; c < kVectors; ++c) {
            __m512i z = _mm512_set1_epi32(8);
            if (a.zero) z = _mm512_add_epi32(z, Simd::int_from_i8(a.zero + (static_cast<int64_t>(panel) * a.groups + g) * kPanel + c * W));
            zero[c] = _mm512_mullo_epi32(_mm512_and_si512(z, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x01010101));
        }
        uint32_t* to = out;
        for (const uint32_t* from = source; from < source + group_words; from += kPanel, to += 2 * kPanel) {
            for (int c = 0; c < kVectors; ++c) {
                __builtin_prefetch(reinterpret_cast<const uint8_t*>(from + c * W) + a.panel_bytes, 0, 2);
                const __m512i v = Simd::load_words(from + c * W);
                _mm512_store_si512(to + c * W, _mm512_sub_epi8(Simd::low_nibbles(v), zero[c]));
                _mm512_store_si512(to + kPanel + c * W, _mm512_sub_epi8(Simd::high_nibbles(v), zero[c]));
            }
        }
    }
}

// Sums of one block into tile T by way of tiles A and B, and out to memory. Tiles are named in the source, so a macro.
#define QK_SUM_BLOCK(T, A, B)                                                                          \
    QK_INLINE void sum_block_##T(const int8_t* x, int64_t stride, const uint32_t* w, int steps, int32_t* sums) { \
        _tile_zero(T);                                                                                 \
        for (int s = 0; s < steps; ++s) {                                                              \
            _tile_loadd(A, x + s * kStep, stride);                                                     \
            _tile_loadd(B, w + s * (kStep / 4) * kPanel, kPanel * 4);                                  \
            _tile_dpbssd(T, A, B);                                                                     \
        }                                                                                              \
        _tile_stored(T, sums + T * 256, 64);                                                           \
    }
QK_SUM_BLOCK(0, 4, 5)
QK_SUM_BLOCK(1, 6, 7)
QK_SUM_BLOCK(2, 4, 5)
QK_SUM_BLOCK(3, 6, 7)
#undef QK_SUM_BLOCK

// Walks the blocks of a row in order: where each begins and how many steps it has.
struct BlockWalk {
    const LinearArgs& a;
    int at = 0, left;
    explicit BlockWalk(const LinearArgs& args) : a(args), left(args.group) {}
    int steps() const { return (least(kBlock, left) + kStep - 1) / kStep; }
    void next() {
        at += steps() * kStep;
        left -= kBlock;
        if (left <= 0) left = a.group;
    }
};

// Adds `Count` blocks' sums, scaled, to the totals of 16 rows.
template <int Count>
QK_INLINE void add_batch(F (&total)[kTileRows16], const int32_t* sums, const float* scale, const float* x_scale, int blocks) {
    for (int t = 0; t < Count; ++t) {
        const F of_block = Simd::load(scale + t * kPanel);
#pragma GCC unroll 16
        for (int m = 0; m < kTileRows16; ++m) {
            const F factor = Simd::mul(of_block, Simd::set(x_scale[m * blocks + t]));
            total[m] = Simd::fma(Simd::to_float(_mm512_load_si512(sums + t * 256 + m * W)), factor, total[m]);
        }
    }
}

// 16 rows by one vector of outputs; `scale` [blocks][kPanel].
inline void tile_outputs(const LinearArgs& a, int64_t row, int rows, int column, const uint32_t* weights, const float* scale, int32_t* sums) {
    const int blocks = a.blocks();
    const int64_t stride = a.stride();
    const int8_t* x = a.codes + row * stride;
    const float* x_scale = a.x_scale + row * blocks;
    F total[kTileRows16];
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows16; ++m) total[m] = Simd::zero();
    BlockWalk walk(a);
    for (int block = 0; block < blocks;) {
        const auto sum = [&](auto tile) QK_LAMBDA_INLINE {
            const uint32_t* w = weights + walk.at / 4 * kPanel;
            constexpr int T = decltype(tile)::value;
            if constexpr (T == 0) sum_block_0(x + walk.at, stride, w, walk.steps(), sums);
            if constexpr (T == 1) sum_block_1(x + walk.at, stride, w, walk.steps(), sums);
            if constexpr (T == 2) sum_block_2(x + walk.at, stride, w, walk.steps(), sums);
            if constexpr (T == 3) sum_block_3(x + walk.at, stride, w, walk.steps(), sums);
            walk.next();
        };
        const float* of_batch = scale + static_cast<int64_t>(block) * kPanel;
        sum(Int<0>{});
        if (blocks - block >= kBatch) {
            sum(Int<1>{});
            sum(Int<2>{});
            sum(Int<3>{});
            add_batch<kBatch>(total, sums, of_batch, x_scale + block, blocks);
            block += kBatch;
        } else {
            add_batch<1>(total, sums, of_batch, x_scale + block, blocks);
            ++block;
        }
    }
    if (rows == kTileRows16 && column + W <= a.n && !a.bias && !(a.softcap > 0)) {
        float* out = a.out + row * a.n + column;
#pragma GCC unroll 16
        for (int m = 0; m < kTileRows16; ++m) Simd::store(out + static_cast<int64_t>(m) * a.n, total[m]);
        return;
    }
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows16; ++m) {
        if (m < rows) write_out(a, row + m, column, total[m]);
    }
}

// A panel's scales as floats, one row of them a block.
inline void spread_scales(const LinearArgs& a, int panel, float* out) {
    const int64_t parameter = static_cast<int64_t>(panel) * a.groups * kPanel;
    for (int g = 0; g < a.groups; ++g) {
        for (int j = 0; j < a.per_group(); ++j, out += kPanel) {
            for (int c = 0; c < kVectors; ++c) Simd::store(out + c * W, scale_at(a, parameter + g * kPanel + c * W, 1.0f));
        }
    }
}

void tile_chunk(const LinearArgs& a, int64_t row, int rows, int panel, int panels, float* scratch) {
    auto* weights = reinterpret_cast<uint32_t*>(scratch);
    auto* sums = reinterpret_cast<int32_t*>(scratch) + static_cast<int64_t>(a.stride()) / 4 * kPanel;
    auto* scale = reinterpret_cast<float*>(sums) + kBatch * 256;
    const TileShape shape;
    _tile_loadconfig(&shape);
    for (int p = panel; p < panel + panels; ++p) {
        // Either way the next panel comes from memory while this one's products are taken.
        const uint32_t* w = weights;
        if (a.dtype == kI8 && a.group == a.group_stride()) {
            const uint8_t* held = a.data + p * a.panel_bytes;
            for (int64_t at = 0; at < a.panel_bytes; at += 64) __builtin_prefetch(held + a.panel_bytes + at, 0, 2);
            w = reinterpret_cast<const uint32_t*>(held);
        } else {
            widen_panel(a, p, weights);
        }
        spread_scales(a, p, scale);
        for (int r = 0; r < rows; r += kTileRows16) {
            for (int c = 0; c < kVectors; ++c) {
                tile_outputs(a, row + r, least(kTileRows16, rows - r), p * kPanel + c * W, w + c * W, scale + c * W, sums);
            }
        }
    }
    _tile_release();
}

}  // namespace
