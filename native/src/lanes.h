// One channel's share of a superblock, its "lane": the scales, then the levels q of each group cut into high and low
// bits.
//
// Between a file's bit order and ours stand the levels, one byte each: every format is read into them and written from
// them. Functions here and in the headers beside must not be included where a backend's instructions are on: the linker
// keeps one copy of an inline function, and it has to run everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#include "half.h"

namespace paceline::packing {

constexpr int LEVEL_BITS[FORMATS] = {4, 4, 5, 5, 8, 4, 5, 6};

template <Format F> constexpr int COLUMNS = LAYOUTS[F].columns;
template <Format F> constexpr int GROUPS = COLUMNS<F> / GROUP;
template <Format F> constexpr int LANE_BYTES = LAYOUTS[F].lane_bytes();
template <Format F> constexpr int GROUP_BYTES = LEVEL_BITS[F] * GROUP / 8;
template <Format F> constexpr int SCALE_BYTES = LANE_BYTES<F> - GROUPS<F> * GROUP_BYTES<F>;

// Four levels at once: the bytes of a word never reach into each other, as shifts are masked to whole levels.
inline uint32_t load_quad(const uint8_t* p) {
    uint32_t quad;
    std::memcpy(&quad, p, 4);
    return quad;
}

inline void store_quad(uint8_t* p, uint32_t quad) { std::memcpy(p, &quad, 4); }

template <int BITS> inline void write_group(const uint8_t* levels, uint8_t* out) {
    if constexpr (BITS == 8) {
        std::memcpy(out, levels, GROUP);
        return;
    }
    // Bits above the fourth come first, as many quads to a word as fit: 8 of one bit each, or 4 of two.
    constexpr int high = BITS - 4, words = high * GROUP / 32, quads = words == 0 ? 0 : 8 / words;
    for (int word = 0; word < words; ++word) {
        uint32_t bits = 0;
        for (int j = 0; j < quads; ++j) {
            const uint32_t quad = load_quad(levels + 4 * quads * word + 4 * j);
            bits |= (quad >> 4 & 0x01010101u * ((1u << high) - 1)) << high * j;
        }
        store_quad(out + 4 * word, bits);
    }
    out += 4 * words;
    for (int i = 0; i < 16; ++i) out[i] = uint8_t((levels[i] & 15) | levels[i + 16] << 4);
}

template <int BITS> inline void read_group(const uint8_t* in, uint8_t* levels) {
    if constexpr (BITS == 8) {
        std::memcpy(levels, in, GROUP);
        return;
    }
    constexpr int high = BITS - 4, words = high * GROUP / 32;
    const uint8_t* low = in + 4 * words;
    for (int i = 0; i < 16; ++i) {
        levels[i] = low[i] & 15;
        levels[i + 16] = low[i] >> 4;
    }
    for (int word = 0; word < words; ++word) {
        const uint32_t bits = load_quad(in + 4 * word);
        for (int j = 0; j < 8 / words; ++j) {
            uint8_t* quad = levels + 32 / words * word + 4 * j;
            store_quad(quad, load_quad(quad) | (bits >> high * j & 0x01010101u * ((1u << high) - 1)) << 4);
        }
    }
}

// levels [columns of a superblock] behind the scales that the lane holds already.
template <Format F> inline void write_levels(const uint8_t* levels, uint8_t* lane) {
    for (int g = 0; g < GROUPS<F>; ++g)
        write_group<LEVEL_BITS[F]>(levels + GROUP * g, lane + SCALE_BYTES<F> + GROUP_BYTES<F> * g);
}

// The weights of a lane, out [columns of a superblock], as formats.h has them.
template <Format F> inline void lane_weights(const uint8_t* lane, float* out) {
    const float d = load_half_bytes(lane);
    const float m = F == Q4_1 || F == Q5_1 || F == Q4_K || F == Q5_K ? load_half_bytes(lane + 2) : 0;
    for (int g = 0; g < GROUPS<F>; ++g, out += GROUP) {
        uint8_t q[GROUP];
        read_group<LEVEL_BITS[F]>(lane + SCALE_BYTES<F> + GROUP_BYTES<F> * g, q);
        if constexpr (F == Q6_K) {
            const auto scale = [&](int half) { return d * float(int8_t(lane[2 + 2 * g + half])); };
            for (int i = 0; i < 16; ++i) out[i] = scale(0) * float(int(q[i]) - 32);
            for (int i = 16; i < 32; ++i) out[i] = scale(1) * float(int(q[i]) - 32);
        } else if constexpr (F == Q4_K || F == Q5_K) {
            const float scale = d * float(int(lane[4 + g])), lowest = m * float(int(lane[12 + g]));
            for (int i = 0; i < GROUP; ++i) out[i] = scale * float(int(q[i])) - lowest;
        } else if constexpr (F == Q4_1 || F == Q5_1) {
            for (int i = 0; i < GROUP; ++i) out[i] = d * float(int(q[i])) + m;
        } else {
            constexpr int zero = 1 << (LEVEL_BITS[F] - 1);
            for (int i = 0; i < GROUP; ++i) out[i] = d * float(int(q[i]) - zero);
        }
    }
}

// Calls step(offset in a lane, bytes) for every item of a lane; lane c's own is 16 offset + c bytes into a superblock.
template <Format F, class Step> inline void each_item(Step step) {
    int offset = 0;
    for (int s = 0; s < LAYOUTS[F].sections; ++s) {
        const Section section = LAYOUTS[F].section[s];
        for (int i = 0; i < section.count; ++i, offset += section.bytes) step(offset, section.bytes);
    }
}

// 16 lanes [16, LANE_BYTES] to a superblock of our layout.
template <Format F> inline void interleave(const uint8_t* lanes, uint8_t* packed) {
    each_item<F>([&](int offset, int bytes) {
        uint8_t* to = packed + LANES * offset;
        const uint8_t* from = lanes + offset;
        if (bytes == 4)
            for (int c = 0; c < LANES; ++c) std::memcpy(to + 4 * c, from + LANE_BYTES<F> * c, 4);
        else
            for (int c = 0; c < LANES; ++c) std::memcpy(to + bytes * c, from + LANE_BYTES<F> * c, bytes);
    });
}

// Lane c of a superblock.
template <Format F> inline void take_lane(const uint8_t* packed, int c, uint8_t* lane) {
    each_item<F>([&](int offset, int bytes) {
        const uint8_t* from = packed + LANES * offset + bytes * c;
        if (bytes == 4) std::memcpy(lane + offset, from, 4);
        else std::memcpy(lane + offset, from, bytes);
    });
}

}  // namespace paceline::packing
