// Matrix product with packed int8 or int4 weights and rows quantized to int8 (quantize_rows): y = x · wᵀ + bias.
//
// A block's products are summed as integers, exactly, so their order is free; the sum is then multiplied by the row's
// and the output's scale and added to a total, block after block. A row's bits therefore depend neither on the number
// of rows, nor on the cut into chunks, nor on the instruction set.

namespace {

constexpr int kAhead = 256, kLineWords = 16;  // words between what is read and what is asked for; of a cache line

// A word's channels are taken in kParts steps of four: all rows and outputs take one before the next, so that few
// registers hold opened weights.
struct Codes4 {
    static constexpr int kParts = 2, kBias = Simd::kBias4, kFlush = Simd::kFlush4, kRows = kWide ? 12 : 5, kOutputs = 2;
    using Sum = Simd::Sum4;
    template <int P>
    static auto open(Words v) {
        return Simd::open4<P>(v);
    }
    template <bool kFirst, class Word>
    static void dot(Sum& sum, const Word& w, const int8_t* x) {
        Simd::dot4<kFirst>(sum, w, x);
    }
};
struct Codes8 {
    static constexpr int kParts = 1, kBias = Simd::kBias8, kFlush = Simd::kFlush8, kRows = kWide ? 12 : 5, kOutputs = kWide ? 2 : 1;
    using Sum = Simd::Sum8;
    template <int>
    static auto open(Words v) {
        return Simd::open8(v);
    }
    template <bool kFirst, class Word>
    static void dot(Sum& sum, const Word& w, const int8_t* x) {
        Simd::dot8<kFirst>(sum, w, x);
    }
};

// M rows of codes, at offsets from a place that moves along them.
template <int M>
struct Rows {
    int64_t offsets[M];
};

// Words of C neighbouring vectors of outputs, from the first one's on.
template <int C>
struct Outputs {
    int64_t panel;  // from a panel to the next
    QK_INLINE int64_t offset(int c) const { return c / kVectors * panel + c % kVectors * W; }
};

// Adds four channels of M rows from x on, in C vectors of outputs.
template <class Codes, int P, bool kFirst, int M, int C>
QK_INLINE void add_part(const uint32_t* words, const Outputs<C>& outputs, const int8_t* x, const Rows<M>& rows, typename Codes::Sum (&sum)[M][C]) {
    decltype(Codes::template open<P>(Words{})) w[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) w[c] = Codes::template open<P>(Simd::load_words(words + outputs.offset(c)));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) Codes::template dot<kFirst>(sum[m][c], w[c], x + rows.offsets[m]);
    }
}

template <class Codes, bool kFirst, int M, int C>
QK_INLINE void add_word(const uint32_t* words, const Outputs<C>& outputs, const int8_t* x, const Rows<M>& rows, typename Codes::Sum (&sum)[M][C]) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
        if (c * W % kLineWords == 0) __builtin_prefetch(words + outputs.offset(c) + kAhead);
    }
    add_part<Codes, 0, kFirst>(words, outputs, x, rows, sum);
    if constexpr (Codes::kParts > 1) add_part<Codes, 1, false>(words, outputs, x + 4, rows, sum);
}

template <class Sum, int M, int C>
QK_INLINE void flush_all(Sum (&sum)[M][C]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].flush();
    }
}

// kWords words of each output, then a flush.
template <class Codes, int kWords, int M, int C>
QK_INLINE void add_words(const uint32_t* words, const Outputs<C>& outputs, const int8_t* x, const Rows<M>& rows, typename Codes::Sum (&sum)[M][C]) {
    add_word<Codes, true>(words, outputs, x, rows, sum);
#pragma GCC unroll 16
    for (int i = 1; i < kWords; ++i) add_word<Codes, false>(words + i * kPanel, outputs, x + 4 * Codes::kParts * i, rows, sum);
    flush_all(sum);
}

// Sums of the products of `count` channels.
template <class Codes, int M, int C>
QK_INLINE void sum_products(int count, const uint32_t* words, const Outputs<C>& outputs, const int8_t* x, const Rows<M>& rows,
                            typename Codes::Sum (&sum)[M][C]) {
    constexpr int kChannels = 4 * Codes::kParts, kWords = least(Codes::kFlush, 32 / kChannels);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].clear();
    }
    if (count == 2 * kWords * kChannels) {  // sums then stay in registers from flush to flush
        add_words<Codes, kWords>(words, outputs, x, rows, sum);
        return add_words<Codes, kWords>(words + kWords * kPanel, outputs, x + kWords * kChannels, rows, sum);
    }
    int left = (count + kChannels - 1) / kChannels;
    for (; left >= kWords; left -= kWords) {
        add_words<Codes, kWords>(words, outputs, x, rows, sum);
        words += kWords * kPanel;
        x += kWords * kChannels;
    }
    if (left == 0) return;
    add_word<Codes, true>(words, outputs, x, rows, sum);
    while (--left) add_word<Codes, false>(words += kPanel, outputs, x += kChannels, rows, sum);
    flush_all(sum);
}

// M rows by C neighbouring vectors of outputs. Wide sets have not every M: rows that are not there repeat the last, their
// results are dropped.
template <class Codes, int M, int C>
void dot_outputs(const LinearArgs& a, int64_t row, int rows, int vector) {
    const int blocks = a.blocks();
    Rows<M> codes, first;
    for (int m = 0; m < M; ++m) {
        const int here = kWide ? least(m, rows - 1) : m;
        codes.offsets[m] = static_cast<int64_t>(here) * a.stride();
        first.offsets[m] = static_cast<int64_t>(here) * blocks;
    }
    const int64_t panel = vector / kVectors, inside = vector % kVectors * W, group_words = a.group_bytes() / 4;
    const auto* words = reinterpret_cast<const uint32_t*>(a.data + panel * a.panel_bytes) + inside;
    int64_t parameter = panel * a.groups * kPanel + inside;
    const Outputs<C> outputs{a.panel_bytes / 4}, parameters{static_cast<int64_t>(a.groups) * kPanel};
    const int8_t* x = a.codes + row * a.stride();
    const float* x_scale = a.x_scale + row * blocks;
    const int32_t* x_sum = a.x_sum + row * blocks;
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    for (int g = 0; g < a.groups; ++g, parameter += kPanel) {
        F scale[C];
        for (int c = 0; c < C; ++c) scale[c] = scale_at(a, parameter + parameters.offset(c), 1.0f);
        for (int k = 0; k < a.group; k += kBlock, ++x_scale, ++x_sum) {
            typename Codes::Sum sum[M][C];
            sum_products<Codes>(least(a.group - k, kBlock), words + k / (4 * Codes::kParts) * kPanel, outputs, x + k, codes, sum);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const F factor = Simd::set(x_scale[first.offsets[m]]);
                const int32_t codes_sum = x_sum[first.offsets[m]];
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    const Simd::I more = excess(a, Codes::kBias, parameter + parameters.offset(c), codes_sum);
                    total[m][c] = Simd::fma(Simd::to_float(Simd::int_sub(sum[m][c].value(), more)), Simd::mul(scale[c], factor), total[m][c]);
                }
            }
        }
        x += a.group_stride();
        words += group_words;
    }
    for (int m = 0; m < least(M, rows); ++m) {
        for (int c = 0; c < C; ++c) write_out(a, row + m, (vector + c) * W, total[m][c]);
    }
}

template <class Codes, int M, int C>
void dot_panels(const LinearArgs& a, int64_t row, int rows, int panel, int panels) {
    const int end = (panel + panels) * kVectors;
    int vector = panel * kVectors;
    for (; vector + C <= end; vector += C) dot_outputs<Codes, M, C>(a, row, rows, vector);
    if constexpr (C > kVectors) {
        for (; vector < end; vector += kVectors) dot_outputs<Codes, M, kVectors>(a, row, rows, vector);
    }
}

// Each number of rows takes as many vectors together as hide a dot product's latency and fit the register file.
template <class Codes>
void dot_rows(const LinearArgs& a, int64_t row, int rows, int panel, int panels) {
    constexpr int C = Codes::kOutputs;
    if (rows == 1) return dot_panels<Codes, 1, 4>(a, row, rows, panel, panels);
    if (rows == 2) return dot_panels<Codes, 2, kWide ? 4 : 2>(a, row, rows, panel, panels);
    if constexpr (kWide) {
        if (rows <= 4) return dot_panels<Codes, 4, 4>(a, row, rows, panel, panels);
        if (rows <= 6) return dot_panels<Codes, 6, C>(a, row, rows, panel, panels);
        if (rows <= 8) return dot_panels<Codes, 8, C>(a, row, rows, panel, panels);
        return dot_panels<Codes, 12, C>(a, row, rows, panel, panels);
    } else {
        if (rows == 3) return dot_panels<Codes, 3, C>(a, row, rows, panel, panels);
        if (rows == 4) return dot_panels<Codes, 4, C>(a, row, rows, panel, panels);
        return dot_panels<Codes, 5, C>(a, row, rows, panel, panels);
    }
}

template <class Codes>
void dot_chunk(const LinearArgs& a, int64_t row, int rows, int panel, int panels) {
    const int tiles = (rows + Codes::kRows - 1) / Codes::kRows, step = (rows + tiles - 1) / tiles;
    for (int p = 0; p < panels; p += kDotPanels) {  // the panels stay in L1 while the rows pass
        for (int r = 0; r < rows; r += step) dot_rows<Codes>(a, row + r, least(step, rows - r), panel + p, least(kDotPanels, panels - p));
    }
}

void linear_of_codes(const LinearArgs& a, const Task& task) {
    const Plan& plan = *task.plan;
    const int64_t row = task.chunk / plan.panel_chunks * static_cast<int64_t>(plan.rows_per_chunk);
    const int rows = least(plan.rows_per_chunk, task.rows - static_cast<int>(row));
    const int panel = task.chunk % plan.panel_chunks * plan.panels_per_chunk;
    const int panels = least(plan.panels_per_chunk, a.panels() - panel);
    if (use_tiles(a, rows)) return tile_chunk(a, row, rows, panel, panels, task.scratch);
    if (a.dtype == kI4) dot_chunk<Codes4>(a, row, rows, panel, panels);
    else dot_chunk<Codes8>(a, row, rows, panel, panels);
}

}  // namespace
