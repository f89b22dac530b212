// The one pool of threads. Work is cut in chunks that any thread may take; what a chunk computes never depends on who.
//
// A small model's step is some hundred jobs of a few microseconds each, so what counts is how seldom the threads wait for
// each other's cache lines. A job is one line, which its maker writes and workers read. Everyone begins with a share of
// the chunks of his own and only then takes of others'. Nothing is ever reset: claims and counts carry the job's number,
// and those of an older job read as nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Pool {
  public:
    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // The caller included.
    int threads() const { return count.load(std::memory_order_relaxed); }
    // Waits for the job that runs, if one does. Fewer than one thread are one.
    void resize(int threads);

    // f(chunk) for chunk 0 .. chunks - 1, in the caller and whichever workers are awake. Returns when all are done.
    template <class Function> void run(int chunks, const Function& f) {
        if (chunks == 1 || threads() == 1) {
            for (int chunk = 0; chunk < chunks; ++chunk) f(chunk);
            return;
        }
        start(chunks, &f, [](const void* of, int chunk) { (*static_cast<const Function*>(of))(chunk); });
    }

  private:
    using Call = void (*)(const void*, int);

    // The job as a thread knows it.
    struct Job {
        uint64_t number;
        const void* function;
        Call call;
        int chunks, threads;

        // Chunks [begin(t), begin(t + 1)) are thread t's own.
        int begin(int thread) const { return static_cast<int>((int64_t{chunks} * thread + threads - 1) / threads); }
    };

    // The newest job. `number` is odd while the rest is written, and a multiple of two when it can be read.
    struct alignas(64) Posted {
        std::atomic<uint64_t> number{0};
        std::atomic<const void*> function{nullptr};
        std::atomic<Call> call{nullptr};
        std::atomic<int> chunks{0}, threads{1};
    };

    // One thread's: how many chunks of its share were taken, by whomever, and how many it has done, of whosever share.
    // Each with the number of the job it is about, see `tagged`.
    struct alignas(64) Claimed {
        std::atomic<uint64_t> word{0};
    };
    struct alignas(64) Done {
        std::atomic<uint64_t> word{0};
    };

    void start(int chunks, const void* function, Call call);
    Job post(int chunks, const void* function, Call call);
    void send_home();
    void work(int thread, uint64_t seen);
    uint64_t next_after(uint64_t seen);
    bool read(uint64_t number, Job& job) const;
    int take_share(const Job& job, int of);
    int done_by_others(const Job& job) const;

    std::vector<std::thread> workers;
    std::unique_ptr<Claimed[]> claimed{new Claimed[1]};
    std::unique_ptr<Done[]> done{new Done[1]};
    std::mutex one_job;         // callers of several threads take turns, and a change of threads is one of them
    std::atomic<int> count{1};  // of threads
    Posted posted;
    alignas(64) std::atomic<int> asleep{0};
    std::atomic<bool> stopping{false};
};

// The process's pool, with a single thread at first.
Pool& pool();

}  // namespace paceline
