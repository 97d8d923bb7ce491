// Matrix product with packed int8 or int4 weights and rows quantized to int8 (quantize_rows): y = x · wᵀ + bias.
//
// A block's products are summed as integers, exactly, so their order is free; the sum is then multiplied by the row's
// and the output's scale and added to a total, block after block. A row's bits therefore depend neither on the number
// of rows, nor on the cut into chunks, nor on the instruction set.

namespace {

struct Codes4 {
    static constexpr int kChannels = 8, kBias = Simd::kBias4, kFlush = Simd::kFlush4, kRows = kWide ? 12 : 6;
    using Sum = Simd::Sum4;
    using Word = Simd::Word4;
    static Word open(Words v) { return Simd::open4(v); }
    static void dot(Sum& sum, const Word& w, const int8_t* x) { Simd::dot4(sum, w, x); }
};
struct Codes8 {
    static constexpr int kChannels = 4, kBias = Simd::kBias8, kFlush = Simd::kFlush8, kRows = kWide ? 12 : 4;
    using Sum = Simd::Sum8;
    using Word = Simd::Word8;
    static Word open(Words v) { return Simd::open8(v); }
    static void dot(Sum& sum, const Word& w, const int8_t* x) { Simd::dot8(sum, w, x); }
};

// M rows by C neighbouring vectors of outputs; rows that are not there repeat the last, their results are dropped.
template <class Codes, int M, int C>
void dot_outputs(const LinearArgs& a, int64_t row, int rows, int vector) {
    const int stride = a.stride(), blocks = a.blocks(), per_group = a.per_group();
    const int8_t* x[M];
    int64_t first[M];
    for (int m = 0; m < M; ++m) {
        const int64_t here = row + least(m, rows - 1);
        x[m] = a.codes + here * stride;
        first[m] = here * blocks;
    }
    const uint32_t* weights[C];
    int64_t parameter[C];
    for (int c = 0; c < C; ++c) {
        const int64_t panel = (vector + c) / kVectors, inside = (vector + c) % kVectors * W;
        weights[c] = reinterpret_cast<const uint32_t*>(a.data + panel * a.panel_bytes) + inside;
        parameter[c] = panel * a.groups * kPanel + inside;
    }
    const int64_t group_words = a.group_bytes() / 4;
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    for (int g = 0; g < a.groups; ++g) {
        F scale[C];
        for (int c = 0; c < C; ++c) scale[c] = scale_at(a, parameter[c] + g * kPanel, 1.0f);
        for (int j = 0; j < per_group; ++j) {
            const int begin = j * kBlock, end = least(a.group, begin + kBlock);
            typename Codes::Sum sum[M][C];
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) sum[m][c].clear();
            }
            for (int k = begin; k < end;) {
                const int stop = least(end, k + least(kBlock, Codes::kFlush * Codes::kChannels));
                for (; k < stop; k += Codes::kChannels) {
                    const int64_t at = static_cast<int64_t>(k) / Codes::kChannels * kPanel;
                    typename Codes::Word w[C];
#pragma GCC unroll 16
                    for (int c = 0; c < C; ++c) {
                        __builtin_prefetch(weights[c] + at + 256);
                        w[c] = Codes::open(Simd::load_words(weights[c] + at));
                    }
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
                        for (int c = 0; c < C; ++c) Codes::dot(sum[m][c], w[c], x[m] + k);
                    }
                }
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
                    for (int c = 0; c < C; ++c) sum[m][c].flush();
                }
            }
            const int block = g * per_group + j;
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const F x_scale = Simd::set(a.x_scale[first[m] + block]);
                const int32_t x_sum = a.x_sum[first[m] + block];
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    const Simd::I dot = Simd::int_sub(sum[m][c].value(), excess(a, Codes::kBias, parameter[c] + g * kPanel, x_sum));
                    total[m][c] = Simd::fma(Simd::to_float(dot), Simd::mul(scale[c], x_scale), total[m][c]);
                }
            }
        }
        for (int m = 0; m < M; ++m) x[m] += a.group_stride();
        for (int c = 0; c < C; ++c) weights[c] += group_words;
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
    if (rows == 1) return dot_panels<Codes, 1, 4>(a, row, rows, panel, panels);
    if (rows == 2) return dot_panels<Codes, 2, kWide ? 4 : 2>(a, row, rows, panel, panels);
    if constexpr (kWide) {
        if (rows <= 4) return dot_panels<Codes, 4, 4>(a, row, rows, panel, panels);
        if (rows <= 6) return dot_panels<Codes, 6, 2>(a, row, rows, panel, panels);
        if (rows <= 8) return dot_panels<Codes, 8, 2>(a, row, rows, panel, panels);
        return dot_panels<Codes, 12, 2>(a, row, rows, panel, panels);
    } else {
        if (rows <= 4 || Codes::kRows == 4) return dot_panels<Codes, 4, 1>(a, row, rows, panel, panels);
        if constexpr (Codes::kRows > 4) return dot_panels<Codes, 6, 1>(a, row, rows, panel, panels);
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
