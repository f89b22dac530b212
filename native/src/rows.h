// Functions of one row: rounding to int8, norms, activations, rotary positions. Each in one fixed order of operations.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace paceline::PL_ISA {

// e^x to about 1 ulp for x in [-87, 88], clamped outside: x = n ln 2 + r, a polynomial in r, times 2^n.
inline F exponential(F x) {
    x = min(max(x, set(-87.0f)), set(88.0f));
    const I n = round(mul(x, set(1.44269504f)));
    const F whole = to_float(n);
    F r = fma(whole, set(-0.693359375f), x);
    r = fma(whole, set(2.12194440e-4f), r);
    F p = fma(set(1.9875691500e-4f), r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(mul(r, r), p, add(r, set(1.0f)));
    return mul(p, power_of_two(n));
}

// x [columns] in groups of 32; group g goes to out[g * stride].
inline void quantize(const float* x, int columns, Activations* out, int stride) {
    for (int at = 0; at < columns; at += GROUP, out += stride) {
        const F low = load(x + at), high = load(x + at + LANES);
        const float largest = fold_max(max(abs(low), abs(high)));
        // Below this the inverse overflows; such a group counts as zeros.
        const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
        const I first = round(mul(low, set(inverse))), second = round(mul(high, set(inverse)));
        store_bytes(out->q, first);
        store_bytes(out->q + LANES, second);
        out->scale = largest / 127.0f;
        out->negative_low = -total(first);
        out->negative_high = -total(second);
        out->negative_sum = out->negative_low + out->negative_high;
        out->scaled_sum = out->scale * static_cast<float>(-out->negative_sum);
    }
}

// x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
inline void rms_norm(const float* x, int width, const float* weight, float eps, float* out) {
    F squares = zero();
    for (int i = 0; i < width; i += LANES) {
        const F part = load(x + i);
        squares = fma(part, part, squares);
    }
    const F factor = set(1.0f / std::sqrt(fold_add(squares) / static_cast<float>(width) + eps));
    for (int i = 0; i < width; i += LANES) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
}

inline F sigmoid_times(F x, F of) { return div(x, add(set(1.0f), exponential(sub(zero(), of)))); }

// silu(x) = x sigmoid(x); gelu with tanh: x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline void gate(int activation, const float* gates, const float* ups, int width, float* out) {
    for (int i = 0; i < width; i += LANES) {
        const F x = load(gates + i);
        F of = x;
        if (activation == GELU_TANH) of = mul(mul(set(1.59576912f), x), fma(mul(x, x), set(0.044715f), set(1.0f)));
        store(out + i, mul(sigmoid_times(x, of), load(ups + i)));
    }
}

// Rotate a head [head_dim] by half-split pairs (Su et al. 2021): cos, sin [head_dim / 2].
inline void rotate(float* x, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        x[i] = std::fma(first, cos[i], -(second * sin[i]));
        x[i + half] = std::fma(second, cos[i], first * sin[i]);
    }
}

inline void to_half(const float* x, int width, uint16_t* out) {
    for (int i = 0; i < width; i += LANES) store_half(out + i, load(x + i));
}

// The largest of a row (the first of equals) and its probability, 1 / sum(exp(x - largest)); NaN where nothing is above -infinity.
inline void row_best(const float* x, int width, int64_t* best, float* chance) {
    constexpr int PART = 1024;  // looked through again for where its largest lies
    float largest = -INFINITY;
    int within = 0;
    for (int from = 0; from < width; from += PART) {
        const int to = std::min(width, from + PART), whole = from + (to - from) / LANES * LANES;
        F top = set(-INFINITY);
        for (int i = from; i < whole; i += LANES) top = max(top, load(x + i));
        float found = fold_max(top);
        for (int i = whole; i < to; ++i) found = x[i] > found ? x[i] : found;
        if (found > largest) largest = found, within = from;
    }
    if (best != nullptr) {
        int at = within;
        while (at < width && x[at] != largest) ++at;
        *best = at < width ? at : 0;
    }
    if (chance == nullptr) return;
    const int whole = width / LANES * LANES;
    const F shift = set(largest);
    F sum = zero();
    for (int i = 0; i < whole; i += LANES) sum = add(sum, exponential(sub(load(x + i), shift)));
    float rest[LANES], tail = 0.0f;
    for (int i = 0; i < LANES; ++i) rest[i] = whole + i < width ? x[whole + i] : -INFINITY;
    store(rest, exponential(sub(load(rest), shift)));
    for (int i = 0; i < width - whole; ++i) tail += rest[i];
    *chance = largest > -INFINITY ? 1.0f / (fold_add(sum) + tail) : NAN;
}

// A bijection of 32-bit words with full avalanche (Wellons' lowbias32), as in sampling/noise.py.
PL_INLINE uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Gumbel noise of u = (bits + 1/2) / 2^32.
inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

// argmax of x + Gumbel noise of the two key words and each token's id (`ids`, or its place): a draw from softmax(x).
//
// A token with score s can beat the best sum b so far only if -log u < exp(s - b), so only if 1 - u < exp(s - b); of the
// few that pass this in fp32, with room for its errors, the noise is computed.
inline int64_t draw(const float* x, int width, const int64_t* ids, const int64_t* key) {
    constexpr int PART = 256;
    constexpr float MOST_NOISE = 23.0f;
    const uint32_t first = static_cast<uint32_t>(key[0]), second = static_cast<uint32_t>(key[1]);
    const auto bits_of = [=](int i) {
        return mix(mix((ids == nullptr ? static_cast<uint32_t>(i) : static_cast<uint32_t>(ids[i])) + first) ^ second);
    };
    int64_t at;
    row_best(x, width, &at, nullptr);
    if (!std::isfinite(x[at])) return at;
    double best = double{x[at]} + gumbel(bits_of(static_cast<int>(at)));
    alignas(64) float score[PART], bound[PART];
    alignas(64) int32_t missing[PART];  // 1 - u in 24 bits, rounded down
    for (int from = 0; from < width; from += PART) {
        const int count = std::min(PART, width - from);
        std::copy(x + from, x + from + count, score);
        std::fill(score + count, score + PART, -INFINITY);
        F top = set(-INFINITY);
        for (int i = 0; i < PART; i += LANES) top = max(top, load(score + i));
        if (fold_max(top) < static_cast<float>(best) - MOST_NOISE) continue;
        for (int i = 0; i < count; ++i) missing[i] = static_cast<int32_t>(~bits_of(from + i) >> 8);
        const F shift = set(static_cast<float>(best));
        for (int i = 0; i < PART; i += LANES) store(bound + i, mul(exponential(sub(load(score + i), shift)), set(0x1.01p24f)));
        for (int i = 0; i < count; ++i) {
            if (static_cast<float>(missing[i]) > bound[i]) continue;
            const double sum = double{score[i]} + gumbel(bits_of(from + i));
            if (sum > best || (sum == best && from + i < at)) best = sum, at = from + i;
        }
    }
    return at;
}

}  // namespace paceline::PL_ISA
