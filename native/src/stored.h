// GGUF blocks, read: a superblock of one row to its scales, in our order, and its levels.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace paceline::packing {

// Bytes of two runs of levels: one in the low, one in the high nibbles.
inline void read_nibbles(const uint8_t* stored, uint8_t* first, uint8_t* second, int count) {
    for (int i = 0; i < count; ++i) {
        first[i] = stored[i] & 15;
        second[i] = stored[i] >> 4;
    }
}

// Bit i of the 32 is bit 4 of level i. The product puts four neighbouring bits into a byte each.
inline void add_fifth_bits(const uint8_t* stored, uint8_t* levels) {
    for (int j = 0; j < 8; ++j) {
        const uint32_t four = stored[j / 2] >> 4 * (j % 2) & 15;
        store_quad(levels + 4 * j, load_quad(levels + 4 * j) | (four * 0x00204081u & 0x01010101u) << 4);
    }
}

// 8 scales and 8 minimums of 6 bits in 12 bytes: the first four of each whole in the low bits of 8 bytes; of the others
// the low 4 bits in the last 4 bytes and the high 2 bits above those 8.
inline void read_scales(const uint8_t* stored, uint8_t* scales, uint8_t* minimums) {
    for (int j = 0; j < 4; ++j) {
        scales[j] = stored[j] & 63;
        minimums[j] = stored[j + 4] & 63;
        scales[j + 4] = uint8_t((stored[j + 8] & 15) | (stored[j] >> 6) << 4);
        minimums[j + 4] = uint8_t(stored[j + 8] >> 4 | (stored[j + 4] >> 6) << 4);
    }
}

inline void read_q6_k(const uint8_t* stored, uint8_t* scales, uint8_t* levels) {
    std::memcpy(scales, stored + 208, 2);
    std::memcpy(scales + 2, stored + 192, 16);
    for (int part = 0; part < 2; ++part, levels += 128) {
        const uint8_t *low = stored + 64 * part, *high = stored + 128 + 32 * part;
        read_nibbles(low, levels, levels + 64, 64);
        for (int g = 0; g < 4; ++g)
            for (int i = 0; i < GROUP; ++i) levels[GROUP * g + i] |= uint8_t((high[i] >> 2 * g & 3) << 4);
    }
}

// D, M and 6-bit scales, then (q5_k) 32 bytes whose bit g is bit 4 of group g's levels, then the nibbles.
template <Format F> inline void read_q45_k(const uint8_t* stored, uint8_t* scales, uint8_t* levels) {
    std::memcpy(scales, stored, 4);
    read_scales(stored + 4, scales + 4, scales + 12);
    const uint8_t *high = stored + 16, *low = F == Q5_K ? stored + 48 : stored + 16;
    for (int pair = 0; pair < 4; ++pair)
        read_nibbles(low + GROUP * pair, levels + 64 * pair, levels + 64 * pair + GROUP, GROUP);
    if constexpr (F == Q5_K)
        for (int g = 0; g < GROUPS<F>; ++g)
            for (int i = 0; i < GROUP; ++i) levels[GROUP * g + i] |= uint8_t((high[i] >> g & 1) << 4);
}

template <Format F> inline void read_stored(const uint8_t* stored, uint8_t* scales, uint8_t* levels) {
    if constexpr (F == Q6_K) {
        read_q6_k(stored, scales, levels);
    } else if constexpr (F == Q4_K || F == Q5_K) {
        read_q45_k<F>(stored, scales, levels);
    } else {
        std::memcpy(scales, stored, F == Q4_1 || F == Q5_1 ? 4 : 2);
        if constexpr (F == Q8_0) {
            for (int i = 0; i < GROUP; ++i) levels[i] = stored[2 + i] ^ 0x80;
        } else {
            constexpr int nibbles = LAYOUTS[F].stored_bytes - 16;
            read_nibbles(stored + nibbles, levels, levels + 16, 16);
            if constexpr (F == Q5_0 || F == Q5_1) add_fifth_bits(stored + nibbles - 4, levels);
        }
    }
}

// A stored superblock of one row as a lane.
template <Format F> inline void stored_lane(const uint8_t* stored, uint8_t* lane) {
    uint8_t levels[COLUMNS<F>];
    read_stored<F>(stored, lane, levels);
    write_levels<F>(levels, lane);
}

}  // namespace paceline::packing
