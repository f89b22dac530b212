// 16 lanes in one register: AVX-512 F, BW, VL, VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace paceline::PL_ISA {

// Rows of a linear that take turns, and how far their loop unrolls: 32 registers hold the sums of 16 rows.
constexpr int TURN = 4, UNROLL = 16;
// Measured: an Intel Xeon with AMX decodes faster with it by up to a third, an AMD EPYC (Zen 4) slower (docs/kernels.md).
inline bool asks_for_one_row() { return __builtin_cpu_is("intel"); }

using F = __m512;   // 16 fp32
using I = __m512i;  // 16 int32
using W = __m512i;  // 64 unsigned bytes: 16 lanes of 4

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_half(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F load_s8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline I none() { return _mm512_setzero_si512(); }
inline I set(int32_t x) { return _mm512_set1_epi32(x); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
template <int N> inline I shift_left(I a) { return _mm512_slli_epi32(a, N); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I round(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
inline F power_of_two(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
inline int32_t total(I a) { return _mm512_reduce_add_epi32(a); }

inline W bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline W low_nibbles(W a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
inline W high_nibbles(W a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f)); }
// a | (bits, shifted left by N (right if negative), & mask); bits that leave their byte fall outside the mask.
template <int N> inline W put_bits(W a, W bits, uint8_t mask) {
    if constexpr (N > 0) bits = _mm512_slli_epi16(bits, N);
    if constexpr (N < 0) bits = _mm512_srli_epi16(bits, -N);
    return _mm512_ternarylogic_epi32(a, bits, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8);  // a | (b & c)
}
// acc + four products a lane: unsigned weights, the same four signed inputs in every lane. Exact.
template <bool> inline I dot(I acc, W w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}

// Sums always fold in this order: lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float fold_add(F a) {
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}
inline float fold_max(F a) {
    __m256 e = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 f = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_max_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_max_ss(f, _mm_movehdup_ps(f)));
}
// Lane i: fold_add(a[i]). Pairs of vectors share each fold, so that 16 sums cost 15 additions.
inline F fold_add16(const F (&a)[16]) {
    F b[8], c[4], d[2];
    for (int i = 0; i < 8; ++i)  // 8 lanes of a[i], then 8 of a[i + 8]
        b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    for (int i = 0; i < 4; ++i)  // 4 lanes each of a[i], a[i + 8], a[i + 4], a[i + 12]
        c[i] = add(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)
        d[i] = add(_mm512_shuffle_ps(c[i], c[i + 2], 0x44), _mm512_shuffle_ps(c[i], c[i + 2], 0xee));
    F e = add(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xdd));
    // 128-bit part p of e holds, for x = 0, 8, 4, 12 in turn: a[x], a[x + 2], a[x + 1], a[x + 3]
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, e);
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace paceline::PL_ISA

#include "dots.h"
