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
            const int64_t at_cell = ((block * a.num_kv_heads + h) * a.block_size + offset) * cell_bytes(a.cache_dtype, a.head_dim);
            const int64_t channel = static_cast<int64_t>(h) * a.head_dim;
            const auto store = [&](const float* x, const float* scales, void* cache) {
                store_cell(x, scales ? scales + channel : nullptr, a.cache_dtype, a.head_dim, static_cast<uint8_t*>(cache) + at_cell);
            };
            norm_and_rotate(k + channel, a.k_norm, a, rope, normed, rotated);
            store(rotated, a.k_scale, a.k_cache);
            store(v + channel, a.v_scale, a.v_cache);
        }
    });
}

int64_t rope_scratch(const RopeArgs& a) { return 2 * up(a.head_dim, 16); }

}  // namespace
