// 16 lanes in two registers: AVX2, FMA, F16C; with or without AVX-VNNI. Each function gives the bits of avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../kernels.h"

namespace paceline::PL_ISA {

// Rows of a linear that take turns, and how far their loop unrolls: 16 registers do not hold the sums of all rows, so they
// wait in memory.
constexpr int TURN = 4, UNROLL = 1;
inline bool asks_for_one_row() { return true; }

struct F {  // 16 fp32: lanes 0..7 and 8..15
    __m256 low, high;
};
struct I {  // 16 int32
    __m256i low, high;
};
struct W {  // 64 unsigned bytes: 16 lanes of 4
    __m256i low, high;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline F abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline F load_half(const uint16_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store_half(uint16_t* p, F x) {
    __m128i* halves = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline I none() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
template <int N> inline I shift_left(I a) { return {_mm256_slli_epi32(a.low, N), _mm256_slli_epi32(a.high, N)}; }
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline I round(F a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }  // to nearest, ties to even
inline F power_of_two(I n) {
    const I bits = shift_left<23>(add(n, set(127)));
    return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}
inline void store_bytes(int8_t* p, I a) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    // Packing works inside 128-bit parts: lanes 0..3, 8..11, 4..7, 12..15, hence the permutation.
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.low, byte), _mm256_and_si256(a.high, byte));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline int32_t total(I a) {
    const __m256i e = _mm256_add_epi32(a.low, a.high);
    __m128i f = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    f = _mm_add_epi32(f, _mm_shuffle_epi32(f, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(f, _mm_shuffle_epi32(f, 0xb1)));
}
inline F load_u8(const uint8_t* p) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_float(I{_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))});
}
inline F load_s8(const uint8_t* p) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_float(I{_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))});
}

inline W bytes(const uint8_t* p) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline __m256i masked(__m256i a, uint8_t mask) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask))); }
inline W low_nibbles(W a) { return {masked(a.low, 0x0f), masked(a.high, 0x0f)}; }
inline W high_nibbles(W a) { return {masked(_mm256_srli_epi16(a.low, 4), 0x0f), masked(_mm256_srli_epi16(a.high, 4), 0x0f)}; }
template <int N> inline __m256i shifted(__m256i a) {
    if constexpr (N > 0) return _mm256_slli_epi16(a, N);
    else if constexpr (N < 0) return _mm256_srli_epi16(a, -N);
    else return a;
}
// a | (bits, shifted left by N (right if negative), & mask); bits that leave their byte fall outside the mask.
template <int N> inline W put_bits(W a, W bits, uint8_t mask) {
    return {_mm256_or_si256(a.low, masked(shifted<N>(bits.low), mask)),
            _mm256_or_si256(a.high, masked(shifted<N>(bits.high), mask))};
}

inline __m256i four_inputs(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)
template <bool> PL_INLINE I dot(I acc, W w, const int8_t* x) {
    const __m256i inputs = four_inputs(x);
    return {_mm256_dpbusd_avx_epi32(acc.low, w.low, inputs), _mm256_dpbusd_avx_epi32(acc.high, w.high, inputs)};
}
#else
// Without a dot product, maddubs adds pairs of products in 16 bits. Quads of narrow weights are added there, too, as many
// as fit whatever the inputs are, before one madd makes 32 bits of them.
constexpr int quads_that_fit(int bits) { return 32767 / (2 * 128 * ((1 << bits) - 1)); }

PL_INLINE __m256i add_pairs(__m256i words, __m256i w, __m256i inputs) {
    words = _mm256_add_epi16(words, _mm256_maddubs_epi16(w, inputs));
    __asm__("" : "+x"(words));  // else GCC adds in a tree, computes all products first and spills them (1.5 times as slow)
    return words;
}
PL_INLINE __m256i add_words(__m256i acc, __m256i words) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}

// Eight of the 16 lanes: `half` picks them of a W or I. With wide weights, nibble by nibble.
template <int QUADS, int ROWS, __m256i W::* OF_W, __m256i I::* OF_I>
PL_INLINE void add_wide_dots(const W* w, const Activations* x, int first, I (&sum)[ROWS]) {
    static_assert(QUADS <= quads_that_fit(4));
    __m256i low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm256_setzero_si256();
    for (int j = 0; j < QUADS; ++j) {
        const __m256i lows = masked(w[j].*OF_W, 0x0f), highs = masked(_mm256_srli_epi16(w[j].*OF_W, 4), 0x0f);
        for (int r = 0; r < ROWS; ++r) {
            const __m256i inputs = four_inputs(x[r].q + first + 4 * j);
            low[r] = add_pairs(low[r], lows, inputs);
            high[r] = add_pairs(high[r], highs, inputs);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        const __m256i sixteens = _mm256_slli_epi32(add_words(_mm256_setzero_si256(), high[r]), 4);
        sum[r].*OF_I = add_words(_mm256_add_epi32(sum[r].*OF_I, sixteens), low[r]);
    }
}

// As in dots.h.
template <int BITS, int QUADS, int ROWS> PL_INLINE void add_dots(const W* w, const Activations* x, int first, I (&sum)[ROWS]) {
    if constexpr (BITS == 8) {
        add_wide_dots<QUADS, ROWS, &W::low, &I::low>(w, x, first, sum);
        add_wide_dots<QUADS, ROWS, &W::high, &I::high>(w, x, first, sum);
    } else {
        constexpr int fit = quads_that_fit(BITS) < QUADS ? quads_that_fit(BITS) : QUADS;
        static_assert(QUADS % fit == 0);
        for (int from = 0; from < QUADS; from += fit) {
            I words[ROWS];
            for (I& each : words) each = none();
            for (int j = from; j < from + fit; ++j)
                for (int r = 0; r < ROWS; ++r) {
                    const __m256i inputs = four_inputs(x[r].q + first + 4 * j);
                    words[r] = {add_pairs(words[r].low, w[j].low, inputs), add_pairs(words[r].high, w[j].high, inputs)};
                }
            for (int r = 0; r < ROWS; ++r) sum[r] = {add_words(sum[r].low, words[r].low), add_words(sum[r].high, words[r].high)};
        }
    }
}
#endif

// Sums always fold in this order: lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float fold_add(F a) {
    const __m256 e = _mm256_add_ps(a.low, a.high);
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}
inline float fold_max(F a) {
    const __m256 e = _mm256_max_ps(a.low, a.high);
    __m128 f = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_max_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_max_ss(f, _mm_movehdup_ps(f)));
}
// Lane i: fold_add(a[i]), for 8 vectors. Pairs of vectors share each fold.
inline __m256 fold_add8(const F* a) {
    __m256 c[4], d[2];
    for (int i = 0; i < 4; ++i) {  // 4 lanes of a[i], then 4 of a[i + 4]
        const __m256 e = _mm256_add_ps(a[i].low, a[i].high), f = _mm256_add_ps(a[i + 4].low, a[i + 4].high);
        c[i] = _mm256_add_ps(_mm256_permute2f128_ps(e, f, 0x20), _mm256_permute2f128_ps(e, f, 0x31));
    }
    for (int i = 0; i < 2; ++i)  // 2 lanes each of a[2 i], a[2 i + 1]; then of those 4 further
        d[i] = _mm256_add_ps(_mm256_shuffle_ps(c[2 * i], c[2 * i + 1], 0x44), _mm256_shuffle_ps(c[2 * i], c[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(d[0], d[1], 0x88), _mm256_shuffle_ps(d[0], d[1], 0xdd));
}
inline F fold_add16(const F (&a)[16]) { return {fold_add8(a), fold_add8(a + 8)}; }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace paceline::PL_ISA

#if defined(__AVXVNNI__)
#include "dots.h"
#endif
