#include "threads.h"

#include <chrono>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How long an idle worker looks for work before it sleeps: longer than the gaps inside a step, shorter than an idle
// server's user would notice on the power meter.
constexpr auto LOOK = std::chrono::microseconds(200);

}  // namespace

Pool::Pool(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    stopping = true;
    job += 2;
    job.notify_all();
    for (std::thread& each : workers) each.join();
}

void Pool::start(int count, const void* of, Call with) {
    const std::lock_guard<std::mutex> lock(one_job);
    function = of, call = with, chunks = count;
    next.store(0, std::memory_order_relaxed);
    job.fetch_add(1);  // open
    job.notify_all();
    take_chunks(0);
    job.fetch_add(1);  // closed: a worker that enters from here on finds nothing and touches nothing
    for (int looked = 0; inside.load() != 0; ++looked) {
        pause();
        if (looked > 2000) std::this_thread::yield();  // its processor may be busy with another program
    }
}

void Pool::take_chunks(int thread) {
    for (int chunk = next.fetch_add(1, std::memory_order_relaxed); chunk < chunks;
         chunk = next.fetch_add(1, std::memory_order_relaxed))
        call(function, chunk, thread);
}

void Pool::work(int thread) {
    uint32_t seen = job.load();
    if (seen & 1) --seen;  // one that opened while this thread started is still to do
    while (!stopping) {
        const auto asleep_at = std::chrono::steady_clock::now() + LOOK;
        uint32_t now = job.load(std::memory_order_acquire);
        for (int looked = 0; now == seen; ++looked) {
            if ((looked & 63) == 63 && std::chrono::steady_clock::now() > asleep_at) {
                job.wait(seen);
            } else {
                pause();
            }
            now = job.load(std::memory_order_acquire);
        }
        seen = now;
        if (!(now & 1)) continue;
        // Said before the job is looked at again, so that the caller either waits for us or has closed it already.
        inside.fetch_add(1);
        if (job.load() == now) take_chunks(thread);
        inside.fetch_sub(1);
    }
}

namespace {
// Never destroyed at exit: a forked child has no workers to join, and the system ends those of a process that leaves.
Pool* shared = new Pool(1);
std::mutex changing;
}  // namespace

Pool& pool() { return *shared; }

int set_threads(int threads) {
    const std::lock_guard<std::mutex> lock(changing);
    if (threads < 1) threads = 1;
    if (threads != shared->threads()) {
        delete shared;
        shared = new Pool(threads);
    }
    return shared->threads();
}

}  // namespace paceline
