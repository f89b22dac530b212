// Weights rounded to levels: a group of 32 fp32 numbers to the lane of a format of one group a superblock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace paceline::packing {

// Round to nearest, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits of a fraction. Unlike a call of
// std::nearbyint this is vectorised on every processor.
template <class T> inline T nearest(T x) { return (x + 12582912.0f) - 12582912.0f; }

// What fp16 scales can reach at all, so that no sum below overflows; NaN becomes 0.
inline void bounded(const float* in, float* x) {
    constexpr float limit = LARGEST_HALF * 127;
    for (int i = 0; i < GROUP; ++i) x[i] = in[i] == in[i] ? std::min(std::max(in[i], -limit), limit) : 0.0f;
}

// The scale is rounded first, upwards where rounding down would cut the largest weight off by more than half a step.
inline void quantize_q8_0(const float* weight, uint8_t* lane) {
    float x[GROUP], largest = 0;
    bounded(weight, x);
    for (float each : x) largest = std::max(largest, each < 0 ? -each : each);
    uint16_t half = to_half(largest / 127);
    if (largest > 127.5f * from_half(half) && half < 0x7bff) ++half;
    const float d = from_half(half), inverse = d > 0 ? 1 / d : 0;
    uint8_t levels[GROUP];
    for (int i = 0; i < GROUP; ++i)
        levels[i] = uint8_t(128 + int(nearest(std::min(std::max(x[i] * inverse, -127.0f), 127.0f))));
    store_half_bytes(lane, half);
    write_levels<Q8_0>(levels, lane);
}

// weight = d q + m
struct Affine {
    float d, m;
};

// Four numbers at once, spelled out: a compiler may not reorder a float sum by itself, and did not keep the search's
// levels in registers. Every processor of ours has vectors of 16 bytes.
typedef float Four __attribute__((vector_size(16)));

inline Four four(const float* p) {
    Four v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline float total(Four v) { return (v[0] + v[2]) + (v[1] + v[3]); }

// The levels of x[0..3] by a line of slope 1 / inverse.
inline Four levels_of(const float* x, float m, float inverse) {
    const Four lowest = {}, highest = lowest + 15.0f;
    Four level = (four(x) - m) * inverse;
    level = level > lowest ? level : lowest;
    level = level < highest ? level : highest;
    return nearest(level);
}

inline float inverse_of(Affine a) { return a.d > 0 ? 1 / a.d : 0; }

// A line of least squares, and how much of the squared deviation it explains (times 32).
struct Fit {
    Affine affine;
    float gain;
};

// Through the levels that x has by the line `from`.
inline Fit least_squares(const float* x, float sum_x, Affine from) {
    const float inverse = inverse_of(from);
    Four levels = {}, squares = {}, products = {};
    for (int i = 0; i < GROUP; i += 4) {
        const Four level = levels_of(x + i, from.m, inverse);
        levels += level;
        squares += level * level;
        products += level * four(x + i);
    }
    const float sum_q = total(levels);
    const float spread = GROUP * total(squares) - sum_q * sum_q, common = GROUP * total(products) - sum_q * sum_x;
    if (!(spread > 0) || !(common > 0)) return {{0, sum_x / GROUP}, 0};
    const float d = common / spread;
    return {{d, (sum_x - d * sum_q) / GROUP}, d * common};
}

// Tries ranges cut off (or widened) by these shares at either end, fits each, keeps the fit that explains most and
// repeats levels and fit on it. More cuts buy less than 1% of the error.
// x [32] from 0 to `range`.
inline Affine search(const float* x, float range) {
    constexpr float cuts[] = {-0.03f, 0.0f, 0.03f, 0.06f};
    float sum_x = 0;
    for (int i = 0; i < GROUP; ++i) sum_x += x[i];
    Fit best = {{0, sum_x / GROUP}, 0};
    const auto attempt = [&](Affine from) {
        const Fit fit = least_squares(x, sum_x, from);
        if (fit.gain > best.gain) best = fit;
    };
    for (float below : cuts)
        for (float above : cuts) attempt({range * (1 - below - above) / 15, range * below});
    for (int round = 0; round < 2; ++round) attempt(best.affine);
    return best.affine;
}

struct Rounded {
    uint16_t d, m;
    float levels[GROUP];
    float error;  // squared, of the group
};

// d and m as fp16, then the levels that suit them best.
inline Rounded rounded(const float* x, Affine wanted) {
    Rounded r;
    r.d = to_half(wanted.d);
    r.m = to_half(wanted.m);
    const Affine a = {from_half(r.d), from_half(r.m)};
    Four errors = {};
    for (int i = 0; i < GROUP; i += 4) {
        const Four level = levels_of(x + i, a.m, inverse_of(a)), off = level * a.d + a.m - four(x + i);
        std::memcpy(r.levels + i, &level, sizeof level);
        errors += off * off;
    }
    r.error = total(errors);
    return r;
}

// The search is held against the plain range from the least to the largest weight, as rounding d and m may undo a gain.
inline void quantize_q4_1(const float* weight, uint8_t* lane) {
    float x[GROUP], above[GROUP];
    bounded(weight, x);
    const float least = *std::min_element(x, x + GROUP), range = *std::max_element(x, x + GROUP) - least;
    for (int i = 0; i < GROUP; ++i) above[i] = x[i] - least;
    const Affine found = search(above, range);
    Rounded best = rounded(x, {found.d, found.m + least});
    const Rounded plain = rounded(x, {range / 15, least});
    if (plain.error < best.error) best = plain;
    uint8_t levels[GROUP];
    for (int i = 0; i < GROUP; ++i) levels[i] = uint8_t(int(best.levels[i]));
    store_half_bytes(lane, best.d);
    store_half_bytes(lane + 2, best.m);
    write_levels<Q4_1>(levels, lane);
}

}  // namespace paceline::packing
