// Attention over the paged cache: online softmax (Milakov and Gimelshein 2018) over KV tiles at absolute positions.
//
// A row is one query head of one query. Its scores, its running maximum and its sums are formed tile by tile and
// position by position, whatever other rows share the work, so decode, chunked and whole prefill give the same bits.
// Positions are summed by splits of kKvSplit, each with a maximum of its own, which join in order: so threads can share a
// long context, and do not change a bit of it.
// A calibrated scale belongs to a channel, so k_scale is folded into q once and v_scale into the output once.

namespace {

// What an item works with, laid out in its thread's scratch. ld, ldo, ldc: strides of q and values, of out, of codes.
struct AttentionScratch {
    float *q, *out, *scores, *highest, *top, *sum, *decay, *unit, *factor, *all, *all_highest, *all_sum, *keys, *values, *rows, *zeros;
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
        top = take(padded);
        sum = take(padded);
        decay = take(padded);
        unit = take(padded);
        factor = take(padded);
        all = take(padded * ldo);  // out, highest and sum of the splits that have joined
        all_highest = take(padded);
        all_sum = take(padded);
        keys = take(ldo * kKvTile);    // floats [channel][kKvTile]
        values = take(ldo * kKvTile);  // floats [kKvTile][ld]
        rows = take(16 * ldo);
        zeros = take(ldo);
        bytes = reinterpret_cast<int8_t*>(take(4 * ldo));                   // [ld][16]
        codes = reinterpret_cast<int16_t*>(take(padded * ldc / 2));         // q [row][ldc]
        weights = reinterpret_cast<int16_t*>(take(padded * kKvTile / 2));   // [row][kKvTile]
        sums = reinterpret_cast<int32_t*>(take(8 * 256));
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

constexpr float kLowestScore = -3.402823466e38f;  // below every score that is a number

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

inline void locate(const AttentionArgs& a, const int32_t* table, int kv_head, int start, KvTile* tile) {
    for (int j = tile->lo; j < tile->hi;) {
        const int64_t first = offset_of(a, table, kv_head, start + j, tile->cell);
        const int run = least(a.block_size - (start + j) % a.block_size, tile->hi - j);
        for (int i = 0; i < run; ++i) tile->offsets[j + i] = first + i * tile->cell;
        j += run;
    }
}

// Lanes lo..hi-1 of a tile, which may lie outside it.
struct Lanes {
    int lo, hi;
    bool all() const { return lo <= 0 && hi >= kKvTile; }
};

// Caps one row's scores of a tile and hides all but lanes lo..hi-1; returns the highest that is left.
QK_INLINE float mask_scores(float* scores, int lo, int hi, float softcap) {
    const F hidden = Simd::set(-__builtin_inff());
    F top = hidden;
    if (!(softcap > 0) && Lanes{lo, hi}.all()) {
        for (int j = 0; j < kKvTile; j += W) top = Simd::max(top, Simd::load(scores + j));
        return Simd::highest(top);
    }
    for (int j = 0; j < kKvTile; j += W) {
        F x = Simd::load(scores + j);
        if (softcap > 0) x = soft_capped(x, softcap);
        if (lo > j || hi < j + W) x = Simd::keep_lanes(x, hidden, lo - j, hi - j);
        top = Simd::max(top, x);
        Simd::store(scores + j, x);
    }
    return Simd::highest(top);
}

// One item: the rows of neighbouring KV heads, of each its query heads by query, which share its keys and values.
struct Item {
    const int32_t* table;
    int64_t token;  // of the first query
    int kv_head, heads, group, head_rows, rows;  // head_rows: of one KV head
    int position, begin, end;                    // position of the first query; positions begin..end-1 are seen

    Item(const AttentionArgs& a, const QueryTile& queries, int first_head, int head_count)
        : table(a.block_table + static_cast<int64_t>(queries.sequence) * a.table_width),
          token(a.query_start[queries.sequence] + queries.first), kv_head(first_head), heads(head_count), group(a.group()),
          head_rows(group * queries.count), rows(head_rows * heads) {
        const int fresh = a.query_start[queries.sequence + 1] - a.query_start[queries.sequence];
        position = a.seq_lens[queries.sequence] - fresh + queries.first;
        end = position + queries.count;
        begin = a.first_seen(position);
    }
    int first_split() const { return begin / kKvSplit; }
    int splits() const { return (end - 1) / kKvSplit - first_split() + 1; }
    int head(int row) const { return row / head_rows; }                           // counted from kv_head
    int query(int row) const { return (row - head(row) * head_rows) / group; }    // counted from the first
    // Where a row of q or of the result begins.
    int64_t channel(const AttentionArgs& a, int row) const {
        return (token + query(row)) * a.num_heads * a.head_dim + ((kv_head + head(row)) * group + row % group) * a.head_dim;
    }
};

// Asks for the keys and values of the tile at `start`: blocks are scattered, so the hardware cannot foresee them.
inline void fetch_tile(const AttentionArgs& a, const Item& item, int start, int end, int64_t cell) {
    const int stop = least(end, start + kKvTile);
    for (int at = start; at < stop; at += a.block_size - at % a.block_size) {
        const int count = least(a.block_size - at % a.block_size, stop - at);
        const int64_t first = offset_of(a, item.table, item.kv_head, at, cell);
        for (int64_t byte = 0; byte < count * cell; byte += 64) {
            __builtin_prefetch(static_cast<const char*>(a.k_cache) + first + byte);
            __builtin_prefetch(static_cast<const char*>(a.v_cache) + first + byte);
        }
    }
}

// What paths that take one KV head at a time share.
struct OneHead {
    static int heads(const AttentionArgs&, const Plan&, int) { return 1; }
    static void fetch(const AttentionArgs& a, const Item& item, int start, int end, int64_t cell) { fetch_tile(a, item, start, end, cell); }
    static void place(const AttentionArgs& a, const Item& item, int start, KvTile* tile) { locate(a, item.table, item.kv_head, start, tile); }
};

}  // namespace

#include "attention_codes.inl"
#ifndef QK_BASE
#include "attention_floats.inl"
#endif
#if defined(__AMX_INT8__)
#include "attention_few.inl"
#include "attention_tiles_amx.inl"
#include "attention_few_amx.inl"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "attention_few.inl"
#include "attention_few_avx2.inl"
#define QK_FEW_CODES 1
#endif

namespace {

#ifndef QK_BASE
struct FloatPath : OneHead {
    static int tiles(const Item&) { return 1; }
    static void open(const AttentionArgs&, const AttentionScratch&, const Item&) {}
    static void query(const AttentionArgs&, const AttentionScratch& s, const Item&, int r) { s.unit[r] = 1.0f; }
    static void scores(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int) {
        float_scores(a, s, tile, item.rows);
    }
    template <class Visible>
    static void soften(const AttentionArgs& a, const AttentionScratch& s, const Item& item, int, const Visible& visible) {
        for (int r = 0; r < item.rows; ++r) {
            const Lanes seen = visible(0, r);
            ::soften(s.scores + r * kKvTile, seen.lo, seen.hi, a.softcap, s.highest + r, s.sum + r, s.decay + r);
        }
    }
    template <class Visible>
    static void values(const AttentionArgs& a, const AttentionScratch& s, const Item& item, const KvTile& tile, int, const Visible& visible) {
        add_float_values(a, s, tile, item.rows, visible);
    }
    static void close(const AttentionArgs&, float*, int64_t, int) {}
};
#endif

// Before the first position: nothing summed, nothing seen.
inline void clear(const AttentionScratch& s, int rows) {
    for (int r = 0; r < rows; ++r) {
        s.highest[r] = kLowestScore;
        s.sum[r] = 0.0f;
    }
    std::memset(s.out, 0, sizeof(float) * rows * s.ldo);
}

// Sums up one split of an item's positions. What belongs to row r of tile t lies at t · rows + r.
template <class Path>
void sum_split(Path& path, const AttentionArgs& a, const AttentionScratch& s, const Item& item, int split) {
    const int first = split * kKvSplit, end = least(item.end, first + kKvSplit), at_once = path.tiles(item), rows = item.rows;
    const int64_t cell = cell_bytes(a.cache_dtype, a.head_dim);
    clear(s, rows);
    KvTile tiles[kTilesAtOnce];
    for (int start = most(first, item.begin / kKvTile * kKvTile), count; start < end; start += count * kKvTile) {
        count = least(at_once, (end - start + kKvTile - 1) / kKvTile);
        for (int t = 0; t < count; ++t) {
            const int here = start + t * kKvTile;
            tiles[t].cell = cell;
            tiles[t].lo = most(item.begin - here, 0);
            tiles[t].hi = least(end - here, kKvTile);
            path.fetch(a, item, here + at_once * kKvTile, end, cell);
            path.place(a, item, here, tiles + t);
            path.scores(a, s, item, tiles[t], t * rows);
        }
        const auto visible = [&](int t, int r) QK_LAMBDA_INLINE {
            const int query = item.position + item.query(r), here = start + t * kKvTile;
            return Lanes{a.window > 0 ? a.first_seen(query) - here : 0, query + 1 - here};
        };
        path.soften(a, s, item, count, visible);
        for (int t = 0; t < count; ++t) path.values(a, s, item, tiles[t], t * rows, visible);
    }
    for (int r = 0; r < rows; ++r) {
        if (s.unit[r] != s.unit[r]) s.sum[r] = s.unit[r];  // a query that is not finite, or a score beyond float
    }
}

// Adds a split's sums to those before it.
inline void join_split(const AttentionScratch& s, int rows, const float* highest, const float* sum, const float* out, int64_t width) {
    for (int r = 0; r < rows; r += W) {
        const F before = Simd::load(s.all_highest + r), mine = Simd::load(highest + r), now = Simd::max(before, mine);
        const F kept = exp(Simd::sub(before, now)), added = exp(Simd::sub(mine, now));
        Simd::store(s.all_highest + r, now);
        Simd::store(s.all_sum + r, Simd::fma(Simd::load(sum + r), added, Simd::mul(Simd::load(s.all_sum + r), kept)));
        Simd::store(s.decay + r, kept);
        Simd::store(s.factor + r, added);
    }
    for (int r = 0; r < rows; ++r) {
        const F kept = Simd::set(s.decay[r]), added = Simd::set(s.factor[r]);
        float* all = s.all + r * s.ldo;
        for (int c = 0; c < width; c += W) {
            Simd::store(all + c, Simd::fma(Simd::load(out + r * s.ldo + c), added, Simd::mul(Simd::load(all + c), kept)));
        }
    }
}

inline void begin_join(const AttentionScratch& s, int rows) {
    for (int r = 0; r < rows; ++r) {
        s.all_highest[r] = kLowestScore;
        s.all_sum[r] = 0.0f;
    }
    std::memset(s.all, 0, sizeof(float) * rows * s.ldo);
}

// Puts a split's results, highest and sum by row, then out, where its item gathers them; true for the one that comes last,
// which joins them all. `index`: of the item's first KV head; an item has the room of all its heads.
inline bool gathered(const AttentionArgs& a, const AttentionScratch& s, const Plan& plan, const Item& item, int64_t index, int split) {
    const int rows = item.rows, splits = item.splits();
    const auto part = [&](int i) { return plan.parts + (index * plan.splits + static_cast<int64_t>(i) * item.heads) * a.part_floats(); };
    std::memcpy(part(split), s.highest, sizeof(float) * rows);
    std::memcpy(part(split) + up(rows, 16), s.sum, sizeof(float) * rows);
    std::memcpy(part(split) + 2 * up(rows, 16), s.out, sizeof(float) * rows * s.ldo);
    if (__atomic_add_fetch(plan.arrived + index, 1, __ATOMIC_ACQ_REL) < splits) return false;
    __atomic_store_n(plan.arrived + index, 0, __ATOMIC_RELAXED);
    begin_join(s, rows);
    for (int i = 0; i < splits; ++i) join_split(s, rows, part(i), part(i) + up(rows, 16), part(i) + 2 * up(rows, 16), s.ldo);
    return true;
}

template <class Path>
void attend(const AttentionArgs& a, const Task& task) {
    // Heads follow one another fastest, then splits: a block's heads lie side by side in the cache and are read together.
    const int splits = most(1, task.plan->splits), kv_head = task.chunk % a.num_kv_heads;
    const int64_t tile = task.chunk / a.num_kv_heads / splits, index = tile * a.num_kv_heads + kv_head;
    const QueryTile& queries = task.plan->tiles[tile];
    const int bundle = Path::heads(a, *task.plan, queries.count), size = a.head_dim;
    if (kv_head % bundle) return;  // an item before took it along
    const Item item(a, queries, kv_head, least(bundle, a.num_kv_heads - kv_head));
    const int only = task.plan->splits > 0 ? task.chunk / a.num_kv_heads % splits : -1, rows = item.rows;  // the split asked for, or all
    if (only >= item.splits()) return;
    const AttentionScratch s(task.scratch, a.group() * a.queries(), size);
    const int first = item.first_split() + most(only, 0);
    Path path;
    path.fetch(a, item, most(first * kKvSplit, item.begin / kKvTile * kKvTile), item.end, cell_bytes(a.cache_dtype, size));

    path.open(a, s, item);
    for (int r = 0; r < rows; ++r) {
        const float* q = a.q + item.channel(a, r);
        const float* k_scale = a.k_scale ? a.k_scale + static_cast<int64_t>(item.kv_head + item.head(r)) * size : nullptr;
        over_row(size, [&](int i, auto n) {
            F x = Simd::mul(load_part(q + i, n), Simd::set(a.scale));
            if (k_scale) x = Simd::mul(x, load_part(k_scale + i, n));
            store_part(s.q + r * s.ld + i, x, n);
        });
        path.query(a, s, item, r);
    }
    std::memset(s.zeros, 0, sizeof(float) * s.ldo);
    if (s.ld != size) std::memset(s.values, 0, sizeof(float) * kKvTile * s.ld);

    float *out = s.all, *sum = s.all_sum;
    if (only >= 0) {
        sum_split(path, a, s, item, first);
        if (!gathered(a, s, *task.plan, item, index, only)) return path.close(a, nullptr, s.ldo, 0);
    } else if (item.splits() == 1) {
        sum_split(path, a, s, item, first);
        out = s.out;
        sum = s.sum;
    } else {
        begin_join(s, rows);
        for (int split = first; split < first + item.splits(); ++split) {
            sum_split(path, a, s, item, split);
            join_split(s, rows, s.highest, s.sum, s.out, s.ldo);
        }
    }
    path.close(a, out, s.ldo, rows);

    for (int r = 0; r < rows; ++r) {
        const float inverse = 1.0f / sum[r];  // of 0, where every score is -infinity: no number, as softmax has it
        const float* v_scale = a.v_scale ? a.v_scale + static_cast<int64_t>(item.kv_head + item.head(r)) * size : nullptr;
        float* y = a.out + item.channel(a, r);
        over_row(size, [&](int i, auto n) {
            F x = Simd::mul(Simd::load(out + r * s.ldo + i), Simd::set(inverse));
            if (v_scale) x = Simd::mul(x, load_part(v_scale + i, n));
            // A row that ran on over hidden positions may hold +0 where another holds -0.
            store_part(y + i, Simd::add(x, Simd::zero()), n);
        });
    }
}

void paged_attention(const Task& task) {
    const AttentionArgs a(*task.node);
#ifndef QK_BASE
    if (a.cache_dtype != kI8) return attend<FloatPath>(a, task);
#endif
    [[maybe_unused]] const int64_t tile = task.chunk / a.num_kv_heads / most(1, task.plan->splits);
    [[maybe_unused]] const bool few = a.group() * task.plan->tiles[tile].count <= kFewRows;
#if defined(__AMX_INT8__)
    if (few) attend<FewTilePath>(a, task);
    else attend<TilePath>(a, task);
#else
#ifdef QK_FEW_CODES
    if (few && FewCodePath::direct(a)) return attend<FewCodePath>(a, task);
#endif
    attend<CodePath>(a, task);
#endif
}

}  // namespace
