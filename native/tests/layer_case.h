// Random matrices, a decoder layer of them, and a ragged batch for it.
#pragma once

#include <algorithm>
#include <vector>

#include "block_case.h"
#include "check.h"
#include "paceline.h"

namespace paceline::test {

struct alignas(64) Line {
    char byte[64];
};

// At least `bytes`, 64-byte aligned.
inline std::vector<Line> workspace(int64_t bytes) { return std::vector<Line>((bytes + 63) / 64); }

// Matrices of one input, below each other, of random formats.
class LinearCase {
  public:
    LinearCase() = default;
    LinearCase(const std::vector<int>& rows, int columns, Random& random) : weights(rows.size()) {
        linear.parts = static_cast<int>(rows.size());
        linear.columns = columns;
        for (int p = 0; p < linear.parts; ++p) {
            const Format format = static_cast<Format>(random.between(0, columns % 256 == 0 ? FORMATS - 1 : Q8_0));
            for (int block = 0; block < rows[p]; block += LANES) {
                const BlockCase numbers(format, MODEL, columns / LAYOUTS[format].columns, random);
                weights[p].insert(weights[p].end(), numbers.weights.begin(), numbers.weights.end());
            }
            expect(pl_packed_bytes(format, rows[p], columns) == static_cast<int64_t>(weights[p].size()), "packed_bytes");
            linear.part[p] = {format, rows[p], columns, 0, weights[p].data()};
            linear.rows += rows[p];
        }
        if (random.one_in(2)) bias = random.normals(linear.rows);
    }

    pl_linear get() const {
        pl_linear own = linear;
        own.bias = bias.empty() ? nullptr : bias.data();
        for (int p = 0; p < own.parts; ++p) own.part[p].packed = weights[p].data();
        return own;
    }

    pl_linear linear{};

  private:
    std::vector<std::vector<uint8_t>> weights;
    std::vector<float> bias;
};

struct LayerCase {
    explicit LayerCase(Random& random) {
        const int kv_heads = random.between(1, 3), heads = kv_heads * random.between(1, 5);
        const int head_dim = 32 * random.between(1, 4), hidden = 32 * random.between(1, 9);
        const int intermediate = random.one_in(3) ? 512 : 32 * random.between(1, 20), width = heads * head_dim;
        const int inputs = random.one_in(3) ? 2 * hidden : hidden; // of a head: beside
        qkv = LinearCase({width, kv_heads * head_dim, kv_heads * head_dim}, inputs, random);
        output = LinearCase({hidden}, width, random);
        gate_up = LinearCase({intermediate, intermediate}, hidden, random);
        down = LinearCase({hidden}, intermediate, random);
        for (std::vector<float>& each : norms) each = random.normals(std::max(hidden, head_dim));
        if (!random.one_in(4)) layer.attention_norm = norms[0].data();
        if (!random.one_in(4)) layer.embed_norm = norms[6].data();
        layer.mlp_norm = norms[1].data();
        if (random.one_in(2)) layer.query_norm = norms[2].data(), layer.key_norm = norms[3].data();
        if (random.one_in(2)) layer.post_attention_norm = norms[4].data(), layer.post_mlp_norm = norms[5].data();
        layer.hidden = hidden, layer.heads = heads, layer.kv_heads = kv_heads;
        layer.head_dim = head_dim, layer.intermediate = intermediate;
        layer.activation = random.between(0, 1);
        layer.window = random.one_in(3) ? random.between(1, 40) : 0;
        layer.eps = 1e-6f, layer.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        layer.qkv = qkv.get(), layer.output = output.get(), layer.gate_up = gate_up.get(), layer.down = down.get();
    }
    LayerCase(const LayerCase&) = delete;

    pl_layer layer{};

  private:
    LinearCase qkv, output, gate_up, down;
    std::vector<float> norms[7];
};

// Sequences with a past in the pool; each brings a chain of new rows or a tree of them.
class BatchCase {
  public:
    explicit BatchCase(Random& random) {
        const int sequences = random.between(1, 4);
        for (int s = 0; s < sequences; ++s) add_sequence(random);
    }

    int rows() const { return static_cast<int>(slot.size()); }
    int slots() const { return used; }

    // f(batch) with the rows [first, first + count); work and what is beside are left to the caller.
    template <class Function> void with(int first, int count, const Function& f) const {
        std::vector<const int32_t*> table, tail;
        std::vector<int32_t> tail_length;
        for (int row = first; row < first + count; ++row) {
            table.push_back(tables[sequence[row]].data());
            tail.push_back(tails[row].data());
            tail_length.push_back(static_cast<int32_t>(tails[row].size()));
        }
        f(pl_batch{count, 0, &slot[first], &position[first], table.data(), &prefix[first], tail.data(), tail_length.data(), nullptr, nullptr});
    }

    static constexpr int MOST_POSITIONS = 128;

  private:
    void add_sequence(Random& random) {
        const int past = random.between(0, 60), fresh = random.between(1, 20), own = static_cast<int>(tables.size()), start = rows();
        const bool tree = random.one_in(2);
        tables.emplace_back();
        for (int i = 0; i < past + fresh; ++i) tables.back().push_back(used++);
        for (int i = 0; i < fresh; ++i) {
            sequence.push_back(own);
            slot.push_back(tables.back()[past + i]);
            prefix.push_back(tree ? past : past + i + 1);
            tails.emplace_back();
            if (tree && i > 0) tails.back() = tails[start + random.between(0, i - 1)];
            if (tree) tails.back().push_back(slot.back());
            position.push_back(prefix.back() + static_cast<int>(tails.back().size()) - 1);
        }
    }

    int used = 0;
    std::vector<int> sequence;
    std::vector<int32_t> slot, position, prefix;
    std::vector<std::vector<int32_t>> tables, tails;
};

}  // namespace paceline::test
