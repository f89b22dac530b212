// A head's chain in one call has the bits of the calls that it is made of, one after the other.
#include <algorithm>

#include "check.h"
#include "everywhere.h"
#include "layer_case.h"
#include "paceline.h"

namespace paceline::test {
namespace {

constexpr int VOCABULARY = 64, DEPTH = 6, POSITIONS = 64;

struct HeadCase {
    explicit HeadCase(Random& random) {
        const int kv_heads = random.between(1, 2), heads = kv_heads * random.between(1, 3), head_dim = 32;
        const int hidden = 32 * random.between(1, 4), inner = 32 * random.between(1, 6), width = heads * head_dim;
        linears = {
            LinearCase({width, kv_heads * head_dim, kv_heads * head_dim}, 2 * hidden, random), LinearCase({hidden}, width, random),
            LinearCase({inner, inner}, hidden, random), LinearCase({hidden}, inner, random),
            LinearCase({hidden}, 3 * hidden, random), LinearCase({random.between(20, 50)}, hidden, random),
            LinearCase({VOCABULARY}, hidden, random),
        };
        for (std::vector<float>& each : norms) each = random.normals(hidden);
        pl_layer& layer = head.layer;
        layer.qkv = linears[0].get(), layer.output = linears[1].get(), layer.gate_up = linears[2].get(), layer.down = linears[3].get();
        layer.attention_norm = norms[0].data(), layer.embed_norm = norms[1].data(), layer.mlp_norm = norms[2].data();
        layer.hidden = hidden, layer.heads = heads, layer.kv_heads = kv_heads, layer.head_dim = head_dim, layer.intermediate = inner;
        layer.eps = 1e-6f, layer.scale = 0.18f;
        head.fc = linears[4].get(), head.output = linears[5].get(), head.embedding = linears[6].get().part[0];
        head.output_norm = norms[3].data();
        if (random.one_in(2)) head.residual_norm = norms[4].data();
        head.feeds_normed = random.between(0, 1);
        for (int i = 0; i < head.output.rows; ++i) ids.push_back(random.between(0, VOCABULARY - 1));
        if (random.one_in(2)) head.ids = ids.data();
    }
    HeadCase(const HeadCase&) = delete;

    pl_head head{};

  private:
    std::vector<LinearCase> linears;
    std::vector<float> norms[5];
    std::vector<int64_t> ids;
};

// One sequence of `past` rows before the `rows` that are fed, and DEPTH - 1 behind them.
struct Place {
    Place(int past, int rows) : rows(rows) {
        for (int i = 0; i < past + rows + DEPTH - 1; ++i) table.push_back(i);
        for (int i = past; i < past + rows + DEPTH - 1; ++i) slot.push_back(i), prefix.push_back(i + 1), none.push_back(0);
        tables.assign(slot.size(), table.data());
        tails.assign(slot.size(), nullptr);
    }
    pl_batch from(int first, int count) const {
        return {count, 0, &slot[first], &slot[first], &tables[first], &prefix[first], &tails[first], &none[first], nullptr, nullptr};
    }
    const int rows;

  private:
    std::vector<int32_t> table, slot, prefix, none;
    std::vector<const int32_t*> tables, tails;
};

struct Found {
    std::vector<int64_t> tokens;
    std::vector<float> chances;
    std::vector<uint16_t> keys, values;
};

struct Given {
    std::vector<float> taps, cos, sin;
    std::vector<int64_t> tokens, noise;
    std::vector<uint16_t> keys, values;
    float stop_below, temperature;
    std::vector<float> worth;
};

Found in_one_call(const pl_head& head, const Place& place, const Given& given) {
    Found found{std::vector<int64_t>(DEPTH), std::vector<float>(DEPTH), given.keys, given.values};
    std::vector<Line> work = workspace(pl_chain_work(&head, place.rows));
    pl_batch batch = place.from(0, place.rows);
    batch.work = work.data();
    const pl_draft draft{given.taps.data(), given.tokens.data(), DEPTH, given.stop_below, given.temperature, 0, given.noise.data(), given.worth.empty() ? nullptr : given.worth.data()};
    const int count = pl_chain(
        &head, &batch, &draft, found.keys.data(), found.values.data(), given.cos.data(), given.sin.data(), found.tokens.data(),
        found.chances.data());
    found.tokens.resize(count);
    found.chances.resize(count);
    return found;
}

std::vector<float> linear(const pl_linear& linear, const std::vector<float>& x, int rows) {
    std::vector<float> out(static_cast<size_t>(rows) * linear.rows);
    std::vector<Line> work = workspace(pl_linear_work(rows, linear.columns));
    pl_linear_forward(&linear, x.data(), rows, work.data(), out.data());
    return out;
}

// The rows' outputs, in place of their features.
void layer_of(const pl_head& head, pl_batch batch, const Given& given, const int64_t* tokens, std::vector<float>& features, Found& found) {
    std::vector<float> embeds(features.size());
    pl_dequantize_rows(head.embedding.format, head.embedding.packed, head.layer.hidden, tokens, batch.rows, embeds.data());
    if (head.residual_norm != nullptr)
        pl_rms_norm(features.data(), batch.rows, head.layer.hidden, head.residual_norm, head.layer.eps, features.data());
    std::vector<Line> work = workspace(pl_layer_work(&head.layer, batch.rows));
    batch.beside = embeds.data(), batch.work = work.data();
    pl_attention(&head.layer, &batch, found.keys.data(), found.values.data(), given.cos.data(), given.sin.data(), features.data());
    pl_mlp(&head.layer, &batch, features.data());
}

Found level_by_level(const pl_head& head, const Place& place, const Given& given) {
    Found found{{}, {}, given.keys, given.values};
    std::vector<float> features = linear(head.fc, given.taps, place.rows);
    layer_of(head, place.from(0, place.rows), given, given.tokens.data(), features, found);
    const int hidden = head.layer.hidden, width = head.output.rows;
    float survival = 1.0f;
    for (int level = 0;;) {
        std::vector<float> last(features.end() - hidden, features.end()), normed(hidden);
        pl_rms_norm(last.data(), 1, hidden, head.output_norm, head.layer.eps, normed.data());
        std::vector<float> scores = linear(head.output, normed, 1);
        if (given.temperature > 0)
            for (float& score : scores) score *= 1.0f / given.temperature;
        int64_t best, column;
        float chance;
        pl_row_best(scores.data(), 1, width, &best, &chance);
        column = best;
        if (given.temperature > 0) {
            pl_draw(scores.data(), 1, width, head.ids, &given.noise[2 * level], &column);
            chance *= std::exp(scores[column] - scores[best]);
        }
        found.tokens.push_back(head.ids == nullptr ? column : head.ids[column]);
        found.chances.push_back(chance);
        survival *= given.worth.empty() ? chance : given.worth[std::min(9, static_cast<int>(chance * 10))];
        if (++level == DEPTH || survival < given.stop_below) return found;
        features = head.feeds_normed ? normed : last;
        layer_of(head, place.from(place.rows + level - 1, 1), given, &found.tokens.back(), features, found);
    }
}

void test_chain(Random& random) {
    const HeadCase c(random);
    const Place place(random.between(0, 30), random.between(1, 20));
    const size_t angles = size_t{POSITIONS} * c.head.layer.head_dim / 2;
    Given given{random.normals(size_t(place.rows) * c.head.fc.columns), random.normals(angles), random.normals(angles), {}, {}, {}, {}, 0, 0, {}};
    for (int row = 0; row < place.rows; ++row) given.tokens.push_back(random.between(0, VOCABULARY - 1));
    for (int i = 0; i < 2 * DEPTH; ++i) given.noise.push_back(static_cast<int64_t>(random.next() >> 32));
    const size_t pool = size_t{POSITIONS} * c.head.layer.kv_heads * c.head.layer.head_dim;
    for (std::vector<uint16_t>* store : {&given.keys, &given.values})
        for (size_t i = 0; i < pool; ++i) store->push_back(static_cast<uint16_t>(random.between(0, 15 << 10)));
    if (random.one_in(2)) given.stop_below = 0.01f;
    if (random.one_in(2)) given.temperature = 0.7f;
    if (random.one_in(2))
        for (int i = 0; i < 10; ++i) given.worth.push_back(0.1f * random.between(0, 10));
    everywhere([&](const std::string& where) {
        const Found expected = level_by_level(c.head, place, given), found = in_one_call(c.head, place, given);
        expect(found.tokens == expected.tokens, where + ": tokens of a chain");
        if (found.tokens.size() != expected.tokens.size()) return;
        expect_same(found.chances.data(), expected.chances.data(), expected.chances.size(), where + ": chances of a chain");
        expect(found.keys == expected.keys && found.values == expected.values, where + ": keys and values of a chain");
    });
}

}  // namespace

int run() {
    Random random(11);
    for (int round = 0; round < 24; ++round) test_chain(random);
    std::printf("%s: %d failures\n", pl_backends(), failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace paceline::test

int main() { return paceline::test::run(); }
