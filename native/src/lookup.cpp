// Drafts from text that repeats, each in one call: beside a small model's step, the same in Python takes time that counts.
// The rules, to the bit, are those of paceline/propose/suffix_index.py, continuation.py and ngram.py, which work without us.
#include <algorithm>
#include <vector>

#include "paceline.h"

namespace paceline {
namespace {

constexpr double ESCAPE = 96.0, ALIKE = 64.0;  // the weight of the unseen after L agreeing tokens: ESCAPE / (ALIKE + L * L)
constexpr int ENOUGH = 4;                      // occurrences after which no shorter match is tried
constexpr int32_t BREAK = -1, NO_MORE = -1;    // no ids

// A place where the ending occurred: how many tokens agree, and what followed, `count` ids from `first` of Found::text.
struct Occurrence {
    int matched, first, count;
};

struct Found {
    std::vector<Occurrence> occurrences;
    std::vector<int32_t> text;

    int32_t token(const Occurrence& each, int at) const { return text[each.first + at]; }
};

struct Continuation {
    double expected = 0.0;
    int matched = 0;
    std::vector<int32_t> path;
    std::vector<double> confidence;
};

// What comes next in most of those that agree so far: `length` ids of the first of them, in all `total` or in `count`.
struct Next {
    const Occurrence* first;
    int length, count, total, distinct;
};

int32_t latest(const pl_chains& chains, const pl_lookup& in) {
    int32_t bucket = chains.key & chains.mask;
    if (bucket >= chains.buckets) bucket &= chains.mask >> 1;
    int32_t position = chains.bucket[bucket];
    while (position >= in.oldest && chains.keys[position % in.capacity] != chains.key)
        position = chains.beside[position % in.capacity];
    return position;
}

// Up to `limit` ids of the stream from `slot` on, wherever its pieces lie, behind those that `text` has.
int read_on(const pl_lookup& in, int32_t slot, int limit, std::vector<int32_t>& text) {
    int count = 0;
    while (count < limit && slot < in.slots) {
        const int32_t token = in.tokens[slot++];
        if (token != BREAK) {
            text.push_back(token);
            ++count;
        } else if (in.tokens[slot] == NO_MORE) {
            break;
        } else {
            slot = -2 - in.tokens[slot];
        }
    }
    return count;
}

// The most recent occurrences from `position` back that agree with the last `reach` ids and that something followed: those
// that agree longest first, the most recent of a length before the others.
Found occurrences(const pl_lookup& in, const pl_chains& chains, int32_t position, int reach, int limit) {
    Found found;
    const int32_t* ending = in.tail + in.count;
    for (int seen = 0; seen < in.recent && position >= in.oldest; ++seen) {
        const int32_t slot = position % in.capacity, *end = in.tokens + slot + 1;
        int matched = 0;
        while (matched < reach && end[-1 - matched] == ending[-1 - matched]) ++matched;
        const int first = static_cast<int>(found.text.size());
        if (matched >= chains.length)
            if (const int count = read_on(in, slot + 1, limit, found.text)) found.occurrences.push_back({matched, first, count});
        position = chains.older[slot];
    }
    std::stable_sort(
        found.occurrences.begin(), found.occurrences.end(),
        [](const Occurrence& a, const Occurrence& b) { return a.matched > b.matched; });
    return found;
}

// Of those that are alive, which all have an id at `at`: the run in which they agree, or else the commonest next id, the
// first of equals.
Next commonest(const Found& found, const std::vector<const Occurrence*>& live, int at) {
    struct Group {
        int32_t token;
        const Occurrence* first;
        int count;
    };
    std::vector<Group> groups;
    for (const Occurrence* each : live) {
        const int32_t token = found.token(*each, at);
        const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.token == token; });
        if (same == groups.end())
            groups.push_back({token, each, 1});
        else
            ++same->count;
    }
    const int total = static_cast<int>(live.size()), distinct = static_cast<int>(groups.size());
    const Group* best = &groups[0];
    for (const Group& each : groups)
        if (each.count > best->count) best = &each;
    int length = 1;
    const auto agree = [&](const Occurrence* each) {
        return each->count > at + length && found.token(*each, at + length) == found.token(*best->first, at + length);
    };
    if (distinct == 1)
        while (best->first->count > at + length && std::all_of(live.begin(), live.end(), agree)) ++length;
    return {best->first, length, best->count, total, distinct};
}

// The first `count` occurrences expanded greedily by frequency: see `vote` in continuation.py.
Continuation vote(const Found& found, int count, int matched, int limit, double floor) {
    Continuation out;
    out.matched = matched;
    std::vector<const Occurrence*> live;
    for (int i = 0; i < count; ++i) live.push_back(&found.occurrences[i]);
    double product = 1.0;
    while (!live.empty() && static_cast<int>(out.path.size()) < limit) {
        const int at = static_cast<int>(out.path.size());
        const Next next = commonest(found, live, at);
        const double unseen = next.distinct * ESCAPE;
        const int stop = std::min(at + next.length, limit);
        for (int place = at; place < stop; ++place) {
            const double agreeing = static_cast<double>(matched + place);
            const double chance = next.count / (next.total + unseen / (ALIKE + agreeing * agreeing));
            product *= chance;
            if (product < floor) return out;
            out.expected += product;
            out.path.push_back(found.token(*next.first, place));
            out.confidence.push_back(chance);
        }
        std::erase_if(live, [&](const Occurrence* each) {
            for (int place = at; place < stop; ++place)
                if (each->count <= place || found.token(*each, place) != out.path[place]) return true;
            return each->count <= stop;
        });
    }
    return out;
}

// What is best of one anchor's occurrences takes the place of `best`. `most`: how many had the last match that was tried.
void try_lengths(const Found& found, const pl_lookup& in, int& most, Continuation& best) {
    const std::vector<Occurrence>& all = found.occurrences;
    for (size_t i = 0; i < all.size() && most < ENOUGH; ++i) {
        const int count = static_cast<int>(i) + 1, matched = all[i].matched;
        if (count < std::max(1, 2 * most) || (i + 1 < all.size() && all[i + 1].matched == matched)) continue;
        most = count;
        const int limit = std::min(in.most, static_cast<int>(in.factor * matched));
        Continuation tried = vote(found, count, matched, limit, in.floor);
        if (tried.expected > best.expected) best = std::move(tried);
    }
}

Continuation look_up(const pl_lookup& in, const pl_chains* chains, int lengths) {
    std::vector<int32_t> position;
    int longest = in.count;
    for (int i = 0; i < lengths && chains[i].length <= in.count; ++i) {
        const int32_t last = latest(chains[i], in);
        if (last < in.oldest) {
            longest = chains[i].length - 1;
            break;
        }
        position.push_back(last);
    }
    Continuation best;
    int most = 0;
    for (int i = static_cast<int>(position.size()) - 1; i >= 0; --i) {
        const int limit = std::min(in.most, static_cast<int>(in.factor * longest));
        if (limit <= best.expected || most >= ENOUGH) break;
        try_lengths(occurrences(in, chains[i], position[i], longest, limit), in, most, best);
        longest = chains[i].length - 1;
    }
    return best;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

int32_t pl_suffix_lookup(
    const pl_lookup* lookup, const pl_chains* chains, int32_t lengths, int32_t* path, double* confidence, int32_t* matched) {
    const Continuation best = look_up(*lookup, chains, lengths);
    std::copy(best.path.begin(), best.path.end(), path);
    std::copy(best.confidence.begin(), best.confidence.end(), confidence);
    *matched = best.matched;
    return static_cast<int32_t>(best.path.size());
}

int32_t pl_longest_match(const int64_t* ids, int32_t count, int32_t shortest, int32_t longest, int32_t* matched) {
    const int last = count - 1;
    int best = 0, end = -1;
    for (int at = last - 1; at >= 0 && best < longest; --at) {
        int length = 0;
        while (length < longest && length <= at && ids[at - length] == ids[last - length]) ++length;
        if (length > best) best = length, end = at + 1;
    }
    *matched = best;
    return best >= shortest ? end : -1;
}
