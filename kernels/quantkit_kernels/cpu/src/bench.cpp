// The ceilings every figure is a share of: memory read, FP32 FMA and integer products, measured by the threads that run
// the kernels.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "kernels.h"
#include "list.h"
#include "team.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Work {
    const KernelSet* kernels;
    const char* data;
    int64_t bytes;  // a thread
};

template <class Fn>
double best_seconds(int32_t rounds, const Fn& once) {
    double best = 1e30;
    for (int32_t round = 0; round < rounds; ++round) {
        const Clock::time_point start = Clock::now();
        once();
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        if (seconds < best) best = seconds;
    }
    return best;
}

}  // namespace

QK_API double qk_bench_read(int32_t isa, int32_t threads, int64_t bytes, int32_t rounds) {
    const KernelSet* kernels = kernels_of(isa);
    if (!kernels || threads < 1) return 0;
    constexpr int64_t kHuge = 2 << 20;
    const int64_t share = (bytes / threads + kHuge - 1) / kHuge * kHuge;
    void* data = std::aligned_alloc(kHuge, static_cast<size_t>(share * threads));
    if (!data) return 0;
    madvise(data, static_cast<size_t>(share * threads), MADV_HUGEPAGE);
    std::memset(data, 1, static_cast<size_t>(share * threads));
    Work work{kernels, static_cast<const char*>(data), share};
    const int32_t chunks[1] = {threads};
    const auto run = [](void* context, int32_t, int32_t chunk, int32_t) {
        const Work& w = *static_cast<Work*>(context);
        volatile int64_t sink = w.kernels->read(w.data + chunk * w.bytes, w.bytes);
        (void)sink;
    };
    const double seconds = best_seconds(rounds, [&] { Team::of(threads).run({chunks, 1, run, &work}); });
    std::free(data);
    return static_cast<double>(share * threads) / seconds;
}

namespace {

// Operations a second of `once(chunk)`, which gives the operations it did, on all threads together.
template <class Once>
double rate(int32_t threads, int32_t rounds, const Once& once) {
    struct Shared {
        const Once* once;
        double done[256];
    } shared{&once, {}};
    const int32_t chunks[1] = {threads};
    const auto run = [](void* context, int32_t, int32_t chunk, int32_t) {
        Shared& s = *static_cast<Shared*>(context);
        s.done[chunk] = (*s.once)();
    };
    const double seconds = best_seconds(rounds, [&] { Team::of(threads).run({chunks, 1, run, &shared}); });
    double all = 0;
    for (int32_t t = 0; t < threads; ++t) all += shared.done[t];
    return all / seconds;
}

}  // namespace

QK_API double qk_bench_fma(int32_t isa, int32_t threads, int32_t rounds) {
    const KernelSet* kernels = kernels_of(isa);
    if (!kernels || threads < 1 || threads > 256) return 0;
    return rate(threads, rounds, [&] { return kernels->fma(200000); });
}

QK_API double qk_bench_dot(int32_t isa, int32_t threads, int32_t bits, int32_t group, int32_t rounds) {
    const KernelSet* kernels = kernels_of(isa);
    if (!kernels || threads < 1 || threads > 256 || (bits != 4 && bits != 8) || (group != 64 && group != 128)) return 0;
    return rate(threads, rounds, [&] { return kernels->dot(bits, group, 4000); });
}
