// The whole kernel set of one instruction set: a unit includes its Simd, then this, then names the set.
#include <cstring>

#include "convert.h"
#include "kernels.h"

#define QK_LAMBDA_INLINE __attribute__((always_inline))

#include "math.inl"
#include "rows_common.inl"
#include "linear_common.inl"
#if defined(__AMX_INT8__)
#include "tiles_amx.inl"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#include "tiles_i8mm.inl"
#else
#include "tiles_none.inl"
#endif
#include "linear_codes.inl"
#include "ceilings.inl"
#include "sample.inl"
#ifndef QK_BASE
#include "rows.inl"
#include "linear.inl"
#include "cells.inl"
#include "rope.inl"
#endif
#include "attention.inl"

#ifdef QK_BASE

// A set that multiplies integers better than another, and leaves it the rest.
namespace {

void run(const Task& task) {
    const Node& node = *task.node;
    if (of_codes(node)) return linear_of_codes(LinearArgs(node), task);
    if (node.op == kPagedAttention && AttentionArgs(node).cache_dtype == kI8) return paged_attention(task);
    QK_BASE.run(task);
}

int64_t scratch(const Node& node) {
    if (of_codes(node)) return codes_scratch(LinearArgs(node));
    return QK_BASE.scratch(node);
}

int64_t read(const void* data, int64_t bytes) { return QK_BASE.read(data, bytes); }
double fma_loop(int64_t iterations) { return QK_BASE.fma(iterations); }

constexpr KernelSet kKernels{run, scratch, kGemvRows, kGemvPanels, read, fma_loop, dot_loop, kSampleKernels};

}  // namespace

#else

namespace {

void run(const Task& task) {
    switch (task.node->op) {
        case kEmbedding: return embedding(task);
        case kRmsNorm:
        case kAddRmsNorm: return norm(task);
        case kAdd: return add(task);
        case kGatedAct: return gated_act(task);
        case kQkNormRopeKvWrite: return qk_norm_rope_kv_write(task);
        case kPagedAttention: return paged_attention(task);
        case kQuantizeRows: return quantize_rows(task);
        default: return linear(task);
    }
}

int64_t scratch(const Node& node) {
    switch (node.op) {
        case kLinear:
        case kLogits: return linear_scratch(LinearArgs(node));
        case kQkNormRopeKvWrite: return rope_scratch(RopeArgs(node));
        case kPagedAttention: return attention_scratch(AttentionArgs(node));
        default: return 0;
    }
}

int64_t read(const void* data, int64_t bytes) {
    constexpr int kStreams = 4;
    const auto* p = static_cast<const float*>(data);
    const int64_t stride = bytes / 4 / kStreams;
    F sums[kStreams] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
    for (int64_t i = 0; i + W <= stride; i += W) {
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
            __builtin_prefetch(p + s * stride + i + 128);
            sums[s] = Simd::max(sums[s], Simd::load(p + s * stride + i));
        }
    }
    return static_cast<int64_t>(Simd::highest(Simd::max(Simd::max(sums[0], sums[1]), Simd::max(sums[2], sums[3]))));
}

double fma_loop(int64_t iterations) {
    constexpr int kChains = Simd::kRegisters == 32 ? 24 : 12;
    F acc[kChains];
    for (int c = 0; c < kChains; ++c) acc[c] = Simd::set(static_cast<float>(c));
    F x = Simd::set(0.999999f), y = Simd::set(1e-7f);
    for (int64_t i = 0; i < iterations; ++i) {
        __asm__ volatile("" : "+m"(x), "+m"(y));
        const F a = x, b = y;
#pragma GCC unroll 8
        for (int repeat = 0; repeat < 8; ++repeat) {
#pragma GCC unroll 32
            for (int c = 0; c < kChains; ++c) acc[c] = Simd::fma(acc[c], a, b);
        }
    }
    F sum = Simd::zero();
    for (int c = 0; c < kChains; ++c) sum = Simd::add(sum, acc[c]);
    volatile float sink = Simd::sum(sum);
    (void)sink;
    return 2.0 * W * kChains * 8 * static_cast<double>(iterations);
}

constexpr KernelSet kKernels{run, scratch, kGemvRows, kGemvPanels, read, fma_loop, dot_loop, kSampleKernels};

}  // namespace

#endif
