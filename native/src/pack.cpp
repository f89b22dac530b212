// Weights into the layout of formats.h, and out of it again.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "../include/paceline.h"
#include "formats.h"
#include "lanes.h"
#include "quantize.h"
#include "stored.h"

namespace paceline::packing {
namespace {

template <Format F> using Chosen = std::integral_constant<Format, F>;

// Calls work(Chosen<format>); false if there is no such format.
template <class Work> bool with_format(int32_t format, Work work) {
    switch (format) {
        case Q4_0: work(Chosen<Q4_0>()); return true;
        case Q4_1: work(Chosen<Q4_1>()); return true;
        case Q5_0: work(Chosen<Q5_0>()); return true;
        case Q5_1: work(Chosen<Q5_1>()); return true;
        case Q8_0: work(Chosen<Q8_0>()); return true;
        case Q4_K: work(Chosen<Q4_K>()); return true;
        case Q5_K: work(Chosen<Q5_K>()); return true;
        case Q6_K: work(Chosen<Q6_K>()); return true;
        default: return false;
    }
}

bool divides(int32_t format, int32_t columns) {
    return format >= 0 && format < FORMATS && columns >= 0 && columns % LAYOUTS[format].columns == 0;
}

// work(first, last) over the blocks of 16 rows, by several threads where it takes longer than starting them.
template <class Work> void over_blocks(int64_t blocks, int64_t bytes, Work work) {
    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    const int64_t parts = std::clamp<int64_t>(std::min(cores, bytes >> 20), 1, std::max<int64_t>(blocks, 1));
    std::vector<std::thread> threads;
    int64_t first = 0;
    for (int64_t part = 1; part < parts; ++part) {
        const int64_t last = blocks * part / parts;
        try {
            threads.emplace_back(work, first, last);
        } catch (const std::system_error&) {
            break;  // no more threads to be had: the rest is done here
        }
        first = last;
    }
    work(first, blocks);
    for (std::thread& each : threads) each.join();
}

// Fills a packed matrix: lane_of(row, superblock, lane) writes one lane; rows past the last are zeros.
template <Format F, class LaneOf> void fill(int64_t rows, int64_t columns, uint8_t* packed, LaneOf lane_of) {
    const int64_t supers = columns / COLUMNS<F>, blocks = (rows + LANES - 1) / LANES;
    constexpr int64_t size = LAYOUTS[F].super_bytes();
    over_blocks(blocks, blocks * supers * size, [=](int64_t first, int64_t last) {
        uint8_t lanes[LANES * LANE_BYTES<F>] = {};
        for (int64_t block = first; block < last; ++block) {
            const int own = int(std::min<int64_t>(LANES, rows - LANES * block));
            if (own < LANES) std::memset(lanes, 0, sizeof lanes);
            for (int64_t super = 0; super < supers; ++super) {
                for (int c = 0; c < own; ++c) lane_of(LANES * block + c, super, lanes + LANE_BYTES<F> * c);
                interleave<F>(lanes, packed + (block * supers + super) * size);
            }
        }
    });
}

template <Format F> const uint8_t* superblock(const uint8_t* packed, int64_t row, int64_t supers, int64_t super) {
    return packed + (row / LANES * supers + super) * LAYOUTS[F].super_bytes();
}

}  // namespace
}  // namespace paceline::packing

using namespace paceline;
using namespace paceline::packing;

int64_t pl_packed_bytes(int32_t format, int32_t rows, int32_t columns) {
    if (!divides(format, columns) || rows < 0) return -1;
    const int64_t blocks = (int64_t(rows) + LANES - 1) / LANES;
    return blocks * (columns / LAYOUTS[format].columns) * LAYOUTS[format].super_bytes();
}

void pl_pack(int32_t format, const void* stored, int32_t rows, int32_t columns, void* packed) {
    with_format(format, [=](auto chosen) {
        constexpr Format F = chosen;
        const int64_t supers = columns / COLUMNS<F>;
        const auto* from = static_cast<const uint8_t*>(stored);
        fill<F>(rows, columns, static_cast<uint8_t*>(packed), [=](int64_t row, int64_t super, uint8_t* lane) {
            stored_lane<F>(from + (row * supers + super) * LAYOUTS[F].stored_bytes, lane);
        });
    });
}

int32_t pl_quantize(int32_t format, const float* weight, int32_t rows, int32_t columns, void* packed) {
    if (!divides(format, columns)) return -1;
    const int64_t stride = columns;
    auto* to = static_cast<uint8_t*>(packed);
    if (format == Q8_0)
        fill<Q8_0>(rows, columns, to, [=](int64_t row, int64_t super, uint8_t* lane) {
            quantize_q8_0(weight + row * stride + super * GROUP, lane);
        });
    else if (format == Q4_1)
        fill<Q4_1>(rows, columns, to, [=](int64_t row, int64_t super, uint8_t* lane) {
            quantize_q4_1(weight + row * stride + super * GROUP, lane);
        });
    else
        return -1;
    return 0;
}

void pl_take_rows(int32_t format, const void* packed, int32_t columns, const int64_t* ids, int32_t count, void* out) {
    with_format(format, [=](auto chosen) {
        constexpr Format F = chosen;
        const int64_t supers = columns / COLUMNS<F>;
        const auto* from = static_cast<const uint8_t*>(packed);
        fill<F>(count, columns, static_cast<uint8_t*>(out), [=](int64_t row, int64_t super, uint8_t* lane) {
            take_lane<F>(superblock<F>(from, ids[row], supers, super), int(ids[row] % LANES), lane);
        });
    });
}

void pl_dequantize_rows(
    int32_t format, const void* packed, int32_t columns, const int64_t* ids, int32_t count, float* out) {
    with_format(format, [=](auto chosen) {
        constexpr Format F = chosen;
        const int64_t supers = columns / COLUMNS<F>;
        const auto* from = static_cast<const uint8_t*>(packed);
        uint8_t lane[LANE_BYTES<F>];
        for (int64_t i = 0; i < count; ++i)
            for (int64_t super = 0; super < supers; ++super) {
                take_lane<F>(superblock<F>(from, ids[i], supers, super), int(ids[i] % LANES), lane);
                lane_weights<F>(lane, out + i * columns + super * COLUMNS<F>);
            }
    });
}
