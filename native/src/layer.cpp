// The two halves of a decoder layer.
#include <algorithm>
#include <numeric>
#include <vector>

#include "products.h"

namespace paceline {
namespace {

struct Workspace : Cut {
    Workspace(const pl_layer& layer, int rows, void* memory) : Cut(memory) {
        const int width = layer.heads * layer.head_dim;
        input = take<Activations>(Rounded::bytes(rows, std::max(layer.qkv.columns, std::max(layer.hidden, width))));
        inner = take<Activations>(Rounded::bytes(rows, layer.intermediate));
        qkv = take<float>(sizeof(float) * rows * layer.qkv.rows);
        attended = take<float>(sizeof(float) * rows * width);
        normed = take<float>(sizeof(float) * rows * layer.hidden);
    }

    Activations *input, *inner;
    float *qkv, *attended, *normed;
};

// One row's [hidden] inputs, by `weight` normed if there is one, rounded into x from `group` on.
void norm_and_round(
    const pl_layer& layer, const Rounded& x, int row, int group, const float* hidden, const float* weight, const Workspace& work) {
    const float* own = hidden + int64_t{row} * layer.hidden;
    if (weight != nullptr) {
        float* normed = work.normed + int64_t{row} * layer.hidden;
        backend().rms_norm(own, layer.hidden, weight, layer.eps, normed);
        own = normed;
    }
    x.round(row, own, group, layer.hidden / GROUP);
}

// What all rows attend with: the hidden states, in a head's first layer behind the tokens' embeddings.
Rounded attention_input(const pl_layer& layer, const pl_batch& batch, const float* hidden, const Workspace& work) {
    const Rounded x{work.input, batch.rows, layer.qkv.columns / GROUP};
    const int before = x.groups - layer.hidden / GROUP;
    over_rows(batch.rows, [&](int row) {
        if (before > 0) norm_and_round(layer, x, row, 0, batch.beside, layer.embed_norm, work);
        norm_and_round(layer, x, row, before, hidden, layer.attention_norm, work);
    });
    return x;
}

// hidden += product, or += norm(product) in layers that norm what they add (Gemma).
void add_to_stream(
    const pl_layer& layer, const pl_linear& linear, const Rounded& x, const float* norm, const Workspace& work, float* hidden) {
    if (norm == nullptr) return add_product(linear, x, hidden);
    store_product(linear, x, work.normed);
    over_rows(x.count, [&](int row) {
        float* own = work.normed + int64_t{row} * layer.hidden;
        backend().rms_norm(own, layer.hidden, norm, layer.eps, own);
        float* to = hidden + int64_t{row} * layer.hidden;
        for (int i = 0; i < layer.hidden; ++i) to[i] += own[i];
    });
}

// Norms and rotary positions of one row's queries and keys, and its key and value into the pool.
void place(
    const pl_layer& layer, const pl_batch& batch, int row, float* qkv, uint16_t* keys, uint16_t* values, const float* cos,
    const float* sin) {
    const int dim = layer.head_dim, width = layer.kv_heads * dim;
    float *key = qkv + layer.heads * dim, *value = key + width;
    for (int head = 0; head < layer.heads + layer.kv_heads; ++head) {
        float* own = qkv + head * dim;
        const float* norm = head < layer.heads ? layer.query_norm : layer.key_norm;
        if (norm != nullptr) backend().rms_norm(own, dim, norm, layer.eps, own);
        const int64_t angle = int64_t{batch.position[row]} * (dim / 2);
        if (cos != nullptr) backend().rotate(own, dim, cos + angle, sin + angle);
    }
    backend().to_half(key, width, keys + int64_t{batch.slot[row]} * width);
    backend().to_half(value, width, values + int64_t{batch.slot[row]} * width);
}

// Rows [first, last) of one sequence, at most MOST_ROWS.
struct Run {
    int first, last;
};

// As few for each sequence as will do, and of like length: threads take them in turn.
std::vector<Run> runs_of(const pl_batch& batch) {
    std::vector<Run> runs;
    for (int first = 0, end = 0; first < batch.rows; first = end) {
        while (end < batch.rows && batch.table[end] == batch.table[first]) ++end;
        const int rows = end - first, parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int part = 0; part < parts; ++part) runs.push_back({first + rows * part / parts, first + rows * (part + 1) / parts});
    }
    return runs;
}

// The calling thread's room for scores. Its own, so that it does not matter how many threads there are, or when that changes.
float* scores_of_thread(const pl_batch& batch, Run run, int heads) {
    int longest = 0;
    for (int row = run.first; row < run.last; ++row) longest = std::max(longest, batch.prefix[row] + batch.tail_length[row]);
    static thread_local std::vector<float> scores;
    scores.resize(std::max<size_t>(scores.size(), size_t(run.last - run.first) * heads * (longest + 2 * LANES)));
    return scores.data();
}

// In how many tasks each run's heads are cut: as few as give every thread as much. Where there are many runs, none of it
// matters but the room that scores take, so heads that share a key and a value go alone.
int tasks_a_run(const pl_layer& layer, int runs) {
    const int threads = pool().threads();
    const int wanted = runs >= 4 * threads ? layer.kv_heads : threads / std::gcd(threads, runs);
    return std::clamp(wanted, (layer.heads + MOST_HEADS - 1) / MOST_HEADS, layer.heads);
}

void attend_all(const pl_layer& layer, const pl_batch& batch, const uint16_t* keys, const uint16_t* values, const Workspace& work) {
    const std::vector<Run> runs = runs_of(batch);
    const int tasks = tasks_a_run(layer, static_cast<int>(runs.size())), dim = layer.head_dim;
    pool().run(static_cast<int>(runs.size()) * tasks, [&](int chunk) {
        const Run run = runs[chunk / tasks];
        const int part = chunk % tasks, first = layer.heads * part / tasks, heads = layer.heads * (part + 1) / tasks - first;
        const int64_t row = run.first, width = layer.heads * dim;
        backend().attend(AttentionTask{
            run.last - run.first, first, heads, layer.heads / layer.kv_heads, dim, layer.window, layer.scale,
            work.qkv + row * layer.qkv.rows, work.attended + row * width, layer.qkv.rows, width, keys, values,
            int64_t{layer.kv_heads} * dim, batch.table[row], batch.prefix + row, batch.tail + row, batch.tail_length + row,
            scores_of_thread(batch, run, heads),
        });
    });
}

// 32 inner channels at a time: gate and up, the activation, and its rounding, while they are in the nearest cache.
void inner_rows(const pl_layer& layer, const Rounded& x, const Rounded& inner) {
    const pl_matrix &gates = layer.gate_up.part[0], &ups = layer.gate_up.part[1];
    const int total = layer.intermediate / GROUP, step = units_a_chunk(total, 4 * block_bytes(gates), x.count);
    pool().run((total + step - 1) / step, [&](int chunk) {
        alignas(64) float gate[TILE * LANES], up[TILE * LANES], both[TILE][GROUP];
        for (int tile = 0; tile < x.tiles(); ++tile) {
            const int rows = x.rows(tile);
            for (int unit = chunk * step; unit < std::min(total, (chunk + 1) * step); ++unit) {
                for (int part = 0; part < GROUP / LANES; ++part) {
                    const int block = unit * (GROUP / LANES) + part;
                    multiply(gates, block, x, tile, gate);
                    multiply(ups, block, x, tile, up);
                    if (layer.gate_up.bias != nullptr) {
                        const float *gate_bias = layer.gate_up.bias + block * LANES, *up_bias = gate_bias + gates.rows;
                        for (int r = 0; r < rows; ++r)
                            for (int c = 0; c < LANES; ++c) gate[r * LANES + c] += gate_bias[c], up[r * LANES + c] += up_bias[c];
                    }
                    for (int r = 0; r < rows; ++r)
                        backend().gate(layer.activation, gate + r * LANES, up + r * LANES, LANES, both[r] + part * LANES);
                }
                for (int r = 0; r < rows; ++r)
                    backend().quantize(both[r], GROUP, inner.row(tile * TILE + r) + int64_t{unit} * rows, rows);
            }
        }
    });
}

}  // namespace
}  // namespace paceline

using namespace paceline;

int64_t pl_layer_work(const pl_layer* layer, int32_t rows) { return Workspace(*layer, rows, nullptr).bytes(); }

void pl_attention(
    const pl_layer* layer, const pl_batch* batch, uint16_t* keys, uint16_t* values, const float* cos, const float* sin,
    float* hidden) {
    const Workspace work(*layer, batch->rows, batch->work);
    store_product(layer->qkv, attention_input(*layer, *batch, hidden, work), work.qkv);
    over_rows(batch->rows, [&](int row) {
        place(*layer, *batch, row, work.qkv + int64_t{row} * layer->qkv.rows, keys, values, cos, sin);
    });
    attend_all(*layer, *batch, keys, values, work);
    const int width = layer->heads * layer->head_dim;
    const Rounded attended{work.input, batch->rows, width / GROUP};
    over_rows(batch->rows, [&](int row) { attended.round(row, work.attended + int64_t{row} * width); });
    add_to_stream(*layer, layer->output, attended, layer->post_attention_norm, work, hidden);
}

void pl_mlp(const pl_layer* layer, const pl_batch* batch, float* hidden) {
    const Workspace work(*layer, batch->rows, batch->work);
    const Rounded x{work.input, batch->rows, layer->hidden / GROUP};
    over_rows(batch->rows, [&](int row) { norm_and_round(*layer, x, row, 0, hidden, layer->mlp_norm, work); });
    const Rounded inner{work.inner, batch->rows, layer->intermediate / GROUP};
    inner_rows(*layer, x, inner);
    add_to_stream(*layer, layer->down, inner, layer->post_mlp_norm, work, hidden);
}

void pl_layers(
    const pl_layer* const* layers, const pl_place* places, int32_t count, const pl_batch* batch, float* hidden,
    float* const* kept) {
    for (int i = 0; i < count; ++i) {
        if (kept[i] != nullptr) std::copy_n(hidden, int64_t{batch->rows} * layers[i]->hidden, kept[i]);
        const pl_place& at = places[i];
        pl_attention(layers[i], batch, at.keys, at.values, at.cos, at.sin, hidden);
        pl_mlp(layers[i], batch, hidden);
    }
}
