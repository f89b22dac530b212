#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <cassert>
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

// How often a thread that is done with its share looks whether the job is over, before it takes of another's share. It mostly
// soon is, and only to look at another's share takes that cache line away from its owner.
constexpr int PATIENCE = 16;

// A count of chunks with the low bits of the job's number in front. Numbers come round after months; two that are compared
// are never so far apart.
constexpr int COUNT_BITS = 24;
constexpr uint64_t MOST_CHUNKS = (uint64_t{1} << COUNT_BITS) - 1;
constexpr uint64_t tagged(uint64_t number, int count) { return number << COUNT_BITS | static_cast<uint64_t>(count); }
constexpr int count_of(uint64_t word) { return static_cast<int>(word & MOST_CHUNKS); }
// Whether the word is about this job (0), an older (< 0) or a newer one (> 0).
constexpr int64_t age(uint64_t word, uint64_t number) {
    return static_cast<int64_t>((word & ~MOST_CHUNKS) - tagged(number, 0));
}

}  // namespace

void Pool::resize(int threads) {
    const std::lock_guard<std::mutex> lock(one_job);
    threads = std::max(1, threads);
    if (threads == count) return;
    send_home();
    count = 1;
    claimed.reset(new Claimed[threads]);
    done.reset(new Done[threads]);
    const uint64_t seen = posted.number;
    for (int thread = 0; thread < threads; ++thread) claimed[thread].word = tagged(seen, 0);
    for (int thread = 1; thread < threads; ++thread) workers.emplace_back([this, thread, seen] { work(thread, seen); });
    count = threads;
}

void Pool::send_home() {
    stopping = true;
    posted.number += 2;
    posted.number.notify_all();
    for (std::thread& each : workers) each.join();
    workers.clear();
    stopping = false;
}

void Pool::start(int chunks, const void* function, Call call) {
    assert(static_cast<uint64_t>(chunks) <= MOST_CHUNKS);
    const std::lock_guard<std::mutex> lock(one_job);
    const Job job = post(chunks, function, call);
    if (asleep.load(std::memory_order_relaxed) > 0) posted.number.notify_all();
    int own = take_share(job, 0);
    // One that fell asleep while the job was on its way to it. To be sure of that costs nothing by now.
    if (asleep.fetch_add(0) > 0) posted.number.notify_all();
    for (int looked = 0; own + done_by_others(job) < chunks; ++looked) {
        pause();
        if (looked == PATIENCE)
            for (int of = 1; of < job.threads; ++of) own += take_share(job, of);
        if (looked > 2000) std::this_thread::yield();  // a worker's processor may be busy with another program
    }
}

Pool::Job Pool::post(int chunks, const void* function, Call call) {
    const Job job{posted.number.load(std::memory_order_relaxed) + 2, function, call, chunks, count};
    posted.number.store(job.number - 1, std::memory_order_relaxed);
    posted.function.store(function, std::memory_order_release);
    posted.call.store(call, std::memory_order_release);
    posted.chunks.store(chunks, std::memory_order_release);
    posted.threads.store(job.threads, std::memory_order_release);
    posted.number.store(job.number, std::memory_order_release);
    return job;
}

// Takes and does chunks of that thread's share while there are any; returns how many.
int Pool::take_share(const Job& job, int of) {
    const int begin = job.begin(of), size = job.begin(of + 1) - begin;
    if (size == 0) return 0;
    std::atomic<uint64_t>& word = claimed[of].word;
    int taken = 0;
    for (uint64_t now = word.load(std::memory_order_relaxed);;) {
        const int64_t known = age(now, job.number);
        if (known > 0) return taken;  // we are late: this job is over
        const int next = known == 0 ? count_of(now) : 0;
        if (next == size) return taken;
        const uint64_t ours = tagged(job.number, next + 1);
        if (!word.compare_exchange_weak(now, ours, std::memory_order_relaxed)) continue;
        now = ours;
        job.call(job.function, begin + next);
        ++taken;
    }
}

int Pool::done_by_others(const Job& job) const {
    int total = 0;
    for (int thread = 1; thread < job.threads; ++thread) {
        const uint64_t word = done[thread].word.load(std::memory_order_acquire);
        if (age(word, job.number) == 0) total += count_of(word);
    }
    return total;
}

void Pool::work(int thread, uint64_t seen) {
    while (true) {
        seen = next_after(seen);
        if (stopping.load(std::memory_order_relaxed)) return;
        Job job;
        if (!read(seen, job)) continue;
        int own = 0;
        const auto help = [&](int of) {
            const int more = take_share(job, of);
            if (more > 0) done[thread].word.store(tagged(job.number, own += more), std::memory_order_release);
        };
        help(thread);
        for (int looked = 0; looked < PATIENCE && posted.number.load(std::memory_order_relaxed) == seen; ++looked) pause();
        for (int turn = 1; turn < job.threads && posted.number.load(std::memory_order_relaxed) == seen; ++turn)
            help((thread + turn) % job.threads);
    }
}

// The number of a job that came after `seen`.
uint64_t Pool::next_after(uint64_t seen) {
    const auto asleep_at = std::chrono::steady_clock::now() + LOOK;
    for (int looked = 1;; ++looked) {
        const uint64_t now = posted.number.load(std::memory_order_acquire);
        if (now != seen && now % 2 == 0) return now;
        if (looked % 64 != 0 || std::chrono::steady_clock::now() < asleep_at) {
            pause();
        } else {
            asleep.fetch_add(1);
            posted.number.wait(seen);
            asleep.fetch_sub(1);
        }
    }
}

// False if another job has been posted since, which then is the one to look at.
bool Pool::read(uint64_t number, Job& job) const {
    job = {
        number, posted.function.load(std::memory_order_acquire), posted.call.load(std::memory_order_acquire),
        posted.chunks.load(std::memory_order_acquire), posted.threads.load(std::memory_order_acquire),
    };
    return posted.number.load(std::memory_order_relaxed) == number;
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
