// One persistent team of threads that runs a list of nodes, each cut into chunks, without a barrier all must reach:
// a node is over when its chunks are done, so a thread the system has set aside holds up nobody.
//
// One half of the threads takes chunks from the front, the other from the back. Chunks go by rows, so what a thread reads
// in one node it has mostly written in the one before, and finds in its own cache.
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

    static constexpr int32_t kMostNodes = (1 << 20) - 2, kMostChunks = (1 << 22) - 1;  // of a job, of a node

    // Threads below this number take a node's chunks in order, the others from its end.
    static constexpr int front_threads(int threads) { return (threads + 1) / 2; }
    static constexpr bool from_back(int thread, int threads) { return thread >= front_threads(threads); }

    // Runs every node in order; returns when the last is done. Callers take turns.
    void run(const Job& job);

private:
    static constexpr uint32_t kIdle = (1u << 20) - 1;

    // The node being worked on, or kIdle, and which of its chunks nobody has claimed: front..back-1.
    struct Cursor {
        uint32_t node, front, back;
        uint64_t packed() const { return static_cast<uint64_t>(node) << 44 | static_cast<uint64_t>(front) << 22 | back; }
        static Cursor of(uint64_t word) {
            constexpr uint64_t low = (1u << 22) - 1;
            return {static_cast<uint32_t>(word >> 44), static_cast<uint32_t>(word >> 22 & low), static_cast<uint32_t>(word & low)};
        }
    };

    void worker(int thread);
    bool claim_and_run(int thread);
    Cursor cursor_at(const Job& job, int32_t node) const;
    uint32_t node_now() const { return Cursor::of(cursor_.load(std::memory_order_acquire)).node; }

    alignas(64) std::atomic<uint64_t> cursor_{Cursor{kIdle, 0, 0}.packed()};
    alignas(64) std::atomic<int32_t> done_{0};
    alignas(64) Job job_{};
    std::mutex turn_;
    std::mutex parking_;
    std::condition_variable wake_;
    std::atomic<int32_t> parked_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};
