// Attention over an int8 cache on AMX: the integers of attention_codes.inl, split into two signed bytes each, so that one
// instruction multiplies 16 rows with 16 columns over 64 channels or positions.

namespace {

// Codes of 15 bits as high · 128 + low, both within a signed byte.
QK_INLINE __m512i high_part(__m512i codes) { return _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(64)), 7); }
QK_INLINE __m512i low_part(__m512i codes, __m512i high) { return _mm512_sub_epi32(codes, _mm512_slli_epi32(high, 7)); }
template <int Bits>
QK_INLINE F joined(const int32_t* high, const int32_t* low) {
    return Simd::to_float(_mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(high), Bits), _mm512_loadu_si512(low)));
}

// 16 × 16 words of 32 bits: out[c][r] = rows[r][c].
inline void transpose_words(const int8_t* const* rows, int at, uint32_t* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + at);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4·g + j] holds, in lane l, word 4·l + j of rows 4·g .. 4·g + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44), high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
        _mm512_storeu_si512(out + (0 + j) * 16, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (4 + j) * 16, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(out + (8 + j) * 16, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (12 + j) * 16, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

// A row of int8, padded with zeros to a multiple of 64 bytes where it is not one.
inline const int8_t* whole_row(const void* row, int size, int8_t* room) {
    if (size % 64 == 0) return static_cast<const int8_t*>(row);
    std::memset(room, 0, static_cast<size_t>(up(size, 64)));
    std::memcpy(room, row, static_cast<size_t>(size));
    return room;
}

// The weights of a tile's positions, four vectors of 15 bits, as bytes: position 16·q + 4·l + e at 16·l + 4·q + e.
QK_INLINE void store_planes(const __m512i* codes, uint8_t* high, uint8_t* low) {
    const __m512i front = _mm512_packus_epi32(codes[0], codes[1]), back = _mm512_packus_epi32(codes[2], codes[3]);
    const __m512i byte = _mm512_set1_epi16(255);
    _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(front, byte), _mm512_and_si512(back, byte)));
    _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(front, 8), _mm512_srli_epi16(back, 8)));
}

// Channels 64·c .. 64·c + 63 of the values of positions j .. j + 3 into `held` [4][positions / 4][16], in the order of the weights.
QK_INLINE void weave_values(const int8_t* const* rows, int c, int j, uint32_t* held) {
    const __m512i r0 = _mm512_loadu_si512(rows[0] + c * 64), r1 = _mm512_loadu_si512(rows[1] + c * 64);
    const __m512i r2 = _mm512_loadu_si512(rows[2] + c * 64), r3 = _mm512_loadu_si512(rows[3] + c * 64);
    const __m512i front = _mm512_unpacklo_epi8(r0, r1), back = _mm512_unpackhi_epi8(r0, r1);
    const __m512i front2 = _mm512_unpacklo_epi8(r2, r3), back2 = _mm512_unpackhi_epi8(r2, r3);
    uint32_t* out = held + (j / 4 % 4 * 4 + j / 16) * 16;
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(front, front2));
    _mm512_storeu_si512(out + 256, _mm512_unpackhi_epi16(front, front2));
    _mm512_storeu_si512(out + 512, _mm512_unpacklo_epi16(back, back2));
    _mm512_storeu_si512(out + 768, _mm512_unpackhi_epi16(back, back2));
}

// Adds to 64 channels of a row of out what a tile's sums, [4][512] of which the low plane lies `low` behind the high, stand for.
QK_INLINE void add_value_sums(const AttentionScratch& s, const int32_t* sums, int low, int row, float* out) {
    const F decay = Simd::set(s.decay[row]), factor = Simd::set(s.factor[row]);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
        const int32_t* sum = sums + t * 512;
        Simd::store(out + t * 16, Simd::fma(joined<8>(sum, sum + low), factor, Simd::mul(Simd::load(out + t * 16), decay)));
    }
}

// Sums of 16 rows of both planes, [2][16][16] at `sums`, over `steps` times 64 bytes of a row, in tiles High and Low. Tiles
// are named in the source, so a macro.
#define QK_MULTIPLY_PLANES(name, High, Low, DOT)                                                                                       \
    QK_INLINE void name(const void* high, const void* low, int64_t stride, const uint32_t* columns, int steps, int32_t* sums) {        \
        _tile_zero(High);                                                                                                              \
        _tile_zero(Low);                                                                                                               \
        for (int step = 0; step < steps; ++step) {                                                                                     \
            _tile_loadd(6, columns + step * 256, 64);                                                                                  \
            _tile_loadd(4, static_cast<const char*>(high) + step * 64, stride);                                                        \
            _tile_loadd(5, static_cast<const char*>(low) + step * 64, stride);                                                         \
            DOT(High, 4, 6);                                                                                                           \
            DOT(Low, 5, 6);                                                                                                            \
        }                                                                                                                              \
        _tile_stored(High, sums, 64);                                                                                                  \
        _tile_stored(Low, sums + 256, 64);                                                                                             \
    }
QK_MULTIPLY_PLANES(score_planes_even, 0, 1, _tile_dpbssd)
QK_MULTIPLY_PLANES(score_planes_odd, 2, 3, _tile_dpbssd)
QK_MULTIPLY_PLANES(value_planes_even, 0, 1, _tile_dpbusd)
QK_MULTIPLY_PLANES(value_planes_odd, 2, 3, _tile_dpbusd)
#undef QK_MULTIPLY_PLANES

struct TilePath : OneHead {
    // Two planes of bytes, high then low: q [padded rows][ldc], signed, high · 128 + low; and weights [padded rows][kKvTile],
    // unsigned, high · 256 + low.
    static int8_t* query_bytes(const AttentionScratch& s) { return reinterpret_cast<int8_t*>(s.codes); }
    static uint8_t* weight_bytes(const AttentionScratch& s) { return reinterpret_cast<uint8_t*>(s.weights); }

    static int tiles(const Item&) { return 1; }

    static void open(const AttentionArgs&, const AttentionScratch&, const Item& item) {
        TileShape shape;
        for (int tile = 0; tile < 6; ++tile) shape.rows[tile] = static_cast<uint8_t>(least(item.rows, 16));
        _tile_loadconfig(&shape);
    }
    static void close(const AttentionArgs& a, float* sums, int64_t stride, int rows) {
        _tile_release();
        // Columns of value tiles are channels 16·l + 4·t + e at 16·t + 4·l + e: back into order, 64 at a time.
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < a.head_dim; c += 64) {
                float* out = sums + r * stride + c;
                const F t0 = Simd::load(out), t1 = Simd::load(out + 16), t2 = Simd::load(out + 32), t3 = Simd::load(out + 48);
                const F low = _mm512_shuffle_f32x4(t0, t1, 0x44), high = _mm512_shuffle_f32x4(t0, t1, 0xee);
                const F low2 = _mm512_shuffle_f32x4(t2, t3, 0x44), high2 = _mm512_shuffle_f32x4(t2, t3, 0xee);
                Simd::store(out, _mm512_shuffle_f32x4(low, low2, 0x88));
                Simd::store(out + 16, _mm512_shuffle_f32x4(low, low2, 0xdd));
                Simd::store(out + 32, _mm512_shuffle_f32x4(high, high2, 0x88));
                Simd::store(out + 48, _mm512_shuffle_f32x4(high, high2, 0xdd));
            }
        }
    }

    static int64_t plane(const AttentionArgs& a) { return up(a.group() * a.queries(), 16); }

    static void query(const AttentionArgs& a, const AttentionScratch& s, const Item&, int r) {
        alignas(64) int16_t codes[1024 + 64];
        const int size = a.head_dim, whole = up(size, 64);
        s.unit[r] = quantize_query(s.q + r * s.ld, size, codes);
        for (int i = size; i < whole; ++i) codes[i] = 0;
        int8_t* high = query_bytes(s) + r * s.ldc;
        int8_t* low = high + plane(a) * s.ldc;
        for (int i = 0; i < whole; i += W) {
            const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
            const __m512i top = high_part(wide);
            Simd::store_bytes(high + i, top);
            Simd::store_bytes(low + i, low_part(wide, top));
        }
    }


    static void scores(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at) {
        const int rows = item.rows;
        auto* keys = reinterpret_cast<uint32_t*>(s.keys);  // [positions / 16][ldc / 64][16][16]
        auto* room = reinterpret_cast<int8_t*>(s.rows);
        const int chunks = static_cast<int>(s.ldc) / 64, groups = (tile.hi + 15) / 16;
        for (int g = tile.lo / 16; g < groups; ++g) {
            const int8_t* source[16];
            for (int i = 0; i < 16; ++i) source[i] = whole_row(tile.row(a.k_cache, g * 16 + i, s.zeros), a.head_dim, room + i * s.ldc);
            for (int c = 0; c < chunks; ++c) transpose_words(source, c * 64, keys + (g * chunks + c) * 256);
        }
        const int8_t* q = query_bytes(s);
        const int64_t low = plane(a) * s.ldc;
        for (int r = 0; r < rows; r += 16) {
            // All sums of a block of rows go out before the first is read: a load just behind a tile's store waits for it.
            for (int g = tile.lo / 16; g < groups; ++g) {
                const uint32_t* k = keys + g * chunks * 256;
                if (g % 2) score_planes_odd(q + r * s.ldc, q + low + r * s.ldc, s.ldc, k, chunks, s.sums + g * 512);
                else score_planes_even(q + r * s.ldc, q + low + r * s.ldc, s.ldc, k, chunks, s.sums + g * 512);
            }
            for (int g = tile.lo / 16; g < groups; ++g) {
                const int32_t* sum = s.sums + g * 512;
                for (int m = 0; m < least(16, rows - r); ++m) {
                    const F score = Simd::mul(joined<7>(sum + m * 16, sum + 256 + m * 16), Simd::set(s.unit[r + m]));
                    Simd::store(s.scores + (at + r + m) * kKvTile + g * 16, score);
                }
            }
        }
    }

    template <class Visible>
    static void soften(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int tiles, const Visible& visible) {
        uint8_t* high = weight_bytes(s);
        uint8_t* low = high + plane(a) * kKvTile;
        soften_codes(s, tiles, item.rows, a.softcap, visible, [&](int v, const __m512i* codes) QK_LAMBDA_INLINE {
            store_planes(codes, high + v * kKvTile, low + v * kKvTile);
        });
    }

    template <class Visible>
    static void values(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int at, const Visible&) {
        const int rows = item.rows;
        auto* held = reinterpret_cast<uint32_t*>(s.values);  // [ldc / 64][4][positions / 4][16]
        auto* room = reinterpret_cast<int8_t*>(s.rows);
        const int chunks = static_cast<int>(s.ldc) / 64;
        for (int j = 0; j < kKvTile; j += 4) {
            const int8_t* source[4];
            for (int i = 0; i < 4; ++i) source[i] = whole_row(tile.row(a.v_cache, j + i, s.zeros), a.head_dim, room + i * s.ldc);
            for (int c = 0; c < chunks; ++c) weave_values(source, c, j, held + c * 1024);
        }
        const uint8_t* weights = weight_bytes(s) + at * kKvTile;
        const int64_t low = plane(a) * kKvTile;
        for (int r = 0; r < rows; r += 16) {
            for (int c = 0; c < chunks; ++c) {
                for (int t = 0; t < 4; ++t) {
                    const uint32_t* v = held + (4 * c + t) * 256;
                    if (t % 2) value_planes_odd(weights + r * kKvTile, weights + low + r * kKvTile, kKvTile, v, 1, s.sums + t * 512);
                    else value_planes_even(weights + r * kKvTile, weights + low + r * kKvTile, kKvTile, v, 1, s.sums + t * 512);
                }
                for (int m = 0; m < least(16, rows - r); ++m) {
                    add_value_sums(s, s.sums + m * 16, 256, at + r + m, s.out + (r + m) * s.ldo + c * 64);
                }
            }
        }
    }
};

}  // namespace
