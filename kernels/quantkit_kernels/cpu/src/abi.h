// The plain C ABI between Python (ctypes) and the library: a step is a flat array of these nodes.
#pragma once
#include <cstdint>

#define QK_API extern "C" __attribute__((visibility("default")))

// Raised whenever Node, an op's argument order, the packed layout or a function changes; Python refuses another number.
constexpr int32_t kAbiVersion = 5;

enum Op : int32_t {
    kEmbedding = 0,
    kRmsNorm,
    kAddRmsNorm,
    kAdd,
    kLinear,
    kGatedAct,
    kQkNormRopeKvWrite,
    kPagedAttention,
    kLogits,
    kQuantizeRows,
    kOpCount,
};

enum Dtype : int32_t { kF32 = 0, kF16, kBF16, kI8, kI4, kF8 };

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// One op. The meaning of i, f and p is given by the argument structs in args.h, one an op.
struct Node {
    int32_t op;
    int32_t i[15];
    float f[8];
    void* p[16];
};

struct List;

QK_API int32_t qk_abi_version();
// Bit mask (IsaBit of isa.h) of what this build holds and this processor and operating system can run.
QK_API int32_t qk_isa_mask();
QK_API const char* qk_last_error();

// Null with qk_last_error() set if a node is not valid. isa is one bit of the mask.
QK_API List* qk_list_create(const Node* nodes, int32_t count, int32_t isa, int32_t threads);
QK_API void qk_list_destroy(List* list);
// 0, or 1 with qk_last_error() set where an index of the step lies outside its tensor; nothing has been computed then.
QK_API int32_t qk_list_run(List* list, int32_t tokens, int32_t sequences, int32_t rows);

// The same step node by node: seconds[n] is what node n took, its start and end included.
QK_API int32_t qk_list_time(List* list, int32_t tokens, int32_t sequences, int32_t rows, double* seconds);

// How one row of logits becomes a token, in the order of the fields; mirrored by sampling.py.
struct SampleRow {
    const int32_t* bias_ids;  // [biases], each id once
    const float* bias;        // [biases], added
    const int32_t* tokens;    // [length], of which the first `prompt` were given and the rest generated
    const int32_t* banned;    // [bans], never drawn
    int32_t biases, prompt, length, bans;
    double repetition;        // divides positive logits of tokens and multiplies the others; 1: off
    float presence;           // subtracted once from those of generated tokens
    float frequency;          // subtracted as often as one was generated
    double temperature;       // under 1e-5: the largest logit
    int32_t top_k;            // 0: off
    int32_t logprobs;         // likeliest tokens to report, or -1: no log probabilities
    double top_p, min_p;      // 1 and 0: off
    uint64_t seed, position;  // of the uniform number
};

struct Sampler;

// Null with qk_last_error() set. A sampler has one caller at a time.
QK_API Sampler* qk_sampler_create(int32_t vocab, int32_t isa, int32_t threads);
QK_API void qk_sampler_destroy(Sampler* sampler);
// tokens [rows], -1 where a row holds NaN or its largest logit is infinite. For rows with logprobs n >= 0: at
// logprobs [rows][1 + most] the token's and the n likeliest tokens' log probabilities by the logits as they came,
// at top_ids [rows][most] those tokens; both null where no row has them. 0, or 1 with qk_last_error() set where an id lies outside the vocabulary.
QK_API int32_t qk_sampler_run(Sampler* sampler, const float* logits, const SampleRow* rows, int32_t count, int32_t most,
                              int32_t* tokens, double* logprobs, int32_t* top_ids);

// Packs weight [n, k] (dtype: codes int8 for kI8 and kI4) into panels; see pack.cpp for the layout.
QK_API int64_t qk_packed_bytes(int32_t dtype, int64_t n, int64_t k, int64_t groups);
QK_API void qk_pack(int32_t dtype, const void* weight, int64_t n, int64_t k, int64_t groups, void* packed);

// Ceilings: bytes/s read from a buffer of `bytes`, FP32 FMA FLOP/s; best of `rounds`.
QK_API double qk_bench_read(int32_t isa, int32_t threads, int64_t bytes, int32_t rounds);
QK_API double qk_bench_fma(int32_t isa, int32_t threads, int32_t rounds);
// Operations/s of codes of `bits` (4 or 8) times quantized rows, in cache, scaled every `group` (64 or 128) channels.
QK_API double qk_bench_dot(int32_t isa, int32_t threads, int32_t bits, int32_t group, int32_t rounds);
