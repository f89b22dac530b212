// A random attention task: rows of one sequence with their own prefixes and tails (as in a tree of drafts), slots in any
// order.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "reference.h"

namespace paceline::test {

class AttentionCase {
  public:
    explicit AttentionCase(Random& random) {
        task.rows = random.between(1, MOST_ROWS);
        task.group = random.between(1, 10);
        task.heads = task.group * random.between(1, 3);
        task.head_dim = random.one_in(10) ? 256 : LANES * random.between(1, 8);
        task.window = random.one_in(2) ? random.between(1, 70) : 0;
        task.scale = (random.one_in(4) ? 8.0f : 1.0f) / std::sqrt(static_cast<float>(task.head_dim));
        place_rows(random);
        place_slots(random);
        point();
    }
    AttentionCase(const AttentionCase& other)
        : task(other.task), query(other.query), keys(other.keys), values(other.values), table(other.table), prefix(other.prefix),
          tails(other.tails), tail_length(other.tail_length) {
        point();
    }

    // out [rows, out_stride], the heads in so many tasks
    std::vector<float> run(const Backend& backend, int tasks = 1) const {
        std::vector<float> out(task.rows * task.out_stride, 7.0f), scratch(task.rows * task.heads * (longest() + 32));
        AttentionTask own = task;
        own.query = query.data();
        own.out = out.data();
        own.scratch = scratch.data();
        for (int part = 0; part < tasks; ++part) {
            own.first_head = task.heads * part / tasks;
            own.heads = task.heads * (part + 1) / tasks - own.first_head;
            if (own.heads > 0) backend.attend(own);
        }
        return out;
    }

    // One row, its whole history in the table.
    AttentionCase flattened(int row) const {
        AttentionCase alone(*this);
        AttentionTask whole = task;
        whole.window = 0;
        alone.table = history(whole, row);
        alone.prefix = {static_cast<int>(alone.table.size())};
        alone.tails = {{}};
        alone.tail_length = {0};
        alone.query.erase(alone.query.begin(), alone.query.begin() + row * task.query_stride);
        alone.task.rows = 1;
        alone.point();
        return alone;
    }

    // Scores are sums of head_dim products; their error is the relative error of the powers.
    double tolerance() const { return 1e-5 * (1.0 + task.scale * task.head_dim); }

    std::string name() const {
        return std::to_string(task.rows) + " rows, " + std::to_string(task.heads) + " heads of " + std::to_string(task.head_dim) +
               ", window " + std::to_string(task.window) + ", longest " + std::to_string(longest());
    }

    AttentionTask task{};
    std::vector<float> query;

  private:
    static constexpr int SLOTS = 128;

    static std::vector<uint16_t> halves(size_t count, Random& random) {
        std::vector<uint16_t> x(count);
        for (uint16_t& each : x)
            each = static_cast<uint16_t>(random.between(0, 1) << 15 | random.between(0, 15) << 10 | random.between(0, 1023));
        return x;
    }

    void place_rows(Random& random) {
        const int width = task.heads * task.head_dim, most = random.between(0, 100);
        task.query_stride = width + LANES * random.between(0, 2);
        task.out_stride = width;
        query = random.normals(task.rows * task.query_stride);
        query.resize((task.rows - 1) * task.query_stride + width);
        for (int row = 0; row < task.rows; ++row) {
            prefix.push_back(random.one_in(2) ? most : random.between(0, most));
            tail_length.push_back(random.between(prefix[row] == 0 ? 1 : 0, 6));
        }
    }

    void place_slots(Random& random) {
        task.slot_stride = task.heads / task.group * task.head_dim;
        keys = halves(SLOTS * task.slot_stride, random);
        values = halves(SLOTS * task.slot_stride, random);
        std::vector<int32_t> order(SLOTS);
        std::iota(order.begin(), order.end(), 0);
        for (int i = SLOTS - 1; i > 0; --i) std::swap(order[i], order[random.between(0, i)]);
        table.assign(order.begin(), order.begin() + *std::max_element(prefix.begin(), prefix.end()));
        for (int length : tail_length) {
            tails.emplace_back();
            for (int i = 0; i < length; ++i) tails.back().push_back(order[random.between(100, SLOTS - 1)]);
        }
    }

    void point() {
        tail_pointers.clear();
        for (const std::vector<int32_t>& each : tails) tail_pointers.push_back(each.data());
        task.query = query.data();
        task.keys = keys.data();
        task.values = values.data();
        task.table = table.data();
        task.prefix = prefix.data();
        task.tail = tail_pointers.data();
        task.tail_length = tail_length.data();
    }

    int longest() const {
        int most = 0;
        for (int row = 0; row < task.rows; ++row) most = std::max(most, prefix[row] + tail_length[row]);
        return most;
    }

    std::vector<uint16_t> keys, values;
    std::vector<int32_t> table, prefix;
    std::vector<std::vector<int32_t>> tails;
    std::vector<int32_t> tail_length;
    std::vector<const int32_t*> tail_pointers;
};

}  // namespace paceline::test
