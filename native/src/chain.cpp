// A head's chain of drafts in one call: a level takes so little that what a caller does in between would double it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "products.h"

namespace paceline {
namespace {

struct ChainWork : Cut {
    ChainWork(const pl_head& head, int rows, void* memory) : Cut(memory) {
        layer = take<void>(pl_layer_work(&head.layer, rows));
        linear = take<void>(std::max(Rounded::bytes(rows, head.fc.columns), Rounded::bytes(1, head.output.columns)));
        features = take<float>(sizeof(float) * rows * head.layer.hidden);
        embeds = take<float>(sizeof(float) * rows * head.layer.hidden);
        normed = take<float>(sizeof(float) * head.layer.hidden);
        scores = take<float>(sizeof(float) * head.output.rows);
    }

    void *layer, *linear;
    float *features, *embeds, *normed, *scores;
};

pl_batch rows_from(const pl_batch& all, int first, int count, const ChainWork& work) {
    return {
        count, 0, all.slot + first, all.position + first, all.table + first, all.prefix + first, all.tail + first,
        all.tail_length + first, work.embeds, work.layer,
    };
}

// The column that follows by these scores, and its probability.
int64_t pick(const pl_head& head, const pl_draft& draft, int level, float* scores, float* chance) {
    const int width = head.output.rows;
    int64_t best;
    if (draft.temperature > 0.0f) {
        const float factor = 1.0f / draft.temperature;
        for (int i = 0; i < width; ++i) scores[i] *= factor;
    }
    backend().row_best(scores, width, &best, chance);
    if (draft.temperature <= 0.0f) return best;
    const int64_t drawn = backend().draw(scores, width, head.ids, draft.keys + 2 * int64_t{level});
    *chance *= std::exp(scores[drawn] - scores[best]);
    return drawn;
}

float worth(const pl_draft& draft, float chance) {
    if (draft.worth == nullptr || !(chance >= 0.0f)) return chance;
    return draft.worth[std::min(static_cast<int>(chance * 10), 9)];
}

}  // namespace
}  // namespace paceline

using namespace paceline;

int64_t pl_chain_work(const pl_head* head, int32_t rows) { return ChainWork(*head, rows, nullptr).bytes(); }

int32_t pl_chain(
    const pl_head* head, const pl_batch* batch, const pl_draft* draft, uint16_t* keys, uint16_t* values, const float* cos,
    const float* sin, int64_t* drafted, float* chance) {
    const ChainWork work(*head, batch->rows, batch->work);
    const pl_layer& layer = head->layer;
    const int64_t* tokens = draft->tokens;
    float survival = 1.0f;
    pl_linear_forward(&head->fc, draft->taps, batch->rows, work.linear, work.features);
    for (int first = 0, count = batch->rows, level = 0;; first += count, count = 1) {
        const pl_batch rows = rows_from(*batch, first, count, work);
        pl_dequantize_rows(head->embedding.format, head->embedding.packed, layer.hidden, tokens, count, work.embeds);
        if (head->residual_norm != nullptr)
            pl_rms_norm(work.features, count, layer.hidden, head->residual_norm, layer.eps, work.features);
        pl_attention(&layer, &rows, keys, values, cos, sin, work.features);
        pl_mlp(&layer, &rows, work.features);
        const float* last = work.features + int64_t{count - 1} * layer.hidden;
        backend().rms_norm(last, layer.hidden, head->output_norm, layer.eps, work.normed);
        pl_linear_forward(&head->output, work.normed, 1, work.linear, work.scores);
        const int64_t column = pick(*head, *draft, level, work.scores, chance + level);
        drafted[level] = head->ids == nullptr ? column : head->ids[column];
        survival *= worth(*draft, chance[level]);
        tokens = drafted + level++;
        if (level == draft->depth || !(survival >= draft->stop_below)) return level;
        std::memmove(work.features, head->feeds_normed != 0 ? work.normed : last, sizeof(float) * layer.hidden);
    }
}
