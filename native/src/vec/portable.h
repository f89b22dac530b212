// 16 lanes in plain C++, for a processor without any of the other headers. Each function gives the bits of avx512.h.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>

namespace paceline::PL_ISA {

// Rows of a linear that take turns, and how far their loop unrolls: quickly compiled: made for any processor, not for speed.
constexpr int TURN = 1, UNROLL = 1;
inline bool asks_for_one_row() { return false; }

static_assert(FLT_EVAL_METHOD == 0, "every operation has to round to fp32");

struct F {  // 16 fp32
    float lane[16];
};
struct I {  // 16 int32
    int32_t lane[16];
};
struct W {  // 64 unsigned bytes: 16 lanes of 4
    uint8_t byte[64];
};

// No fp32 on the way is subnormal: a caller's thread may flush those to zero.
inline float from_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude < 0x400) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
    if (magnitude < 0x7c00) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
    return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13 | (magnitude > 0x7c00 ? 0x400000u : 0));
}
// To nearest, ties to even.
inline uint16_t half_of(float x) {
    const uint32_t sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000u, magnitude = std::bit_cast<uint32_t>(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520: half way past the largest
    // A sum with 0.5 is rounded to multiples of 2^-24, the unit of a subnormal fp16.
    if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f)));
    return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}
// To nearest, ties to even; INT32_MIN where that is not an int32, as on x86.
inline int32_t nearest(float x) {
    if (!(x >= -0x1p31f && x < 0x1p31f)) return INT32_MIN;
    const float unit = std::copysign(0x1p23f, x);  // from where on every fp32 is whole
    return static_cast<int32_t>(std::fabs(x) < 0x1p23f ? (x + unit) - unit : x);
}

template <class Function> inline F each(const Function& f) {
    F out;
    for (int i = 0; i < 16; ++i) out.lane[i] = f(i);
    return out;
}
template <class Function> inline I each_int(const Function& f) {
    I out;
    for (int i = 0; i < 16; ++i) out.lane[i] = static_cast<int32_t>(f(i));
    return out;
}
template <class Function> inline W each_byte(const Function& f) {
    W out;
    for (int i = 0; i < 64; ++i) out.byte[i] = static_cast<uint8_t>(f(i));
    return out;
}

inline F set(float x) {
    return each([x](int) { return x; });
}
inline F zero() { return set(0.0f); }
inline F load(const float* p) {
    return each([p](int i) { return p[i]; });
}
inline void store(float* p, const F& x) {
    for (int i = 0; i < 16; ++i) p[i] = x.lane[i];
}
inline F add(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F sub(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F mul(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F div(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
// The second of equals, and where either is NaN, as on x86.
inline F max(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F min(const F& a, const F& b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F abs(const F& a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
}
inline F load_half(const uint16_t* p) {
    return each([p](int i) { return from_half(p[i]); });
}
inline void store_half(uint16_t* p, const F& x) {
    for (int i = 0; i < 16; ++i) p[i] = half_of(x.lane[i]);
}
inline F load_u8(const uint8_t* p) {
    return each([p](int i) { return static_cast<float>(p[i]); });
}
inline F load_s8(const uint8_t* p) {
    return each([p](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}

// Sums and shifts wrap around: unsigned arithmetic, as a signed overflow is undefined.
inline uint32_t wrapped(int32_t x) { return static_cast<uint32_t>(x); }
inline I set(int32_t x) {
    return each_int([x](int) { return x; });
}
inline I none() { return set(int32_t{0}); }
inline I add(const I& a, const I& b) {
    return each_int([&](int i) { return wrapped(a.lane[i]) + wrapped(b.lane[i]); });
}
template <int N> inline I shift_left(const I& a) {
    return each_int([&](int i) { return wrapped(a.lane[i]) << N; });
}
inline F to_float(const I& a) {
    return each([&](int i) { return static_cast<float>(a.lane[i]); });
}
inline I round(const F& a) {
    return each_int([&](int i) { return nearest(a.lane[i]); });
}
inline F power_of_two(const I& n) {
    return each([&](int i) { return std::bit_cast<float>((wrapped(n.lane[i]) + 127) << 23); });
}
inline void store_bytes(int8_t* p, const I& a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.lane[i]);
}
inline int32_t total(const I& a) {
    uint32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += wrapped(a.lane[i]);
    return static_cast<int32_t>(sum);
}

inline W bytes(const uint8_t* p) {
    return each_byte([p](int i) { return p[i]; });
}
inline W low_nibbles(const W& a) {
    return each_byte([&](int i) { return a.byte[i] & 0x0f; });
}
inline W high_nibbles(const W& a) {
    return each_byte([&](int i) { return a.byte[i] >> 4; });
}
// a | (bits, shifted left by N (right if negative), & mask).
template <int N> inline W put_bits(const W& a, const W& bits, uint8_t mask) {
    constexpr int left = N > 0 ? N : 0, right = N < 0 ? -N : 0;
    return each_byte([&](int i) { return a.byte[i] | ((bits.byte[i] << left >> right) & mask); });
}
// acc + four products a lane: unsigned weights, the same four signed inputs in every lane. Exact.
template <bool> inline I dot(const I& acc, const W& w, const int8_t* x) {
    return each_int([&](int i) {
        const uint8_t* four = w.byte + 4 * i;
        return wrapped(acc.lane[i]) + wrapped(four[0] * x[0] + four[1] * x[1] + four[2] * x[2] + four[3] * x[3]);
    });
}

// Sums always fold in this order: lanes i and i + 8, then i + 4, i + 2, i + 1.
template <class Function> inline float fold(F a, const Function& f) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.lane[i] = f(a.lane[i], a.lane[i + width]);
    return a.lane[0];
}
inline float fold_add(const F& a) {
    return fold(a, [](float x, float y) { return x + y; });
}
inline float fold_max(const F& a) {
    return fold(a, [](float x, float y) { return x > y ? x : y; });
}
// Lane i: fold_add(a[i]).
inline F fold_add16(const F (&a)[16]) {
    return each([&](int i) { return fold_add(a[i]); });
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace paceline::PL_ISA

#include "dots.h"
