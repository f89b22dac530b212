// Which backend runs: the best that was built and that this processor has.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "paceline.h"

namespace paceline {

#define PL_DECLARE(isa) \
    namespace isa { const Backend& table(); }
#if PL_HAVE_AVX512
PL_DECLARE(avx512)
#endif
#if PL_HAVE_AVX2VNNI
PL_DECLARE(avx2vnni)
#endif
#if PL_HAVE_AVX2
PL_DECLARE(avx2)
#endif
#if PL_HAVE_NEON
PL_DECLARE(neon)
#endif
PL_DECLARE(portable)

namespace {

#if PL_HAVE_NEON
bool has_dot_product();
#endif

std::vector<const Backend*> usable() {
    std::vector<const Backend*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if PL_HAVE_AVX512
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        found.push_back(&avx512::table());
#endif
#if PL_HAVE_AVX2VNNI
    if (avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avx2vnni::table());
#endif
#if PL_HAVE_AVX2
    if (avx2) found.push_back(&avx2::table());
#endif
#endif
#if PL_HAVE_NEON
    if (has_dot_product()) found.push_back(&neon::table());
#endif
    found.push_back(&portable::table());
    return found;
}

const std::vector<const Backend*>& all() {
    static const std::vector<const Backend*> found = usable();
    return found;
}

std::atomic<const Backend*> chosen{nullptr};

}  // namespace

const Backend& backend() {
    const Backend* now = chosen.load(std::memory_order_relaxed);
    if (now == nullptr) chosen = now = all().front();
    return *now;
}

}  // namespace paceline

#if PL_HAVE_NEON
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
namespace paceline {
namespace {
bool has_dot_product() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true;  // every 64-bit Apple processor since 2020
#endif
}
}  // namespace
}  // namespace paceline
#endif

int32_t pl_abi(void) { return 7; }

const char* pl_backends(void) {
    static const std::string names = [] {
        std::string joined;
        for (const paceline::Backend* each : paceline::all()) {
            if (!joined.empty()) joined += ',';
            joined += each->name;
        }
        return joined;
    }();
    return names.c_str();
}

const char* pl_backend(void) { return paceline::backend().name; }

int32_t pl_use_backend(const char* name) {
    for (const paceline::Backend* each : paceline::all())
        if (std::strcmp(each->name, name) == 0) {
            paceline::chosen = each;
            return 0;
        }
    return -1;
}
