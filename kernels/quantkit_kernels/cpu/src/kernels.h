// What an instruction set's translation unit offers, and what a chunk of work is told.
#pragma once
#include "args.h"

// A run of consecutive queries of one sequence: one item of attention work for each KV head.
struct QueryTile {
    int32_t sequence;
    int32_t first;  // first query, counted inside the sequence's new tokens
    int32_t count;
};

// How one node is cut into chunks for the step at hand. Never changes a result, only who computes it.
struct Plan {
    int32_t chunks;
    int32_t rows_per_chunk;
    int32_t panels_per_chunk;
    int32_t panel_chunks;
    const QueryTile* tiles;
    int32_t most_heads;  // KV heads an item of attention may take along, so that there is work for all threads
    // Attention whose items are cut by position: chunks an item, room for their results and how many are there already.
    int32_t splits;
    float* parts;
    int32_t* arrived;
};

struct Task {
    const Node* node;
    const Plan* plan;
    int32_t rows;     // tokens, or logits rows for kLogits
    int32_t chunk;
    float* scratch;   // this thread's, 64-byte aligned
    const uint8_t* upcoming;  // packed weights that this thread is likely to read next, or null
};

constexpr int kSampleBlock = 128;  // logits of a row whose maximum and sum are kept

// What sampling does with a row, or a block of it. The same bits on every instruction set.
struct SampleKernels {
    // The largest x, +infinity where one is not a number; tops: of every kSampleBlock.
    float (*highest)(const float* x, int32_t count, float* tops);
    // w = exp((x - top) · rate), zero where x < limit
    void (*weigh)(const float* x, int32_t count, float top, float rate, float limit, float* w);
    float (*mass)(const float* x, const float* w, int32_t count, float limit);  // sum of w where x >= limit
};

struct KernelSet {
    void (*run)(const Task& task);
    int64_t (*scratch)(const Node& node);  // floats of scratch a thread needs for it
    int32_t gemv_rows;                     // up to so many rows linear dequantizes in registers, beyond into a tile
    int32_t gemv_panels;                   // panels it then takes together
    int64_t (*read)(const void* data, int64_t bytes);  // a sum, so that the read is not optimised away
    double (*fma)(int64_t iterations);                 // FLOP done
    double (*dot)(int bits, int group, int64_t iterations);  // the same of integer products; group 64 or 128
    SampleKernels sample;
};

constexpr int kRowBlock = 192;   // rows a GEMM chunk handles at most
constexpr int kRowUnit = 16;     // and a multiple of this, where there are several
constexpr int kDepthBlock = 128; // input channels of a dequantized tile
constexpr int kFewestTileRows = 9;  // from so many rows on matrix tiles pay
constexpr int kDotPanels = 2;      // panels that many rows pass over at once
constexpr int kMostHeads = 4;    // KV heads that an item of attention takes along at most
constexpr int kKvTile = 64;      // positions of a KV tile, aligned to absolute positions
constexpr int kKvSplit = 512;    // positions summed up on their own, aligned likewise, before they join the rest

extern const KernelSet kPortableKernels;
#if QK_X86
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvxVnniKernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512VnniKernels;
extern const KernelSet kAmxKernels;
#endif
#if QK_ARM64
extern const KernelSet kNeonKernels;
extern const KernelSet kNeonDotprodKernels;
extern const KernelSet kNeonI8mmKernels;
#endif
