// Matrix product with packed int8 or int4 weights and rows quantized to int8 (quantize_rows): y = x · wᵀ + bias.
//
// A block's products are summed as integers, exactly, so their order is free; the sum is then multiplied by the row's
// and the output's scale and added to a total, block after block. A row's bits therefore depend neither on the number
// of rows, nor on the cut into chunks, nor on the instruction set.

namespace {

// Words of a cache line, and from what is read to what is asked for: where that lies in a cache already; in memory.
constexpr int kLineWords = 16, kNear = 4 * kLineWords, kAhead = 16 * kLineWords;

// A word's channels are taken in kParts steps of four: all rows and outputs take one before the next, so that few
// registers hold opened weights.
struct Codes4 {
    static constexpr int kParts = 2, kBias = Simd::kBias4, kRows = kWide ? 12 : 5, kOutputs = 2;
    using Sum = Simd::Sum4;
    template <int P>
    static auto open(Words v) {
        return Simd::open4<P>(v);
    }
    template <class Word>
    static void dot(Sum& sum, const Word& w, const int8_t* x) {
        Simd::dot4(sum, w, x);
    }
};
struct Codes8 {
    static constexpr int kParts = 1, kBias = Simd::kBias8, kRows = kWide ? 12 : 5, kOutputs = kWide ? 2 : 1;
    using Sum = Simd::Sum8;
    template <int>
    static auto open(Words v) {
        return Simd::open8(v);
    }
    template <class Word>
    static void dot(Sum& sum, const Word& w, const int8_t* x) {
        Simd::dot8(sum, w, x);
    }
};

// What M rows bring to a step of kStep channels, so that one place moves along them all. `less`, `sum` and `factor` are
// their block's.
template <int M>
struct Step {
    int8_t codes[M][kStep];
    int32_t start[M];  // start_of() the codes
    int32_t less[M];   // what the weight codes' bias adds to the sums of products, negated
    int32_t sum[M];    // of the codes
    float factor[M];   // the scale
};
constexpr int kStepFloats = sizeof(Step<1>) / sizeof(float);  // of a row

// M rows of which `rows` are there: the last is repeated, what comes of that is dropped.
template <class Codes, int M>
void pack_rows(const LinearArgs& a, int64_t row, int rows, Step<M>* out) {
    const int blocks = a.blocks(), group_blocks = a.per_group(), group_steps = a.group_stride() / kStep;
    for (int m = 0; m < M; ++m) {
        const int64_t from = row + least(m, rows - 1);
        const int8_t* codes = a.codes + from * a.stride();
        for (int g = 0, s = 0; g < a.groups; ++g) {
            for (int i = 0; i < group_steps; ++i, ++s) {
                const int64_t block = from * blocks + g * group_blocks + i * kStep / kBlock;
                std::memcpy(out[s].codes[m], codes + s * kStep, kStep);
                out[s].start[m] = Simd::start_of(codes + s * kStep);
                out[s].less[m] = -Codes::kBias * a.x_sum[block];
                out[s].sum[m] = a.x_sum[block];
                out[s].factor[m] = a.x_scale[block];
            }
        }
    }
}

// Asks for a cache line here and now: compilers would gather the requests of an unrolled loop at its start.
QK_INLINE void ask_for(const uint32_t* words) {
#if QK_X86
    __asm__ volatile("prefetcht0 %0" ::"m"(*words));
#else
    __builtin_prefetch(words);
#endif
}

// Words of C neighbouring vectors of outputs, from the first one's on.
template <int C>
struct Outputs {
    int64_t panel;          // from a panel to the next
    int64_t ahead = kNear;  // from what is read to what is asked for
    QK_INLINE int64_t offset(int c) const { return c / kVectors * panel + c % kVectors * W; }
};

// Adds the products of four channels from x on, P-th part of a word, in C vectors of outputs.
template <class Codes, int P, int M, int C>
QK_INLINE void add_part(const uint32_t* words, const Outputs<C>& outputs, const int8_t (*x)[kStep], typename Codes::Sum (&sum)[M][C]) {
    decltype(Codes::template open<P>(Words{})) w[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) w[c] = Codes::template open<P>(Simd::load_words(words + outputs.offset(c)));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) Codes::dot(sum[m][c], w[c], x[m]);
    }
}

template <class Codes, int M, int C>
QK_INLINE void add_word(const uint32_t* words, const Outputs<C>& outputs, const Step<M>& step, int k, typename Codes::Sum (&sum)[M][C]) {
    const auto at = [&](int channel) QK_LAMBDA_INLINE { return reinterpret_cast<const int8_t(*)[kStep]>(step.codes[0] + channel); };
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
        if (c * W % kLineWords == 0) ask_for(words + outputs.offset(c) + outputs.ahead);
    }
    add_part<Codes, 0>(words, outputs, at(k), sum);
    if constexpr (Codes::kParts > 1) add_part<Codes, 1>(words, outputs, at(k + 4), sum);
}

template <class Codes, int M, int C>
QK_INLINE void start_all(const Step<M>& step, typename Codes::Sum (&sum)[M][C]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].start(step.start[m]);
    }
}

template <class Sum, int M, int C>
QK_INLINE void flush_all(Sum (&sum)[M][C]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].flush();
    }
}

template <class Codes>
constexpr int kStepWords = kStep / (4 * Codes::kParts) * kPanel;

// The products of a whole step.
template <class Codes, int M, int C>
QK_INLINE void add_step(const uint32_t* words, const Outputs<C>& outputs, const Step<M>& step, typename Codes::Sum (&sum)[M][C]) {
    constexpr int kWord = 4 * Codes::kParts;
    start_all<Codes>(step, sum);
#pragma GCC unroll 16
    for (int k = 0; k < kStep; k += kWord) add_word<Codes>(words + k / kWord * kPanel, outputs, step, k, sum);
    flush_all(sum);
}

// The products of a step's first channels.
template <class Codes, int M, int C>
QK_INLINE void add_channels(int channels, const uint32_t* words, const Outputs<C>& outputs, const Step<M>& step, typename Codes::Sum (&sum)[M][C]) {
    constexpr int kWord = 4 * Codes::kParts;
    start_all<Codes>(step, sum);
    for (int k = 0; k < channels; k += kWord) add_word<Codes>(words + k / kWord * kPanel, outputs, step, k, sum);
    flush_all(sum);
}

template <class Codes, int M, int C>
QK_INLINE void open_all(const Step<M>& step, typename Codes::Sum (&sum)[M][C]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][c].open(step.less[m]);
    }
}

// Adds a block's sums, scaled, to the totals.
template <int M, int C, class Sum>
QK_INLINE void close_all(const Step<M>& step, const F (&scale)[C], const Sum (&sum)[M][C], F (&total)[M][C]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const F factor = Simd::set(step.factor[m]);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) total[m][c] = Simd::fma(Simd::to_float(sum[m][c].value()), Simd::mul(scale[c], factor), total[m][c]);
    }
}

// M rows by C neighbouring vectors of outputs. kSteps: of each block, all of them whole and without zero points; 0 where
// that does not hold.
template <class Codes, int M, int C, int kSteps>
void dot_outputs(const LinearArgs& a, const Step<M>* step, int64_t row, int rows, int vector, int64_t ahead) {
    const int64_t panel = vector / kVectors, inside = vector % kVectors * W, group_words = a.group_bytes() / 4;
    const auto* words = reinterpret_cast<const uint32_t*>(a.data + panel * a.panel_bytes) + inside;
    int64_t parameter = panel * a.groups * kPanel + inside;
    const Outputs<C> outputs{a.panel_bytes / 4, ahead}, parameters{static_cast<int64_t>(a.groups) * kPanel};
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    for (int g = 0; g < a.groups; ++g, parameter += kPanel, words += group_words) {
        F scale[C];
        for (int c = 0; c < C; ++c) scale[c] = scale_at(a, parameter + parameters.offset(c), 1.0f);
        typename Codes::Sum sum[M][C];
        const uint32_t* w = words;
        if constexpr (kSteps > 0) {
            for (int left = kSteps == 1 ? kStep : a.group; left > 0; left -= kSteps * kStep) {
                open_all<Codes>(*step, sum);
#pragma GCC unroll 1
                for (int s = 0; s < kSteps; ++s, ++step, w += kStepWords<Codes>) add_step<Codes>(w, outputs, *step, sum);
                close_all(step[-1], scale, sum, total);
            }
            continue;
        }
        for (int left = a.group; left > 0; left -= kBlock) {
            open_all<Codes>(*step, sum);
            int channels = least(left, kBlock);
            for (; channels >= kStep; channels -= kStep, w += kStepWords<Codes>) add_step<Codes>(w, outputs, *step++, sum);
            if (channels > 0) add_channels<Codes>(channels, w, outputs, *step++, sum);
            const Step<M>& last = step[-1];
            if (a.zero) {
                for (int m = 0; m < M; ++m) {
                    for (int c = 0; c < C; ++c) {
                        const Simd::I zero = Simd::int_from_i8(a.zero + parameter + parameters.offset(c));
                        sum[m][c].add(Simd::int_mul(zero, Simd::int_set(-last.sum[m])));
                    }
                }
            }
            close_all(last, scale, sum, total);
        }
    }
    for (int m = 0; m < least(M, rows); ++m) {
        for (int c = 0; c < C; ++c) write_out(a, row + m, (vector + c) * W, total[m][c]);
    }
}

// Vectors of outputs that M rows take together: as many as hide a dot product's latency and fit the register file.
template <class Codes, int M>
constexpr int kTogether = M == 1 || (kWide && M <= 4) ? 4 : M == 2 ? 2 : Codes::kOutputs;

template <class Codes, int kSteps, int M>
void dot_panels(const LinearArgs& a, const Step<M>* steps, int64_t row, int rows, int panel, int panels, int64_t ahead) {
    constexpr int C = kTogether<Codes, M>;
    const int end = (panel + panels) * kVectors;
    int vector = panel * kVectors;
    for (; vector + C <= end; vector += C) dot_outputs<Codes, M, C, kSteps>(a, steps, row, rows, vector, ahead);
    if constexpr (C > kVectors) {
        for (; vector < end; vector += kVectors) dot_outputs<Codes, M, kVectors, kSteps>(a, steps, row, rows, vector, ahead);
    }
}

// use(Int<M>) for the M that takes so many rows; wide sets have not every M.
template <class Use>
QK_INLINE void with_rows(int rows, const Use& use) {
    if (rows == 1) return use(Int<1>{});
    if (rows == 2) return use(Int<2>{});
    if constexpr (kWide) {
        if (rows <= 4) return use(Int<4>{});
        if (rows <= 6) return use(Int<6>{});
        if (rows <= 8) return use(Int<8>{});
        return use(Int<12>{});
    } else {
        if (rows == 3) return use(Int<3>{});
        if (rows == 4) return use(Int<4>{});
        return use(Int<5>{});
    }
}

// From the words at `here` to those that a pass of the first rows over some panels asks for. A pass of one row reads as
// fast as memory gives and looks a little ahead; one of several asks for what is read after these panels, so that memory
// is at work while the other rows pass as well.
inline int64_t ahead_of(const uint8_t* here, const uint8_t* next, int rows) {
    if (rows == 1) return kAhead;
    return next ? (reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(here)) / 4 : kNear;
}

// Rows of a chunk, in tiles of at most Codes::kRows, and where each tile's steps are packed.
struct RowTiles {
    int rows, step;
    int64_t floats;  // from a tile to the next
    template <class Codes>
    static RowTiles of(const LinearArgs& a, int rows) {
        const int tiles = (rows + Codes::kRows - 1) / Codes::kRows, step = (rows + tiles - 1) / tiles;
        int64_t floats = 0;
        with_rows(step, [&](auto m) QK_LAMBDA_INLINE { floats = int64_t{decltype(m)::value} * kStepFloats * (a.stride() / kStep); });
        return {rows, step, floats};
    }
    // use(first row, rows, Step<M>*) for each tile.
    template <class Use>
    QK_INLINE void each(float* scratch, const Use& use) const {
        for (int r = 0; r < rows; r += step, scratch += floats) {
            const int here = least(step, rows - r);
            with_rows(here, [&](auto m) QK_LAMBDA_INLINE { use(r, here, reinterpret_cast<Step<decltype(m)::value>*>(scratch)); });
        }
    }
};

// The panels at hand stay in L1 while the rows pass.
template <class Codes>
void dot_chunk(const LinearArgs& a, const Task& task, int64_t row, int rows, int panel, int panels) {
    const RowTiles tiles = RowTiles::of<Codes>(a, rows);
    tiles.each(task.scratch, [&](int r, int here, auto* steps) { pack_rows<Codes>(a, row + r, here, steps); });
    const int whole_steps = a.zero ? 0 : a.group == kStep ? 1 : a.group % kBlock == 0 ? 2 : 0;
    for (int p = 0; p < panels; p += kDotPanels) {
        const uint8_t* here = a.data + (panel + p) * a.panel_bytes;
        const uint8_t* next = p + kDotPanels < panels ? here + kDotPanels * a.panel_bytes : task.upcoming;
        const int count = least(kDotPanels, panels - p);
        tiles.each(task.scratch, [&](int r, int tile_rows, const auto* steps) {
            const int64_t ahead = r == 0 ? ahead_of(here, next, rows) : kNear;
            if (whole_steps == 1) dot_panels<Codes, 1>(a, steps, row + r, tile_rows, panel + p, count, ahead);
            else if (whole_steps == 2) dot_panels<Codes, 2>(a, steps, row + r, tile_rows, panel + p, count, ahead);
            else dot_panels<Codes, 0>(a, steps, row + r, tile_rows, panel + p, count, ahead);
        });
    }
}

// Floats of scratch: of the matrix tiles, or of the packed rows, of which a tile may repeat a third.
inline int64_t codes_scratch(const LinearArgs& a) {
    const int64_t packed = static_cast<int64_t>(kRowBlock * 4 / 3 + Codes4::kRows) * kStepFloats * (a.stride() / kStep);
    const int64_t tiles = tile_scratch(a);
    return packed > tiles ? packed : tiles;
}

void linear_of_codes(const LinearArgs& a, const Task& task) {
    const Plan& plan = *task.plan;
    const int64_t row = task.chunk / plan.panel_chunks * static_cast<int64_t>(plan.rows_per_chunk);
    const int rows = least(plan.rows_per_chunk, task.rows - static_cast<int>(row));
    const int panel = task.chunk % plan.panel_chunks * plan.panels_per_chunk;
    const int panels = least(plan.panels_per_chunk, a.panels() - panel);
    if (use_tiles(a, rows)) return tile_chunk(a, row, rows, panel, panels, task.scratch);
    if (a.dtype == kI4) dot_chunk<Codes4>(a, task, row, rows, panel, panels);
    else dot_chunk<Codes8>(a, task, row, rows, panel, panels);
}

}  // namespace
