// Linears and a decoder layer row by row, composed of the backend's functions, which have tests of their own.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "layer_case.h"
#include "paceline.h"

namespace paceline::test {

// Hidden states of the rows, the pool and the angles.
struct State {
    std::vector<float> hidden, beside, cos, sin;
    std::vector<uint16_t> keys, values;
};

// One row of a linear: [linear.rows].
inline std::vector<float> linear_row(const pl_linear& linear, const float* x, const float* norm = nullptr, float eps = 0.0f) {
    std::vector<float> normed(x, x + linear.columns), out;
    if (norm != nullptr) pl_rms_norm(x, 1, linear.columns, norm, eps, normed.data());
    std::vector<Activations> activations(linear.columns / GROUP);
    backend().quantize(normed.data(), linear.columns, activations.data(), 1);
    for (int p = 0; p < linear.parts; ++p) {
        const pl_matrix& matrix = linear.part[p];
        const uint8_t* block = static_cast<const uint8_t*>(matrix.packed);
        for (int first = 0; first < matrix.rows; first += LANES, block += pl_packed_bytes(matrix.format, LANES, matrix.columns)) {
            float channels[LANES];
            backend().block[matrix.format][1](block, activations.data(), matrix.columns, channels);
            out.insert(out.end(), channels, channels + std::min(LANES, matrix.rows - first));
        }
    }
    for (int i = 0; linear.bias != nullptr && i < linear.rows; ++i) out[i] += linear.bias[i];
    return out;
}

class LayerReference {
  public:
    LayerReference(const pl_layer& layer, State& state) : layer(layer), state(state) {}

    void row(const pl_batch& batch, float* hidden) {
        std::vector<float> qkv = linear_row(layer.qkv, attention_input(batch, hidden).data());
        place(batch, qkv.data());
        add(layer.output, attended(batch, qkv.data()), layer.post_attention_norm, hidden);
        add(layer.down, gated(linear_row(layer.gate_up, hidden, layer.mlp_norm, layer.eps)), layer.post_mlp_norm, hidden);
    }

  private:
    std::vector<float> attention_input(const pl_batch& batch, const float* hidden) const {
        std::vector<float> x;
        if (layer.qkv.columns > layer.hidden) append(x, batch.beside, layer.embed_norm);
        append(x, hidden, layer.attention_norm);
        return x;
    }

    void append(std::vector<float>& x, const float* part, const float* norm) const {
        x.insert(x.end(), part, part + layer.hidden);
        float* own = x.data() + x.size() - layer.hidden;
        if (norm != nullptr) pl_rms_norm(own, 1, layer.hidden, norm, layer.eps, own);
    }

    void place(const pl_batch& batch, float* qkv) {
        const int dim = layer.head_dim, width = layer.kv_heads * dim, at = batch.position[0] * (dim / 2);
        for (int head = 0; head < layer.heads + layer.kv_heads; ++head) {
            float* own = qkv + head * dim;
            const float* norm = head < layer.heads ? layer.query_norm : layer.key_norm;
            if (norm != nullptr) pl_rms_norm(own, 1, dim, norm, layer.eps, own);
            if (!state.cos.empty()) backend().rotate(own, dim, &state.cos[at], &state.sin[at]);
        }
        const float* key = qkv + layer.heads * dim;
        backend().to_half(key, width, &state.keys[static_cast<size_t>(batch.slot[0]) * width]);
        backend().to_half(key + width, width, &state.values[static_cast<size_t>(batch.slot[0]) * width]);
    }

    std::vector<float> attended(const pl_batch& batch, const float* qkv) const {
        const int dim = layer.head_dim, seen = batch.prefix[0] + batch.tail_length[0];
        std::vector<float> out(layer.heads * dim), scratch(seen + 32);
        for (int head = 0; head < layer.heads; ++head)
            backend().attend(AttentionTask{
                1, head, 1, layer.heads / layer.kv_heads, dim, layer.window, layer.scale, qkv, out.data(), dim, dim,
                state.keys.data(), state.values.data(), int64_t{layer.kv_heads} * dim, batch.table[0], batch.prefix, batch.tail,
                batch.tail_length, scratch.data()});
        return out;
    }

    std::vector<float> gated(const std::vector<float>& gate_up) const {
        std::vector<float> out(layer.intermediate);
        backend().gate(layer.activation, gate_up.data(), gate_up.data() + layer.intermediate, layer.intermediate, out.data());
        return out;
    }

    void add(const pl_linear& linear, const std::vector<float>& x, const float* norm, float* hidden) const {
        std::vector<float> y = linear_row(linear, x.data(), nullptr, layer.eps);
        if (norm != nullptr) pl_rms_norm(y.data(), 1, layer.hidden, norm, layer.eps, y.data());
        for (int i = 0; i < layer.hidden; ++i) hidden[i] += y[i];
    }

    const pl_layer& layer;
    State& state;
};

}  // namespace paceline::test
