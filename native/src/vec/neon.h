// 16 lanes in four registers: ARMv8.2 with dot products. Each function gives the bits of avx512.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../kernels.h"

namespace paceline::PL_ISA {

// Rows of a linear that take turns, and how far their loop unrolls: the sums of rows wait in memory.
constexpr int TURN = 4, UNROLL = 1;
inline bool asks_for_one_row() { return false; }

template <class Register> struct Four {
    Register a, b, c, d;
};
using F = Four<float32x4_t>;  // 16 fp32
using I = Four<int32x4_t>;    // 16 int32
using W = Four<uint8x16_t>;   // 64 unsigned bytes: 16 lanes of 4

template <class Function, class... Operand> inline auto each(const Function& f, const Operand&... x) {
    return Four<decltype(f(x.a...))>{f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline F set(float x) {
    const float32x4_t same = vdupq_n_f32(x);
    return {same, same, same, same};
}
inline F zero() { return set(0.0f); }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
inline F add(F a, F b) {
    return each([](auto x, auto y) { return vaddq_f32(x, y); }, a, b);
}
inline F sub(F a, F b) {
    return each([](auto x, auto y) { return vsubq_f32(x, y); }, a, b);
}
inline F mul(F a, F b) {
    return each([](auto x, auto y) { return vmulq_f32(x, y); }, a, b);
}
inline F div(F a, F b) {
    return each([](auto x, auto y) { return vdivq_f32(x, y); }, a, b);
}
inline F fma(F a, F b, F c) {
    return each([](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
// The second of equals, and where either is NaN, as on x86: vmaxq and vminq differ in both.
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F max(F a, F b) {
    return each([](auto x, auto y) { return larger(x, y); }, a, b);
}
inline F min(F a, F b) {
    return each([](auto x, auto y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b);
}
inline F abs(F a) {
    return each([](auto x) { return vabsq_f32(x); }, a);
}
inline float32x4_t load_half4(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F load_half(const uint16_t* p) { return {load_half4(p), load_half4(p + 4), load_half4(p + 8), load_half4(p + 12)}; }
inline void store_half4(uint16_t* p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store_half(uint16_t* p, F x) {
    store_half4(p, x.a);
    store_half4(p + 4, x.b);
    store_half4(p + 8, x.c);
    store_half4(p + 12, x.d);
}

inline I set(int32_t x) {
    const int32x4_t same = vdupq_n_s32(x);
    return {same, same, same, same};
}
inline I none() { return set(int32_t{0}); }
inline I add(I a, I b) {
    return each([](auto x, auto y) { return vaddq_s32(x, y); }, a, b);
}
template <int N> inline I shift_left(I a) {
    return each([](auto x) { return vshlq_n_s32(x, N); }, a);
}
inline F to_float(I a) {
    return each([](auto x) { return vcvtq_f32_s32(x); }, a);
}
// To nearest, ties to even; INT32_MIN where that is not an int32, as on x86.
inline I round(F a) {
    return each(
        [](auto x) { return vbslq_s32(vcaltq_f32(x, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN)); }, a);
}
inline F power_of_two(I n) {
    return each([](auto x) { return vreinterpretq_f32_s32(x); }, shift_left<23>(add(n, set(127))));
}
inline void store_bytes(int8_t* p, I a) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a.a), vmovn_s32(a.b)), high = vcombine_s16(vmovn_s32(a.c), vmovn_s32(a.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline int32_t total(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.a, a.b), vaddq_s32(a.c, a.d))); }
inline F words_to_float(int16x8_t low, int16x8_t high) {
    return to_float(I{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)});
}
inline F load_u8(const uint8_t* p) {
    const uint8x16_t all = vld1q_u8(p);
    return words_to_float(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(all))), vreinterpretq_s16_u16(vmovl_high_u8(all)));
}
inline F load_s8(const uint8_t* p) {
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(p));
    return words_to_float(vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all));
}

inline W bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline W low_nibbles(W a) {
    return each([](auto x) { return vandq_u8(x, vdupq_n_u8(0x0f)); }, a);
}
inline W high_nibbles(W a) {
    return each([](auto x) { return vshrq_n_u8(x, 4); }, a);
}
template <int N> inline uint8x16_t shifted(uint8x16_t a) {
    if constexpr (N > 0) return vshlq_n_u8(a, N);
    else if constexpr (N < 0) return vshrq_n_u8(a, -N);
    else return a;
}
// a | (bits, shifted left by N (right if negative), & mask).
template <int N> inline W put_bits(W a, W bits, uint8_t mask) {
    return each([mask](auto x, auto y) { return vorrq_u8(x, vandq_u8(shifted<N>(y), vdupq_n_u8(mask))); }, a, bits);
}
// acc + four products a lane: unsigned weights, the same four signed inputs in every lane. Exact.
template <bool WIDE> PL_INLINE I dot(I acc, W w, const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(word));
    if constexpr (!WIDE) {
        return each([x](auto sum, auto y) { return vdotq_s32(sum, vreinterpretq_s8_u8(y), x); }, acc, w);
    } else {
#ifdef __ARM_FEATURE_MATMUL_INT8
        return each([x](auto sum, auto y) { return vusdotq_s32(sum, y, x); }, acc, w);
#else
        // w x = (w - 128) x - (-128) x: only the sign's bit keeps a wide weight from the signed instruction.
        const int32x4_t less = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), x);
        return each(
            [=](auto sum, auto y) {
                return vdotq_s32(vsubq_s32(sum, less), vreinterpretq_s8_u8(veorq_u8(y, vdupq_n_u8(0x80))), x);
            },
            acc, w);
#endif
    }
}

// Sums always fold in this order: lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float32x4_t fold_add_to4(const F& a) { return vaddq_f32(vaddq_f32(a.a, a.c), vaddq_f32(a.b, a.d)); }
inline float fold_add(F a) {
    const float32x4_t e = fold_add_to4(a);
    const float32x2_t f = vadd_f32(vget_low_f32(e), vget_high_f32(e));
    return vget_lane_f32(f, 0) + vget_lane_f32(f, 1);
}
inline float fold_max(F a) {
    float32x4_t e = larger(larger(a.a, a.c), larger(a.b, a.d));
    e = larger(e, vextq_f32(e, e, 2));
    return vgetq_lane_f32(larger(e, vextq_f32(e, e, 1)), 0);
}
// 2 lanes of x, then 2 of y.
inline float32x4_t fold_add_to2(float32x4_t x, float32x4_t y) {
    return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)), vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
}
inline float32x4_t fold_add4(const F* a) {
    const float32x4_t low = fold_add_to2(fold_add_to4(a[0]), fold_add_to4(a[1]));
    return vpaddq_f32(low, fold_add_to2(fold_add_to4(a[2]), fold_add_to4(a[3])));
}
// Lane i: fold_add(a[i]). Pairs of vectors share each fold.
inline F fold_add16(const F (&a)[16]) { return {fold_add4(a), fold_add4(a + 4), fold_add4(a + 8), fold_add4(a + 12)}; }

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace paceline::PL_ISA

#include "dots.h"
