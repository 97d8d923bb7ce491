// A list of nodes bound to tensors: made once, run once a step. Nothing is allocated in a step.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "kernels.h"
#include "list.h"
#include "team.h"

thread_local std::string last_error;

namespace {

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float, Free>;

Floats aligned_floats(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 4095) / 4096 * 4096 + 4096;
    return Floats(static_cast<float*>(std::aligned_alloc(4096, bytes)));
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Elements a chunk of a row-wise op should have, so that claiming it costs little beside doing it.
constexpr int kElementsPerChunk = 8192;
// Chunks a thread should get of a product, so that the last ones even out.
constexpr int kChunksPerThread = 6;
// So many items of attention a thread may take neighbouring heads along.
constexpr int kBundlesPerThread = 2;
// Attention of so many items a thread is not cut by position as well.
constexpr int kItemsPerThread = 8;

}  // namespace

const KernelSet* kernels_of(int32_t isa) {
    if (!(isa & qk_isa_mask())) return nullptr;
#if QK_X86
#if QK_AMX
    if (isa == kIsaAmx) return &kAmxKernels;
#endif
    if (isa == kIsaAvx512Vnni) return &kAvx512VnniKernels;
    if (isa == kIsaAvx512) return &kAvx512Kernels;
#if QK_AVX_VNNI
    if (isa == kIsaAvxVnni) return &kAvxVnniKernels;
#endif
    if (isa == kIsaAvx2) return &kAvx2Kernels;
#endif
#if QK_ARM64
#if QK_I8MM
    if (isa == kIsaNeonI8mm) return &kNeonI8mmKernels;
#endif
    if (isa == kIsaNeonDotprod) return &kNeonDotprodKernels;
    if (isa == kIsaNeon) return &kNeonKernels;
#endif
    return isa == kIsaPortable ? &kPortableKernels : nullptr;
}

struct List {
    std::vector<Node> nodes;
    std::vector<Plan> plans;
    std::vector<int32_t> chunks;
    std::vector<std::vector<QueryTile>> tiles;  // by attention node, empty where an earlier node's are shared
    std::vector<int32_t> tiles_from;            // node whose tiles this node uses, -1 if not attention
    std::vector<int32_t> tile_counts;           // by attention node with tiles of its own
    std::vector<int32_t> following;             // the next product of codes after a node, -1 if there is none
    Floats parts;                               // of the attention that is cut by position
    std::vector<int32_t> arrived;
    std::vector<Floats> scratch;
    const KernelSet* kernels = nullptr;
    int threads = 1;
    std::mutex turn;  // a step's plan belongs to the list
    int32_t tokens = 0, rows = 0;

    void plan_rows(int node, int count, int width) {
        const int per_chunk = std::max(1, kElementsPerChunk / std::max(1, width));
        plans[node] = {ceil_div(count, per_chunk), per_chunk, 0, 0, nullptr, 0, 0, nullptr, nullptr};
    }

    void plan_product(int node, int count) {
        const LinearArgs a(nodes[node]);
        Plan& plan = plans[node];
        int blocks = std::max(1, ceil_div(count, kRowBlock));
        if (threads > 1 && blocks > 1) blocks += blocks % 2;  // threads come from both ends
        plan.rows_per_chunk = std::max(1, ceil_div(count, blocks));
        if (blocks > 1) plan.rows_per_chunk = ceil_div(plan.rows_per_chunk, kRowUnit) * kRowUnit;
        const int unit = a.codes ? kDotPanels : count <= kernels->gemv_rows ? kernels->gemv_panels : 1;
        const int wanted = std::max(1, threads * kChunksPerThread / blocks);
        plan.panels_per_chunk = std::max(1, ceil_div(ceil_div(a.panels(), wanted), unit)) * unit;
        plan.panel_chunks = ceil_div(a.panels(), plan.panels_per_chunk);
        plan.chunks = count == 0 ? 0 : ceil_div(count, plan.rows_per_chunk) * plan.panel_chunks;
    }

    void plan_attention(int node, int sequences) {
        const AttentionArgs a(nodes[node]);
        const int source = tiles_from[node];
        if (source == node) {
            QueryTile* out = tiles[node].data();
            int count = 0;
            for (int b = 0; b < sequences; ++b) {
                const int fresh = a.query_start[b + 1] - a.query_start[b];
                for (int first = 0; first < fresh; first += a.queries()) {
                    out[count++] = {b, first, std::min(a.queries(), fresh - first)};
                }
            }
            tile_counts[node] = count;
        }
        const int items = tile_counts[source] * a.num_kv_heads;
        const int splits = items <= kItemsPerThread * threads && threads > 1 ? splits_of(a, sequences) : 0;
        const int bundles = tile_counts[source] * ceil_div(a.num_kv_heads, kMostHeads) * std::max(1, splits);
        const int most_heads = bundles >= kBundlesPerThread * threads || threads == 1 ? kMostHeads : 1;
        plans[node] = {items * std::max(1, splits), 0, 0, 0, tiles[source].data(), most_heads, splits, parts.get(), arrived.data()};
    }

    // Splits of the longest sequence, 0 where there is but one or a sequence has more than one new token.
    static int splits_of(const AttentionArgs& a, int sequences) {
        int splits = 1;
        for (int b = 0; b < sequences; ++b) {
            const int fresh = a.query_start[b + 1] - a.query_start[b], last = a.seq_lens[b] - 1;
            if (fresh > 1) return 0;
            if (fresh == 1) splits = std::max(splits, last / kKvSplit - a.first_seen(last) / kKvSplit + 1);
        }
        return splits > 1 ? splits : 0;
    }

    // False, with last_error set, where the step is too large to be cut up.
    bool plan_step(int32_t step_tokens, int32_t sequences, int32_t step_rows) {
        tokens = step_tokens;
        rows = step_rows;
        for (size_t n = 0; n < nodes.size(); ++n) {
            const int i = static_cast<int>(n);
            const Node& node = nodes[n];
            switch (node.op) {
                case kLinear: plan_product(i, tokens); break;
                case kLogits: plan_product(i, rows); break;
                case kQuantizeRows: plan_rows(i, on_picked_rows(node) ? rows : tokens, node.i[0]); break;
                case kPagedAttention: plan_attention(i, sequences); break;
                case kQkNormRopeKvWrite: plan_rows(i, tokens, (node.i[0] + 2 * node.i[1]) * node.i[2]); break;
                default: plan_rows(i, tokens, node.i[0]); break;
            }
            chunks[n] = plans[n].chunks;
            if (chunks[n] <= Team::kMostChunks) continue;
            last_error = "node " + std::to_string(n) + " would be cut into more than " + std::to_string(Team::kMostChunks) + " pieces";
            return false;
        }
        return true;
    }

    // Where the weights of a product's chunk begin.
    const uint8_t* weights(int32_t node, int32_t chunk) const {
        const LinearArgs a(nodes[node]);
        return a.data + chunk % plans[node].panel_chunks * plans[node].panels_per_chunk * a.panel_bytes;
    }

    // The weights that a thread is likely to want after a product's chunk: of its next chunk, if threads share alike, or
    // of its first in the product that follows.
    const uint8_t* upcoming(int32_t node, int32_t chunk, int32_t thread) const {
        if (!of_codes(nodes[node])) return nullptr;
        const bool from_back = Team::from_back(thread, threads);
        const int32_t side = from_back ? threads - Team::front_threads(threads) : Team::front_threads(threads);
        const int32_t chunks = plans[node].chunks, done = from_back ? chunks - 1 - chunk : chunk;
        if ((done + side) * threads < chunks * side) return weights(node, from_back ? chunk - side : chunk + side);
        const int32_t next = following[node];
        return next < 0 || plans[next].chunks == 0 ? nullptr : weights(next, from_back ? plans[next].chunks - 1 : 0);
    }

    static void run_chunk(void* context, int32_t node, int32_t chunk, int32_t thread) {
        const List& list = *static_cast<List*>(context);
        const Node& n = list.nodes[node];
        const int32_t rows = on_picked_rows(n) ? list.rows : list.tokens;
        list.kernels->run({&n, &list.plans[node], rows, chunk, list.scratch[thread].get(), list.upcoming(node, chunk, thread)});
    }
};

namespace {

// A fork while another thread is inside a step leaves the child a list that is locked for ever and half done: forks see
// to it that each list is as new there.
class Lists {
public:
    static Lists& all() {
        static auto* lists = new Lists;  // leaked: lists may outlive static destruction
        return *lists;
    }
    void add(List* list) {
        const std::lock_guard<std::mutex> lock(guard_);
        held_.insert(list);
    }
    void remove(List* list) {
        const std::lock_guard<std::mutex> lock(guard_);
        held_.erase(list);
    }

private:
    Lists() {
        pthread_atfork([] { all().guard_.lock(); }, [] { all().guard_.unlock(); }, [] {
            for (List* list : all().held_) {
                new (&list->turn) std::mutex;
                std::fill(list->arrived.begin(), list->arrived.end(), 0);
            }
            all().guard_.unlock();
        });
    }
    std::mutex guard_;
    std::set<List*> held_;
};

}  // namespace

QK_API int32_t qk_abi_version() { return kAbiVersion; }
QK_API int32_t qk_isa_mask() { return isa_mask(); }
QK_API const char* qk_last_error() { return last_error.c_str(); }

QK_API List* qk_list_create(const Node* nodes, int32_t count, int32_t isa, int32_t threads) {
    const KernelSet* kernels = kernels_of(isa);
    if (!kernels || threads < 1) {
        last_error = !kernels ? "this processor cannot run the instruction set asked for" : "a list needs at least one thread";
        return nullptr;
    }
    if (count > Team::kMostNodes) {
        last_error = "a list holds at most " + std::to_string(Team::kMostNodes) + " calls";
        return nullptr;
    }
    auto list = std::make_unique<List>();
    list->nodes.assign(nodes, nodes + count);
    list->plans.resize(count);
    list->chunks.resize(count);
    list->tiles.resize(count);
    list->tiles_from.assign(count, -1);
    list->kernels = kernels;
    list->threads = threads;
    list->tile_counts.assign(count, 0);
    list->following.assign(count, -1);
    for (int32_t n = count - 2; n >= 0; --n) list->following[n] = of_codes(nodes[n + 1]) ? n + 1 : list->following[n + 1];
    list->arrived.assign(kItemsPerThread * threads, 0);
    int64_t floats = 16, part_floats = 16;
    for (int32_t n = 0; n < count; ++n) {
        floats = std::max(floats, kernels->scratch(nodes[n]));
        if (nodes[n].op != kPagedAttention) continue;
        const AttentionArgs a(nodes[n]);
        const int64_t splits = ceil_div(a.table_width * a.block_size, kKvSplit);
        part_floats = std::max(part_floats, kItemsPerThread * threads * splits * a.part_floats());
        list->tiles_from[n] = n;
        for (int32_t earlier = 0; earlier < n; ++earlier) {
            if (list->tiles_from[earlier] != earlier) continue;
            const AttentionArgs b(nodes[earlier]);
            if (b.query_start == a.query_start && b.queries() == a.queries()) {
                list->tiles_from[n] = earlier;
                break;
            }
        }
        // Every sequence may leave one tile part empty.
        if (list->tiles_from[n] == n) list->tiles[n].resize(ceil_div(a.max_tokens, a.queries()) + a.max_sequences);
    }
    list->parts = aligned_floats(part_floats);
    for (int32_t thread = 0; thread < threads; ++thread) list->scratch.push_back(aligned_floats(floats));
    if (!list->parts || std::any_of(list->scratch.begin(), list->scratch.end(), [](const Floats& room) { return !room; })) {
        last_error = "out of memory for the threads' scratch";
        return nullptr;
    }
    Lists::all().add(list.get());
    return list.release();
}

QK_API void qk_list_destroy(List* list) {
    Lists::all().remove(list);
    delete list;
}

QK_API int32_t qk_list_run(List* list, int32_t tokens, int32_t sequences, int32_t rows) {
    const StepCounts counts{tokens, sequences, rows};
    if (!check_step(list->nodes.data(), static_cast<int32_t>(list->nodes.size()), counts, &last_error)) return 1;
    const std::lock_guard<std::mutex> lock(list->turn);
    if (!list->plan_step(tokens, sequences, rows)) return 1;
    // Looked up by process: the threads of a parent do not exist in its forked child.
    Team::of(list->threads).run({list->chunks.data(), static_cast<int32_t>(list->nodes.size()), &List::run_chunk, list});
    return 0;
}

namespace {

struct OneNode {
    List* list;
    int32_t node;
    static void run(void* context, int32_t, int32_t chunk, int32_t thread) {
        const OneNode& one = *static_cast<OneNode*>(context);
        List::run_chunk(one.list, one.node, chunk, thread);
    }
};

}  // namespace

QK_API int32_t qk_list_time(List* list, int32_t tokens, int32_t sequences, int32_t rows, double* seconds) {
    const StepCounts counts{tokens, sequences, rows};
    const auto size = static_cast<int32_t>(list->nodes.size());
    if (!check_step(list->nodes.data(), size, counts, &last_error)) return 1;
    const std::lock_guard<std::mutex> lock(list->turn);
    if (!list->plan_step(tokens, sequences, rows)) return 1;
    Team& team = Team::of(list->threads);
    for (int32_t node = 0; node < size; ++node) {
        OneNode one{list, node};
        const auto start = std::chrono::steady_clock::now();
        team.run({&list->chunks[node], 1, &OneNode::run, &one});
        seconds[node] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return 0;
}
