// What is left of the C ABI: threads, single linears, norms, scores.
#include "products.h"

using namespace paceline;

int32_t pl_set_threads(int32_t threads) {
    pool().resize(threads);
    return pool().threads();
}

int64_t pl_linear_work(int32_t count, int32_t columns) { return Rounded::bytes(count, columns); }

void pl_linear_forward(const pl_linear* linear, const float* x, int32_t count, void* work, float* out) {
    const Rounded rounded{static_cast<Activations*>(work), count, linear->columns / GROUP};
    over_rows(count, [&](int row) { rounded.round(row, x + int64_t{row} * linear->columns); });
    store_product(*linear, rounded, out);
}

void pl_rms_norm(const float* x, int32_t count, int32_t width, const float* weight, float eps, float* out) {
    over_rows(count, [&](int row) {
        backend().rms_norm(x + int64_t{row} * width, width, weight, eps, out + int64_t{row} * width);
    });
}

void pl_row_best(const float* logits, int32_t rows, int32_t width, int64_t* best, float* chance) {
    pool().run(rows, [&](int row) {
        backend().row_best(
            logits + int64_t{row} * width, width, best == nullptr ? nullptr : best + row,
            chance == nullptr ? nullptr : chance + row);
    });
}

void pl_temper(const float* logits, int32_t rows, int32_t width, float temperature, float* out) {
    pool().run(rows, [&](int row) {
        const float* __restrict x = logits + int64_t{row} * width;
        float* __restrict y = out + int64_t{row} * width;
        int64_t best;
        backend().row_best(x, width, &best, nullptr);
        const float largest = x[best];
        for (int i = 0; i < width; ++i) y[i] = (x[i] - largest) / temperature;
    });
}

void pl_draw(const float* scores, int32_t rows, int32_t width, const int64_t* ids, const int64_t* keys, int64_t* drawn) {
    pool().run(rows, [&](int row) {
        drawn[row] = backend().draw(scores + int64_t{row} * width, width, ids, keys + 2 * int64_t{row});
    });
}
