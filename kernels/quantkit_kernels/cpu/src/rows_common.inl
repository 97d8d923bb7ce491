// Shared by everything that walks along rows.

namespace {

// Row vectors: f(i, n) for whole vectors (n = W), then once for the rest.
template <class Fn>
QK_INLINE void over_row(int size, const Fn& f) {
    int i = 0;
    for (; i + W <= size; i += W) f(i, Int<W>{});
    if (i < size) f(i, size - i);
}

QK_INLINE F load_part(const float* p, Int<W>) { return Simd::load(p); }
QK_INLINE F load_part(const float* p, int n) { return Simd::load_n(p, n); }
QK_INLINE void store_part(float* p, F x, Int<W>) { Simd::store(p, x); }
QK_INLINE void store_part(float* p, F x, int n) { Simd::store_n(p, x, n); }
QK_INLINE int count_of(Int<W>) { return W; }
QK_INLINE int count_of(int n) { return n; }

// What is quantized and below this magnitude is zero: its inverse would not be finite.
constexpr float kSmallest = 1e-30f;

struct Magnitude {
    float top;     // largest |x|, 0 where poison is not 0
    float poison;  // 0, or not a number where an x is infinite or not a number
};

QK_INLINE Magnitude magnitude(const float* x, int size) {
    F top = Simd::zero(), poison = Simd::zero();
    over_row(size, [&](int i, auto n) QK_LAMBDA_INLINE {
        const F v = load_part(x + i, n);
        top = Simd::max(top, Simd::max(v, Simd::sub(Simd::zero(), v)));
        poison = Simd::fma(v, Simd::zero(), poison);
    });
    const float bad = Simd::sum(poison);
    return {bad == 0.0f ? Simd::highest(top) : 0.0f, bad};
}

}  // namespace
