#include "check.h"

#include "args.h"

namespace {

std::string outside(const char* what, int64_t at, int64_t value, int64_t low, int64_t high) {
    return std::string(what) + "[" + std::to_string(at) + "] = " + std::to_string(value) + " is outside " +
           std::to_string(low) + ".." + std::to_string(high - 1);
}

bool check_range(const char* what, const int32_t* values, int32_t count, int64_t low, int64_t high, std::string* error) {
    for (int32_t i = 0; i < count; ++i) {
        if (values[i] >= low && values[i] < high) continue;
        *error = outside(what, i, values[i], low, high);
        return false;
    }
    return true;
}

bool check_attention(const AttentionArgs& a, const StepCounts& step, std::string* error) {
    if (step.sequences > a.max_sequences) {
        *error = "paged_attention: " + std::to_string(step.sequences) + " sequences, tensors hold " +
                 std::to_string(a.max_sequences);
        return false;
    }
    if (step.sequences == 0) return true;
    if (a.query_start[0] < 0 || a.query_start[step.sequences] > step.tokens) {
        *error = "query_start_loc must lie within 0.." + std::to_string(step.tokens);
        return false;
    }
    for (int32_t b = 0; b < step.sequences; ++b) {
        const int32_t fresh = a.query_start[b + 1] - a.query_start[b];
        if (fresh < 0 || a.seq_lens[b] < fresh) {
            *error = "sequence " + std::to_string(b) + ": " + std::to_string(fresh) + " new tokens of " +
                     std::to_string(a.seq_lens[b]);
            return false;
        }
        if (fresh == 0) continue;
        const int32_t oldest = a.window > 0 && a.seq_lens[b] - fresh + 1 > a.window ? a.seq_lens[b] - fresh + 1 - a.window : 0;
        const int32_t first = oldest / a.block_size, blocks = (a.seq_lens[b] - 1) / a.block_size + 1;
        if (blocks > a.table_width) {
            *error = "seq_lens[" + std::to_string(b) + "] = " + std::to_string(a.seq_lens[b]) +
                     " needs more blocks than block_table has columns (" + std::to_string(a.table_width) + ")";
            return false;
        }
        const int32_t* table = a.block_table + static_cast<int64_t>(b) * a.table_width;
        if (!check_range("block_table row", table + first, blocks - first, 0, a.num_blocks, error)) return false;
    }
    return true;
}

// Whether checking `a` has checked `b`, a node of the same op.
bool same_indices(const Node& a, const Node& b) {
    switch (a.op) {
        case kQkNormRopeKvWrite: {
            const RopeArgs x(a), y(b);
            return x.positions == y.positions && x.slots == y.slots && x.num_positions == y.num_positions &&
                   x.num_blocks == y.num_blocks && x.block_size == y.block_size;
        }
        case kPagedAttention: {
            const AttentionArgs x(a), y(b);
            return x.block_table == y.block_table && x.query_start == y.query_start && x.seq_lens == y.seq_lens &&
                   x.table_width == y.table_width && x.num_blocks == y.num_blocks && x.block_size == y.block_size &&
                   x.max_sequences == y.max_sequences && x.window == y.window;
        }
        default: return false;
    }
}

bool check_node(const Node& node, const StepCounts& step, std::string* error) {
    switch (node.op) {
        case kEmbedding: {
            const EmbeddingArgs a(node);
            return check_range("token_ids", a.ids, step.tokens, 0, a.vocab, error);
        }
        case kQkNormRopeKvWrite: {
            const RopeArgs a(node);
            const int64_t slots = static_cast<int64_t>(a.num_blocks) * a.block_size;
            return check_range("positions", a.positions, step.tokens, 0, a.num_positions, error) &&
                   check_range("slot_mapping", a.slots, step.tokens, -1, slots, error);
        }
        case kPagedAttention: return check_attention(AttentionArgs(node), step, error);
        case kQuantizeRows: {
            const QuantizeArgs a(node);
            if (!a.picks) return true;
            const int32_t live = step.tokens < a.hidden_rows ? step.tokens : a.hidden_rows;
            return check_range("logits_rows", a.row_index, step.rows, 0, live, error);
        }
        case kLogits: {
            const LinearArgs a(node);
            if (a.codes) return true;  // quantize_rows has picked the rows
            const int32_t live = step.tokens < a.hidden_rows ? step.tokens : a.hidden_rows;
            return check_range("logits_rows", a.row_index, step.rows, 0, live, error);
        }
        default: return true;
    }
}

}  // namespace

bool check_step(const Node* nodes, int32_t count, const StepCounts& step, std::string* error) {
    if (step.tokens < 0 || step.sequences < 0 || step.rows < 0) {
        *error = "tokens, sequences and rows must not be negative";
        return false;
    }
    for (int32_t n = 0; n < count; ++n) {
        const Node& node = nodes[n];
        const int32_t wanted = on_picked_rows(node) ? step.rows : step.tokens;
        if (wanted > node.i[kCapacityField]) {
            *error = "node " + std::to_string(n) + ": " + std::to_string(wanted) + " rows, its tensors hold " +
                     std::to_string(node.i[kCapacityField]);
            return false;
        }
        // Layers index the same way: one with the same index tensors and bounds as the last of its kind is checked.
        bool seen = false;
        for (int32_t back = n - 1; back >= 0 && !seen; --back) {
            if (nodes[back].op != node.op) continue;
            seen = same_indices(nodes[back], node);
            break;
        }
        if (!seen && !check_node(node, step, error)) return false;
    }
    return true;
}
