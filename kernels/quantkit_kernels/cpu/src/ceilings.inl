// What this processor reaches at best in integer products: codes times quantized rows, scaled every `group` channels,
// out of L1, with no bounds, no zero points and no result to write.

namespace {

constexpr int kCeilingDepth = 512;  // channels: weights and rows together stay within half of L1

#if defined(__AMX_INT8__)

double dot_loop(int, int group, int64_t iterations) {
    alignas(64) uint32_t weights[kCeilingDepth / 4 * kPanel];
    alignas(64) int8_t x[kTileRows16 * kCeilingDepth];
    alignas(64) int32_t sums[kBatch * 256];
    alignas(64) float scale[kCeilingDepth / kStep * kPanel], x_scale[kTileRows16 * kCeilingDepth / kStep];
    std::memset(weights, 3, sizeof weights);
    std::memset(x, 5, sizeof x);
    for (float& s : scale) s = 1e-3f;
    for (float& s : x_scale) s = 1e-3f;
    const int steps = group / kStep, blocks = kCeilingDepth / group;
    F total[kTileRows16];
    for (F& t : total) t = Simd::zero();
    const TileShape shape;
    _tile_loadconfig(&shape);
    for (int64_t i = 0; i < iterations; ++i) {
        for (int block = 0; block < blocks; block += kBatch) {
            const auto at = [&](int t) QK_LAMBDA_INLINE { return (block + t) * group; };
            sum_block_0(x + at(0), kCeilingDepth, weights + at(0) / 4 * kPanel, steps, sums);
            sum_block_1(x + at(1), kCeilingDepth, weights + at(1) / 4 * kPanel, steps, sums);
            sum_block_2(x + at(2), kCeilingDepth, weights + at(2) / 4 * kPanel, steps, sums);
            sum_block_3(x + at(3), kCeilingDepth, weights + at(3) / 4 * kPanel, steps, sums);
            add_batch<kBatch>(total, sums, scale + block * kPanel, x_scale + block, blocks);
        }
    }
    _tile_release();
    F all = Simd::zero();
    for (const F& t : total) all = Simd::add(all, t);
    volatile float sink = Simd::sum(all);
    (void)sink;
    return 2.0 * kTileRows16 * W * kCeilingDepth * static_cast<double>(iterations);
}

#elif defined(__ARM_FEATURE_MATMUL_INT8)

template <class Pairs>
double dots(int group, int64_t iterations) {
    constexpr int M = kPairRows, C = 2;
    alignas(64) uint32_t words[kCeilingDepth / Pairs::kWordChannels * kPanel];
    alignas(64) int8_t codes[M * kCeilingDepth];
    std::memset(words, 0x33, sizeof words);
    std::memset(codes, 5, sizeof codes);
    const int8_t* x[M];
    for (int m = 0; m < M; ++m) x[m] = codes + m * kCeilingDepth;
    const uint32_t* const weights[C] = {words, words + W};
    F total[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    float scale = 1e-3f, x_scale = 1e-3f;
    for (int64_t i = 0; i < iterations; ++i) {
        __asm__ volatile("" : "+m"(scale), "+m"(x_scale));
        for (int k = 0; k < kCeilingDepth; k += group) {
            PairSum sum[M / 2][C];
            sum_pairs<Pairs, M, C>(k, k + group, x, weights, sum);
            const F factor = Simd::mul(Simd::set(scale), Simd::set(x_scale));
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) total[m][c] = Simd::fma(Simd::to_float(sum[m / 2][c].row(m % 2)), factor, total[m][c]);
            }
        }
    }
    F all = Simd::zero();
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) all = Simd::add(all, total[m][c]);
    }
    volatile float sink = Simd::sum(all);
    (void)sink;
    return 2.0 * M * C * W * kCeilingDepth * static_cast<double>(iterations);
}

double dot_loop(int bits, int group, int64_t iterations) {
    return bits == 4 ? dots<Pairs4>(group, iterations) : dots<Pairs8>(group, iterations);
}

#else

template <class Codes>
double dots(int group, int64_t iterations) {
    constexpr int M = Codes::kRows, C = Codes::kOutputs, kSteps = kCeilingDepth / kStep;
    alignas(64) uint32_t words[kSteps * kStepWords<Codes>];
    alignas(64) Step<M> steps[kSteps];
    std::memset(words, 0x33, sizeof words);
    std::memset(steps, 0, sizeof steps);
    for (Step<M>& step : steps) std::memset(step.codes, 5, sizeof step.codes);
    const Outputs<C> outputs{0, 0};
    F total[M][C], scale[C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) total[m][c] = Simd::zero();
    }
    const int block = group / kStep;
    for (int64_t i = 0; i < iterations; ++i) {
        __asm__ volatile("" : "+m"(steps), "+m"(words));
        for (int s = 0; s < kSteps;) {
            for (F& each : scale) each = Simd::set(1e-3f);
            typename Codes::Sum sum[M][C];
            open_all<Codes>(steps[s], sum);
            for (const int end = s + block; s < end; ++s) add_step<Codes>(words + s * kStepWords<Codes>, outputs, steps[s], sum);
            close_all(steps[s - 1], scale, sum, total);
        }
    }
    F all = Simd::zero();
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) all = Simd::add(all, total[m][c]);
    }
    volatile float sink = Simd::sum(all);
    (void)sink;
    return 2.0 * M * C * W * kCeilingDepth * static_cast<double>(iterations);
}

double dot_loop(int bits, int group, int64_t iterations) {
    return bits == 4 ? dots<Codes4>(group, iterations) : dots<Codes8>(group, iterations);
}

#endif

}  // namespace
