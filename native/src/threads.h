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
    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // The caller included.
    int threads() const { return count; }
    // Waits for the job that runs, if one does. Fewer than one thread are one.
    void resize(int threads);

    // f(chunk) for chunk 0 .. chunks - 1, in the caller and whichever workers are awake. Returns when all are done.
    template <class Function> void run(int chunks, const Function& f) {
        if (chunks == 1 || count == 1) {
            for (int chunk = 0; chunk < chunks; ++chunk) f(chunk);
            return;
        }
        start(chunks, &f, [](const void* of, int chunk) { (*static_cast<const Function*>(of))(chunk); });
    }

  private:
    using Call = void (*)(const void*, int);
    void send_home();
    void start(int chunks, const void* function, Call call);
    void work();
    void take_chunks();

    std::vector<std::thread> workers;
    std::mutex one_job;         // callers of several threads take turns, and a change of threads is one of them
    std::atomic<int> count{1};  // of threads
    const void* function = nullptr;
    Call call = nullptr;
    int chunks = 0;
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<uint32_t> job{0};  // odd: open; even: closed
    alignas(64) std::atomic<int> inside{0};    // workers that may be reading the job
    alignas(64) std::atomic<bool> stopping{false};
};

// The process's pool, with a single thread at first.
Pool& pool();

}  // namespace paceline
