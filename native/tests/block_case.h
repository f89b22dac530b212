// Random weights of one block and activations of TILE rows, of one kind of numbers.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "reference.h"

namespace paceline::test {

// EXTREME: the largest weights and activations in every pattern of signs. TINY, LARGE: scales whose products leave fp32.
// MODEL: weights about as large as a model's.
enum Numbers { ORDINARY, EXTREME, TINY, LARGE, ZERO, NOT_FINITE, MODEL };
constexpr Numbers ALL_NUMBERS[] = {ORDINARY, EXTREME, TINY, LARGE, ZERO, NOT_FINITE, MODEL};
constexpr const char* NUMBERS[] = {"ordinary", "extreme", "tiny", "large", "zero", "not finite", "model"};

struct BlockCase {
    BlockCase(Format format, Numbers numbers, int superblocks, Random& random)
        : format(format), numbers(numbers), columns(superblocks * LAYOUTS[format].columns),
          weights(superblocks * LAYOUTS[format].super_bytes()) {
        for (uint8_t& each : weights) each = weight_byte(random);
        for (int i = 0; i < superblocks; ++i) set_halves(&weights[i * LAYOUTS[format].super_bytes()], random);
        for (int r = 0; r < TILE; ++r)
            for (int g = 0; g < columns / GROUP; ++g) rows[r].push_back(activations(random));
    }

    // Of rows 0 .. TILE - 1, 0, 1 ...: enough for TILE rows from any of the first five.
    std::vector<float> expected() const {
        std::vector<float> out((TILE + 5) * LANES);
        for (int c = 0; c < LANES; ++c) {
            const std::vector<Group> groups = channel_groups(format, weights.data(), columns, c);
            for (int r = 0; r < TILE + 5; ++r)
                out[r * LANES + c] = r < TILE ? product(format, groups, rows[r].data()) : out[(r - TILE) * LANES + c];
        }
        return out;
    }

    std::vector<Activations> side_by_side(int first, int count) const {
        std::vector<Activations> x;
        for (int g = 0; g < columns / GROUP; ++g)
            for (int r = 0; r < count; ++r) x.push_back(rows[(first + r) % TILE][g]);
        return x;
    }

    std::string name(int count) const {
        return std::string(LAYOUTS[format].name) + " " + NUMBERS[numbers] + ", columns " + std::to_string(columns) + ", rows " +
               std::to_string(count);
    }

    Format format;
    Numbers numbers;
    int columns;
    std::vector<uint8_t> weights;
    std::vector<Activations> rows[TILE];

  private:
    uint8_t weight_byte(Random& random) const {
        if (numbers == EXTREME && !random.one_in(8)) return 0xff;
        return static_cast<uint8_t>(random.next());
    }

    uint16_t half(Random& random) const {
        const int sign = random.between(0, 1) << 15, fraction = random.between(0, 1023);
        switch (numbers) {
            case TINY: return static_cast<uint16_t>(sign | fraction);  // subnormal
            case LARGE: return static_cast<uint16_t>(sign | 30 << 10 | fraction);
            case ZERO: return static_cast<uint16_t>(sign);
            case MODEL: return static_cast<uint16_t>(sign | random.between(3, 6) << 10 | fraction);
            case NOT_FINITE: return static_cast<uint16_t>(sign | (random.one_in(4) ? 31 : 15) << 10 | (random.one_in(2) ? fraction : 0));
            default: return static_cast<uint16_t>(sign | random.between(5, 17) << 10 | fraction);
        }
    }

    void set_halves(uint8_t* superblock, Random& random) const {
        const Layout& layout = LAYOUTS[format];
        for (int s = 0; s < layout.sections && layout.section[s].bytes == 2; ++s)
            for (int c = 0; c < LANES; ++c, superblock += 2) {
                const uint16_t bits = half(random);
                superblock[0] = static_cast<uint8_t>(bits);
                superblock[1] = static_cast<uint8_t>(bits >> 8);
            }
    }

    float scale(Random& random) const {
        const float some = std::fabs(random.normal());
        switch (numbers) {
            case TINY: return some * (random.one_in(2) ? 1e-37f : 1e-42f);
            case LARGE: return some * 1e32f;
            case ZERO: return 0.0f;
            case NOT_FINITE: return random.one_in(6) ? NAN : random.one_in(6) ? INFINITY : some;
            default: return some * 0.02f;
        }
    }

    Activations activations(Random& random) const {
        Activations a{};
        const int sign = random.between(-1, 1);  // 0: each its own
        for (int8_t& q : a.q) {
            q = static_cast<int8_t>(numbers == ZERO ? 0 : random.between(-127, 127));
            if (numbers == EXTREME) q = static_cast<int8_t>(127 * (sign != 0 ? sign : random.between(0, 1) * 2 - 1));
        }
        a.scale = scale(random);
        sum_up(a);
        return a;
    }
};

}  // namespace paceline::test
