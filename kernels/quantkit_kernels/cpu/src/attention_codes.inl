// Attention over an int8 cache: scores and sums are integers times a scale, so the order of their terms is free and
// every instruction set gives the same bits.
//
// A row of q, k_scale and the softmax's scale folded in, is taken in 15 bits with one scale. The weights of a tile of
// positions, exp(score - the tile's own maximum), are taken in 15 bits of one.

namespace {

constexpr float kCodeTop = 16256.0f;  // 127 · 128: splits into two signed bytes; sums over 1,024 channels stay below 2^31

// Sixteen rows of int8 into sixteen columns of pairs [channel / 2][kKvTile][2]; an odd last channel pairs with zero.
inline void pair_keys(int size, const int8_t* const* rows, int8_t* bytes, int16_t* pairs) {
    const int whole = size / 16 * 16;
    for (int d0 = 0; d0 < whole; d0 += Simd::kByteColumns) {
        const int lanes = least(Simd::kByteColumns, whole - d0) / 16;
        Simd::transpose_bytes(rows, d0, lanes, bytes);
        for (int lane = 0; lane < lanes; ++lane) {
            for (int d = 0; d < 16; d += 2) {
                const int8_t* even = bytes + (d * lanes + lane) * 16;
                Simd::pair_bytes(even, even + lanes * 16, pairs + static_cast<int64_t>(d0 + lane * 16 + d) * kKvTile);
            }
        }
    }
    for (int d = whole; d < size; d += 2) {
        int16_t* to = pairs + static_cast<int64_t>(d) * kKvTile;
        for (int i = 0; i < 16; ++i) {
            to[2 * i] = rows[i][d];
            to[2 * i + 1] = d + 1 < size ? rows[i][d + 1] : int16_t{0};
        }
    }
}

// Two rows of int8 side by side as 16-bit pairs [size][2].
inline void pair_values(int size, const int8_t* even, const int8_t* odd, int16_t* pairs) {
    int d = 0;
    for (; d + 16 <= size; d += 16) Simd::pair_bytes(even + d, odd + d, pairs + 2 * d);
    for (; d < size; ++d) {
        pairs[2 * d] = even[d];
        pairs[2 * d + 1] = odd[d];
    }
}

// W integers as 16 bits.
QK_INLINE void store_codes(int16_t* out, Simd::I held, Int<W>) { Simd::store_shorts(out, held); }
QK_INLINE void store_codes(int16_t* out, Simd::I held, int count) {
    int16_t lanes[W];
    Simd::store_shorts(lanes, held);
    for (int j = 0; j < count; ++j) out[j] = lanes[j];
}

// One row of q as codes; returns what a code stands for, which is not a number where the row isn't finite. An odd last
// channel is followed by zero.
inline float quantize_query(const float* q, int size, int16_t* codes) {
    const Magnitude found = magnitude(q, size);
    if (!(found.top >= kSmallest)) {
        std::memset(codes, 0, sizeof(int16_t) * static_cast<size_t>(size + size % 2));
        return found.poison == 0.0f ? 0.0f : found.poison;
    }
    const F inverse = Simd::set(kCodeTop / found.top);
    over_row(size, [&](int i, auto n) QK_LAMBDA_INLINE {
        store_codes(codes + i, Simd::to_int(Simd::mul(load_part(q + i, n), inverse)), n);
    });
    if (size % 2) codes[size] = 0;
    return found.top / kCodeTop;
}

// M rows of codes x [M][ldx] with C vectors of columns of pairs [depth / 2][columns][2]: use(m, c, sum).
template <int M, int C, class Use>
QK_INLINE void dot_codes(int depth, const int16_t* x, int64_t ldx, const int16_t* pairs, int64_t columns, const Use& use) {
    Simd::I sums[M][C];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[m][c] = Simd::int_set(0);
    }
#pragma GCC unroll 2
    for (int d = 0; d < depth; d += 2) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[m][c] = Simd::dot_pairs(sums[m][c], pairs + d * columns + 2 * c * W, x + m * ldx + d);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) use(m, c, sums[m][c]);
    }
}

// The same for all rows, a few at a time, and vectors of columns first.. below `stop` in steps of C.
template <int C, class Use>
QK_INLINE void dot_all(int rows, int depth, const int16_t* x, int64_t ldx, const int16_t* pairs, int64_t columns, int first, int stop,
                       const Use& use) {
    constexpr int kMost = kWide ? 4 : 6;
    const int blocks = (rows + kMost - 1) / kMost;
    for (int c0 = first; c0 + C * W <= stop; c0 += C * W) {
        for (int b = 0, row = 0; b < blocks; ++b) {
            const int count = (rows - row) / (blocks - b);
            with_count<kMost>(count, [&](auto m) QK_LAMBDA_INLINE {
                dot_codes<decltype(m)::value, C>(depth, x + row * ldx, ldx, pairs + 2 * c0, columns, [&](int r, int c, Simd::I sum)
                                                                                                         QK_LAMBDA_INLINE {
                    use(row + r, c0 + c * W, sum);
                });
            });
            row += count;
        }
    }
}

inline void code_scores(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int at, int rows) {
    for (int j = tile.lo / 16 * 16; j < tile.hi; j += 16) {
        const int8_t* source[16];
        for (int i = 0; i < 16; ++i) source[i] = static_cast<const int8_t*>(tile.row(a.k_cache, j + i, s.zeros));
        pair_keys(a.head_dim, source, s.bytes, s.key_pairs() + 2 * j);
    }
    constexpr int C = kWide ? 4 : 2;
    dot_all<C>(rows, a.head_dim, s.codes, s.ldc, s.key_pairs(), kKvTile, 0, up(tile.hi, C * W), [&](int r, int j, Simd::I sum) QK_LAMBDA_INLINE {
        Simd::store(s.scores + (at + r) * kKvTile + j, Simd::mul(Simd::to_float(sum), Simd::set(s.unit[r])));
    });
}

// kCodeTop · 2^((score - top) · log2 e) as integers: 2^n by the exponent, the rest by a polynomial of degree 4 that is
// within 3e-6 of 2^r for |r| <= 1/2, a twentieth of a code's step. Zero for what is hidden.
QK_INLINE Simd::I weight_codes(F score, F top) {
    const F t = Simd::max(Simd::mul(Simd::sub(score, top), Simd::set(1.44269504f)), Simd::set(-24.0f));
    const F n = Simd::round(t), r = Simd::sub(t, n);
    F p = Simd::set(0.00958285f * kCodeTop);
    p = Simd::fma(p, r, Simd::set(0.05590643f * kCodeTop));
    p = Simd::fma(p, r, Simd::set(0.24024099f * kCodeTop));
    p = Simd::fma(p, r, Simd::set(0.69312419f * kCodeTop));
    p = Simd::fma(p, r, Simd::set(kCodeTop));
    return Simd::to_int(Simd::times_power_of_two(p, n));
}

// Turns the rows' scores of some tiles into codes and updates their maxima and sums. `put(v, codes)` takes the kKvTile / W
// vectors of row r of tile t at v = t · rows + r, where scores, tops, decays and factors lie as well.
template <class Visible, class Put>
QK_INLINE void soften_codes(const AttentionScratch& s, int tiles, int rows, float softcap, const Visible& visible, const Put& put) {
    for (int t = 0; t < tiles; ++t) {
        for (int r = 0; r < rows; ++r) {
            const Lanes seen = visible(t, r);
            const int v = t * rows + r;
            const float found = mask_scores(s.scores + v * kKvTile, seen.lo, seen.hi, softcap);
            const float top = found > kLowestScore ? found : kLowestScore;
            const float before = s.highest[r], now = top > before ? top : before;
            if (!(found < __builtin_inff())) s.unit[r] = __builtin_nanf("");  // a score beyond float: the row is not a number
            s.top[v] = top;
            s.decay[v] = before - now;
            s.factor[v] = top - now;
            s.highest[r] = now;
        }
    }
    for (int v = 0; v < tiles * rows; v += W) {
        Simd::store(s.decay + v, exp(Simd::load(s.decay + v)));
        Simd::store(s.factor + v, Simd::mul(exp(Simd::load(s.factor + v)), Simd::set(1.0f / kCodeTop)));
    }
    for (int t = 0; t < tiles; ++t) {
        for (int r = 0; r < rows; ++r) {
            const int v = t * rows + r;
            const F top = Simd::set(s.top[v]);
            Simd::I codes[kKvTile / W], total = Simd::int_set(0);
#pragma GCC unroll 16
            for (int j = 0; j < kKvTile / W; ++j) {
                codes[j] = weight_codes(Simd::load(s.scores + v * kKvTile + j * W), top);
                total = Simd::int_add(total, codes[j]);
            }
            put(v, codes);
            s.sum[r] = s.sum[r] * s.decay[v] + static_cast<float>(Simd::int_sum(total)) * s.factor[v];
        }
    }
}

// Few rows leave most of the machine waiting for one tile's maxima: they take several tiles side by side.
constexpr int kFewRows = 8, kTilesAtOnce = 4;

inline void add_code_values(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int at, int rows) {
    const int first = tile.lo / 2 * 2;
    for (int j = first; j < tile.hi; j += 2) {
        const auto* even = static_cast<const int8_t*>(tile.row(a.v_cache, j, s.zeros));
        const auto* odd = static_cast<const int8_t*>(tile.row(a.v_cache, j + 1, s.zeros));
        pair_values(a.head_dim, even, odd, s.value_pairs() + static_cast<int64_t>(j) * s.ld);
    }
    const auto add = [&](int r, int c, Simd::I sum) QK_LAMBDA_INLINE {
        float* out = s.out + r * s.ldo + c;
        const F kept = Simd::mul(Simd::load(out), Simd::set(s.decay[at + r]));
        Simd::store(out, Simd::fma(Simd::to_float(sum), Simd::set(s.factor[at + r]), kept));
    };
    constexpr int C = kWide ? 4 : 2;
    const int16_t* pairs = s.value_pairs() + static_cast<int64_t>(first) * s.ld;
    const int whole = static_cast<int>(s.ld) / (C * W) * (C * W);
    dot_all<C>(rows, tile.hi - first, s.weights + at * kKvTile + first, kKvTile, pairs, s.ld, 0, whole, add);
    dot_all<1>(rows, tile.hi - first, s.weights + at * kKvTile + first, kKvTile, pairs, s.ld, whole, static_cast<int>(s.ld), add);
}

// Everything of a tile, for the sets without matrix tiles.
struct CodePath : OneHead {
    static int tiles(const Item& item) { return item.rows <= kFewRows ? kTilesAtOnce : 1; }
    static void open(const AttentionArgs&, const AttentionScratch&, const Item&) {}
    static void query(const AttentionArgs& a, const AttentionScratch& s, const Item&, int r) {
        s.unit[r] = quantize_query(s.q + r * s.ld, a.head_dim, s.codes + r * s.ldc);
    }
    static void scores(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at) {
        code_scores(a, s, tile, at, item.rows);
    }
    template <class Visible>
    static void soften(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int tiles, const Visible& visible) {
        soften_codes(s, tiles, item.rows, a.softcap, visible, [&](int v, const Simd::I* codes) QK_LAMBDA_INLINE {
            for (int j = 0; j < kKvTile / W; ++j) Simd::store_shorts(s.weights + v * kKvTile + j * W, codes[j]);
        });
    }
    template <class Visible>
    static void values(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at, const Visible&) {
        add_code_values(a, s, tile, at, item.rows);
    }
    static void close(const AttentionArgs&, float*, int64_t, int) {}
};

}  // namespace
