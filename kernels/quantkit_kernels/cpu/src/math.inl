// Transcendentals and the microkernel, on the Simd of the unit that includes this.

namespace {

using F = Simd::F;
constexpr int W = Simd::W;

#define QK_INLINE inline __attribute__((always_inline))

template <int N>
struct Int {
    static constexpr int value = N;
};

// Calls f(Int<n>{}) for 1 <= n <= N.
template <int N, class Fn>
QK_INLINE void with_count(int n, const Fn& f) {
    if constexpr (N > 1) {
        if (n < N) return with_count<N - 1>(n, f);
    }
    f(Int<N>{});
}

constexpr int up(int n, int unit) { return (n + unit - 1) / unit * unit; }
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

// a · b + c, rounded once where the hardware can (kFused), or twice on every instruction set.
template <bool kFused>
QK_INLINE F product_sum(F a, F b, F c) {
    if constexpr (kFused) return Simd::fma(a, b, c);
    else return Simd::add(Simd::mul(a, b), c);
}

// e^x: x = n·ln2 + r with |r| <= ln2/2, Taylor to r^6 with minimax coefficients (Cephes expf). Exactly zero below
// -87.3; NaN stays NaN. Not fused it has the same bits everywhere.
template <bool kFused = true>
QK_INLINE F exp(F x) {
    const F lowest = Simd::set(-87.33654f);
    const F bounded = Simd::min(Simd::set(88.37f), Simd::max(lowest, x));
    const F n = Simd::round(Simd::mul(bounded, Simd::set(1.44269504f)));
    F r = product_sum<kFused>(n, Simd::set(-0.693359375f), bounded);
    r = product_sum<kFused>(n, Simd::set(2.12194440e-4f), r);
    F p = Simd::set(1.9875691500e-4f);
    p = product_sum<kFused>(p, r, Simd::set(1.3981999507e-3f));
    p = product_sum<kFused>(p, r, Simd::set(8.3334519073e-3f));
    p = product_sum<kFused>(p, r, Simd::set(4.1665795894e-2f));
    p = product_sum<kFused>(p, r, Simd::set(1.6666665459e-1f));
    p = product_sum<kFused>(p, r, Simd::set(5.0000001201e-1f));
    p = product_sum<kFused>(p, Simd::mul(r, r), Simd::add(r, Simd::set(1.0f)));
    return Simd::zero_below(x, lowest, Simd::mul(p, Simd::power_of_two(n)));
}

// 1 / (1 + e^-x)
QK_INLINE F sigmoid(F x) {
    const F one = Simd::set(1.0f);
    return Simd::div(one, Simd::add(one, exp(Simd::sub(Simd::zero(), x))));
}

// cap · tanh(x / cap), with tanh(y) = 2·sigmoid(2y) - 1
QK_INLINE F soft_capped(F x, float cap) {
    const F t = sigmoid(Simd::mul(x, Simd::set(2.0f / cap)));
    return Simd::fma(t, Simd::set(2.0f * cap), Simd::set(-cap));
}

QK_INLINE float exp(float x) {
    float lanes[W];
    Simd::store(lanes, exp(Simd::set(x)));
    return lanes[0];
}

// acc[m][c] += sum over k, in order, of a[m][k] · b[k][c·W..]: the loop every product in this library runs through.
template <int M, int C>
QK_INLINE void multiply(F (&acc)[M][C], int depth, const float* a, int64_t lda, const float* b, int64_t ldb) {
    for (int k = 0; k < depth; ++k) {
        F w[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) w[c] = Simd::load(b + k * ldb + c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const F x = Simd::set(a[m * lda + k]);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) acc[m][c] = Simd::fma(x, w[c], acc[m][c]);
        }
    }
}

// Rows of a tile two vectors wide that fit the register file with their operands.
constexpr int kTileRows = Simd::kRegisters == 32 ? 12 : 6;

// Splits `rows` into the fewest blocks of at most kTileRows, as even as can be; returns the size of the first.
inline int tile_rows(int rows) {
    const int blocks = (rows + kTileRows - 1) / kTileRows;
    return blocks ? (rows + blocks - 1) / blocks : 0;
}

}  // namespace
