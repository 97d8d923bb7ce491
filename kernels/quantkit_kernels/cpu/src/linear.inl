// Matrix product with packed weights: y = x · wᵀ + bias, w = (code - zero) · scale.
//
// For each output the products of a group are added in channel order into one accumulator, which is then multiplied by
// the group's scale and added to the total. Few rows dequantize in registers, many through a tile in L1; both do the
// same arithmetic in the same order, so a row's bits depend neither on the number of rows nor on the cut into chunks.

namespace {

struct Float32Format {
    static constexpr int kBytes = 4;
    static constexpr float kUnit = 1.0f;
    static F load(const uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
};
struct Float16Format {
    static constexpr int kBytes = 2;
    static constexpr float kUnit = 1.0f;
    static F load(const uint8_t* p) { return Simd::from_f16(reinterpret_cast<const uint16_t*>(p)); }
};
struct BFloat16Format {
    static constexpr int kBytes = 2;
    static constexpr float kUnit = 1.0f;
    static F load(const uint8_t* p) { return Simd::from_bf16(reinterpret_cast<const uint16_t*>(p)); }
};
// Codes: several channels of an output share a word.
struct Int8Format {
    static constexpr int kBytes = 0, kChannels = 4;
    static constexpr float kUnit = Simd::kByteUnit;
    using Words = decltype(Simd::load_words(nullptr));
    static Words load_words(const uint32_t* p) { return Simd::load_words(p); }
    template <int N>
    static F channel(const Words& v) {
        return Simd::byte<N>(v);
    }
};
struct Int4Format {
    static constexpr int kBytes = 0, kChannels = 8;
    static constexpr float kUnit = Simd::kNibbleUnit;
    using Words = Simd::Nibbles;
    static Words load_words(const uint32_t* p) { return Simd::load_nibbles(p); }
    template <int N>
    static F channel(const Words& v) {
        return Simd::nibble<N>(v);
    }
};

template <class Format>
constexpr bool in_words = Format::kBytes == 0;

// Codes are divided by the format's unit, so zero points are too; both are exact.
template <class Format>
QK_INLINE F zero_at(const LinearArgs& a, int64_t index) {
    const F z = Simd::from_i8(a.zero + index);
    return Format::kUnit == 1.0f ? z : Simd::mul(z, Simd::set(1.0f / Format::kUnit));
}

// Hands the weights of a group's channels, in order, to `use(k, w)`: code - zero for C neighbouring vectors of outputs,
// which may be a part of a panel or several panels.
template <class Format, int C>
struct OutputReader {
    static constexpr int kPanels = C > kVectors ? C / kVectors : 1;
    const uint8_t* group[kPanels];
    int inside;  // where the first vector lies in its panel, in outputs; 0 where there are several panels
    F zero[C];
    bool zeros;

    static int64_t parameter(const LinearArgs& a, int vector, int g) {
        return (vector / kVectors * static_cast<int64_t>(a.groups) + g) * kPanel + vector % kVectors * W;
    }

    QK_INLINE void open(const LinearArgs& a, int vector, int g) {
        zeros = a.zero != nullptr;
        const int64_t group_bytes = a.group_bytes();
        inside = kPanels > 1 ? 0 : vector % kVectors * W;
        for (int p = 0; p < kPanels; ++p) group[p] = a.data + (vector / kVectors + p) * a.panel_bytes + g * group_bytes;
        for (int c = 0; c < C; ++c) zero[c] = zeros ? zero_at<Format>(a, parameter(a, vector + c, g)) : Simd::zero();
    }

    // Asks for the `bytes` that follow `p` at a distance: weights come from memory, and the hardware looks less far.
    static QK_INLINE void prefetch(const uint8_t* p, int bytes) {
        constexpr int kDistance = 1024;
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(p + kDistance + at);
    }

    template <bool kZeros, int N, class Words, class Use>
    QK_INLINE void word(const Words (&v)[C], int k, int count, const Use& use) const {
        if (N < count) {
            F w[C];
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                w[c] = Format::template channel<N>(v[c]);
                if constexpr (kZeros) w[c] = Simd::sub(w[c], zero[c]);
            }
            use(k + N, w);
        }
        if constexpr (N + 1 < Format::kChannels) word<kZeros, N + 1>(v, k, count, use);
    }

    template <bool kZeros, class Use>
    QK_INLINE void walk(int k0, int k1, const Use& use) const {
        if constexpr (in_words<Format>) {
            constexpr int kChannels = Format::kChannels;
            for (int k = k0; k < k1; k += kChannels) {
                const int64_t at = static_cast<int64_t>(k) / kChannels * kPanel;
                for (int p = 0; p < kPanels; ++p) prefetch(group[p] + at * 4, 4 * kPanel);
                typename Format::Words v[C];
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    const auto* words = reinterpret_cast<const uint32_t*>(group[c / kVectors]) + inside;
                    v[c] = Format::load_words(words + at + c % kVectors * W);
                }
                if (k + kChannels <= k1) word<kZeros, 0>(v, k, kChannels, use);
                else word<kZeros, 0>(v, k, k1 - k, use);
            }
        } else {
            for (int k = k0; k < k1; ++k) {
                constexpr int kRowBytes = kPanel * Format::kBytes;
                for (int p = 0; p < kPanels; ++p) prefetch(group[p] + k * kRowBytes, kRowBytes);
                F w[C];
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) {
                    const int64_t at = static_cast<int64_t>(k) * kPanel + inside + c % kVectors * W;
                    w[c] = Format::load(group[c / kVectors] + at * Format::kBytes);
                    if constexpr (kZeros) w[c] = Simd::sub(w[c], zero[c]);
                }
                use(k, w);
            }
        }
    }

    // k0 must be a multiple of 8.
    template <class Use>
    QK_INLINE void channels(int k0, int k1, const Use& use) const {
        if (zeros) walk<true>(k0, k1, use);
        else walk<false>(k0, k1, use);
    }
};

// M rows by C vectors of outputs, weights dequantized in registers.
template <class Format, int M, int C>
void gemv(const LinearArgs& a, const float* x, int64_t row, int rows, int vector) {
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    const float* source[M];  // rows that are not there repeat the last, their results are dropped
    for (int m = 0; m < M; ++m) source[m] = x + static_cast<int64_t>(least(m, rows - 1)) * a.k;
    OutputReader<Format, C> reader;
    for (int g = 0; g < a.groups; ++g) {
        reader.open(a, vector, g);
        const int64_t first = static_cast<int64_t>(g) * a.group;
        F acc[M][C];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) acc[m][c] = Simd::zero();
        }
        reader.channels(0, a.group, [&](int k, const F(&w)[C]) QK_LAMBDA_INLINE {
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const F value = Simd::set(source[m][first + k]);
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) acc[m][c] = Simd::fma(value, w[c], acc[m][c]);
            }
        });
        for (int c = 0; c < C; ++c) {
            if (!a.scale) {
                for (int m = 0; m < M; ++m) total[m][c] = acc[m][c];
                continue;
            }
            const F scale = scale_at(a, reader.parameter(a, vector + c, g), Format::kUnit);
            for (int m = 0; m < M; ++m) total[m][c] = Simd::fma(acc[m][c], scale, total[m][c]);
        }
    }
    for (int m = 0; m < least(M, rows); ++m) {
        for (int c = 0; c < C; ++c) write_out(a, row + m, (vector + c) * W, total[m][c]);
    }
}

// Where a block of channels stands in its panel's sums.
struct BlockSums {
    float* part;    // [rows][kPanel], sums of a group not yet finished
    float* total;   // [rows][kPanel], scaled sums of the groups before
    int panel, g, depth;
    bool opens, closes;  // the block is its group's first, its last
    float unit;
};

// `rows` rows of x (row stride lda) by the dequantized tile [depth][kPanel].
inline void multiply_tile(const LinearArgs& a, const float* x, int64_t row0, int rows, const float* tile, const BlockSums& s) {
    const int64_t lda = a.k;
    const bool last = s.closes && s.g == a.groups - 1;
    const int step = tile_rows(rows);
    for (int r = 0; r < rows; r += step) {
        with_count<kTileRows>(least(step, rows - r), [&](auto count) QK_LAMBDA_INLINE {
            constexpr int M = decltype(count)::value;
            for (int c0 = 0; c0 < kVectors; c0 += 2) {
                F acc[M][2];
                float* partial = s.part + r * kPanel + c0 * W;
                float* sum = s.total + r * kPanel + c0 * W;
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
                    for (int c = 0; c < 2; ++c) acc[m][c] = s.opens ? Simd::zero() : Simd::load(partial + m * kPanel + c * W);
                }
                multiply<M, 2>(acc, s.depth, x + r * lda, lda, tile + c0 * W, kPanel);
#pragma GCC unroll 2
                for (int c = 0; c < 2; ++c) {
                    if (s.closes && a.scale) {
                        const int64_t index = (s.panel * static_cast<int64_t>(a.groups) + s.g) * kPanel + (c0 + c) * W;
                        const F scale = scale_at(a, index, s.unit);
#pragma GCC unroll 16
                        for (int m = 0; m < M; ++m) {
                            const F before = s.g == 0 ? Simd::zero() : Simd::load(sum + m * kPanel + c * W);
                            acc[m][c] = Simd::fma(acc[m][c], scale, before);
                        }
                    }
                    float* rest = s.closes ? sum : partial;
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m) {
                        if (last) write_out(a, row0 + r + m, s.panel * kPanel + (c0 + c) * W, acc[m][c]);
                        else Simd::store(rest + m * kPanel + c * W, acc[m][c]);
                    }
                }
            }
        });
    }
}

// One panel by many rows: per block of channels the panel is dequantized once into a tile that stays in L1.
template <class Format>
void gemm_panel(const LinearArgs& a, const float* x, int64_t row0, int rows, int panel, float* scratch) {
    float* tile = scratch;
    float* part = tile + kDepthBlock * kPanel;
    float* total = part + kRowBlock * kPanel;
    OutputReader<Format, kVectors> reader;
    for (int g = 0; g < a.groups; ++g) {
        reader.open(a, panel * kVectors, g);
        for (int k0 = 0; k0 < a.group; k0 += kDepthBlock) {
            const int k1 = least(a.group, k0 + kDepthBlock);
            reader.channels(k0, k1, [&](int k, const F(&w)[kVectors]) QK_LAMBDA_INLINE {
                for (int c = 0; c < kVectors; ++c) Simd::store(tile + (k - k0) * kPanel + c * W, w[c]);
            });
            const float* block = x + static_cast<int64_t>(g) * a.group + k0;
            multiply_tile(a, block, row0, rows, tile, {part, total, panel, g, k1 - k0, k0 == 0, k1 == a.group, Format::kUnit});
        }
    }
}

template <class Format, int M, int C>
void gemv_outputs(const LinearArgs& a, const float* x, int64_t row, int rows, int panel0, int panels) {
    const int end = (panel0 + panels) * kVectors;
    int vector = panel0 * kVectors;
    for (; vector + C <= end; vector += C) gemv<Format, M, C>(a, x, row, rows, vector);
    if constexpr (C > kVectors) {
        for (; vector < end; vector += kVectors) gemv<Format, M, kVectors>(a, x, row, rows, vector);
    }
}

template <class Format>
void gemv_panels(const LinearArgs& a, const float* x, int64_t row, int rows, int panel0, int panels) {
    constexpr int kOne = in_words<Format> && !kWide ? 4 : 8;
    if (rows == 1) return gemv_outputs<Format, 1, kOne>(a, x, row, rows, panel0, panels);
    if (rows == 2) return gemv_outputs<Format, 2, 4>(a, x, row, rows, panel0, panels);
    if (rows <= 4) return gemv_outputs<Format, 4, kWide ? 4 : 2>(a, x, row, rows, panel0, panels);
    if (rows <= 6) return gemv_outputs<Format, 6, 2>(a, x, row, rows, panel0, panels);
    if constexpr (kWide) gemv_outputs<Format, 8, 2>(a, x, row, rows, panel0, panels);
}

template <class Format>
void linear_chunk(const LinearArgs& a, const Task& task) {
    const Plan& plan = *task.plan;
    const int row0 = task.chunk / plan.panel_chunks * plan.rows_per_chunk;
    const int rows = least(plan.rows_per_chunk, task.rows - row0);
    const int panel0 = task.chunk % plan.panel_chunks * plan.panels_per_chunk;
    const int panels = least(plan.panels_per_chunk, a.panels() - panel0);
    const float* x = a.x + static_cast<int64_t>(row0) * a.k;
    float* scratch = task.scratch;
    if (a.row_index) {
        for (int r = 0; r < rows; ++r) {
            const float* source = a.x + static_cast<int64_t>(a.row_index[row0 + r]) * a.k;
            std::memcpy(scratch + static_cast<int64_t>(r) * a.k, source, sizeof(float) * a.k);
        }
        x = scratch;
        scratch += up(plan.rows_per_chunk * a.k, 16);
    }
    if (task.rows <= kGemvRows) return gemv_panels<Format>(a, x, row0, rows, panel0, panels);
    for (int p = 0; p < panels; ++p) gemm_panel<Format>(a, x, row0, rows, panel0 + p, scratch);
}

void linear(const Task& task) {
    const LinearArgs a(*task.node);
    if (a.codes) return linear_of_codes(a, task);
    switch (a.dtype) {
        case kF32: return linear_chunk<Float32Format>(a, task);
        case kF16: return linear_chunk<Float16Format>(a, task);
        case kBF16: return linear_chunk<BFloat16Format>(a, task);
        case kI8: return linear_chunk<Int8Format>(a, task);
        default: return linear_chunk<Int4Format>(a, task);
    }
}

int64_t linear_scratch(const LinearArgs& a) {
    if (a.codes) return codes_scratch(a);
    const int64_t gathered = a.row_index ? up(kRowBlock * a.k, 16) : 0;
    return gathered + kDepthBlock * kPanel + 2 * kRowBlock * kPanel;
}

}  // namespace
