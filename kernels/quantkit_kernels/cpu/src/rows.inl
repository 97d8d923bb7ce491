// Ops that work row by row: embedding, norms, addition, gated activation.

namespace {

template <class Fn>
QK_INLINE void over_chunk_rows(const Task& task, const Fn& f) {
    const int row0 = task.chunk * task.plan->rows_per_chunk;
    const int row1 = least(task.rows, row0 + task.plan->rows_per_chunk);
    for (int64_t row = row0; row < row1; ++row) f(row);
}

QK_INLINE void quantize_block(const float* x, int count, int8_t* codes, float* scale, int32_t* sum) {
    const Magnitude found = magnitude(x, count);
    const float bad = found.poison, highest = found.top;
    if (count % kStep != 0 || !(highest >= kSmallest)) std::memset(codes, 0, static_cast<size_t>(up(count, kStep)));
    *sum = 0;
    *scale = bad == 0.0f ? 0.0f : bad;
    if (!(highest >= kSmallest)) return;
    *scale = highest / 127.0f;
    const F inverse = Simd::set(127.0f / highest);
    Simd::I total = Simd::int_set(0);
    over_row(count, [&](int i, auto n) QK_LAMBDA_INLINE {
        const Simd::I held = Simd::to_int(Simd::mul(load_part(x + i, n), inverse));
        total = Simd::int_add(total, held);
        Simd::store_bytes(codes + i, held);  // lanes beyond the block's end are zero, and its room a multiple of kStep
    });
    *sum = Simd::int_sum(total);
}

inline void quantize_row(const QuantizeArgs& a, const float* x, int64_t row) {
    const int per_group = a.per_group();
    for (int g = 0; g < a.groups; ++g) {
        for (int j = 0; j < per_group; ++j) {
            const int64_t block = row * a.blocks() + g * per_group + j;
            int8_t* codes = a.codes + row * a.stride() + g * a.group_stride() + j * kBlock;
            quantize_block(x + g * a.group + j * kBlock, least(kBlock, a.group - j * kBlock), codes, a.scale + block, a.sum + block);
        }
    }
}

void quantize_rows(const Task& task) {
    const QuantizeArgs a(*task.node);
    over_chunk_rows(task, [&](int64_t row) {
        const int64_t source = a.row_index ? a.row_index[row] : row;
        quantize_row(a, a.x + source * a.k, row);
    });
}

// A row of any stored type as floats.
inline void to_float(const void* source, int dtype, int64_t offset, int size, float* out) {
    int i = 0;
    if (dtype == kF32) {
        std::memcpy(out, static_cast<const float*>(source) + offset, sizeof(float) * size);
    } else if (dtype == kF16) {
        const uint16_t* p = static_cast<const uint16_t*>(source) + offset;
        for (; i + W <= size; i += W) Simd::store(out + i, Simd::from_f16(p + i));
        for (; i < size; ++i) out[i] = half_to_float(p[i]);
    } else if (dtype == kBF16) {
        const uint16_t* p = static_cast<const uint16_t*>(source) + offset;
        for (; i + W <= size; i += W) Simd::store(out + i, Simd::from_bf16(p + i));
        for (; i < size; ++i) out[i] = bf16_to_float(p[i]);
    } else {
        const int8_t* p = static_cast<const int8_t*>(source) + offset;
        for (; i + W <= size; i += W) Simd::store(out + i, Simd::from_i8(p + i));
        for (; i < size; ++i) out[i] = p[i];
    }
}

void embedding(const Task& task) {
    const EmbeddingArgs a(*task.node);
    over_chunk_rows(task, [&](int64_t row) {
        float* out = a.out + row * a.hidden;
        to_float(a.table, a.dtype, static_cast<int64_t>(a.ids[row]) * a.hidden, a.hidden, out);
        if (a.scale == 1.0f) return;
        over_row(a.hidden, [&](int i, auto n) { store_part(out + i, Simd::mul(load_part(out + i, n), Simd::set(a.scale)), n); });
    });
}

// 1 / sqrt(mean(x²) + eps)
QK_INLINE float inverse_rms(const float* x, int size, float eps) {
    F sum = Simd::zero();
    over_row(size, [&](int i, auto n) {
        const F v = load_part(x + i, n);
        sum = Simd::fma(v, v, sum);
    });
    return 1.0f / __builtin_sqrtf(Simd::sum(sum) / static_cast<float>(size) + eps);
}

QK_INLINE void scale_row(const float* x, float factor, const float* weight, float offset, int size, float* out) {
    over_row(size, [&](int i, auto n) {
        const F w = Simd::add(load_part(weight + i, n), Simd::set(offset));
        store_part(out + i, Simd::mul(Simd::mul(load_part(x + i, n), Simd::set(factor)), w), n);
    });
}

void norm(const Task& task) {
    const NormArgs a(*task.node);
    const QuantizeArgs codes = QuantizeArgs::after(*task.node);
    over_chunk_rows(task, [&](int64_t row) {
        const float* x = a.x + row * a.hidden;
        if (a.residual) {
            const float* residual = a.residual + row * a.hidden;
            float* sum = a.residual_out + row * a.hidden;
            over_row(a.hidden, [&](int i, auto n) { store_part(sum + i, Simd::add(load_part(x + i, n), load_part(residual + i, n)), n); });
            x = sum;
        }
        scale_row(x, inverse_rms(x, a.hidden, a.eps), a.weight, a.offset, a.hidden, a.out + row * a.hidden);
        if (codes.groups) quantize_row(codes, a.out + row * a.hidden, row);
    });
}

void add(const Task& task) {
    const AddArgs a(*task.node);
    over_chunk_rows(task, [&](int64_t row) {
        const int64_t at = row * a.hidden;
        over_row(a.hidden, [&](int i, auto n) {
            store_part(a.out + at + i, Simd::add(load_part(a.x + at + i, n), load_part(a.y + at + i, n)), n);
        });
    });
}

// silu(x) = x·sigmoid(x); gelu_tanh(x) = x·sigmoid(2·sqrt(2/pi)·(x + 0.044715·x³)), from tanh(u) = 2·sigmoid(2u) - 1.
QK_INLINE F activate(F x, int activation) {
    if (activation == kSilu) return Simd::mul(x, sigmoid(x));
    const F cube = Simd::mul(Simd::mul(x, x), x);
    const F u = Simd::fma(cube, Simd::set(0.044715f), x);
    return Simd::mul(x, sigmoid(Simd::mul(u, Simd::set(1.5957691216f))));
}

void gated_act(const Task& task) {
    const GatedActArgs a(*task.node);
    const QuantizeArgs codes = QuantizeArgs::after(*task.node);
    over_chunk_rows(task, [&](int64_t row) {
        const float* gate = a.gate_up + row * 2 * a.inner;
        const float* up_row = gate + a.inner;
        float* out = a.out + row * a.inner;
        over_row(a.inner, [&](int i, auto n) {
            store_part(out + i, Simd::mul(activate(load_part(gate + i, n), a.activation), load_part(up_row + i, n)), n);
        });
        if (codes.groups) quantize_row(codes, out, row);
    });
}

}  // namespace
