// Attention of a few rows over the block pool: every row over its own history in the order of positions.
//
// For one row and head, with history positions j = start .. length - 1 (0 or the sliding window's edge):
//     score(j)  fold_add of 16 lanes, each an fma chain along head_dim; times scale
//     p(j)      exp(score(j) - max)
//     sum       lane j % 16 adds p(j) in order of j; then fold_add
//     out       an fma chain of p(j) v(j) in order of j; times 1 / sum
// No operation depends on the row's neighbours, on the slots where its history lies, or on how rows and heads are shared.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace paceline::PL_ISA {

inline int chunk_of(int position) { return position / LANES * LANES; }

constexpr int MOST_QUERIES = 6;  // that share a read of keys or values: what the registers hold

// Scores of the `count` <= 16 keys, `at` a slot's beginning, for each query; lanes past `count` hold the score of a zero key.
template <int QUERIES>
void score_keys(
    const AttentionTask& task, const uint16_t* const* keys, int at, int count, const float* const* queries, float* const* scores) {
    F part[QUERIES][LANES];
    for (int key = 0; key < count; ++key) {
        F sum[QUERIES];
        for (F& each : sum) each = zero();
        for (int i = 0; i < task.head_dim; i += LANES) {
            const F k = load_half(keys[key] + at + i);
            for (int q = 0; q < QUERIES; ++q) sum[q] = fma(load(queries[q] + i), k, sum[q]);
        }
        for (int q = 0; q < QUERIES; ++q) part[q][key] = sum[q];
    }
    for (int q = 0; q < QUERIES; ++q) {
        for (int key = count; key < LANES; ++key) part[q][key] = zero();
        store(scores[q], mul(fold_add16(part[q]), set(task.scale)));
    }
}

// WIDE registers of the output, from `column` of a head on: out += powers * values, key after key. `at`: see above.
template <int QUERIES, int WIDE>
void add_part(int column, const uint16_t* const* values, int at, int count, const float* const* powers, float* const* out) {
    F sum[QUERIES][WIDE];
    for (int q = 0; q < QUERIES; ++q)
        for (int w = 0; w < WIDE; ++w) sum[q][w] = load(out[q] + column + w * LANES);
    for (int key = 0; key < count; ++key) {
        F v[WIDE];
        for (int w = 0; w < WIDE; ++w) v[w] = load_half(values[key] + at + column + w * LANES);
        for (int q = 0; q < QUERIES; ++q)
            for (int w = 0; w < WIDE; ++w) sum[q][w] = fma(set(powers[q][key]), v[w], sum[q][w]);
    }
    for (int q = 0; q < QUERIES; ++q)
        for (int w = 0; w < WIDE; ++w) store(out[q] + column + w * LANES, sum[q][w]);
}

template <int QUERIES>
void weigh_values(
    const AttentionTask& task, const uint16_t* const* values, int at, int count, const float* const* powers, float* const* out) {
    int column = 0;
    for (; column + 4 * LANES <= task.head_dim; column += 4 * LANES) add_part<QUERIES, 4>(column, values, at, count, powers, out);
    for (; column < task.head_dim; column += LANES) add_part<QUERIES, 1>(column, values, at, count, powers, out);
}

// f.template operator()<QUERIES>(first) for runs of at most MOST_QUERIES of `count` queries.
template <class Function> void in_runs(int count, const Function& f) {
    int first = 0;
    for (; first + MOST_QUERIES <= count; first += MOST_QUERIES) f.template operator()<MOST_QUERIES>(first);
    switch (count - first) {
        case 1: return f.template operator()<1>(first);
        case 2: return f.template operator()<2>(first);
        case 3: return f.template operator()<3>(first);
        case 4: return f.template operator()<4>(first);
        case 5: return f.template operator()<5>(first);
        default: return;
    }
}

// One task's queries, by key/value head, then by row.
class RowsOfHistory {
  public:
    explicit RowsOfHistory(const AttentionTask& task) : task(task), end_head(task.first_head + task.heads) {
        for (int r = 0; r < task.rows; ++r) {
            length[r] = task.prefix[r] + task.tail_length[r];
            start[r] = task.window > 0 ? std::max(0, length[r] - task.window) : 0;
            base[r] = chunk_of(start[r]);
            first = std::min(first, base[r]);
            last = std::max(last, length[r]);
            joint_from = std::max(joint_from, start[r]);
            joint_to = std::min(joint_to, task.prefix[r]);
        }
        const int room = last - first + LANES;
        float* scratch = task.scratch;
        over_groups([&](int, int from, int to) {
            for (int r = 0; r < task.rows; ++r)
                for (int head = from; head < to; ++head, scratch += room) {
                    row[queries] = r;
                    powers[queries] = scratch;
                    query[queries] = task.query + r * task.query_stride + head * task.head_dim;
                    out[queries++] = task.out + r * task.out_stride + head * task.head_dim;
                }
        });
    }

    void attend() {
        over_chunks([this](int r, int rows, int chunk) { score(r, rows, chunk); });
        for (int q = 0; q < queries; ++q) {
            soften(q);
            std::fill(out[q], out[q] + task.head_dim, 0.0f);
        }
        over_chunks([this](int r, int rows, int chunk) { add_values(r, rows, chunk); });
        for (int q = 0; q < queries; ++q)
            for (int i = 0; i < task.head_dim; ++i) out[q][i] *= inverse[q];
    }

  private:
    // f(key/value head, the first of our heads that share it, the end of them)
    template <class Function> void over_groups(const Function& f) const {
        for (int kv = task.first_head / task.group; kv * task.group < end_head; ++kv)
            f(kv, std::max(task.first_head, kv * task.group), std::min(end_head, (kv + 1) * task.group));
    }

    // Chunks of 16 positions in order: for all rows at once where each sees the whole chunk in the table, else row by row.
    template <class Function> void over_chunks(const Function& f) const {
        for (int chunk = first; chunk < last; chunk += LANES) {
            if (chunk >= joint_from && chunk + LANES <= joint_to) {
                f(0, task.rows, chunk);
                continue;
            }
            for (int r = 0; r < task.rows; ++r)
                if (chunk >= base[r] && chunk < length[r]) f(r, 1, chunk);
        }
    }

    // f.template operator()<QUERIES>(first query, key/value head's beginning in a slot) for runs of these rows' queries.
    template <class Function> void over_queries(int r, int rows, const Function& f) const {
        over_groups([&](int kv, int from, int to) {
            const int before = (from - task.first_head) * task.rows, heads = to - from;
            in_runs(rows * heads, [&]<int QUERIES>(int run) {
                f.template operator()<QUERIES>(before + r * heads + run, kv * task.head_dim);
            });
        });
    }

    int slot(int r, int position) const {
        return position < task.prefix[r] ? task.table[position] : task.tail[r][position - task.prefix[r]];
    }

    // Where `count` slots lie. All are asked for at once, so that memory is waited for once; earlier is no better (measured).
    void find(int r, int from, int count, const uint16_t* store, const uint16_t** found) const {
        const int begin = task.first_head / task.group * task.head_dim, end = ((end_head - 1) / task.group + 1) * task.head_dim;
        for (int i = 0; i < count; ++i) {
            found[i] = store + slot(r, from + i) * task.slot_stride;
            for (int at = begin; at < end; at += 64 / 2) prefetch(found[i] + at);
        }
    }

    void score(int r, int rows, int chunk) {
        const uint16_t* keys[LANES];
        const int count = std::min(LANES, length[r] - chunk);
        find(r, chunk, count, task.keys, keys);
        over_queries(r, rows, [&]<int QUERIES>(int q, int at) {
            float* scores[QUERIES];
            for (int i = 0; i < QUERIES; ++i) scores[i] = powers[q + i] + chunk - base[row[q + i]];
            score_keys<QUERIES>(task, keys, at, count, query + q, scores);
        });
    }

    void add_values(int r, int rows, int chunk) {
        const uint16_t* values[LANES];
        const int from = rows > 1 ? chunk : std::max(chunk, start[r]), count = std::min(chunk + LANES, length[r]) - from;
        find(r, from, count, task.values, values);
        over_queries(r, rows, [&]<int QUERIES>(int q, int at) {
            const float* own[QUERIES];
            for (int i = 0; i < QUERIES; ++i) own[i] = powers[q + i] + from - base[row[q + i]];
            weigh_values<QUERIES>(task, values, at, count, own, out + q);
        });
    }

    // Scores to exp(score - max), 0 outside the history; and 1 / their sum.
    void soften(int q) {
        const int begin = start[row[q]] - base[row[q]], end = length[row[q]] - base[row[q]];
        float* p = powers[q];
        std::fill(p, p + begin, -INFINITY);
        std::fill(p + end, p + (end + LANES - 1) / LANES * LANES, -INFINITY);
        F top = set(-INFINITY);
        for (int i = 0; i < end; i += LANES) top = max(top, load(p + i));
        const F shift = set(fold_max(top));
        for (int i = 0; i < end; i += LANES) store(p + i, exponential(sub(load(p + i), shift)));
        std::fill(p, p + begin, 0.0f);
        std::fill(p + end, p + (end + LANES - 1) / LANES * LANES, 0.0f);
        F sum = zero();
        for (int i = 0; i < end; i += LANES) sum = add(sum, load(p + i));
        inverse[q] = 1.0f / fold_add(sum);
    }

    const AttentionTask& task;
    const int end_head;
    int queries = 0;
    int first = INT32_MAX, last = 0, joint_from = 0, joint_to = INT32_MAX;
    int length[MOST_ROWS], start[MOST_ROWS], base[MOST_ROWS];
    int row[MOST_ROWS * MOST_HEADS];
    const float* query[MOST_ROWS * MOST_HEADS];
    float *powers[MOST_ROWS * MOST_HEADS], *out[MOST_ROWS * MOST_HEADS], inverse[MOST_ROWS * MOST_HEADS];
};

inline void attend(const AttentionTask& task) { RowsOfHistory(task).attend(); }

}  // namespace paceline::PL_ISA
