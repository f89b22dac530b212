// What one instruction set offers: the same functions, with the same bits, in every backend.
#pragma once

#include <cstdint>

#include "formats.h"

namespace paceline {

// For what a kernel's inner loop is made of: a call there would spill every register.
#define PL_INLINE inline __attribute__((always_inline))

constexpr int TILE = 16;  // most rows that one pass over the weights serves

// 32 activations of one row: q = round(x / scale), scale = max|x| / 127. One cache line.
struct alignas(64) Activations {
    int8_t q[GROUP];
    float scale;
    float scaled_sum;                                   // scale * sum of q
    int32_t negative_low, negative_high, negative_sum;  // minus the sum of q: inputs 0..15, 16..31, all
    int32_t unused[3];
};

enum Activation : int32_t { SILU, GELU_TANH };

constexpr int MOST_ROWS = 4;     // of one attention task
constexpr int MOST_HEADS = 128;  // of one attention task

// Heads [first_head, first_head + heads) of `rows` rows of one sequence: see pl_batch for the histories.
struct AttentionTask {
    int rows, first_head, heads, group, head_dim, window;  // group: heads that share a key/value head
    float scale;
    const float* query;  // of the first row, at head 0; heads follow each other, rows are query_stride apart
    float* out;          // likewise
    int64_t query_stride, out_stride;
    const uint16_t *keys, *values;  // of slot 0 at key/value head 0; these follow each other, too
    int64_t slot_stride;
    const int32_t *table, *prefix;  // the sequence's slots; for each row how many it sees
    const int32_t* const* tail;
    const int32_t* tail_length;
    float* scratch;  // rows * heads * (longest + 32)
};

using BlockKernel = void (*)(const uint8_t* weights, const Activations* x, int columns, float* out);

struct Backend {
    const char* name;
    // [format][rows]: out[row * 16 + channel] of a block of 16 channels; x[group * rows + row]
    BlockKernel block[FORMATS][TILE + 1];
    void (*quantize)(const float* x, int columns, Activations* out, int stride);
    void (*rms_norm)(const float* x, int width, const float* weight, float eps, float* out);
    void (*gate)(int activation, const float* gates, const float* ups, int width, float* out);
    void (*rotate)(float* x, int head_dim, const float* cos, const float* sin);
    void (*to_half)(const float* x, int width, uint16_t* out);
    void (*attend)(const AttentionTask& task);
    void (*row_best)(const float* x, int width, int64_t* best, float* chance);
    int64_t (*draw)(const float* x, int width, const int64_t* ids, const int64_t* key);
};

// The backend in use (dispatch.cpp).
const Backend& backend();

}  // namespace paceline
