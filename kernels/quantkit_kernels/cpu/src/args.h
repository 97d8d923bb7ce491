// The arguments of each op, read out of a Node. Their order is mirrored by calls.py. In an unnamed namespace, so that
// no unit compiled for a wider instruction set lends its copy of a constructor to the others.
#pragma once
#include "abi.h"

namespace {

constexpr int kPanel = 32;          // output rows of a packed panel
constexpr int kCapacityField = 14;  // Node::i: rows the node's tensors hold

struct EmbeddingArgs {
    const int32_t* ids;
    const void* table;
    float* out;
    int hidden, vocab, dtype;
    float scale;
    explicit EmbeddingArgs(const Node& n)
        : ids(static_cast<const int32_t*>(n.p[0])), table(n.p[1]), out(static_cast<float*>(n.p[2])), hidden(n.i[0]),
          vocab(n.i[1]), dtype(n.i[2]), scale(n.f[0]) {}
};

// rms_norm (residual null) and add_rms_norm.
struct NormArgs {
    const float* x;
    const float* residual;
    const float* weight;
    float* out;
    float* residual_out;
    int hidden;
    float eps, offset;
    explicit NormArgs(const Node& n)
        : x(static_cast<const float*>(n.p[0])), residual(static_cast<const float*>(n.p[1])),
          weight(static_cast<const float*>(n.p[2])), out(static_cast<float*>(n.p[3])),
          residual_out(static_cast<float*>(n.p[4])), hidden(n.i[0]), eps(n.f[0]), offset(n.f[1]) {}
};

struct AddArgs {
    const float* x;
    const float* y;
    float* out;
    int hidden;
    explicit AddArgs(const Node& n)
        : x(static_cast<const float*>(n.p[0])), y(static_cast<const float*>(n.p[1])), out(static_cast<float*>(n.p[2])),
          hidden(n.i[0]) {}
};

struct GatedActArgs {
    const float* gate_up;
    float* out;
    int inner, activation;
    explicit GatedActArgs(const Node& n)
        : gate_up(static_cast<const float*>(n.p[0])), out(static_cast<float*>(n.p[1])), inner(n.i[0]),
          activation(n.i[1]) {}
};

constexpr int kBlock = 128;      // channels that share a scale of quantized activations, at most
constexpr int kStep = 64;        // a block is stored padded with zeros to a multiple of so many channels
constexpr int kAfter = 8;        // Node::p: codes, scale and sum of a node that quantizes its own rows
constexpr int kAfterGroups = 8;  // Node::i: their groups

// How a quantized row is cut: a group of channels into blocks of kBlock, of which the last may be shorter.
struct Blocks {
    int groups, group;
    int per_group() const { return (group + kBlock - 1) / kBlock; }
    int blocks() const { return groups * per_group(); }
    int group_stride() const { return (group + kStep - 1) / kStep * kStep; }
    int stride() const { return groups * group_stride(); }
};

// Rows quantized to int8, each block with its own scale, maximum / 127, and the sum of its codes.
struct QuantizeArgs : Blocks {
    const float* x;
    const int32_t* row_index;  // rows to take, or null for all in order
    int8_t* codes;             // [rows][stride()]
    float* scale;              // [rows][blocks()]
    int32_t* sum;              // [rows][blocks()]
    int k, hidden_rows;
    bool picks;  // rows, by row_index
    explicit QuantizeArgs(const Node& n)
        : Blocks{n.i[1], n.i[0] / n.i[1]}, x(static_cast<const float*>(n.p[0])),
          row_index(static_cast<const int32_t*>(n.p[1])), codes(static_cast<int8_t*>(n.p[2])),
          scale(static_cast<float*>(n.p[3])), sum(static_cast<int32_t*>(n.p[4])), k(n.i[0]), hidden_rows(n.i[2]), picks(n.i[3] != 0) {}
    // What a norm or a gated activation does with its own rows besides: groups is 0 where nothing asks for it.
    static QuantizeArgs after(const Node& n) { return QuantizeArgs(n, n.i[0], n.i[kAfterGroups]); }

private:
    QuantizeArgs(const Node& n, int width, int count)
        : Blocks{count, count ? width / count : 0}, x(nullptr), row_index(nullptr),
          codes(static_cast<int8_t*>(n.p[kAfter])), scale(static_cast<float*>(n.p[kAfter + 1])),
          sum(static_cast<int32_t*>(n.p[kAfter + 2])), k(width), hidden_rows(0), picks(false) {}
};

// linear, and logits (rows >= 0 of row_index, softcap given). With codes, x is not read: rows come quantized.
struct LinearArgs : Blocks {
    const float* x;
    const uint8_t* data;
    const void* scale;   // [panels][groups][kPanel] in scale_dtype, or null
    const int8_t* zero;  // [panels][groups][kPanel], or null
    const float* bias;   // [n], or null
    float* out;
    const int32_t* row_index;
    const int8_t* codes;     // as QuantizeArgs has them, or null: x is multiplied as it is
    const float* x_scale;
    const int32_t* x_sum;
    int64_t panel_bytes;
    int k, n, dtype, scale_dtype, hidden_rows;
    float softcap;       // 0: none
    int64_t group_bytes() const { return panel_bytes / groups; }
    int panels() const { return (n + kPanel - 1) / kPanel; }
    explicit LinearArgs(const Node& node)
        : Blocks{node.i[2], node.i[0] / node.i[2]}, x(static_cast<const float*>(node.p[0])), data(static_cast<const uint8_t*>(node.p[1])), scale(node.p[2]),
          zero(static_cast<const int8_t*>(node.p[3])), bias(static_cast<const float*>(node.p[4])),
          out(static_cast<float*>(node.p[5])), row_index(static_cast<const int32_t*>(node.p[6])),
          codes(static_cast<const int8_t*>(node.p[7])), x_scale(static_cast<const float*>(node.p[8])),
          x_sum(static_cast<const int32_t*>(node.p[9])),
          panel_bytes(qk_packed_bytes(node.i[3], kPanel, node.i[0], node.i[2])), k(node.i[0]), n(node.i[1]), dtype(node.i[3]), scale_dtype(node.i[4]),
          hidden_rows(node.i[5]), softcap(node.f[0]) {}
};

// Whether a node multiplies weights with rows that come quantized.
inline bool of_codes(const Node& node) { return (node.op == kLinear || node.op == kLogits) && LinearArgs(node).codes; }

// Whether a node works on the rows whose logits are wanted, instead of all tokens.
inline bool on_picked_rows(const Node& n) { return n.op == kLogits || (n.op == kQuantizeRows && QuantizeArgs(n).picks); }

// Channels of a kI4 cell that share a scale and a minimum.
inline int cell_group(int head_dim) { return head_dim % 32 == 0 ? 32 : head_dim % 16 == 0 ? 16 : 8; }

// Bytes of a cell, one position of one head in the cache. kF8 is e4m3; kI4 cells are laid out in cells.inl.
inline int64_t cell_bytes(int dtype, int head_dim) {
    if (dtype == kI4) return head_dim / 2 + head_dim / cell_group(head_dim) * 4;
    return head_dim * (dtype == kF32 ? 4 : dtype == kI8 || dtype == kF8 ? 1 : 2);
}

struct RopeArgs {
    const float* qkv;
    const int32_t* positions;
    const int32_t* slots;
    const float* cos;
    const float* sin;
    const float* q_norm;
    const float* k_norm;
    void* k_cache;
    void* v_cache;
    const float* k_scale;
    const float* v_scale;
    float* q_out;
    int num_heads, num_kv_heads, head_dim, rotary_half, cache_dtype, block_size, num_blocks, num_positions;
    float eps, offset;
    explicit RopeArgs(const Node& n)
        : qkv(static_cast<const float*>(n.p[0])), positions(static_cast<const int32_t*>(n.p[1])),
          slots(static_cast<const int32_t*>(n.p[2])), cos(static_cast<const float*>(n.p[3])),
          sin(static_cast<const float*>(n.p[4])), q_norm(static_cast<const float*>(n.p[5])),
          k_norm(static_cast<const float*>(n.p[6])), k_cache(n.p[7]), v_cache(n.p[8]),
          k_scale(static_cast<const float*>(n.p[9])), v_scale(static_cast<const float*>(n.p[10])),
          q_out(static_cast<float*>(n.p[11])), num_heads(n.i[0]), num_kv_heads(n.i[1]), head_dim(n.i[2]),
          rotary_half(n.i[3]), cache_dtype(n.i[4]), block_size(n.i[5]), num_blocks(n.i[6]), num_positions(n.i[7]),
          eps(n.f[0]), offset(n.f[1]) {}
};

struct AttentionArgs {
    const float* q;
    const void* k_cache;
    const void* v_cache;
    const float* k_scale;
    const float* v_scale;
    const int32_t* block_table;
    const int32_t* query_start;
    const int32_t* seq_lens;
    float* out;
    int num_heads, num_kv_heads, head_dim, cache_dtype, block_size, num_blocks, table_width, window;  // window 0: none
    int max_sequences, max_tokens;
    float scale, softcap;                                                                             // softcap 0: none
    int group() const { return num_heads / num_kv_heads; }
    // Queries an item handles: about 48 rows (query heads of one KV head × queries) share each converted KV tile.
    int queries() const { return group() >= 48 ? 1 : 48 / group(); }
    // What a split of one query's positions hands over: highest and sum by row, then sums by row and channel.
    int64_t part_floats() const { return 2 * ((group() + 15) / 16 * 16) + static_cast<int64_t>(group()) * ((head_dim + 63) / 64 * 64); }
    // The first position that a query at `position` sees.
    int first_seen(int position) const { return window > 0 && position + 1 > window ? position + 1 - window : 0; }
    explicit AttentionArgs(const Node& n)
        : q(static_cast<const float*>(n.p[0])), k_cache(n.p[1]), v_cache(n.p[2]),
          k_scale(static_cast<const float*>(n.p[3])), v_scale(static_cast<const float*>(n.p[4])),
          block_table(static_cast<const int32_t*>(n.p[5])), query_start(static_cast<const int32_t*>(n.p[6])),
          seq_lens(static_cast<const int32_t*>(n.p[7])), out(static_cast<float*>(n.p[8])), num_heads(n.i[0]),
          num_kv_heads(n.i[1]), head_dim(n.i[2]), cache_dtype(n.i[3]), block_size(n.i[4]), num_blocks(n.i[5]),
          table_width(n.i[6]), window(n.i[7]), max_sequences(n.i[8]), max_tokens(n.i[kCapacityField]), scale(n.f[0]), softcap(n.f[1]) {}
};

}  // namespace
