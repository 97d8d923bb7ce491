#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>

namespace {

using Clock = std::chrono::steady_clock;

// After a step the workers watch for the next one this long, then sleep: shorter than a decode step's host work would
// cost a wake-up each step, longer would take cores from torch's threads.
constexpr std::chrono::microseconds kLinger{60};
// Inside a step a waiting thread gives its core away after about this many pauses.
constexpr int kPausesBeforeYield = 400;

void pause_once() {
#if QK_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Rounding to nearest and no flush to zero, whatever the calling thread has set: bits must not depend on it.
class FloatState {
public:
    FloatState() {
#if QK_X86
        saved_ = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(0x1f80);
#elif defined(__aarch64__)
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
#endif
    }
    ~FloatState() {
#if QK_X86
        __builtin_ia32_ldmxcsr(static_cast<unsigned>(saved_));
#elif defined(__aarch64__)
        __asm__ volatile("msr fpcr, %0" ::"r"(saved_));
#endif
    }
    FloatState(const FloatState&) = delete;
    FloatState& operator=(const FloatState&) = delete;

private:
    uint64_t saved_ = 0;
};

std::mutex* forked_guard = nullptr;

// A fork while another thread holds the mutex would leave it locked in the child for ever: forks wait for it.
std::mutex* kept_over_forks(std::mutex* guard) {
    forked_guard = guard;
    pthread_atfork([] { forked_guard->lock(); }, [] { forked_guard->unlock(); }, [] { forked_guard->unlock(); });
    return guard;
}

}  // namespace

Team& Team::of(int threads) {
    // Leaked on purpose: workers must not be joined by static destructors. A forked child has none of its parent's
    // threads, so teams are kept by process.
    static std::mutex* guard = kept_over_forks(new std::mutex);
    static auto* teams = new std::map<std::pair<pid_t, int>, std::unique_ptr<Team>>;
    const std::lock_guard<std::mutex> lock(*guard);
    std::unique_ptr<Team>& team = (*teams)[{getpid(), threads}];
    if (!team) team.reset(new Team(threads));
    return *team;
}

Team::Team(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { worker(thread); });
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(parking_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : workers_) thread.join();
}

Team::Cursor Team::cursor_at(const Job& job, int32_t node) const {
    while (node < job.nodes && job.chunks[node] == 0) ++node;
    if (node == job.nodes) return {kIdle, 0, 0};
    return {static_cast<uint32_t>(node), 0, static_cast<uint32_t>(job.chunks[node])};
}

// Claims one chunk and runs it; false where the node at hand has none left. The node and its unclaimed chunks are one
// atomic value and job_ is read only while holding a claim, so a thread that lags can never touch a step that is over.
bool Team::claim_and_run(int thread) {
    const bool back = from_back(thread, static_cast<int>(workers_.size()) + 1);
    uint64_t seen = cursor_.load(std::memory_order_acquire);
    Cursor at;
    uint32_t chunk;
    do {
        at = Cursor::of(seen);
        if (at.front == at.back) return false;
        chunk = back ? --at.back : at.front++;
    } while (!cursor_.compare_exchange_weak(seen, at.packed(), std::memory_order_acq_rel, std::memory_order_acquire));
    const auto node = static_cast<int32_t>(at.node);
    const int32_t chunks = job_.chunks[node];
    job_.run(job_.context, node, static_cast<int32_t>(chunk), thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) {
        done_.store(0, std::memory_order_relaxed);
        cursor_.store(cursor_at(job_, node + 1).packed(), std::memory_order_release);
    }
    return true;
}

void Team::run(const Job& job) {
    const std::lock_guard<std::mutex> turn(turn_);
    const FloatState state;
    if (workers_.empty()) {
        for (int32_t node = 0; node < job.nodes; ++node) {
            for (int32_t chunk = 0; chunk < job.chunks[node]; ++chunk) job.run(job.context, node, chunk, 0);
        }
        return;
    }
    const Cursor start = cursor_at(job, 0);
    if (start.node == kIdle) return;
    job_ = job;
    cursor_.store(start.packed(), std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) {
        { const std::lock_guard<std::mutex> lock(parking_); }
        wake_.notify_all();
    }
    for (;;) {
        const uint32_t node = node_now();
        if (node == kIdle) return;
        if (claim_and_run(0)) continue;
        for (int pauses = 0; node_now() == node; ++pauses) {
            if (pauses < kPausesBeforeYield) pause_once();
            else sched_yield();
        }
    }
}

void Team::worker(int thread) {
    const FloatState state;
    for (;;) {
        const Clock::time_point idle_since = Clock::now();
        while (node_now() == kIdle) {
            for (int i = 0; i < 16 && node_now() == kIdle; ++i) pause_once();
            if (Clock::now() - idle_since < kLinger) continue;
            std::unique_lock<std::mutex> lock(parking_);
            parked_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [this] { return stop_ || node_now() != kIdle; });
            parked_.fetch_sub(1, std::memory_order_seq_cst);
            if (stop_) return;
        }
        if (stop_) return;
        for (uint32_t node = node_now(); node != kIdle; node = node_now()) {
            if (claim_and_run(thread)) continue;
            for (int pauses = 0; node_now() == node; ++pauses) {
                if (pauses < kPausesBeforeYield) pause_once();
                else sched_yield();
            }
        }
    }
}
