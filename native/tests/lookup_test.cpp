// Drafts from text that repeats: small texts whose answers are known, in memory that ends where they end. What they find in
// any text is compared with Python's search (tests/unit/test_suffix_index.py, test_ngram.py).
#include <algorithm>

#include "check.h"
#include "paceline.h"

using namespace paceline::test;

namespace {

// Positions are slots here; the first two slots lead, as a match may be read back so far.
constexpr int LEAD = 2;

// Where the n-grams of one length occur, in one bucket that lists only what `ending` ends with.
struct Chain {
    Chain(const std::vector<int32_t>& tokens, const std::vector<int32_t>& ending, int length)
        : length(length), wanted(key(ending.data() + ending.size())), keys(tokens.size()), older(tokens.size(), -1),
          beside(tokens.size(), -1) {
        for (size_t at = LEAD; at < tokens.size(); ++at) {
            keys[at] = key(tokens.data() + at + 1);
            if (keys[at] != wanted) continue;
            older[at] = latest;
            latest = static_cast<int32_t>(at);
        }
    }
    int32_t key(const int32_t* end) const { return end[-1] + 1000 * end[-length]; }
    pl_chains view() const { return {length, wanted, 1, 0, &latest, keys.data(), beside.data(), older.data()}; }

    int length;
    int32_t wanted, latest = -1;
    std::vector<int32_t> keys, older, beside;
};

struct Drafted {
    std::vector<int32_t> path;
    std::vector<double> confidence;
    int32_t matched = 0;
};

Drafted look_up(const std::vector<int32_t>& tokens, const std::vector<int32_t>& ending, int most, double floor) {
    const Chain one(tokens, ending, 1), two(tokens, ending, 2);
    const pl_chains chains[] = {one.view(), two.view()};
    const int32_t size = static_cast<int32_t>(tokens.size()), count = static_cast<int32_t>(ending.size());
    const pl_lookup asked = {tokens.data(), size, size, LEAD, 16, ending.data(), count, most, 4.0, floor};
    Drafted out{std::vector<int32_t>(most), std::vector<double>(most)};
    const int32_t found = pl_suffix_lookup(&asked, chains, 2, out.path.data(), out.confidence.data(), &out.matched);
    out.path.resize(found), out.confidence.resize(found);
    return out;
}

void suffixes() {
    // 5 6 7 | 8 of one text, which goes on with 9 in slot 10; 6 7 2 of another between.
    const std::vector<int32_t> tokens = {-1, -1, 5, 6, 7, 8, -1, -2 - 10, 3, -1, 9, -1, -1};
    Drafted found = look_up(tokens, {5, 6}, 3, 0.0);
    expect(found.path == std::vector<int32_t>{7, 8, 9} && found.matched == 2, "a text is followed into its next piece");
    const double chance = 1 / (1 + 96.0 / (64.0 + 4.0));
    expect(found.confidence[0] == chance, "one occurrence behind two tokens");
    expect(look_up(tokens, {5, 6}, 1, 0.0).path.size() == 1, "no more than are wanted");
    expect(look_up(tokens, {5, 6}, 3, chance).path.size() == 1, "a draft ends above its floor");
    expect(look_up(tokens, {1, 4}, 3, 0.0).path.empty(), "what never occurred leads nowhere");
    expect(look_up(tokens, {1, 9}, 3, 0.0).path.empty(), "nothing follows a text's end");
    const std::vector<int32_t> votes = {-1, -1, 1, 2, 1, 3, 1, 3, 1, 2, 1, 3, 9, -1, -1};
    found = look_up(votes, {8, 1}, 1, 0.0);
    expect(found.path == std::vector<int32_t>{3} && found.confidence[0] == 3 / (5 + 2 * 96.0 / 65.0), "the commonest leads");
}

void matches() {
    Random random(5);
    for (int round = 0; round < 2000; ++round) {
        std::vector<int64_t> ids(random.between(1, 40));
        for (int64_t& each : ids) each = random.between(0, 2);
        const int count = static_cast<int>(ids.size()), shortest = random.between(1, 3), longest = random.between(3, 6);
        int best = 0, end = -1;
        for (int at = 1; at < count; ++at) {
            int length = 0;
            while (length < longest && length < at && ids[at - 1 - length] == ids[count - 1 - length]) ++length;
            if (length >= std::max(best, 1)) best = length, end = at;
        }
        int32_t matched;
        const int32_t found = pl_longest_match(ids.data(), count, shortest, longest, &matched);
        expect(found == (best >= shortest ? end : -1) && (found < 0 || matched == best), "longest match");
    }
}

}  // namespace

int main() {
    suffixes();
    matches();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
