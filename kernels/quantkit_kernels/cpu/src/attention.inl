// Attention over the paged cache: online softmax (Milakov and Gimelshein 2018) over KV tiles at absolute positions.
//
// A row is one query head of one query. Its scores, its running maximum and its sums are formed tile by tile and
// position by position, whatever other rows share the work, so decode, chunked and whole prefill give the same bits.
// A static int8 scale belongs to a channel, so k_scale is folded into q once and v_scale into the output once. Over an
// int8 cache the scores are sums of integers: q, scaled, is taken in 15 bits with one scale a row, the keys as stored.

namespace {

constexpr float kQueryTop = 16383.0f;  // 15 bits: sums of q · k stay below 2^31 in heads of up to 1,024 channels

struct AttentionScratch {
    float *q, *out, *scores, *highest, *sum, *decay, *unit, *keys, *values, *rows, *zeros;
    int8_t* bytes;
    int16_t* codes;  // q as codes [row][ld]
    int64_t ld;

    // Over an int8 cache the keys' room holds pairs [channel / 2][kKvTile][2] of 16 bits.
    int16_t* key_pairs() const { return reinterpret_cast<int16_t*>(keys); }

    AttentionScratch(float* base, int row_count, int head_dim) {
        ld = up(head_dim, 16);
        const int64_t rows_up = up(row_count, 16);
        q = base;
        out = q + row_count * ld;
        scores = out + row_count * ld;
        highest = scores + row_count * static_cast<int64_t>(kKvTile);
        sum = highest + rows_up;
        decay = sum + rows_up;
        unit = decay + rows_up;
        keys = unit + rows_up;                 // [channel][kKvTile]
        values = keys + ld * kKvTile;          // [kKvTile][ld]
        rows = values + ld * kKvTile;          // [16][ld]
        zeros = rows + 16 * ld;                // [ld]
        bytes = reinterpret_cast<int8_t*>(zeros + ld);  // [ld][16]
        codes = reinterpret_cast<int16_t*>(zeros + 5 * ld);
    }
};

int64_t attention_scratch(const AttentionArgs& a) {
    const int64_t ld = up(a.head_dim, 16), rows = a.group() * a.queries();
    return rows * (2 * ld + kKvTile) + 4 * up(static_cast<int>(rows), 16) + 2 * ld * kKvTile + 16 * ld + ld + 4 * ld + rows * ld / 2;
}

QK_INLINE int64_t cell_bytes(int dtype) { return dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

// Sixteen key rows of int8 into sixteen columns of pairs [channel / 2][kKvTile][2]; an odd last channel pairs with zero.
inline void pair_keys(const AttentionArgs& a, const void* const* source, const AttentionScratch& s, int16_t* pairs) {
    const int size = a.head_dim, whole = size / 16 * 16;
    const int8_t* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = static_cast<const int8_t*>(source[i]);
    for (int d0 = 0; d0 < whole; d0 += Simd::kByteColumns) {
        const int lanes = least(Simd::kByteColumns, whole - d0) / 16;
        Simd::transpose_bytes(rows, d0, lanes, s.bytes);
        for (int lane = 0; lane < lanes; ++lane) {
            for (int d = 0; d < 16; d += 2) {
                const int8_t* even = s.bytes + (d * lanes + lane) * 16;
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

// One row of q as codes of 15 bits; returns what a code stands for. The row's end is zeros up to an even count.
inline float quantize_query(const float* q, int size, int16_t* codes) {
    const Magnitude found = magnitude(q, size);
    const float top = found.top, poison = found.poison;
    if (poison != 0.0f || !(top >= 1e-30f)) {
        std::memset(codes, 0, sizeof(int16_t) * static_cast<size_t>(size + size % 2));
        return poison == 0.0f ? 0.0f : poison;
    }
    const F inverse = Simd::set(kQueryTop / top);
    over_row(size, [&](int i, auto n) QK_LAMBDA_INLINE {
        int32_t lanes[W];
        const Simd::I held = Simd::to_int(Simd::mul(load_part(q + i, n), inverse));
        std::memcpy(lanes, &held, sizeof lanes);
        for (int j = 0; j < count_of(n); ++j) codes[i + j] = static_cast<int16_t>(lanes[j]);
    });
    if (size % 2) codes[size] = 0;
    return top / kQueryTop;
}

// Scores of M rows with columns `first`.. of the tile, C vectors of them.
template <int M, int C>
inline void score_rows(const AttentionArgs& a, const AttentionScratch& s, int row, int first) {
    Simd::I sums[M][C];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[m][c] = Simd::int_set(0);
    }
    const int16_t* q = s.codes + row * s.ld;
    for (int d = 0; d < a.head_dim; d += 2) {
        const int16_t* pairs = s.key_pairs() + static_cast<int64_t>(d) * kKvTile + 2 * first;
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[m][c] = Simd::dot_pairs(sums[m][c], pairs + 2 * c * W, q + m * s.ld + d);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const F unit = Simd::set(s.unit[row + m]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            Simd::store(s.scores + (row + m) * kKvTile + first + c * W, Simd::mul(Simd::to_float(sums[m][c]), unit));
        }
    }
}

inline void integer_scores(const AttentionArgs& a, const AttentionScratch& s, int rows, int columns) {
    constexpr int C = kWide ? 4 : 2, kMost = 4;
    const int step = (rows + kMost - 1) / kMost;
    for (int first = 0; first < columns; first += C * W) {
        for (int b = 0, row = 0; b < step; ++b) {
            const int count = (rows - row) / (step - b);
            with_count<kMost>(count, [&](auto m) QK_LAMBDA_INLINE { score_rows<decltype(m)::value, C>(a, s, row, first); });
            row += count;
        }
    }
}

// Sixteen key rows, as floats, into sixteen columns of keys [channel][kKvTile].
inline void transpose_keys(const AttentionArgs& a, const void* const* source, const AttentionScratch& s, float* keys) {
    const int size = a.head_dim;
    for (int i = 0; i < 16; ++i) to_float(source[i], a.cache_dtype, 0, size, s.rows + i * s.ld);
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
    const F hidden = Simd::set(-__builtin_inff());
    F top = hidden;
    for (int j = 0; j < kKvTile; j += W) {
        F x = Simd::load(scores + j);
        if (softcap > 0) x = soft_capped(x, softcap);
        if (lo > j || hi < j + W) x = Simd::keep_lanes(x, hidden, lo - j, hi - j);
        top = Simd::max(top, x);
        Simd::store(scores + j, x);
    }
    const float before = *highest, tile = Simd::highest(top);
    const float now = tile > before ? tile : before;
    if (now == -__builtin_inff()) {  // nothing visible up to here
        for (int j = 0; j < kKvTile; j += W) Simd::store(scores + j, Simd::zero());
        *decay = 1.0f;
        return;
    }
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

// Asks for the keys and values of the tile at `start`: blocks are scattered, so the hardware cannot foresee them.
inline void fetch_tile(const AttentionArgs& a, const int32_t* table, int kv_head, int start, int end, int64_t cell) {
    const int stop = least(end, start + kKvTile);
    for (int at = start; at < stop; at += a.block_size - at % a.block_size) {
        const int inside = at % a.block_size, count = least(a.block_size - inside, stop - at);
        const int64_t first = ((static_cast<int64_t>(table[at / a.block_size]) * a.num_kv_heads + kv_head) * a.block_size + inside) * cell;
        for (int64_t byte = 0; byte < count * cell; byte += 64) {
            __builtin_prefetch(static_cast<const char*>(a.k_cache) + first + byte);
            __builtin_prefetch(static_cast<const char*>(a.v_cache) + first + byte);
        }
    }
}

void paged_attention(const Task& task) {
    const AttentionArgs a(*task.node);
    const int group = a.group(), size = a.head_dim;
    const int item = task.plan->chunks / a.num_kv_heads - 1 - task.chunk / a.num_kv_heads;  // the longest first
    const int kv_head = task.chunk % a.num_kv_heads;
    const QueryTile tile = task.plan->tiles[item];
    const int rows = group * tile.count;
    const AttentionScratch s(task.scratch, group * a.queries(), size);

    const int32_t* table = a.block_table + static_cast<int64_t>(tile.sequence) * a.table_width;
    const int64_t token = a.query_start[tile.sequence] + tile.first;
    const int fresh = a.query_start[tile.sequence + 1] - a.query_start[tile.sequence];
    const int position = a.seq_lens[tile.sequence] - fresh + tile.first;  // of the first query
    const int end = position + tile.count;
    const int begin = a.window > 0 ? most(0, position - a.window + 1) : 0;

    const bool integers = a.cache_dtype == kI8;
    const float* k_scale = a.k_scale ? a.k_scale + static_cast<int64_t>(kv_head) * size : nullptr;
    for (int r = 0; r < rows; ++r) {
        const float* q = a.q + (token + r / group) * a.num_heads * size + (kv_head * group + r % group) * size;
        over_row(size, [&](int i, auto n) {
            F x = Simd::mul(load_part(q + i, n), Simd::set(a.scale));
            if (k_scale) x = Simd::mul(x, load_part(k_scale + i, n));
            store_part(s.q + r * s.ld + i, x, n);
        });
        s.highest[r] = -__builtin_inff();
        s.sum[r] = 0.0f;
        if (integers) s.unit[r] = quantize_query(s.q + r * s.ld, size, s.codes + r * s.ld);
    }
    std::memset(s.out, 0, sizeof(float) * rows * s.ld);
    std::memset(s.zeros, 0, sizeof(float) * s.ld);
    if (s.ld != size) std::memset(s.values, 0, sizeof(float) * kKvTile * s.ld);

    const bool few = rows <= kTileRows / 2 && kWide;  // four vectors a row then hide the latency of an FMA
    const int64_t cell = size * cell_bytes(a.cache_dtype);
    fetch_tile(a, table, kv_head, begin / kKvTile * kKvTile, end, cell);
    for (int start = begin / kKvTile * kKvTile; start < end; start += kKvTile) {
        const int lo = most(begin - start, 0), hi = least(end - start, kKvTile);
        fetch_tile(a, table, kv_head, start + kKvTile, end, cell);
        int64_t offsets[kKvTile];
        for (int j = lo; j < hi;) {
            const int block = (start + j) / a.block_size, inside = (start + j) % a.block_size;
            const int64_t first = ((static_cast<int64_t>(table[block]) * a.num_kv_heads + kv_head) * a.block_size + inside) * cell;
            const int run = least(a.block_size - inside, hi - j);
            for (int i = 0; i < run; ++i) offsets[j + i] = first + i * cell;
            j += run;
        }
        for (int j = lo / 16 * 16; j < hi; j += 16) {
            const void* source[16];
            for (int i = 0; i < 16; ++i) {
                const bool live = j + i >= lo && j + i < hi;
                source[i] = live ? static_cast<const char*>(a.k_cache) + offsets[j + i] : reinterpret_cast<const char*>(s.zeros);
            }
            if (integers) pair_keys(a, source, s, s.key_pairs() + 2 * j);
            else transpose_keys(a, source, s, s.keys + j);
        }
        const auto zero = [](int, int) { return Simd::zero(); };
        if (integers) {
            integer_scores(a, s, rows, hi);
        } else if (few && kKvTile == 4 * W) {
            product<4>(rows, size, s.q, s.ld, s.keys, kKvTile, s.scores, kKvTile, zero);
        } else {
            for (int c = 0; c < hi; c += 2 * W) {
                product<2>(rows, size, s.q, s.ld, s.keys + c, kKvTile, s.scores + c, kKvTile, zero);
            }
        }
        for (int r = 0; r < rows; ++r) {
            const int here = position + r / group;
            const int row_lo = a.window > 0 ? most(0, here - a.window + 1) - start : 0;
            soften(s.scores + r * kKvTile, row_lo, here + 1 - start, a.softcap, s.highest + r, s.sum + r, s.decay + r);
        }
        for (int j = lo; j < hi;) {  // cells of one block follow one another
            int run = 1;
            while (s.ld == size && j + run < hi && offsets[j + run] == offsets[j] + run * cell) ++run;
            to_float(static_cast<const char*>(a.v_cache) + offsets[j], a.cache_dtype, 0, run * size, s.values + j * s.ld);
            j += run;
        }
        const auto accumulate = [&](auto width, int c) {
            product<decltype(width)::value>(
                rows, hi - lo, s.scores + lo, kKvTile, s.values + lo * s.ld + c, s.ld, s.out + c, s.ld,
                [&](int r, int v) QK_LAMBDA_INLINE { return Simd::mul(Simd::load(s.out + r * s.ld + c + v * W), Simd::set(s.decay[r])); });
        };
        int c = 0;
        if (few) {
            for (; c + 4 * W <= s.ld; c += 4 * W) accumulate(Int<4>{}, c);
        }
        for (; c + 2 * W <= s.ld; c += 2 * W) accumulate(Int<2>{}, c);
        if (c < s.ld) accumulate(Int<1>{}, c);
    }

    const float* v_scale = a.v_scale ? a.v_scale + static_cast<int64_t>(kv_head) * size : nullptr;
    for (int r = 0; r < rows; ++r) {
        const F inverse = Simd::set(s.sum[r] == 0.0f ? 0.0f : 1.0f / s.sum[r]);
        float* out = a.out + (token + r / group) * a.num_heads * size + (kv_head * group + r % group) * size;
        over_row(size, [&](int i, auto n) {
            F x = Simd::mul(Simd::load(s.out + r * s.ld + i), inverse);
            if (v_scale) x = Simd::mul(x, load_part(v_scale + i, n));
            // A row that ran on over hidden positions may hold +0 where another holds -0.
            store_part(out + i, Simd::add(x, Simd::zero()), n);
        });
    }
}

}  // namespace
