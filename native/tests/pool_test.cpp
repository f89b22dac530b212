// The pool of threads: every chunk of every job is done once, whoever sleeps, comes late or is sent home meanwhile.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "threads.h"

using namespace paceline;
using namespace paceline::test;

namespace {

void busy(int turns) {
    volatile int i = 0;
    while (i < turns) i = i + 1;
}

// `jobs` one behind the other, of changing numbers of chunks and uneven work; what each leaves is checked by the next.
void run_jobs(int jobs, int most_chunks, int nap_every) {
    std::vector<int> times(most_chunks), before(most_chunks, 0);
    for (int job = 0; job < jobs; ++job) {
        const int chunks = 1 + job * 7 % most_chunks;
        std::fill(times.begin(), times.end(), 0);
        pool().run(chunks, [&](int chunk) {
            busy((job + chunk) % 5 * 40);
            times[chunk] += 1 + before[chunk];
        });
        for (int chunk = 0; chunk < most_chunks; ++chunk) {
            expect(times[chunk] == (chunk < chunks ? 1 + before[chunk] : 0), "each chunk once, after the job before");
            before[chunk] = (job + chunk) % 3;
        }
        if (nap_every > 0 && job % nap_every == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 + job % 7 * 60));
    }
}

}  // namespace

int main() {
    for (int threads : {1, 2, 3, 8}) {
        pool().resize(threads);
        expect(pool().threads() == threads, "as many threads as were asked for");
        run_jobs(4000, 37, 0);
        run_jobs(300, 9, 1);  // workers fall asleep about when the next job comes
    }
    // Others take of the share of one that is held up.
    pool().resize(4);
    std::atomic<int> sum{0};
    pool().run(64, [&](int chunk) {
        if (chunk == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        sum += chunk;
    });
    expect(sum == 64 * 63 / 2, "all chunks of a job whose caller is held up");
    // Callers of several threads, and changes of the number of threads, take turns.
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) callers.emplace_back([] { run_jobs(1500, 23, 40); });
    for (int i = 0; i < 60; ++i) pool().resize(1 + i % 4);
    for (std::thread& each : callers) each.join();
    pool().resize(1);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
