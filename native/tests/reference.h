// What the kernels should compute, in scalar code written from the comments of formats.h, linear.h, rows.h and attention.h
// alone: no function of a backend is used, and nothing is fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "kernels.h"

namespace paceline::test {

// IEEE fp16 by its definition.
inline float value_of_half(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
    else if (exponent > 0) magnitude = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

// ---- weights: 16 channels of one block ----

struct Group {
    int q[32];  // the stored value less the format's zero
    float d, d1, m;
};

// Bytes of one superblock.
class Superblock {
  public:
    Superblock(Format format, const uint8_t* at) : format(format), layout(LAYOUTS[format]), at(at) {}

    Group group(int index, int channel) const {
        Group g{};
        for (int k = 0; k < GROUP; ++k) g.q[k] = quantum(index, channel, k);
        scales(index, channel, g);
        return g;
    }

  private:
    // Byte i of a channel's lane, in repeat `repeat` of a section.
    int byte(int section, int repeat, int channel, int i) const {
        int64_t start = 0;
        for (int s = 0; s < section; ++s) start += int64_t{layout.section[s].count} * layout.section[s].bytes * LANES;
        return at[start + (int64_t{repeat} * LANES + channel) * layout.section[section].bytes + i];
    }
    float half(int section, int channel) const {
        return value_of_half(static_cast<uint16_t>(byte(section, 0, channel, 0) | byte(section, 0, channel, 1) << 8));
    }
    int nibble(int section, int first, int channel, int k) const {
        const int both = byte(section, first + k % 16 / 4, channel, k % 4);
        return k < 16 ? both & 15 : both >> 4;
    }
    int fifth_bit(int section, int repeat, int channel, int k) const { return byte(section, repeat, channel, k % 4) >> (k / 4) & 1; }

    int quantum(int g, int c, int k) const {
        switch (format) {
            case Q4_0: return nibble(1, 0, c, k) - 8;
            case Q4_1: return nibble(2, 0, c, k);
            case Q5_0: return nibble(2, 0, c, k) + 16 * fifth_bit(1, 0, c, k) - 16;
            case Q5_1: return nibble(3, 0, c, k) + 16 * fifth_bit(2, 0, c, k);
            case Q8_0: return byte(1, k / 4, c, k % 4) - 128;
            case Q4_K: return nibble(4, 4 * g, c, k);
            case Q5_K: return nibble(4, 5 * g + 1, c, k) + 16 * fifth_bit(4, 5 * g, c, k);
            default: {
                const int two_bits = byte(2, 6 * g + k / 16, c, k % 4) >> (k % 16 / 4 * 2) & 3;
                return nibble(2, 6 * g + 2, c, k) + 16 * two_bits - 32;
            }
        }
    }

    void scales(int index, int channel, Group& g) const {
        g.d = half(0, channel);
        if (format == Q4_1 || format == Q5_1) g.m = half(1, channel);
        if (format == Q4_K || format == Q5_K) {
            g.m = (0.0f - half(1, channel)) * static_cast<float>(byte(3, index, channel, 0));
            g.d *= static_cast<float>(byte(2, index, channel, 0));
        }
        if (format == Q6_K) {
            g.d1 = g.d * static_cast<float>(static_cast<int8_t>(byte(1, 2 * index + 1, channel, 0)));
            g.d *= static_cast<float>(static_cast<int8_t>(byte(1, 2 * index, channel, 0)));
        }
    }

    Format format;
    const Layout& layout;
    const uint8_t* at;
};

inline bool has_minimum(Format format) { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }

// The groups of one channel of a block, in the order of its inputs.
inline std::vector<Group> channel_groups(Format format, const uint8_t* block, int columns, int channel) {
    const Layout& layout = LAYOUTS[format];
    std::vector<Group> groups;
    for (int column = 0; column < columns; column += layout.columns, block += layout.super_bytes())
        for (int g = 0; g < layout.columns / GROUP; ++g) groups.push_back(Superblock(format, block).group(g, channel));
    return groups;
}

inline int part_sum(const Group& g, const Activations& x, int first, int last) {
    int sum = 0;
    for (int k = first; k < last; ++k) sum += g.q[k] * x.q[k];
    return sum;
}

// One row times one channel.
inline float product(Format format, const std::vector<Group>& groups, const Activations* row) {
    float acc = 0.0f;
    for (size_t i = 0; i < groups.size(); ++i) {
        const Group& g = groups[i];
        const Activations& x = row[i];
        float u;
        if (format == Q6_K) {
            const float first = static_cast<float>(part_sum(g, x, 0, 16)) * g.d;
            u = std::fma(static_cast<float>(part_sum(g, x, 16, 32)), g.d1, first);
        } else {
            u = static_cast<float>(part_sum(g, x, 0, 32)) * g.d;
        }
        acc = std::fma(x.scale, u, acc);
        if (has_minimum(format)) acc = std::fma(x.scaled_sum, g.m, acc);
    }
    return acc;
}

// ---- rows ----

inline int nearest_even(float x) {
    const double low = std::floor(static_cast<double>(x)), rest = x - low;
    const bool up = rest > 0.5 || (rest == 0.5 && std::fmod(low, 2.0) != 0.0);
    return static_cast<int>(low) + (up ? 1 : 0);
}

// Sums and scaled_sum of an activation group, from its q and scale.
inline void sum_up(Activations& a) {
    a.negative_low = a.negative_high = 0;
    for (int k = 0; k < GROUP; ++k) (k < 16 ? a.negative_low : a.negative_high) -= a.q[k];
    a.negative_sum = a.negative_low + a.negative_high;
    a.scaled_sum = a.scale * static_cast<float>(-a.negative_sum);
}

inline Activations rounded(const float* x) {
    float largest = 0.0f;
    for (int k = 0; k < GROUP; ++k) largest = std::max(largest, std::fabs(x[k]));
    const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    Activations a{};
    for (int k = 0; k < GROUP; ++k) a.q[k] = static_cast<int8_t>(nearest_even(x[k] * inverse));
    a.scale = largest / 127.0f;
    sum_up(a);
    return a;
}

// Lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float folded(std::vector<float> lanes) {
    for (size_t width = lanes.size() / 2; width > 0; width /= 2)
        for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline std::vector<float> normed(const std::vector<float>& x, const std::vector<float>& weight, float eps) {
    std::vector<float> lanes(LANES, 0.0f), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) lanes[i % LANES] = std::fma(x[i], x[i], lanes[i % LANES]);
    const float factor = 1.0f / std::sqrt(folded(lanes) / static_cast<float>(x.size()) + eps);
    for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * factor * weight[i];
    return out;
}

inline double gated(int activation, double gate, double up) {
    if (activation == SILU) return gate / (1.0 + std::exp(-gate)) * up;
    return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
}

inline double log_sum_exp(const std::vector<float>& x) {
    const double largest = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (float each : x) sum += std::exp(each - largest);
    return largest + std::log(sum);
}

// ---- attention ----

// Slots that a row sees, in the order of positions.
inline std::vector<int> history(const AttentionTask& task, int row) {
    std::vector<int> slots(task.table, task.table + task.prefix[row]);
    for (int i = 0; i < task.tail_length[row]; ++i) slots.push_back(task.tail[row][i]);
    const int seen = static_cast<int>(slots.size());
    if (task.window > 0 && seen > task.window) slots.erase(slots.begin(), slots.end() - task.window);
    return slots;
}

// One row and head, in double precision: out [head_dim].
inline std::vector<double> attended(const AttentionTask& task, int row, int head) {
    const std::vector<int> slots = history(task, row);
    const float* query = task.query + row * task.query_stride + head * task.head_dim;
    const int at = head / task.group * task.head_dim;
    std::vector<double> power;
    for (int slot : slots) {
        double score = 0.0;
        for (int i = 0; i < task.head_dim; ++i) score += double{query[i]} * value_of_half(task.keys[slot * task.slot_stride + at + i]);
        power.push_back(score * task.scale);
    }
    const double largest = *std::max_element(power.begin(), power.end());
    double sum = 0.0;
    for (double& each : power) sum += each = std::exp(each - largest);
    std::vector<double> out(task.head_dim, 0.0);
    for (size_t j = 0; j < slots.size(); ++j)
        for (int i = 0; i < task.head_dim; ++i)
            out[i] += power[j] / sum * value_of_half(task.values[slots[j] * task.slot_stride + at + i]);
    return out;
}

}  // namespace paceline::test
