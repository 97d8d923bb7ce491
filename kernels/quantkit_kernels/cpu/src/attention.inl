// Attention over the paged cache: online softmax (Milakov and Gimelshein 2018) over KV tiles at absolute positions.
//
// A row is one query head of one query. Its scores, its running maximum and its sums are formed tile by tile and
// position by position, whatever other rows share the work, so decode, chunked and whole prefill give the same bits.
// A static int8 scale belongs to a channel, so k_scale is folded into q once and v_scale into the output once.

namespace {

// What an item works with, laid out in its thread's scratch. ld, ldo, ldc: strides of q and values, of out, of codes.
struct AttentionScratch {
    float *q, *out, *scores, *highest, *sum, *decay, *unit, *factor, *keys, *values, *rows, *zeros;
    int8_t* bytes;
    int16_t *codes, *weights;
    int32_t* sums;
    int64_t ld, ldo, ldc;
    int64_t size = 0;  // floats

    AttentionScratch(float* base, int row_count, int head_dim) {
        ld = up(head_dim, 16);
        ldo = ldc = up(head_dim, 64);
        const int64_t padded = up(row_count, 16);
        const auto take = [&](int64_t count) {
            float* here = base ? base + size : nullptr;  // without a base only the size is wanted
            size += up(static_cast<int>(count), 16);
            return here;
        };
        q = take(padded * ld);
        out = take(padded * ldo);
        scores = take(padded * kKvTile);
        highest = take(padded);
        sum = take(padded);
        decay = take(padded);
        unit = take(padded);
        factor = take(padded);
        keys = take(ldo * kKvTile);    // floats [channel][kKvTile]
        values = take(ldo * kKvTile);  // floats [kKvTile][ld]
        rows = take(16 * ldo);
        zeros = take(ldo);
        bytes = reinterpret_cast<int8_t*>(take(4 * ldo));                   // [ld][16]
        codes = reinterpret_cast<int16_t*>(take(padded * ldc / 2));         // q [row][ldc]
        weights = reinterpret_cast<int16_t*>(take(padded * kKvTile / 2));   // [row][kKvTile]
        sums = reinterpret_cast<int32_t*>(take(2 * 256));
    }

    // Over an int8 cache the same room holds pairs of 16 bits: [channel / 2][kKvTile][2] and [kKvTile / 2][ld][2].
    int16_t* key_pairs() const { return reinterpret_cast<int16_t*>(keys); }
    int16_t* value_pairs() const { return reinterpret_cast<int16_t*>(values); }
};

#ifndef QK_BASE
int64_t attention_scratch(const AttentionArgs& a) {
    return AttentionScratch(nullptr, a.group() * a.queries(), a.head_dim).size;
}
#endif

QK_INLINE int64_t cell_bytes(int dtype) { return dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

// Positions of the cache that an item sees together: lo..hi-1 of kKvTile, at these byte offsets.
struct KvTile {
    int lo, hi;
    int64_t cell;
    int64_t offsets[kKvTile];

    const void* row(const void* cache, int j, const void* nothing) const {
        return j >= lo && j < hi ? static_cast<const char*>(cache) + offsets[j] : static_cast<const char*>(nothing);
    }
};

// Where a position's keys and values lie in the cache, in bytes.
QK_INLINE int64_t offset_of(const AttentionArgs& a, const int32_t* table, int kv_head, int position, int64_t cell) {
    const int64_t block = table[position / a.block_size], inside = position % a.block_size;
    return ((block * a.num_kv_heads + kv_head) * a.block_size + inside) * cell;
}

// Asks for the keys and values of the tile at `start`: blocks are scattered, so the hardware cannot foresee them.
inline void fetch_tile(const AttentionArgs& a, const int32_t* table, int kv_head, int start, int end, int64_t cell) {
    const int stop = least(end, start + kKvTile);
    for (int at = start; at < stop; at += a.block_size - at % a.block_size) {
        const int count = least(a.block_size - at % a.block_size, stop - at);
        const int64_t first = offset_of(a, table, kv_head, at, cell);
        for (int64_t byte = 0; byte < count * cell; byte += 64) {
            __builtin_prefetch(static_cast<const char*>(a.k_cache) + first + byte);
            __builtin_prefetch(static_cast<const char*>(a.v_cache) + first + byte);
        }
    }
}

inline void locate(const AttentionArgs& a, const int32_t* table, int kv_head, int start, KvTile* tile) {
    for (int j = tile->lo; j < tile->hi;) {
        const int64_t first = offset_of(a, table, kv_head, start + j, tile->cell);
        const int run = least(a.block_size - (start + j) % a.block_size, tile->hi - j);
        for (int i = 0; i < run; ++i) tile->offsets[j + i] = first + i * tile->cell;
        j += run;
    }
}

// Caps one row's scores of a tile and hides all but lanes lo..hi-1; returns the highest that is left.
QK_INLINE float mask_scores(float* scores, int lo, int hi, float softcap) {
    const F hidden = Simd::set(-__builtin_inff());
    F top = hidden;
    for (int j = 0; j < kKvTile; j += W) {
        F x = Simd::load(scores + j);
        if (softcap > 0) x = soft_capped(x, softcap);
        if (lo > j || hi < j + W) x = Simd::keep_lanes(x, hidden, lo - j, hi - j);
        top = Simd::max(top, x);
        Simd::store(scores + j, x);
    }
    return Simd::highest(top);
}

}  // namespace

#include "attention_codes.inl"
#ifndef QK_BASE
#include "attention_floats.inl"
#endif
#if defined(__AMX_INT8__)
#include "attention_tiles_amx.inl"
#endif

namespace {

#ifndef QK_BASE
struct FloatPath {
    static void open(const AttentionArgs&, const AttentionScratch&, int) {}
    static void query(const AttentionArgs&, const AttentionScratch& s, int r) { s.unit[r] = 1.0f; }
    static void scores(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int rows) { float_scores(a, s, tile, rows); }
    static void soften(const AttentionArgs& a, const AttentionScratch& s, int r, int lo, int hi) {
        ::soften(s.scores + r * kKvTile, lo, hi, a.softcap, s.highest + r, s.sum + r, s.decay + r);
    }
    static void values(const AttentionArgs& a, const AttentionScratch& s, const KvTile& tile, int rows) { add_float_values(a, s, tile, rows); }
    static void close(const AttentionArgs&, const AttentionScratch&, int) {}
};
#endif

template <class Path>
void attend(const AttentionArgs& a, const Task& task) {
    const int group = a.group(), size = a.head_dim;
    const int item = task.plan->chunks / a.num_kv_heads - 1 - task.chunk / a.num_kv_heads;  // the longest first
    const int kv_head = task.chunk % a.num_kv_heads;
    const QueryTile queries = task.plan->tiles[item];
    const int rows = group * queries.count;
    const AttentionScratch s(task.scratch, group * a.queries(), size);

    const int32_t* table = a.block_table + static_cast<int64_t>(queries.sequence) * a.table_width;
    const int64_t token = a.query_start[queries.sequence] + queries.first;
    const int fresh = a.query_start[queries.sequence + 1] - a.query_start[queries.sequence];
    const int position = a.seq_lens[queries.sequence] - fresh + queries.first;  // of the first query
    const int end = position + queries.count;
    const int begin = a.window > 0 ? most(0, position - a.window + 1) : 0;
    const int64_t cell = size * cell_bytes(a.cache_dtype);
    fetch_tile(a, table, kv_head, begin / kKvTile * kKvTile, end, cell);

    Path::open(a, s, rows);
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
        Path::query(a, s, r);
    }
    std::memset(s.out, 0, sizeof(float) * rows * s.ldo);
    std::memset(s.zeros, 0, sizeof(float) * s.ldo);
    if (s.ld != size) std::memset(s.values, 0, sizeof(float) * kKvTile * s.ld);

    KvTile tile;
    tile.cell = cell;
    for (int start = begin / kKvTile * kKvTile; start < end; start += kKvTile) {
        fetch_tile(a, table, kv_head, start + kKvTile, end, cell);
        tile.lo = most(begin - start, 0);
        tile.hi = least(end - start, kKvTile);
        locate(a, table, kv_head, start, &tile);
        Path::scores(a, s, tile, rows);
        for (int r = 0; r < rows; ++r) {
            const int here = position + r / group;
            const int lo = a.window > 0 ? most(0, here - a.window + 1) - start : 0;
            Path::soften(a, s, r, lo, here + 1 - start);
        }
        Path::values(a, s, tile, rows);
    }
    Path::close(a, s, rows);

    const float* v_scale = a.v_scale ? a.v_scale + static_cast<int64_t>(kv_head) * size : nullptr;
    for (int r = 0; r < rows; ++r) {
        float inverse = s.sum[r] == 0.0f ? 0.0f : 1.0f / s.sum[r];
        if (s.unit[r] != s.unit[r]) inverse = s.unit[r];  // a query that is not finite
        float* out = a.out + (token + r / group) * a.num_heads * size + (kv_head * group + r % group) * size;
        over_row(size, [&](int i, auto n) {
            F x = Simd::mul(Simd::load(s.out + r * s.ldo + i), Simd::set(inverse));
            if (v_scale) x = Simd::mul(x, load_part(v_scale + i, n));
            // A row that ran on over hidden positions may hold +0 where another holds -0.
            store_part(out + i, Simd::add(x, Simd::zero()), n);
        });
    }
}

void paged_attention(const Task& task) {
    const AttentionArgs a(*task.node);
#ifndef QK_BASE
    if (a.cache_dtype != kI8) return attend<FloatPath>(a, task);
#endif
#if defined(__AMX_INT8__)
    attend<TilePath>(a, task);
#else
    attend<CodePath>(a, task);
#endif
}

}  // namespace
