// Attention of few rows over an int8 cache with 256-bit vectors, the same integers as attention_codes.inl. Keys and values
// are widened to 16 bits where the cache has them, once for all rows of a head, and never laid out anew.

namespace {

// Sums of eight vectors, each over its own lanes.
QK_INLINE __m256i eight_sums(const __m256i* v) {
    const auto halves = [](__m256i a, __m256i b) QK_LAMBDA_INLINE { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); };
    const auto quarters = [](__m256i a, __m256i b) QK_LAMBDA_INLINE { return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)); };
    const __m256i a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
    const __m256i b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

QK_INLINE __m256i sixteen_codes(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// Products of R rows of codes x [R][ldx] with eight positions' keys, use(r, sums). Of 16 · kChunks channels, or of `size`
// where kChunks is 0.
template <int R, int kChunks, class Use>
QK_INLINE void eight_scores(int size, const int8_t* keys, const int16_t* x, int64_t ldx, const char* ahead, const Use& use) {
    const int chunks = kChunks ? kChunks : size / 16;
    __m256i sums[R][8];
#pragma GCC unroll 1
    for (int j = 0; j < 8; ++j, keys += 16 * chunks) {
        __builtin_prefetch(ahead + 64 * j, 0, 2);
        __m256i sum[R];
        const int16_t* row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sum[r] = _mm256_setzero_si256();
            row[r] = x + r * ldx;
            __asm__("" : "+r"(row[r]));  // one register a row: compilers would keep every chunk's address in one
        }
#pragma GCC unroll 8
        for (int c = 0; c < chunks; ++c) {
            const __m256i key = sixteen_codes(keys + 16 * c);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                sum[r] = Simd::dot_words(sum[r], key, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[r] + 16 * c)));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][j] = sum[r];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) use(r, eight_sums(sums[r]));
}

// 16 channels of two positions as pairs: 0..3 and 8..11, then 4..7 and 12..15.
struct ChannelPairs {
    __m256i low, high;
};
QK_INLINE ChannelPairs pair_channels(const int8_t* even, const int8_t* odd) {
    const __m256i a = sixteen_codes(even), b = sixteen_codes(odd);
    return {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
}

// Products of R rows of weights [R][kKvTile] with C times 16 channels of the values of positions 16 · first .. below 16 · stop,
// which lie cell by cell from `values(group)` on: use(r, c, sums) for vectors c of eight channels.
template <int R, int C, class Values, class Use>
QK_INLINE void sum_values(int first, int stop, int64_t cell, const Values& values, const int16_t* weights, Ahead& ahead, const Use& use) {
    __m256i low[R][C], high[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) low[r][c] = high[r][c] = _mm256_setzero_si256();
    }
    for (int g = first; g < stop; ++g) {
        const int8_t* at = values(g);
        const int16_t* of_group = weights + 16 * g;
        const char* lines = ahead.take(8);
#pragma GCC unroll 1
        for (int j = 0; j < 16; j += 2, at += 2 * cell) {
            __builtin_prefetch(lines + 32 * j, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                __asm__ volatile("" : : : "memory");  // weights are loaded anew: kept, they would push sums out
                const ChannelPairs v = pair_channels(at + 16 * c, at + cell + 16 * c);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const __m256i w = Simd::broadcast(reinterpret_cast<const int8_t*>(of_group + r * kKvTile + j));
                    low[r][c] = Simd::dot_words(low[r][c], v.low, w);
                    high[r][c] = Simd::dot_words(high[r][c], v.high, w);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            use(r, 2 * c, _mm256_permute2x128_si256(low[r][c], high[r][c], 0x20));
            use(r, 2 * c + 1, _mm256_permute2x128_si256(low[r][c], high[r][c], 0x31));
        }
    }
}

struct FewCodePath : FewHeads<16> {
    static constexpr int kMost = 4;  // rows of a head taken together

    static void open(const AttentionArgs&, const AttentionScratch&, const Item&) {}
    static void close(const AttentionArgs&, float*, int64_t, int) {}
    static void query(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int r) { CodePath::query(a, s, item, r); }

    static int tiles(const Item&) { return 1; }

    void scores(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at) {
        for (int j = tile.lo / 8 * 8; j < tile.hi; j += 8) {
            for (int h = 0; h < item.heads; ++h) {
                const int64_t here = tile.offsets[j / 16 * 16] + h * head_bytes(a) + j % 16 * a.head_dim;
                const char* lines = ahead.take(8);
                // Values of the same positions are wanted next, in L1.
                const char* values = static_cast<const char*>(a.v_cache) + here;
                for (int byte = 0; byte < 8 * a.head_dim; byte += 64) __builtin_prefetch(values + byte);
                over_rows(item, h, [&](int row, auto count) QK_LAMBDA_INLINE {
                    constexpr int R = decltype(count)::value;
                    const auto score = [&](auto channels) QK_LAMBDA_INLINE {
                        eight_scores<R, decltype(channels)::value>(a.head_dim, static_cast<const int8_t*>(a.k_cache) + here, s.codes + row * s.ldc, s.ldc, lines,
                                        [&](int r, __m256i sums) QK_LAMBDA_INLINE {
                                            float* out = s.scores + (at + row + r) * kKvTile + j;
                                            Simd::store(out, Simd::mul(Simd::to_float(sums), Simd::set(s.unit[row + r])));
                                        });
                    };
                    if (a.head_dim == 64) score(Int<4>{});
                    else if (a.head_dim == 128) score(Int<8>{});
                    else score(Int<0>{});
                });
            }
        }
    }

    template <class Visible>
    void soften(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int tiles, const Visible& visible) {
        CodePath::soften(a, s, item, tiles, visible);
    }

    template <class Visible>
    void values(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at, const Visible&) {
        const int first = tile.lo / 16, stop = (tile.hi + 15) / 16;  // weights of the others are zero
        for (int h = 0; h < item.heads; ++h) {
            const int8_t* cache = static_cast<const int8_t*>(a.v_cache) + h * head_bytes(a);
            over_rows(item, h, [&](int row, auto count) QK_LAMBDA_INLINE {
                constexpr int R = decltype(count)::value, kFit = R < 4 ? 2 : 1;
                const auto sum = [&](int d, auto columns) QK_LAMBDA_INLINE {
                    sum_values<R, decltype(columns)::value>(
                        first, stop, a.head_dim, [&](int group) QK_LAMBDA_INLINE { return cache + tile.offsets[16 * group] + d; },
                        s.weights + (at + row) * kKvTile, ahead, [&](int r, int c, __m256i sums) QK_LAMBDA_INLINE {
                            float* out = s.out + (row + r) * s.ldo + d + c * W;
                            const F kept = Simd::mul(Simd::load(out), Simd::set(s.decay[at + row + r]));
                            Simd::store(out, Simd::fma(Simd::to_float(sums), Simd::set(s.factor[at + row + r]), kept));
                        });
                };
                int d = 0;
                for (; d + 16 * kFit <= a.head_dim; d += 16 * kFit) sum(d, Int<kFit>{});
                if (kFit > 1 && d < a.head_dim) sum(d, Int<1>{});
            });
        }
    }

private:
    // A head's rows, at most kMost at a time: use(first row, how many).
    template <class Use>
    static QK_INLINE void over_rows(const Item& item, int head, const Use& use) {
        const int blocks = (item.head_rows + kMost - 1) / kMost;
        int row = head * item.head_rows, left = item.head_rows;
        for (int b = blocks; b > 0; --b) {
            const int count = (left + b - 1) / b;
            with_count<kMost>(count, [&](auto m) QK_LAMBDA_INLINE { use(row, m); });
            row += count;
            left -= count;
        }
    }
};

}  // namespace
