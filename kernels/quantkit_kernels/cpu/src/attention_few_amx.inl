// Attention of few rows over an int8 cache on AMX, the same integers as attention_tiles_amx.inl: one multiplication takes
// both planes of all rows of a head. Keys are its rows, as the cache holds them, and queries its columns; weights are its
// rows. Heads whose cells lie side by side are taken along, position by position, so that the cache is read in its order.

namespace {

// Four columns of 16 rows of sums, high plane · 128 + low plane, the low one kFewRows columns behind.
QK_INLINE void four_columns(const int32_t* sums, __m512i* columns) {
    __m512i quads[4];  // of rows j, 4 + j, 8 + j, 12 + j
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const auto gather = [&](int plane) QK_LAMBDA_INLINE {
            const auto quad = [&](int row) QK_LAMBDA_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(sums + row * 16 + plane)); };
            const __m256i front = _mm256_inserti128_si256(_mm256_castsi128_si256(quad(j)), quad(4 + j), 1);
            const __m256i back = _mm256_inserti128_si256(_mm256_castsi128_si256(quad(8 + j)), quad(12 + j), 1);
            return _mm512_inserti64x4(_mm512_castsi256_si512(front), back, 1);
        };
        quads[j] = _mm512_add_epi32(_mm512_slli_epi32(gather(0), 7), gather(kFewRows));
    }
    const __m512i a = _mm512_unpacklo_epi32(quads[0], quads[1]), b = _mm512_unpacklo_epi32(quads[2], quads[3]);
    const __m512i c = _mm512_unpackhi_epi32(quads[0], quads[1]), d = _mm512_unpackhi_epi32(quads[2], quads[3]);
    columns[0] = _mm512_unpacklo_epi64(a, b);
    columns[1] = _mm512_unpackhi_epi64(a, b);
    columns[2] = _mm512_unpacklo_epi64(c, d);
    columns[3] = _mm512_unpackhi_epi64(c, d);
}

struct FewTilePath : FewHeads<64> {
    // Columns of a head's queries [channels / 4][16][4 bytes]: the high planes, then from kFewRows the low ones.
    static int8_t* query_columns(const AttentionScratch& s, int head) { return reinterpret_cast<int8_t*>(s.codes) + head * s.ldc * 16; }
    // Weights [2 · head_rows][kKvTile] of a head's rows, which begin at `row` of all: the high planes, then the low ones.
    static uint8_t* weight_rows(const AttentionScratch& s, int row) { return reinterpret_cast<uint8_t*>(s.weights) + row * 2 * kKvTile; }
    // A head's values of a tile, [ldc / 64][4][positions / 4][16]; there is room for kMostHeads.
    static uint32_t* held_values(const AttentionScratch& s, int head) { return reinterpret_cast<uint32_t*>(s.values) + head * s.ldc * 16; }

    static void open(const AttentionArgs&, const AttentionScratch&, const Item& item) {
        TileShape shape;  // 0, 1: sums of values; 2, 3: of scores; 4: weights; 5, 6: keys or values; 7: queries
        shape.rows[0] = shape.rows[1] = shape.rows[4] = static_cast<uint8_t>(2 * item.head_rows);
        _tile_loadconfig(&shape);
    }
    static void close(const AttentionArgs& a, float* sums, int64_t stride, int rows) { TilePath::close(a, sums, stride, rows); }

    static void query(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int r) {
        alignas(64) int16_t codes[1024 + 64];
        const int size = a.head_dim, whole = up(size, 64), head = item.head(r);
        int8_t* columns = query_columns(s, head) + (r - head * item.head_rows) * 4;
        s.unit[r] = quantize_query(s.q + r * s.ld, size, codes);
        for (int i = size; i < whole; ++i) codes[i] = 0;
        for (int i = 0; i < whole; i += W) {
            const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
            const __m512i top = high_part(wide);
            int8_t high[16], low[16];
            Simd::store_bytes(high, top);
            Simd::store_bytes(low, low_part(wide, top));
            for (int word = 0; word < 4; ++word) {
                int8_t* column = columns + (i / 4 + word) * 64;
                std::memcpy(column, high + 4 * word, 4);
                std::memcpy(column + kFewRows * 4, low + 4 * word, 4);
            }
        }
    }

    // Sums of the products of 16 positions' keys with a head's queries, [16 positions][16 columns], in tiles Sums and Keys.
    // Tiles are named in the source, so a macro.
#define QK_SCORE_TILE(Sums, Keys)                              \
    _tile_zero(Sums);                                          \
    for (int c = 0; c < chunks; ++c) {                         \
        _tile_loadd(7, columns + c * 1024, 64);                \
        _tile_loadd(Keys, keys + c * 64, stride);              \
        _tile_dpbssd(Sums, Keys, 7);                           \
    }                                                          \
    _tile_stored(Sums, sums, 64);

    void scores(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at) {
        const int chunks = static_cast<int>(s.ldc) / 64, groups = (tile.hi + 15) / 16;
        const bool in_place = direct(a);
        for (int from = tile.lo / 16; from < groups; from += 2) {  // sums of 2 · kMostHeads products fit
            const int stop = least(from + 2, groups);
            int32_t* sums = s.sums;
            for (int g = from; g < stop; ++g) {
                for (int h = 0; h < item.heads; ++h, sums += 256) {
                    const int8_t* columns = query_columns(s, h);
                    const int8_t* keys = static_cast<const int8_t*>(a.k_cache) + h * head_bytes(a);
                    int64_t stride = a.head_dim;
                    if (in_place) {
                        keys += tile.offsets[g * 16];
                        // Values of the same positions are wanted next, in L1.
                        const char* values = static_cast<const char*>(a.v_cache) + h * head_bytes(a) + tile.offsets[g * 16];
                        for (int64_t byte = 0; byte < 16 * a.head_dim; byte += 64) __builtin_prefetch(values + byte);
                    } else {
                        auto* room = reinterpret_cast<int8_t*>(s.rows);
                        stride = s.ldc;
                        for (int i = 0; i < 16; ++i) {
                            std::memcpy(room + i * stride, tile.row(keys, g * 16 + i, s.zeros), static_cast<size_t>(a.head_dim));
                        }
                        keys = room;
                    }
                    ahead.some(6 * chunks);
                    if (h % 2) {
                        QK_SCORE_TILE(2, 5)
                    } else {
                        QK_SCORE_TILE(3, 6)
                    }
                }
            }
            sums = s.sums;
            for (int g = from; g < stop; ++g) {
                for (int h = 0; h < item.heads; ++h, sums += 256) {
                    const int row = h * item.head_rows;
                    ahead.some(6 * chunks);
                    for (int r = 0; r < item.head_rows; r += 4) {
                        __m512i columns[4];
                        four_columns(sums + r, columns);
                        for (int m = 0; m < least(4, item.head_rows - r); ++m) {
                            const F score = Simd::mul(Simd::to_float(columns[m]), Simd::set(s.unit[row + r + m]));
                            Simd::store(s.scores + (at + row + r + m) * kKvTile + g * 16, score);
                        }
                    }
                }
            }
        }
    }
#undef QK_SCORE_TILE

    template <class Visible>
    void soften(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int tiles, const Visible& visible) {
        soften_codes(s, tiles, item.rows, a.softcap, visible, [&](int v, const __m512i* codes) QK_LAMBDA_INLINE {
            ahead.some(10);
            const int inside = v % item.head_rows;
            uint8_t* high = weight_rows(s, v - inside) + inside * kKvTile;
            store_planes(codes, high, high + item.head_rows * kKvTile);
        });
    }

    template <class Visible>
    void values(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at, const Visible&) {
        auto* room = reinterpret_cast<int8_t*>(s.rows);
        const int chunks = static_cast<int>(s.ldc) / 64;
        const bool in_place = direct(a);
        for (int g = tile.lo / 16; g < (tile.hi + 15) / 16; ++g) {  // weights of the others are zero
            for (int h = 0; h < item.heads; ++h) {
                const int8_t* cache = static_cast<const int8_t*>(a.v_cache) + h * head_bytes(a);
                for (int j = g * 16; j < g * 16 + 16; j += 4) {
                    const int8_t* source[4];
                    for (int i = 0; i < 4; ++i) {
                        source[i] = in_place ? cache + tile.offsets[g * 16] + (j % 16 + i) * a.head_dim
                                             : whole_row(tile.row(cache, j + i, s.zeros), a.head_dim, room + i * s.ldc);
                    }
                    ahead.some(2 * chunks);
                    for (int c = 0; c < chunks; ++c) weave_values(source, c, j, held_values(s, h) + c * 1024);
                }
            }
        }
        for (int h = 0; h < item.heads; ++h) {
            const int row = h * item.head_rows;
            _tile_loadd(4, weight_rows(s, at + row), kKvTile);
            for (int c = 0; c < chunks; ++c) {
                const uint32_t* held = held_values(s, h) + c * 1024;
#define QK_VALUE_TILE(t, Sums, Values)          \
    _tile_zero(Sums);                           \
    _tile_loadd(Values, held + t * 256, 64);    \
    _tile_dpbusd(Sums, 4, Values);              \
    _tile_stored(Sums, s.sums + t * 512, 64);
                ahead.some(8);
                QK_VALUE_TILE(0, 0, 5)
                QK_VALUE_TILE(1, 1, 6)
                QK_VALUE_TILE(2, 0, 5)
                QK_VALUE_TILE(3, 1, 6)
#undef QK_VALUE_TILE
                ahead.some(8);
                for (int m = 0; m < item.head_rows; ++m) {
                    add_value_sums(s, s.sums + m * 16, item.head_rows * 16, at + row + m, s.out + (row + m) * s.ldo + c * 64);
                }
            }
        }
    }
};

}  // namespace
