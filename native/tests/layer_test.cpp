// Linears and decoder layers through the C ABI: every backend, number of threads and division of the rows into calls
// gives the bits that the portable backend's functions give row by row.
#include "check.h"
#include "everywhere.h"
#include "layer_case.h"
#include "layer_reference.h"
#include "paceline.h"

namespace paceline::test {
namespace {

void use_portable() {
    pl_use_backend("portable");
    pl_set_threads(1);
}

// ---- linears ----

std::vector<float> forward(const pl_linear& linear, const std::vector<float>& x, int count) {
    std::vector<float> out(static_cast<size_t>(count) * linear.rows);
    std::vector<Line> work = workspace(pl_linear_work(count, linear.columns));
    pl_linear_forward(&linear, x.data(), count, work.data(), out.data());
    return out;
}

std::vector<float> row_by_row(const pl_linear& linear, const std::vector<float>& x, int count) {
    std::vector<float> all;
    for (int row = 0; row < count; ++row) {
        const std::vector<float> out = linear_row(linear, &x[static_cast<size_t>(row) * linear.columns]);
        all.insert(all.end(), out.begin(), out.end());
    }
    return all;
}

void test_linear(const std::vector<int>& rows, int columns, int count, Random& random) {
    const LinearCase c(rows, columns, random);
    const pl_linear linear = c.get();
    const std::vector<float> x = random.normals(static_cast<size_t>(count) * columns);
    use_portable();
    const std::vector<float> expected = row_by_row(linear, x, count);
    everywhere([&](const std::string& where) {
        const std::vector<float> out = forward(linear, x, count);
        const std::string shape = std::to_string(count) + " rows, " + std::to_string(linear.rows) + " x " + std::to_string(columns);
        expect_same(out.data(), expected.data(), expected.size(), where + ": linear of " + shape);
    });
}

void test_linears(Random& random) {
    for (int count : {0, 1, 2, 15, 16, 17, 33}) {
        test_linear({48, 16, 7}, 256, count, random);
        test_linear({random.between(1, 100)}, 32 * random.between(1, 12), count, random);
        test_linear({16 * random.between(1, 4), random.between(1, 40)}, 256 * random.between(1, 3), count, random);
    }
}

// ---- layers ----

State random_state(const pl_layer& layer, const BatchCase& batch, Random& random) {
    const size_t pool = static_cast<size_t>(batch.slots()) * layer.kv_heads * layer.head_dim;
    const size_t angles = random.one_in(4) ? 0 : static_cast<size_t>(BatchCase::MOST_POSITIONS) * layer.head_dim / 2;
    const size_t hidden = static_cast<size_t>(batch.rows()) * layer.hidden;
    State s{random.normals(hidden), {}, {}, {}, {}, {}};
    if (layer.qkv.columns > layer.hidden) s.beside = random.normals(hidden);
    for (size_t i = 0; i < angles; ++i) {
        const float angle = random.normal();
        s.cos.push_back(std::cos(angle));
        s.sin.push_back(std::sin(angle));
    }
    for (std::vector<uint16_t>* store : {&s.keys, &s.values})
        for (size_t i = 0; i < pool; ++i) store->push_back(static_cast<uint16_t>(random.between(0, 15 << 10) | random.between(0, 1) << 15));
    return s;
}

// Both sublayers, with `step` rows a call.
State after_layer(const pl_layer& layer, const BatchCase& cases, State s, int step) {
    const float *cos = s.cos.empty() ? nullptr : s.cos.data(), *sin = s.cos.empty() ? nullptr : s.sin.data();
    for (int first = 0; first < cases.rows(); first += step) {
        const int count = std::min(step, cases.rows() - first);
        std::vector<Line> work = workspace(pl_layer_work(&layer, count));
        const size_t at = static_cast<size_t>(first) * layer.hidden;
        float* hidden = s.hidden.data() + at;
        cases.with(first, count, [&](pl_batch batch) {
            batch.work = work.data();
            batch.beside = s.beside.empty() ? nullptr : s.beside.data() + at;
            const pl_layer* one = &layer;
            const pl_place place = {s.keys.data(), s.values.data(), cos, sin};
            std::vector<float> before(hidden, hidden + static_cast<size_t>(count) * layer.hidden), kept(before.size(), NAN);
            float* const keep = first % 2 == 0 ? kept.data() : nullptr;
            pl_layers(&one, &place, 1, &batch, hidden, &keep);
            if (keep != nullptr) expect_same(keep, before.data(), before.size(), "what goes into a layer is kept");
        });
    }
    return s;
}

State expected_after(const pl_layer& layer, const BatchCase& cases, State s) {
    LayerReference reference(layer, s);
    for (int row = 0; row < cases.rows(); ++row)
        cases.with(row, 1, [&](pl_batch batch) {
            const size_t at = static_cast<size_t>(row) * layer.hidden;
            batch.beside = s.beside.empty() ? nullptr : &s.beside[at];
            reference.row(batch, &s.hidden[at]);
        });
    return s;
}

void test_layer(Random& random) {
    const LayerCase c(random);
    const BatchCase batch(random);
    const State start = random_state(c.layer, batch, random);
    use_portable();
    const State expected = expected_after(c.layer, batch, start);
    for (float each : expected.hidden) expect(std::isfinite(each), "the layer's numbers stay finite");
    everywhere([&](const std::string& where) {
        for (int step : {1, 5, batch.rows()}) {
            const State found = after_layer(c.layer, batch, start, step);
            const std::string what = where + ", " + std::to_string(step) + " of " + std::to_string(batch.rows()) + " rows a call: ";
            expect_same(found.hidden.data(), expected.hidden.data(), expected.hidden.size(), what + "hidden");
            expect(found.keys == expected.keys && found.values == expected.values, what + "keys and values");
        }
    });
}

}  // namespace

int run() {
    Random random(7);
    test_linears(random);
    for (int round = 0; round < 16; ++round) test_layer(random);
    std::printf("%s: %d failures\n", pl_backends(), failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace paceline::test

int main() { return paceline::test::run(); }
