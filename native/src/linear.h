// Rows of quantised activations times 16 channels of quantised weights.
//
// For one row and one channel, in this order and no other:
//     i   exact integer sum of a group's 32 products (q6_k: of each half)
//     u   float(i) * d                                     (q6_k: fma(float(i1), d1, float(i0) * d0))
//     acc fma(scale, u, acc); formats with a minimum then fma(scaled_sum, m, acc)
// from the first group to the last, starting at 0. So a result's bits depend on its row and channel alone.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace paceline::PL_ISA {

PL_INLINE void low_quads(const uint8_t* p, W (&w)[8]) {
    for (int b = 0; b < 4; ++b) {
        W both = bytes(p + 64 * b);
        w[b] = low_nibbles(both);
        w[b + 4] = high_nibbles(both);
    }
}

PL_INLINE void add_fifth_bit(const uint8_t* p, W (&w)[8]) {
    W high = bytes(p);
    w[0] = put_bits<4>(w[0], high, 0x10);
    w[1] = put_bits<3>(w[1], high, 0x10);
    w[2] = put_bits<2>(w[2], high, 0x10);
    w[3] = put_bits<1>(w[3], high, 0x10);
    w[4] = put_bits<0>(w[4], high, 0x10);
    w[5] = put_bits<-1>(w[5], high, 0x10);
    w[6] = put_bits<-2>(w[6], high, 0x10);
    w[7] = put_bits<-3>(w[7], high, 0x10);
}

PL_INLINE void add_two_bits(const uint8_t* p, W* w) {
    W high = bytes(p);
    w[0] = put_bits<4>(w[0], high, 0x30);
    w[1] = put_bits<2>(w[1], high, 0x30);
    w[2] = put_bits<0>(w[2], high, 0x30);
    w[3] = put_bits<-2>(w[3], high, 0x30);
}

PL_INLINE F half(const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); }

// What a format says of one group: its quads, scale d (q6_k: d of each half) and minimum m.
struct Group32 {
    W w[8];
    F d, d1, m;
};

// zero: log2 of what q is stored above its value by (-1: nothing). bits: of q.
template <Format> struct Reader;

// One group a superblock: d, then m if there is a MINIMUM, the fifth bits if there are, and the low bits.
template <int ZERO, bool MINIMUM, bool FIFTH> struct PlainReader {
    static constexpr int zero = ZERO;
    static constexpr int bits = FIFTH ? 5 : 4;
    static constexpr bool minimum = MINIMUM, halves = false;
    explicit PlainReader(const uint8_t* p) : p(p) {}
    PL_INLINE void read(int, Group32& g) const {
        constexpr int fifth = MINIMUM ? 64 : 32, low = fifth + (FIFTH ? 64 : 0);
        g.d = half(p);
        if constexpr (MINIMUM) g.m = half(p + 32);
        low_quads(p + low, g.w);
        if constexpr (FIFTH) add_fifth_bit(p + fifth, g.w);
    }
    const uint8_t* p;
};

template <> struct Reader<Q4_0> : PlainReader<3, false, false> { using PlainReader::PlainReader; };
template <> struct Reader<Q4_1> : PlainReader<-1, true, false> { using PlainReader::PlainReader; };
template <> struct Reader<Q5_0> : PlainReader<4, false, true> { using PlainReader::PlainReader; };
template <> struct Reader<Q5_1> : PlainReader<-1, true, true> { using PlainReader::PlainReader; };

template <> struct Reader<Q8_0> {
    static constexpr int zero = 7, bits = 8;
    static constexpr bool minimum = false, halves = false;
    explicit Reader(const uint8_t* p) : p(p) {}
    PL_INLINE void read(int, Group32& g) const {
        g.d = half(p);
        for (int j = 0; j < 8; ++j) g.w[j] = bytes(p + 32 + 64 * j);
    }
    const uint8_t* p;
};

// D, M, s and t of the K formats: the products are exact in fp32 (11 + 8 bits).
template <int BITS, int BYTES> struct ScaledReader {
    static constexpr int zero = -1, bits = BITS;
    static constexpr bool minimum = true, halves = false;
    explicit ScaledReader(const uint8_t* p) : p(p), scale(half(p)), lowest(sub(PL_ISA::zero(), half(p + 32))) {}
    PL_INLINE const uint8_t* scales(int group, Group32& g) const {
        g.d = mul(scale, load_u8(p + 64 + 16 * group));
        g.m = mul(lowest, load_u8(p + 192 + 16 * group));
        return p + 320 + BYTES * group;
    }
    const uint8_t* p;
    F scale, lowest;
};

template <> struct Reader<Q4_K> : ScaledReader<4, 256> {
    using ScaledReader::ScaledReader;
    PL_INLINE void read(int group, Group32& g) const { low_quads(scales(group, g), g.w); }
};

template <> struct Reader<Q5_K> : ScaledReader<5, 320> {
    using ScaledReader::ScaledReader;
    PL_INLINE void read(int group, Group32& g) const {
        const uint8_t* own = scales(group, g);
        low_quads(own + 64, g.w);
        add_fifth_bit(own, g.w);
    }
};

template <> struct Reader<Q6_K> {
    static constexpr int zero = 5, bits = 6;
    static constexpr bool minimum = false, halves = true;
    explicit Reader(const uint8_t* p) : p(p), scale(half(p)) {}
    PL_INLINE void read(int group, Group32& g) const {
        g.d = mul(scale, load_s8(p + 32 + 32 * group));
        g.d1 = mul(scale, load_s8(p + 48 + 32 * group));
        const uint8_t* own = p + 288 + 384 * group;
        low_quads(own + 128, g.w);
        add_two_bits(own, g.w);
        add_two_bits(own + 64, g.w + 4);
    }
    const uint8_t* p;
    F scale;
};

template <int ZERO> PL_INLINE I start(int32_t negative_sum) {
    if constexpr (ZERO < 0) return none();
    else return shift_left<ZERO>(set(negative_sum));
}

// With several rows a group is computed so slowly that the processor's own prefetching falls behind, and asking for the
// weights AHEAD bytes further on makes memory and arithmetic overlap. They come into the second-level cache: few requests
// can be under way to the nearest one. With a single row it depends: `asks_for_one_row` of the vectors says where asking
// helps (and where it gets in the way).
constexpr int AHEAD = 8192;

// A group's part of `ROWS` rows, u of the comment above. Rows take turns, since a row's sums wait for each other.
template <class R, int ROWS> PL_INLINE void products(const Group32& g, const Activations* x, F (&u)[ROWS]) {
    I sum[ROWS];
    if constexpr (R::halves) {
        I high[ROWS];
        for (int r = 0; r < ROWS; ++r) sum[r] = start<R::zero>(x[r].negative_low), high[r] = start<R::zero>(x[r].negative_high);
        add_dots<R::bits, 4, ROWS>(g.w, x, 0, sum);
        add_dots<R::bits, 4, ROWS>(g.w + 4, x, 16, high);
        for (int r = 0; r < ROWS; ++r) u[r] = fma(to_float(high[r]), g.d1, mul(to_float(sum[r]), g.d));
    } else {
        for (int r = 0; r < ROWS; ++r) sum[r] = start<R::zero>(x[r].negative_sum);
        add_dots<R::bits, 8, ROWS>(g.w, x, 0, sum);
        for (int r = 0; r < ROWS; ++r) u[r] = mul(to_float(sum[r]), g.d);
    }
}

// The group added to `ROWS` rows' sums.
template <class R, int ROWS> PL_INLINE void add_group(const Group32& g, const Activations* x, F* acc) {
    F u[ROWS];
    products<R, ROWS>(g, x, u);
    for (int r = 0; r < ROWS; ++r) {
        acc[r] = fma(set(x[r].scale), u[r], acc[r]);
        if constexpr (R::minimum) acc[r] = fma(set(x[r].scaled_sum), g.m, acc[r]);
    }
}

// out[r * 16 + c] for ROWS rows and the 16 channels of a block; x[g * ROWS + r].
template <Format FORMAT, int ROWS, bool ASKS> void block(const uint8_t* weights, const Activations* x, int columns, float* out) {
    using R = Reader<FORMAT>;
    constexpr int size = LAYOUTS[FORMAT].super_bytes(), groups = LAYOUTS[FORMAT].columns / GROUP;
    F acc[ROWS];
    for (F& each : acc) each = zero();
    for (int column = 0; column < columns; column += LAYOUTS[FORMAT].columns, weights += size) {
        const R reader(weights);
        for (int group = 0; group < groups; ++group, x += ROWS) {
            Group32 g;
            reader.read(group, g);
            if constexpr (ASKS) {
                constexpr int part = size / groups;
#pragma GCC unroll 10
                for (int line = 0; line < (part + 63) / 64; ++line) prefetch_l2(weights + AHEAD + group * part + 64 * line);
            }
            constexpr int turn = R::halves && TURN > 1 ? TURN / 2 : TURN, whole = ROWS / turn * turn;
#pragma GCC unroll UNROLL
            for (int r = 0; r < whole; r += turn) add_group<R, turn>(g, x + r, acc + r);
            if constexpr (ROWS > whole) add_group<R, ROWS - whole>(g, x + whole, acc + whole);
        }
    }
    for (int r = 0; r < ROWS; ++r) store(out + LANES * r, acc[r]);
}

}  // namespace paceline::PL_ISA
