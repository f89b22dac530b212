// Linears over all rows of a batch: activations in tiles, output channels in chunks for the pool.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "paceline.h"
#include "threads.h"

namespace paceline {

// A call's memory, cut from the caller's in 64-byte lines. From nothing, to measure it; or to use it.
class Cut {
  public:
    explicit Cut(void* memory) : begin(static_cast<char*>(memory)), at(begin) {}
    int64_t bytes() const { return at - begin; }

  protected:
    template <class T> T* take(int64_t size) {
        char* found = at;
        at += (size + 63) / 64 * 64;
        return reinterpret_cast<T*>(found);
    }

  private:
    char *begin, *at;
};

// Rounded rows [count, columns]: tiles of up to TILE rows, in each tile the rows of a group side by side.
struct Rounded {
    Activations* data;
    int count, groups;

    static int64_t bytes(int count, int columns) { return int64_t{count} * (columns / GROUP) * sizeof(Activations); }
    int tiles() const { return (count + TILE - 1) / TILE; }
    int rows(int tile) const { return std::min(TILE, count - tile * TILE); }
    const Activations* tile(int index) const { return data + int64_t{index} * TILE * groups; }
    // Group 0 of a row; group g lies g * rows(row / TILE) further on.
    Activations* row(int index) const { return data + int64_t{index / TILE} * TILE * groups + index % TILE; }

    void round(int index, const float* x) const { round(index, x, 0, groups); }
    // `count` groups of a row, from group `first` on.
    void round(int index, const float* x, int first, int count) const {
        const int stride = rows(index / TILE);
        backend().quantize(x, count * GROUP, row(index) + int64_t{first} * stride, stride);
    }
};

// f(row) for all rows, in parts; a few rows are not worth a wake-up.
template <class Function> void over_rows(int count, const Function& f) {
    const int parts = count < 4 ? 1 : std::min(count, pool().threads() * 4);
    pool().run(parts, [&](int part) {
        const int first = int64_t{count} * part / parts, last = int64_t{count} * (part + 1) / parts;
        for (int row = first; row < last; ++row) f(row);
    });
}

inline int64_t block_bytes(const pl_matrix& matrix) {
    const Layout& layout = LAYOUTS[matrix.format];
    return int64_t{matrix.columns / layout.columns} * layout.super_bytes();
}

inline int blocks(const pl_matrix& matrix) { return padded_rows(matrix.rows) / LANES; }

inline const uint8_t* block_of(const pl_matrix& matrix, int index) {
    return static_cast<const uint8_t*>(matrix.packed) + block_bytes(matrix) * index;
}

// How many units (blocks, or pairs of them) a chunk takes: long runs, which memory streams half again as fast as short ones
// (measured), and chunks enough for everyone. With more than one tile of rows a chunk's weights stay in the second-level
// cache while tile after tile passes over them.
inline int units_a_chunk(int units, int64_t unit_bytes, int rows) {
    const int64_t wanted = rows > TILE ? 256 << 10 : 1 << 20;
    const int most = std::max(1, units / (4 * pool().threads()));
    return std::clamp(static_cast<int>(wanted / unit_bytes), 1, most);
}

// One matrix times one tile: out[row * LANES + channel].
inline void multiply(const pl_matrix& matrix, int block, const Rounded& x, int tile, float* out) {
    backend().block[matrix.format][x.rows(tile)](block_of(matrix, block), x.tile(tile), matrix.columns, out);
}

// finish(first_row, rows, first_channel, channels, out) for every block and tile of the linear; out[row * LANES + channel].
template <class Finish> void product(const pl_linear& linear, const Rounded& x, const Finish& finish) {
    int total = 0;
    int64_t bytes = 0;
    for (int p = 0; p < linear.parts; ++p) {
        total += blocks(linear.part[p]);
        bytes += blocks(linear.part[p]) * block_bytes(linear.part[p]);
    }
    if (total == 0 || x.count == 0) return;
    const int step = units_a_chunk(total, std::max<int64_t>(1, bytes / total), x.count);
    pool().run((total + step - 1) / step, [&](int chunk) {
        alignas(64) float out[TILE * LANES];
        for (int tile = 0; tile < x.tiles(); ++tile) {
            for (int unit = chunk * step; unit < std::min(total, (chunk + 1) * step); ++unit) {
                int part = 0, block = unit, first = 0;
                for (; block >= blocks(linear.part[part]); ++part) {
                    block -= blocks(linear.part[part]);
                    first += linear.part[part].rows;
                }
                const pl_matrix& matrix = linear.part[part];
                multiply(matrix, block, x, tile, out);
                const int channels = std::min(LANES, matrix.rows - block * LANES);
                finish(tile * TILE, x.rows(tile), first + block * LANES, channels, out);
            }
        }
    });
}

// y [count, linear.rows] = product + bias, or += of it.
template <bool ADD> void product_to(const pl_linear& linear, const Rounded& x, float* y) {
    product(linear, x, [&](int row, int rows, int channel, int channels, const float* out) {
        for (int r = 0; r < rows; ++r, out += LANES) {
            float* to = y + int64_t{row + r} * linear.rows + channel;
            for (int c = 0; c < channels; ++c) {
                const float value = linear.bias == nullptr ? out[c] : out[c] + linear.bias[channel + c];
                to[c] = ADD ? to[c] + value : value;
            }
        }
    });
}

inline void store_product(const pl_linear& linear, const Rounded& x, float* y) { product_to<false>(linear, x, y); }
inline void add_product(const pl_linear& linear, const Rounded& x, float* y) { product_to<true>(linear, x, y); }

}  // namespace paceline
