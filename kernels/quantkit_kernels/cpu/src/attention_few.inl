// What paths of few rows share: heads whose cells lie side by side in the cache are taken along, tile by tile, so that it is
// read in its own order, and the next tile is asked for while this one is worked on.

namespace {

// Lines of the next tile, asked for a few at a time between the work on this one: left to itself the processor fetches
// nothing while it computes, and all at once they would hold up what is read now. How many where is spread so that three
// heads of 64 channels, 384 lines, are all asked for.
struct Ahead {
    const char* pieces[2 * kMostHeads * kKvTile / 16];  // keys and values of 16 positions and a head
    int count = 0, piece = 0, line = 0, lines = 0;      // pieces; the next line; lines of a piece

    QK_INLINE void some(int n) {
        for (; n > 0 && piece < count; --n) {
            __builtin_prefetch(pieces[piece] + 64 * line, 0, 1);
            if (++line < lines) continue;
            line = 0;
            ++piece;
        }
    }
    // The next n lines, for a loop to ask for one by one. They may end beyond a piece; past the last they are of no use.
    QK_INLINE const char* take(int n) {
        if (piece == count) return reinterpret_cast<const char*>(pieces);
        const char* first = pieces[piece] + 64 * line;
        line += n;
        if (line >= lines) {
            line = 0;
            ++piece;
        }
        return first;
    }
};

// Paths read keys and values where the cache has them if 16 positions lie in one block and rows are whole units of channels.
template <int kUnit>
struct FewHeads {
    Ahead ahead;

    // KV heads an item takes along: as many as fit, and as equal a number an item as can be.
    static int heads(const AttentionArgs& a, const Plan& plan, int queries) {
        const int fit = most(1, least(plan.most_heads, a.queries() / queries));
        const int items = (a.num_kv_heads + fit - 1) / fit;
        return (a.num_kv_heads + items - 1) / items;
    }
    static int tiles(const Item& item) { return item.heads > 1 ? 1 : kTilesAtOnce; }
    static bool direct(const AttentionArgs& a) { return a.block_size % 16 == 0 && a.head_dim % kUnit == 0; }
    static int64_t head_bytes(const AttentionArgs& a) { return static_cast<int64_t>(a.block_size) * a.head_dim; }

    void fetch(const AttentionArgs& a, const Item& item, int start, int end, int64_t cell) {
        if (!direct(a)) return fetch_tile(a, item, start, end, cell);
        ahead = {};
        ahead.lines = a.head_dim / 4;
        for (int side = 0; side < 2; ++side) {
            const void* cache = side ? a.v_cache : a.k_cache;
            for (int at = start; at < least(end, start + kKvTile); at += 16) {
                const char* first = static_cast<const char*>(cache) + offset_of(a, item.table, item.kv_head, at, cell);
                for (int h = 0; h < item.heads; ++h) ahead.pieces[ahead.count++] = first + h * head_bytes(a);
            }
        }
    }
    static void place(const AttentionArgs& a, const Item& item, int start, KvTile* tile) {
        if (!direct(a)) return locate(a, item.table, item.kv_head, start, tile);
        for (int j = tile->lo / 16 * 16; j < tile->hi; j += 16) tile->offsets[j] = offset_of(a, item.table, item.kv_head, start + j, tile->cell);
    }
};

}  // namespace
