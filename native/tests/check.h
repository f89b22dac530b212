// What the tests share: a seeded generator, and comparisons that count failures.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace paceline::test {

// splitmix64 (Steele, Lea and Flood 2014): the same numbers with every standard library.
class Random {
  public:
    explicit Random(uint64_t seed) : state(seed) {}
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    int between(int least, int most) { return least + static_cast<int>(next() % static_cast<uint64_t>(most - least + 1)); }
    bool one_in(int n) { return between(1, n) == 1; }
    // About normal, of variance 1.
    float normal() {
        float sum = -6.0f;
        for (int i = 0; i < 12; ++i) sum += static_cast<float>(next() >> 40) * 0x1p-24f;
        return sum;
    }
    std::vector<float> normals(size_t count, float scale = 1.0f) {
        std::vector<float> x(count);
        for (float& each : x) each = normal() * scale;
        return x;
    }

  private:
    uint64_t state;
};

inline int failures = 0;

inline void fail(const std::string& what) {
    if (++failures <= 30) std::printf("FAILED %s\n", what.c_str());
}

inline void expect(bool holds, const std::string& what) {
    if (!holds) fail(what);
}

// Equal to the bit; a NaN equals every NaN, as processors differ in its sign.
inline bool same(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b); }

inline void expect_same(const float* found, const float* expected, size_t count, const std::string& what) {
    for (size_t i = 0; i < count; ++i)
        if (!same(found[i], expected[i])) {
            char numbers[96];
            std::snprintf(numbers, sizeof numbers, " [%zu]: %a, expected %a", i, found[i], expected[i]);
            return fail(what + numbers);
        }
}

inline void expect_near(const float* found, const double* expected, size_t count, double tolerance, const std::string& what) {
    for (size_t i = 0; i < count; ++i)
        if (!(std::fabs(found[i] - expected[i]) <= tolerance)) {
            char numbers[96];
            std::snprintf(numbers, sizeof numbers, " [%zu]: %.9g, expected %.9g", i, found[i], expected[i]);
            return fail(what + numbers);
        }
}

}  // namespace paceline::test
