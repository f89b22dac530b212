#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

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

void Pool::resize(int threads) {
    const std::lock_guard<std::mutex> lock(one_job);
    threads = std::max(1, threads);
    if (threads == count) return;
    send_home();
    for (int thread = 1; thread < threads; ++thread) workers.emplace_back([this] { work(); });
    count = threads;
}

void Pool::send_home() {
    stopping = true;
    job += 2;
    job.notify_all();
    for (std::thread& each : workers) each.join();
    workers.clear();
    stopping = false;
}

void Pool::start(int count, const void* of, Call with) {
    const std::lock_guard<std::mutex> lock(one_job);
    function = of, call = with, chunks = count;
    next.store(0, std::memory_order_relaxed);
    job.fetch_add(1);  // open
    job.notify_all();
    take_chunks();
    job.fetch_add(1);  // closed: a worker that enters from here on finds nothing and touches nothing
    for (int looked = 0; inside.load() != 0; ++looked) {
        pause();
        if (looked > 2000) std::this_thread::yield();  // its processor may be busy with another program
    }
}

void Pool::take_chunks() {
    for (int chunk = next.fetch_add(1, std::memory_order_relaxed); chunk < chunks;
         chunk = next.fetch_add(1, std::memory_order_relaxed))
        call(function, chunk);
}

void Pool::work() {
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
        if (job.load() == now) take_chunks();
        inside.fetch_sub(1);
    }
}

namespace {

// Never destroyed: the system ends the workers of a process that leaves. A forked child has none, and may have been made
// in the middle of a job, so it begins anew, with a single thread.
Pool* shared = nullptr;

void begin() { shared = new Pool; }

}  // namespace

Pool& pool() {
    static const bool begun = [] {
        begin();
        return pthread_atfork(nullptr, nullptr, begin) == 0;
    }();
    static_cast<void>(begun);
    return *shared;
}

}  // namespace paceline
