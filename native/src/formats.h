// How quantised weights lie in memory: the numbers of a GGUF tensor as stored, 16 output channels side by side.
//
// A matrix of N rows (output channels) and K columns (inputs) becomes ceil(N / 16) blocks of 16 channels; a block is a
// run of superblocks along K, a superblock a run of sections, and a section `count` times 16 lanes of `bytes` each: lane
// c belongs to channel 16 * block + c (zeros where there is none). So a register filled from one section holds the same
// thing for 16 channels, and a block is read as one stream.
//
// Inputs come in groups of 32, a group in 8 quads of 4 inputs. What a channel's weights are, by format:
//
//   q4_0  d (q - 8)            q5_0  d (q - 16)           q8_0  d (q - 128)        one group a superblock
//   q4_1  d q + m              q5_1  d q + m
//   q4_k  D s q - M t          q5_k  D s q - M t          8 groups a superblock; s, t: 6 bits, kept in a byte each
//   q6_k  D s (q - 32)                                    8 groups a superblock; s: int8, one for 16 inputs
//
// Low 4 bits of a group (formats of 4, 5 and 6 bits): 4 x 16 lanes of 4 bytes. Byte i of lane c in repeat b holds input
// 4 b + i in its low and input 16 + 4 b + i in its high nibble (quads b and b + 4).
// High bits: q5: one repeat of 16 lanes of 4 bytes a group, bit j of byte i: bit 4 of input 4 j + i. q6: two repeats a
// group, bits 2 j .. 2 j + 1 of byte i in repeat h: bits 4..5 of input 16 h + 4 j + i.
// q8: 8 x 16 lanes of 4 bytes a group, byte i of repeat j: input 4 j + i, its stored int8 with 128 added.
// Inside a section the groups of a superblock follow each other. Halves are little-endian IEEE fp16, as stored.
#pragma once

#include <cstdint>

namespace paceline {

constexpr int LANES = 16;
constexpr int GROUP = 32;

enum Format : int32_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FORMATS };

struct Section {
    int count, bytes;
};

struct Layout {
    const char* name;
    int columns;       // inputs of a superblock
    int stored_bytes;  // of a superblock of one row in a GGUF file
    int sections;
    Section section[5];

    constexpr int lane_bytes() const {
        int total = 0;
        for (int i = 0; i < sections; ++i) total += section[i].count * section[i].bytes;
        return total;
    }
    constexpr int super_bytes() const { return lane_bytes() * LANES; }
};

constexpr Layout LAYOUTS[FORMATS] = {
    {"q4_0", 32, 18, 2, {{1, 2}, {4, 4}}},                           // d, low
    {"q4_1", 32, 20, 3, {{1, 2}, {1, 2}, {4, 4}}},                   // d, m, low
    {"q5_0", 32, 22, 3, {{1, 2}, {1, 4}, {4, 4}}},                   // d, high, low
    {"q5_1", 32, 24, 4, {{1, 2}, {1, 2}, {1, 4}, {4, 4}}},           // d, m, high, low
    {"q8_0", 32, 34, 2, {{1, 2}, {8, 4}}},                           // d, q
    {"q4_k", 256, 144, 5, {{1, 2}, {1, 2}, {8, 1}, {8, 1}, {32, 4}}},  // D, M, s, t, low
    {"q5_k", 256, 176, 5, {{1, 2}, {1, 2}, {8, 1}, {8, 1}, {40, 4}}},  // D, M, s, t, then high and low of each group
    {"q6_k", 256, 210, 3, {{1, 2}, {16, 1}, {48, 4}}},               // D, s, then high (2) and low (4) of each group
};

static constexpr int padded_rows(int rows) { return (rows + LANES - 1) / LANES * LANES; }

}  // namespace paceline
