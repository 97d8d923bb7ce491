// One persistent team of threads that runs a list of nodes, each cut into chunks, without a barrier all must reach:
// a node is over when its chunks are done, so a thread the system has set aside holds up nobody.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct Job {
    const int32_t* chunks;  // [nodes], zero for a node with nothing to do
    int32_t nodes;
    void (*run)(void* context, int32_t node, int32_t chunk, int32_t thread);
    void* context;
};

class Team {
public:
    // The team of so many threads (the caller is one of them), made on first use and kept for the process.
    static Team& of(int threads);

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Runs every node in order; returns when the last is done. Callers take turns.
    void run(const Job& job);

private:
    static constexpr uint32_t kIdle = 0xffffffffu;

    void worker(int thread);
    bool claim_and_run(int thread);
    uint64_t cursor_at(const Job& job, int32_t node) const;
    uint32_t node_now() const { return static_cast<uint32_t>(cursor_.load(std::memory_order_acquire) >> 32); }

    // High half: the node being worked on, or kIdle. Low half: how many of its chunks nobody has claimed.
    alignas(64) std::atomic<uint64_t> cursor_{static_cast<uint64_t>(kIdle) << 32};
    alignas(64) std::atomic<int32_t> done_{0};
    alignas(64) Job job_{};
    std::mutex turn_;
    std::mutex parking_;
    std::condition_variable wake_;
    std::atomic<int32_t> parked_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};
