// Every backend that this processor can run against scalar references: to the bit where the order of operations is
// stated (products, rounding, norms), else to the bit between backends and closely to double precision.
// Shapes and numbers are random with a fixed seed; buffers have their exact size, for the address sanitizer.
#include <algorithm>
#include <utility>

#include "attention_case.h"
#include "block_case.h"
#include "check.h"
#include "kernels.h"
#include "paceline.h"
#include "reference.h"

namespace paceline::test {
namespace {

std::vector<const Backend*> usable_backends() {
    std::vector<const Backend*> found;
    std::string names = pl_backends(), name;
    for (char each : names + ",") {
        if (each != ',') {
            name += each;
            continue;
        }
        expect(pl_use_backend(name.c_str()) == 0 && name == pl_backend(), "backend " + name + " is listed and can be used");
        found.push_back(&backend());
        name.clear();
    }
    return found;
}

const std::vector<const Backend*>& backends() {
    static const std::vector<const Backend*> found = usable_backends();
    return found;
}

std::string named(const Backend& backend, const std::string& what) { return std::string(backend.name) + " " + what; }

// ---- products ----

void test_block(const BlockCase& c) {
    const std::vector<float> expected = c.expected();
    for (const Backend* backend : backends())
        for (int rows = 1; rows <= TILE; ++rows) {
            const int first = rows % 5;  // a row's bits do not depend on its place
            const std::vector<Activations> x = c.side_by_side(first, rows);
            std::vector<float> out(rows * LANES);
            backend->block[c.format][rows](c.weights.data(), x.data(), c.columns, out.data());
            expect_same(out.data(), expected.data() + first * LANES, out.size(), named(*backend, c.name(rows)));
        }
}

void test_blocks(Random& random) {
    for (int format = 0; format < FORMATS; ++format)
        for (Numbers numbers : ALL_NUMBERS)
            for (int superblocks : {1, 2, 5}) test_block(BlockCase(static_cast<Format>(format), numbers, superblocks, random));
}

// Every fp16 as a scale: the product 1 * d is its value.
void test_half_values() {
    for (uint32_t first = 0; first < 65536; first += LANES) {
        uint8_t block[LAYOUTS[Q4_0].super_bytes()];
        std::memset(block, 0x88, sizeof block);
        float expected[LANES], out[LANES];
        for (uint32_t c = 0; c < LANES; ++c) {
            block[2 * c] = static_cast<uint8_t>(first + c);
            block[2 * c + 1] = static_cast<uint8_t>((first + c) >> 8);
            block[32 + 4 * c] = 0x89;
            expected[c] = value_of_half(static_cast<uint16_t>(first + c)) + 0.0f;
        }
        Activations x{};
        x.q[0] = 1;
        x.scale = 1.0f;
        sum_up(x);
        for (const Backend* backend : backends()) {
            backend->block[Q4_0][1](block, &x, GROUP, out);
            expect_same(out, expected, LANES, named(*backend, "fp16 from " + std::to_string(first)));
        }
    }
}

// ---- fp16 ----

// The nearest fp16, the even one of two; finite[i] is the value of the fp16 i, 65536 stands for infinity.
uint16_t nearest_half(float x, const std::vector<double>& finite) {
    const double magnitude = std::fabs(static_cast<double>(x));
    const auto above = std::upper_bound(finite.begin(), finite.end() - 1, magnitude);
    const int high = static_cast<int>(above - finite.begin()), low = high - 1;
    const double to_low = magnitude - finite[low], to_high = finite[high] - magnitude;
    const bool up = to_high < to_low || (to_high == to_low && high % 2 == 0);
    return static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) | (up ? high : low));
}

void test_to_half(const std::vector<float>& x, const std::vector<double>& finite) {
    for (const Backend* backend : backends()) {
        std::vector<uint16_t> out(x.size());
        backend->to_half(x.data(), static_cast<int>(x.size()), out.data());
        for (size_t i = 0; i < x.size(); ++i)
            if (out[i] != nearest_half(x[i], finite)) return fail(named(*backend, "to_half of " + std::to_string(x[i])));
    }
}

// Every fp16, every middle between two, and the fp32 numbers beside these.
void test_halves() {
    std::vector<double> finite;
    for (int half = 0; half < 0x7c00; ++half) finite.push_back(value_of_half(static_cast<uint16_t>(half)));
    finite.push_back(65536.0);
    std::vector<float> x = {1e-45f, 1e-10f, 1e5f, 3e38f, INFINITY, -1e-45f, -1e5f, -INFINITY};
    for (size_t i = 0; i + 1 < finite.size(); ++i)
        for (double at : {finite[i], (finite[i] + finite[i + 1]) / 2}) {
            const float exact = static_cast<float>(at);
            for (float each : {exact, std::nextafter(exact, 0.0f), std::nextafter(exact, 1e6f)}) {
                x.push_back(each);
                x.push_back(-each);
            }
        }
    x.resize((x.size() + LANES - 1) / LANES * LANES);
    test_to_half(x, finite);
    for (const Backend* backend : backends()) {
        const std::vector<float> nan(LANES, NAN);
        uint16_t out[LANES];
        backend->to_half(nan.data(), LANES, out);
        expect((out[0] & 0x7fff) > 0x7c00, named(*backend, "keeps NaN as fp16"));
    }
}

// ---- rounding to int8 ----

bool same_group(const Activations& a, const Activations& b) {
    return std::memcmp(a.q, b.q, GROUP) == 0 && same(a.scale, b.scale) && same(a.scaled_sum, b.scaled_sum) &&
           a.negative_low == b.negative_low && a.negative_high == b.negative_high && a.negative_sum == b.negative_sum;
}

void test_quantize(const std::vector<float>& x, const std::string& what) {
    const int columns = static_cast<int>(x.size()), groups = columns / GROUP;
    for (const Backend* backend : backends())
        for (int stride : {1, 3}) {
            std::vector<Activations> out((groups - 1) * stride + 1);
            backend->quantize(x.data(), columns, out.data(), stride);
            for (int g = 0; g < groups; ++g)
                expect(same_group(out[g * stride], rounded(&x[g * GROUP])), named(*backend, what + ", group " + std::to_string(g)));
        }
}

void test_rounding(Random& random) {
    for (float scale : {1.0f, 1e-3f, 1e4f, 1e-29f, 1e-31f, 1e-40f, 1e37f, 0.0f, -0.0f})
        for (int groups : {1, 2, 3, 7}) test_quantize(random.normals(groups * GROUP, scale), "rounds " + std::to_string(scale));
    std::vector<float> ties(8 * GROUP);
    for (float& each : ties) each = static_cast<float>(random.between(-127, 126)) + 0.5f;
    for (size_t i = 0; i < ties.size(); i += GROUP) ties[i] = 127.0f;
    test_quantize(ties, "rounds ties to even");
}

// ---- norms, activations, rotary positions ----

void test_norm(int width, float scale, Random& random) {
    const std::vector<float> x = random.normals(width, scale), weight = random.normals(width);
    const float eps = random.one_in(2) ? 1e-6f : 1e-5f;
    const std::vector<float> expected = normed(x, weight, eps);
    for (const Backend* backend : backends()) {
        std::vector<float> out = x;
        backend->rms_norm(out.data(), width, weight.data(), eps, out.data());
        expect_same(out.data(), expected.data(), out.size(), named(*backend, "rms_norm in place"));
    }
}

void test_norms(Random& random) {
    for (int width : {16, 32, 48, 64, 128, 1024}) {
        for (float scale : {1e-6f, 1e10f, 0.0f}) test_norm(width, scale, random);
        for (int round = 0; round < 20; ++round) test_norm(width, 1.0f, random);
    }
}

void test_gates(Random& random) {
    for (int activation : {SILU, GELU_TANH})
        for (float scale : {0.01f, 1.0f, 10.0f, 300.0f, 1e30f}) {
            const int width = LANES * random.between(1, 9);
            const std::vector<float> gates = random.normals(width, scale), ups = random.normals(width);
            std::vector<float> first(width), out(width);
            backends().back()->gate(activation, gates.data(), ups.data(), width, first.data());
            for (const Backend* backend : backends()) {
                backend->gate(activation, gates.data(), ups.data(), width, out.data());
                expect_same(out.data(), first.data(), out.size(), named(*backend, "gate like portable"));
            }
            for (int i = 0; i < width; ++i) {
                const double expected = gated(activation, gates[i], ups[i]);
                expect_near(&out[i], &expected, 1, 2e-6 * (std::fabs(expected) + std::fabs(ups[i])), "gate");
            }
        }
}

void test_rotation(Random& random) {
    for (int head_dim : {2, 16, 64, 80, 128}) {
        const int half = head_dim / 2;
        const std::vector<float> x = random.normals(head_dim), angle = random.normals(half, 3.0f);
        std::vector<float> cos(half), sin(half);
        std::vector<double> expected(head_dim);
        for (int i = 0; i < half; ++i) {
            cos[i] = std::cos(angle[i]);
            sin[i] = std::sin(angle[i]);
            expected[i] = double{x[i]} * cos[i] - double{x[i + half]} * sin[i];
            expected[i + half] = double{x[i + half]} * cos[i] + double{x[i]} * sin[i];
        }
        std::vector<float> first = x;
        backends().back()->rotate(first.data(), head_dim, cos.data(), sin.data());
        expect_near(first.data(), expected.data(), first.size(), 1e-6, "rotate");
        for (const Backend* backend : backends()) {
            std::vector<float> out = x;
            backend->rotate(out.data(), head_dim, cos.data(), sin.data());
            expect_same(out.data(), first.data(), out.size(), named(*backend, "rotate like portable"));
        }
    }
}

// ---- scores ----

void test_row(const std::vector<float>& x) {
    const int width = static_cast<int>(x.size());
    const int64_t largest = std::max_element(x.begin(), x.end()) - x.begin();
    const double expected = std::exp(x[largest] - log_sum_exp(x));
    float first;
    backends().back()->row_best(x.data(), width, nullptr, &first);
    expect_near(&first, &expected, 1, 1e-5 * expected, "chance of the largest of " + std::to_string(width));
    for (const Backend* backend : backends()) {
        int64_t best = -1, alone = -1;
        float chance;
        backend->row_best(x.data(), width, &best, &chance);
        backend->row_best(x.data(), width, &alone, nullptr);
        expect(best == largest && alone == largest, named(*backend, "first of the largest of " + std::to_string(width)));
        expect_same(&chance, &first, 1, named(*backend, "chance like portable"));
    }
}

// The noise of noise.py, written anew.
double noise(uint64_t id, uint64_t first, uint64_t second) {
    const auto mixed = [](uint64_t x) {
        x = ((x ^ x >> 16) * 0x7feb352du) & 0xffffffffu;
        x = ((x ^ x >> 15) * 0x846ca68bu) & 0xffffffffu;
        return x ^ x >> 16;
    };
    const uint64_t bits = mixed(mixed((id + first) & 0xffffffffu) ^ second);
    return -std::log(-std::log((static_cast<double>(bits) + 0.5) / 4294967296.0));
}

void test_draw(Random& random) {
    for (int round = 0; round < 200; ++round) {
        std::vector<float> x = random.normals(random.between(1, 3000), random.one_in(3) ? 0.1f : 8.0f);
        if (random.one_in(3))  // few are possible
            for (float& each : x) each = random.one_in(20) ? each : -INFINITY;
        if (random.one_in(10)) std::fill(x.begin(), x.end(), -INFINITY);
        const int width = static_cast<int>(x.size());
        std::vector<int64_t> ids(width);
        for (int i = 0; i < width; ++i) ids[i] = int64_t{i} * 7 + 3;
        const int64_t key[2] = {int64_t{0xfffffff0u} + random.between(0, 15), random.between(0, 1 << 30)};
        for (const int64_t* named_ids : {static_cast<const int64_t*>(nullptr), static_cast<const int64_t*>(ids.data())}) {
            int64_t expected = 0;
            double best = -INFINITY;
            for (int i = 0; i < width; ++i) {
                const double sum = x[i] + noise(named_ids == nullptr ? i : ids[i], key[0], key[1]);
                if (sum > best) best = sum, expected = i;
            }
            for (const Backend* backend : backends())
                expect(backend->draw(x.data(), width, named_ids, key) == expected, named(*backend, "draw of " + std::to_string(width)));
        }
    }
}

void test_rows(Random& random) {
    for (int round = 0; round < 100; ++round) {
        std::vector<float> x = random.normals(random.between(1, 200), random.one_in(3) ? 1e-2f : 20.0f);
        if (random.one_in(2))  // equal ones
            for (float& each : x) each = std::round(each);
        if (random.one_in(3)) x[random.between(0, static_cast<int>(x.size()) - 1)] = -INFINITY;
        if (x.size() > 1 || std::isfinite(x[0])) test_row(x);
    }
}

// ---- attention ----

void test_attention_row(const AttentionCase& c, const std::vector<float>& out, int row, const std::string& what) {
    const AttentionCase alone = c.flattened(row);
    const std::vector<float> expected = alone.run(*backends().front());
    const float* own = out.data() + row * c.task.out_stride;
    expect_same(own, expected.data(), expected.size(), what + ": a row alone, its history in one table");
    for (int head = 0; head < c.task.heads; ++head) {
        const std::vector<double> exact = attended(c.task, row, head);
        expect_near(own + head * c.task.head_dim, exact.data(), exact.size(), c.tolerance(), what);
    }
}

void test_attention(Random& random) {
    for (int round = 0; round < 150; ++round) {
        const AttentionCase c(random);
        const std::vector<float> first = c.run(*backends().back());
        for (const Backend* backend : backends()) {
            for (int tasks : {1, 2, 3, 16}) {
                const std::vector<float> out = c.run(*backend, tasks);
                const std::string what = "attention like portable, " + c.name() + ", tasks: " + std::to_string(tasks);
                expect_same(out.data(), first.data(), out.size(), named(*backend, what));
            }
        }
        for (int row = 0; row < c.task.rows; ++row) test_attention_row(c, first, row, c.name());
    }
}

// ---- numbers that are none ----

void test_not_a_number(const Backend& backend, std::vector<float> x, Random& random) {
    const int width = static_cast<int>(x.size());
    std::vector<Activations> activations(width / GROUP);
    std::vector<float> out(width), weight = random.normals(width);
    backend.quantize(x.data(), width, activations.data(), 1);
    backend.rms_norm(x.data(), width, weight.data(), 1e-6f, out.data());
    backend.gate(SILU, x.data(), weight.data(), width, out.data());
    backend.gate(GELU_TANH, x.data(), weight.data(), width, out.data());
    int64_t best = -1;
    float chance;
    backend.row_best(x.data(), width, &best, &chance);
    expect(best >= 0 && best < width, named(backend, "row_best of NaN lies in the row"));
    const int64_t key[2] = {1, 2}, drawn = backend.draw(x.data(), width, nullptr, key);
    expect(drawn >= 0 && drawn < width, named(backend, "draw of NaN lies in the row"));
    AttentionCase c(random);
    c.query[0] = x[0];
    c.run(backend);
}

void test_not_finite(Random& random) {
    for (const Backend* backend : backends())
        for (float odd : {static_cast<float>(NAN), -static_cast<float>(NAN), static_cast<float>(INFINITY), -static_cast<float>(INFINITY)})
            for (int at : {0, 5, 31, 40}) {
                std::vector<float> x = random.normals(2 * GROUP);
                x[at] = odd;
                test_not_a_number(*backend, x, random);
                test_not_a_number(*backend, std::vector<float>(GROUP, odd), random);
            }
}

}  // namespace

int run() {
    Random random(20240229);
    test_blocks(random);
    test_half_values();
    test_halves();
    test_rounding(random);
    test_norms(random);
    test_gates(random);
    test_rotation(random);
    test_rows(random);
    test_draw(random);
    test_attention(random);
    test_not_finite(random);
    std::printf("%s: %d failures\n", pl_backends(), failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace paceline::test

int main() { return paceline::test::run(); }
