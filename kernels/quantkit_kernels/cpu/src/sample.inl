// The vector loops of sampling. Products are rounded before they are added and sums run in kLanes lanes whatever the
// width, so that a seed's token does not depend on the instruction set.

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kLanes = 16, kLaneVectors = kLanes / W;

QK_INLINE F present(F x, F, Int<W>) { return x; }
QK_INLINE F present(F x, F other, int n) { return Simd::keep_lanes(x, other, 0, n); }

// One block's maximum; bad counts what is infinite or not a number.
QK_INLINE float block_top(const float* x, int32_t count, F& bad) {
    const F lowest = Simd::set(-kInfinity), beyond = Simd::set(kInfinity), one = Simd::set(1.0f);
    F top = lowest, found = Simd::zero();
    over_row(count, [&](int i, auto n) QK_LAMBDA_INLINE {
        const F v = load_part(x + i, n);
        top = Simd::max(present(v, lowest, n), top);  // in this order NaN is passed over
        found = Simd::add(found, Simd::zero_below(v, beyond, one));
    });
    bad = Simd::add(bad, found);
    return Simd::highest(top);
}

float highest(const float* x, int32_t count, float* tops) {
    F bad = Simd::zero();
    float all = -kInfinity;
    for (int32_t i = 0; i < count; i += kSampleBlock) {
        const float top = count - i >= kSampleBlock ? block_top(x + i, kSampleBlock, bad) : block_top(x + i, count - i, bad);
        tops[i / kSampleBlock] = top;
        all = top > all ? top : all;
    }
    return Simd::sum(bad) == 0.0f ? all : kInfinity;
}

void weigh(const float* x, int32_t count, float top, float rate, float limit, float* w) {
    const F peak = Simd::set(top), factor = Simd::set(rate), edge = Simd::set(limit);
    over_row(count, [&](int i, auto n) QK_LAMBDA_INLINE {
        const F v = load_part(x + i, n);
        store_part(w + i, Simd::zero_below(v, edge, exp<false>(Simd::mul(Simd::sub(v, peak), factor))), n);
    });
}

float mass(const float* x, const float* w, int32_t count, float limit) {
    const F edge = Simd::set(limit);
    F sums[kLaneVectors];
    for (F& sum : sums) sum = Simd::zero();
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kLaneVectors; ++v) {
            sums[v] = Simd::add(sums[v], Simd::zero_below(Simd::load(x + i + v * W), edge, Simd::load(w + i + v * W)));
        }
    }
    for (int v = 0; i < count; ++v, i += W) {
        const int n = least(W, count - i);
        sums[v] = Simd::add(sums[v], Simd::zero_below(Simd::load_n(x + i, n), edge, Simd::load_n(w + i, n)));
    }
    float lanes[kLanes];
    for (int v = 0; v < kLaneVectors; ++v) Simd::store(lanes + v * W, sums[v]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

constexpr SampleKernels kSampleKernels{highest, weigh, mass};

}  // namespace
