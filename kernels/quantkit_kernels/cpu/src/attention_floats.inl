// Attention over a cache that is read as floats: keys transposed into a tile, scores and sums by FMA in channel and position order.

namespace {

// Four vectors a row then hide the latency of an FMA.
QK_INLINE bool few_rows(int rows) { return rows <= kTileRows / 2 && kWide; }

// Sixteen key rows, as floats, into sixteen columns of keys [channel][kKvTile].
inline void transpose_keys(const AttentionArgs& a, const void* const* source, const AttentionScratch& s, float* keys) {
    const int size = a.head_dim;
    for (int i = 0; i < 16; ++i) load_cells(source[i], a.cache_dtype, size, 1, s.rows + i * s.ld);
    for (int d = 0; d < size; d += 4) {
        for (int i = 0; i < 16; i += 4) {
            Simd::transpose_4x4(s.rows + i * s.ld + d, s.ld, keys + d * kKvTile + i, kKvTile);
        }
    }
}

// c [rows][C·W at a time] (+)= a · b, by blocks of rows; `start(m, c)` gives the first value of an accumulator.
template <int C, class Start>
QK_INLINE void product(int rows, int depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo,
                       const Start& start) {
    const int step = tile_rows(rows);
    for (int r = 0; r < rows; r += step) {
        with_count<kTileRows>(least(step, rows - r), [&](auto count) QK_LAMBDA_INLINE {
            constexpr int M = decltype(count)::value;
            F acc[M][C];
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[m][c] = start(r + m, c);
            }
            multiply<M, C>(acc, depth, a + r * lda, lda, b, ldb);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) Simd::store(out + (r + m) * ldo + c * W, acc[m][c]);
            }
        });
    }
}

// Turns one row's scores of a tile into weights, of which lanes lo..hi-1 are visible, and updates maximum and sum.
inline void soften(float* scores, int lo, int hi, float softcap, float* highest, float* sum, float* decay) {
    const float before = *highest, tile = mask_scores(scores, lo, hi, softcap);
    const float now = tile > before ? tile : before;
    F total = Simd::zero();
    for (int j = 0; j < kKvTile; j += W) {
        const F p = exp(Simd::sub(Simd::load(scores + j), Simd::set(now)));
        total = Simd::add(total, p);
        Simd::store(scores + j, p);
    }
    *decay = now == before ? 1.0f : exp(before - now);
    *sum = *sum * *decay + Simd::sum(total);
    *highest = now;
}

// Keys and values of a tile's positions lo..hi-1 as floats, and the products with them. `source(j)` is position j's row.
inline void float_scores(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int rows) {
    for (int j = tile.lo / 16 * 16; j < tile.hi; j += 16) {
        const void* source[16];
        for (int i = 0; i < 16; ++i) source[i] = tile.row(a.k_cache, j + i, s.zeros);
        transpose_keys(a, source, s, s.keys + j);
    }
    const auto zero = [](int, int) { return Simd::zero(); };
    if (few_rows(rows) && kKvTile == 4 * W) {
        product<4>(rows, a.head_dim, s.q, s.ld, s.keys, kKvTile, s.scores, kKvTile, zero);
        return;
    }
    for (int c = 0; c < tile.hi; c += 2 * W) {
        product<2>(rows, a.head_dim, s.q, s.ld, s.keys + c, kKvTile, s.scores + c, kKvTile, zero);
    }
}

// For a tile with values that are not finite: zero times them is no number, so a row must not meet those it does not see.
// The same sums in the same order otherwise.
template <class Visible>
void add_seen_values(const AttentionScratch& s, const KvTile& tile, int rows, const Visible& visible) {
    for (int r = 0; r < rows; ++r) {
        const Lanes seen = visible(0, r);
        for (int64_t c = 0; c < s.ld; c += W) {
            float* out = s.out + r * s.ldo + c;
            F sum = Simd::mul(Simd::load(out), Simd::set(s.decay[r]));
            for (int j = most(tile.lo, seen.lo); j < least(tile.hi, seen.hi); ++j) {
                sum = Simd::fma(Simd::set(s.scores[r * kKvTile + j]), Simd::load(s.values + j * s.ld + c), sum);
            }
            Simd::store(out, sum);
        }
    }
}

template <class Visible>
void add_float_values(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int rows, const Visible& visible) {
    const int lo = tile.lo, hi = tile.hi;
    for (int j = lo; j < hi;) {  // cells of one block follow one another
        int run = 1;
        while (s.ld == a.head_dim && j + run < hi && tile.offsets[j + run] == tile.offsets[j] + run * tile.cell) ++run;
        load_cells(static_cast<const char*>(a.v_cache) + tile.offsets[j], a.cache_dtype, a.head_dim, run, s.values + j * s.ld);
        j += run;
    }
    const auto count = static_cast<int>((hi - lo) * s.ld);
    if (rows > a.group() && magnitude(s.values + lo * s.ld, count).poison != 0.0f) return add_seen_values(s, tile, rows, visible);
    const auto accumulate = [&](auto width, int c) {
        product<decltype(width)::value>(
            rows, hi - lo, s.scores + lo, kKvTile, s.values + lo * s.ld + c, s.ld, s.out + c, s.ldo,
            [&](int r, int v) QK_LAMBDA_INLINE { return Simd::mul(Simd::load(s.out + r * s.ldo + c + v * W), Simd::set(s.decay[r])); });
    };
    int c = 0;
    if (few_rows(rows)) {
        for (; c + 4 * W <= s.ld; c += 4 * W) accumulate(Int<4>{}, c);
    }
    for (; c + 2 * W <= s.ld; c += 2 * W) accumulate(Int<2>{}, c);
    if (c < s.ld) accumulate(Int<1>{}, c);
}

}  // namespace
