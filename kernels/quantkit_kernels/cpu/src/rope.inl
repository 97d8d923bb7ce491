// Between the qkv projection and attention: q/k norm, rotary embedding, quantization and paged write, a token at a time.

namespace {

struct HeadRope {
    const float* cos;
    const float* sin;
    int half;
};

// out = rope(norm(x)); x and out may not overlap.
inline void norm_and_rotate(const float* x, const float* weight, const RopeArgs& a, const HeadRope& rope, float* normed, float* out) {
    const int size = a.head_dim, half = rope.half;
    if (weight) {
        scale_row(x, inverse_rms(x, size, a.eps), weight, a.offset, size, normed);
        x = normed;
    }
    over_row(half, [&](int i, auto n) {
        const F first = load_part(x + i, n), second = load_part(x + half + i, n);
        const F c = load_part(rope.cos + i, n), s = load_part(rope.sin + i, n);
        store_part(out + i, Simd::sub(Simd::mul(first, c), Simd::mul(second, s)), n);
        store_part(out + half + i, Simd::add(Simd::mul(second, c), Simd::mul(first, s)), n);
    });
    if (2 * half < size) std::memcpy(out + 2 * half, x + 2 * half, sizeof(float) * (size - 2 * half));
}

// Stores one head's channels as the cache keeps them. int8: clamp(round_half_even(x / scale), -127, 127).
inline void store_head(const float* x, const float* scale, int dtype, void* cache, int64_t offset, int size) {
    int i = 0;
    if (dtype == kF32) {
        std::memcpy(static_cast<float*>(cache) + offset, x, sizeof(float) * size);
    } else if (dtype == kF16) {
        uint16_t* out = static_cast<uint16_t*>(cache) + offset;
        for (; i + W <= size; i += W) Simd::to_f16(out + i, Simd::load(x + i));
        for (; i < size; ++i) out[i] = float_to_half(x[i]);
    } else if (dtype == kBF16) {
        uint16_t* out = static_cast<uint16_t*>(cache) + offset;
        for (; i < size; ++i) out[i] = float_to_bf16(x[i]);
    } else {
        int8_t* out = static_cast<int8_t*>(cache) + offset;
        over_row(size, [&](int at, auto n) {
            const F ratio = Simd::div(load_part(x + at, n), load_part(scale + at, n));
            const F code = Simd::min(Simd::set(127.0f), Simd::max(Simd::set(-127.0f), ratio));
            int8_t lanes[W];
            Simd::store_bytes(lanes, Simd::to_int(code));
            std::memcpy(out + at, lanes, static_cast<size_t>(count_of(n)));
        });
    }
}

void qk_norm_rope_kv_write(const Task& task) {
    const RopeArgs a(*task.node);
    float* normed = task.scratch;
    float* rotated = normed + up(a.head_dim, 16);
    const int width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    over_chunk_rows(task, [&](int64_t row) {
        const float* q = a.qkv + row * width;
        const float* k = q + static_cast<int64_t>(a.num_heads) * a.head_dim;
        const float* v = k + static_cast<int64_t>(a.num_kv_heads) * a.head_dim;
        const int64_t at = static_cast<int64_t>(a.positions[row]) * a.rotary_half;
        const HeadRope rope{a.cos + at, a.sin + at, a.rotary_half};
        float* q_out = a.q_out + row * a.num_heads * a.head_dim;
        for (int h = 0; h < a.num_heads; ++h) {
            norm_and_rotate(q + h * a.head_dim, a.q_norm, a, rope, normed, q_out + h * a.head_dim);
        }
        const int32_t slot = a.slots[row];
        if (slot < 0) return;
        const int64_t block = slot / a.block_size, offset = slot % a.block_size;
        for (int h = 0; h < a.num_kv_heads; ++h) {
            const int64_t cell = ((block * a.num_kv_heads + h) * a.block_size + offset) * a.head_dim;
            const int64_t channel = static_cast<int64_t>(h) * a.head_dim;
            norm_and_rotate(k + channel, a.k_norm, a, rope, normed, rotated);
            store_head(rotated, a.k_scale ? a.k_scale + channel : nullptr, a.cache_dtype, a.k_cache, cell, a.head_dim);
            store_head(v + channel, a.v_scale ? a.v_scale + channel : nullptr, a.cache_dtype, a.v_cache, cell, a.head_dim);
        }
    });
}

int64_t rope_scratch(const RopeArgs& a) { return 2 * up(a.head_dim, 16); }

}  // namespace
