// Products of several quantized rows with Arm's matrix product of bytes (SMMLA): two rows by two outputs by eight channels
// in one instruction, where a dot product has one row by four outputs by four.
//
// A block's sums of products are added to the totals as dot_outputs does, with the same roundings.

namespace {

// Two rows by a vector of outputs: outputs 0 and 1 of both rows, then 2 and 3.
struct PairSum {
    Simd::I left, right;
    Simd::I row(int which) const {
        const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
        return vreinterpretq_s32_s64(which ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    }
};

// Eight channels of a vector of outputs, output by output, out of their first four and their last four.
struct PairWord {
    int8x16_t left, right;
};
QK_INLINE PairWord paired(int8x16_t first, int8x16_t last) {
    const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(last);
    return {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))};
}

// `next` leads from a word to the one behind it, or is 0 where the block has no other: x is zero there.
struct Pairs4 {
    static constexpr int kWordChannels = 8, kBias = Simd::kBias4;
    static PairWord open(const uint32_t* at, int) {
        const uint32x4_t w = Simd::load_words(at);
        return paired(Simd::open4<0>(w), Simd::open4<1>(w));
    }
};
struct Pairs8 {
    static constexpr int kWordChannels = 4, kBias = Simd::kBias8;
    static PairWord open(const uint32_t* at, int next) {
        return paired(Simd::open8(Simd::load_words(at)), Simd::open8(Simd::load_words(at + next)));
    }
};

// Sums of the channels begin.. below end of a block, for M rows by C vectors of outputs.
template <class Pairs, int M, int C>
QK_INLINE void sum_pairs(int begin, int end, const int8_t* const (&x)[M], const uint32_t* const (&weights)[C], PairSum (&sum)[M / 2][C]) {
    constexpr int kChannels = 8;
#pragma GCC unroll 16
    for (int m = 0; m < M / 2; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].left = sum[m][c].right = Simd::int_set(0);
    }
    for (int k = begin; k < end; k += kChannels) {
        const int64_t at = static_cast<int64_t>(k) / Pairs::kWordChannels * kPanel;
        const int next = k + Pairs::kWordChannels < end ? kPanel : 0;
        PairWord w[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            for (int word = 0; word < kChannels / Pairs::kWordChannels; ++word) __builtin_prefetch(weights[c] + at + 256 + word * kPanel);
            w[c] = Pairs::open(weights[c] + at, next);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M / 2; ++m) {
            const int8x16_t rows = vcombine_s8(vld1_s8(x[2 * m] + k), vld1_s8(x[2 * m + 1] + k));
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                sum[m][c].left = vmmlaq_s32(sum[m][c].left, rows, w[c].left);
                sum[m][c].right = vmmlaq_s32(sum[m][c].right, rows, w[c].right);
            }
        }
    }
}

// M rows by C neighbouring vectors of outputs of one panel; rows that are not there repeat the last, their results are
// dropped.
template <class Pairs, int M, int C>
void pair_outputs(const LinearArgs& a, int64_t row, int rows, int panel, int inside) {
    const int blocks = a.blocks(), per_group = a.per_group();
    const int8_t* x[M];
    int64_t first[M];
    for (int m = 0; m < M; ++m) {
        const int64_t here = row + least(m, rows - 1);
        x[m] = a.codes + here * a.stride();
        first[m] = here * blocks;
    }
    const uint32_t* weights[C];
    for (int c = 0; c < C; ++c) weights[c] = reinterpret_cast<const uint32_t*>(a.data + panel * a.panel_bytes) + inside + c * W;
    const int64_t group_words = a.group_bytes() / 4;
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    for (int g = 0; g < a.groups; ++g) {
        const int64_t parameter = (static_cast<int64_t>(panel) * a.groups + g) * kPanel + inside;
        F scale[C];
        for (int c = 0; c < C; ++c) scale[c] = scale_at(a, parameter + c * W, 1.0f);
        for (int j = 0; j < per_group; ++j) {
            PairSum sum[M / 2][C];
            sum_pairs<Pairs, M, C>(j * kBlock, least(a.group, (j + 1) * kBlock), x, weights, sum);
            const int block = g * per_group + j;
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const F x_scale = Simd::set(a.x_scale[first[m] + block]);
                const int32_t x_sum = a.x_sum[first[m] + block];
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    const Simd::I dot = Simd::int_sub(sum[m / 2][c].row(m % 2), excess(a, Pairs::kBias, parameter + c * W, x_sum));
                    total[m][c] = Simd::fma(Simd::to_float(dot), Simd::mul(scale[c], x_scale), total[m][c]);
                }
            }
        }
        for (int m = 0; m < M; ++m) x[m] += a.group_stride();
        for (int c = 0; c < C; ++c) weights[c] += group_words;
    }
    for (int m = 0; m < least(M, rows); ++m) {
        for (int c = 0; c < C; ++c) write_out(a, row + m, panel * kPanel + inside + c * W, total[m][c]);
    }
}

template <class Pairs, int M, int C>
void pair_panels(const LinearArgs& a, int64_t row, int rows, int panel, int panels) {
    for (int p = panel; p < panel + panels; ++p) {
        for (int inside = 0; inside < kPanel; inside += C * W) pair_outputs<Pairs, M, C>(a, row, rows, p, inside);
    }
}

constexpr int kPairRows = 12;  // rows of the largest tile that the register file holds

template <class Pairs>
void pair_chunk(const LinearArgs& a, int64_t row, int rows, int panel, int panels) {
    const int tiles = (rows + kPairRows - 1) / kPairRows, step = up((rows + tiles - 1) / tiles, 2);
    for (int p = 0; p < panels; p += kDotPanels) {  // the panels stay in L1 while the rows pass
        const int count = least(kDotPanels, panels - p);
        for (int r = 0; r < rows; r += step) {
            const int here = least(step, rows - r);
            if (here <= 2) pair_panels<Pairs, 2, 4>(a, row + r, here, panel + p, count);
            else if (here <= 4) pair_panels<Pairs, 4, 4>(a, row + r, here, panel + p, count);
            else if (here <= 6) pair_panels<Pairs, 6, 2>(a, row + r, here, panel + p, count);
            else if (here <= 8) pair_panels<Pairs, 8, 2>(a, row + r, here, panel + p, count);
            else pair_panels<Pairs, kPairRows, 2>(a, row + r, here, panel + p, count);
        }
    }
}

inline bool use_tiles(const LinearArgs&, int rows) { return rows > 1; }
inline int64_t tile_scratch(const LinearArgs&) { return 0; }
inline void tile_chunk(const LinearArgs& a, int64_t row, int rows, int panel, int panels, float*) {
    if (a.dtype == kI4) pair_chunk<Pairs4>(a, row, rows, panel, panels);
    else pair_chunk<Pairs8>(a, row, rows, panel, panels);
}

}  // namespace
