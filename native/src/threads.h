// The one pool of threads. Work is cut in chunks that any thread may take; what a chunk computes never depends on who.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers.size()) + 1; }

    // f(chunk, thread) for chunk 0 .. chunks - 1, in the caller and whichever workers are awake. Returns when all are done.
    template <class Function> void run(int chunks, const Function& f) {
        if (chunks == 1 || workers.empty()) {
            for (int chunk = 0; chunk < chunks; ++chunk) f(chunk, 0);
            return;
        }
        start(chunks, &f, [](const void* of, int chunk, int thread) { (*static_cast<const Function*>(of))(chunk, thread); });
    }

  private:
    using Call = void (*)(const void*, int, int);
    void start(int chunks, const void* function, Call call);
    void work(int thread);
    void take_chunks(int thread);

    std::vector<std::thread> workers;
    std::mutex one_job;  // callers of several threads take turns
    const void* function = nullptr;
    Call call = nullptr;
    int chunks = 0;
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<uint32_t> job{0};  // odd: open; even: closed
    alignas(64) std::atomic<int> inside{0};    // workers that may be reading the job
    alignas(64) std::atomic<bool> stopping{false};
};

// The process's pool; made again by set_threads.
Pool& pool();
int set_threads(int threads);

}  // namespace paceline
