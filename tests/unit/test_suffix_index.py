"""The suffix index against a reference that searches all text by brute force."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import paceline.propose.suffix_index as suffix_index
from paceline.errors import PacelineError
from paceline.native.library import library
from paceline.propose.continuation import ALIKE, ESCAPE, Continuation, vote
from paceline.propose.suffix_index import ANCHORS, ENOUGH, SuffixHistory, SuffixIndex

Found = tuple[list[int], list[float], int]


@pytest.fixture(autouse=True, params=["kernels", "python"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with either search, where the kernels are there."""
    if request.param == "python":
        monkeypatch.setattr(suffix_index, "library", lambda: None)
    elif library() is None:
        pytest.skip("no kernels")
    kind: str = request.param
    return kind


class Reference:
    """Every token in the order of its arrival, as (its stream's text, its offset there)."""

    def __init__(self, max_match: int, recent: int) -> None:
        self.max_match, self.recent = max_match, recent
        self.arrived: list[tuple[list[int], int]] = []
        self.growing: dict[int, list[int]] = {}

    def extend(self, stream: int, tokens: Sequence[int]) -> None:
        text = self.growing.setdefault(stream, [])
        for token in tokens:
            text.append(token)
            self.arrived.append((text, len(text) - 1))

    def end(self, stream: int) -> None:
        self.growing.pop(stream, None)

    def speculate(self, context: Sequence[int], max_tokens: int, factor: float, floor: float) -> Found:
        context = list(context[-self.max_match :])
        best: Found = ([], [], 0)
        score, most = 0.0, 0
        for matched in range(len(context), 0, -1):
            occurrences = self.occurrences(context, matched)
            # A length that adds no occurrence is the same match as the longer one.
            if len(occurrences) < max(1, 2 * most) or not any(m == matched for m, _ in occurrences):
                continue
            most = len(occurrences)
            tokens, confidence = expand([f for _, f in occurrences], matched, int(min(max_tokens, factor * matched)))
            expected, product = 0.0, 1.0
            for at, chance in enumerate(confidence):
                product *= chance
                if product < floor:
                    tokens, confidence = tokens[:at], confidence[:at]
                    break
                expected += product
            if expected > score:
                best, score = (tokens, confidence, matched), expected
            if most >= ENOUGH:
                break
        return best

    def occurrences(self, context: list[int], matched: int) -> list[tuple[int, list[int]]]:
        """(match, what follows) of those, among the recent ones of the anchor, that match `matched` tokens."""
        anchor = max(n for n in ANCHORS if n <= matched)
        longest = min([n - 1 for n in ANCHORS if n > anchor] + [self.max_match])
        recent = [
            (min(longest, agreeing(text[: at + 1], context)), text[at + 1 :])
            for text, at in reversed(self.arrived)
            if text[max(0, at + 1 - anchor) : at + 1] == context[-anchor:]
        ][: self.recent]
        found = [(m, following) for m, following in recent if m >= matched and following]
        return sorted(found, key=lambda pair: -pair[0])


def agreeing(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count


def expand(followings: list[list[int]], matched: int, limit: int) -> tuple[list[int], list[float]]:
    path: list[int] = []
    confidence = []
    while len(path) < limit:
        at = len(path)
        children = [f[at] for f in followings if f[:at] == path and len(f) > at]
        if not children:
            break
        token = max(children, key=children.count)
        unseen = len(set(children)) * ESCAPE / (ALIKE + (matched + at) ** 2)
        confidence.append(children.count(token) / (len(children) + unseen))
        path.append(token)
    return path, confidence


def random_edits(rng: random.Random, alphabet: int, count: int) -> Iterator[tuple[int, list[int], bool]]:
    """(stream, tokens, whether it ends): three streams that grow in turns, and copy old passages at times."""
    past: list[int] = [0]
    for _ in range(count):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.3:
            start = rng.randrange(len(past))
            tokens += past[start : start + rng.randint(1, 40)]
        past += tokens
        yield rng.randrange(3), tokens, rng.random() < 0.2


@pytest.mark.parametrize("alphabet", [2, 5, 40])
@pytest.mark.parametrize("recent", [6, 40])
def test_finds_what_brute_force_finds(alphabet: int, recent: int) -> None:
    compare(SuffixIndex(20_000, recent=recent), recent, alphabet)


def test_ngrams_whose_keys_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "_key", lambda ngram: ngram[-4] % 2)
    compare(SuffixIndex(20_000, recent=10_000), 10_000, alphabet=5)


@pytest.mark.parametrize("alphabet", [2, 5, 40])
@pytest.mark.parametrize("size", [400, 20_000])
def test_the_kernels_find_the_same_to_the_bit(
    search: str, alphabet: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the ring is full, and overwrites pieces that others lead to."""
    if search == "python":
        pytest.skip("both are compared already")
    rng = random.Random(f"{alphabet} {size}")
    native = SuffixIndex(size)
    monkeypatch.setattr(suffix_index, "library", lambda: None)
    plain = SuffixIndex(size)
    past, found_something = list[int](), 0
    for stream, tokens, ends in random_edits(rng, alphabet, 300):
        for index in (native, plain):
            index.extend(stream, tokens)
            if ends:
                index.end(stream)
        past += tokens
        for _ in range(3):
            start = rng.randrange(len(past))
            context = past[start : start + rng.randint(1, 50)]
            most, factor, floor = rng.choice((1, 5, 20, 64)), rng.choice((0.25, 1.0, 4.0)), rng.choice((0.0, 0.1))
            found = native.speculate(context, most, factor=factor, min_probability=floor)
            assert found == plain.speculate(context, most, factor=factor, min_probability=floor)
            found_something += bool(found.tokens)
    assert found_something > 200


def compare(index: SuffixIndex, recent: int, alphabet: int) -> None:
    rng = random.Random(f"{alphabet} {recent}")
    reference = Reference(max_match=32, recent=recent)
    found_something = 0
    for stream, tokens, ends in random_edits(rng, alphabet, 60):
        index.extend(stream, tokens)
        reference.extend(stream, tokens)
        if ends:
            index.end(stream)
            reference.end(stream)
        text, at = rng.choice(reference.arrived)
        for context in (text[max(0, at - rng.randint(1, 50)) : at + 1], [rng.randrange(alphabet) for _ in range(8)]):
            most, factor = rng.choice((1, 5, 20)), rng.choice((1.0, 4.0))
            tokens, confidence, matched = reference.speculate(context, most, factor, 0.02)
            found = index.speculate(context, most, factor=factor, min_probability=0.02)
            assert (found.tokens, found.matched) == (tokens, matched)
            assert found.confidence == pytest.approx(confidence)
            found_something += bool(tokens)
    assert found_something > 60


@pytest.mark.parametrize("alphabet", [3, 50])
def test_a_full_ring_finds_what_it_must_still_hold_and_only_what_it_may(alphabet: int) -> None:
    rng = random.Random(alphabet)
    index, text = SuffixIndex(600, recent=600), list[int]()
    found_something = 0
    for _ in range(400):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, 30))]
        index.extend(0, tokens)
        text += tokens
        start = rng.randrange(max(0, len(text) - 600), len(text))
        context = text[start : start + rng.randint(1, 12)]
        held = Reference(max_match=32, recent=600)
        held.extend(0, text[-540:])  # the rest of the ring: what is repeated at its beginning, and ends of pieces
        found = index.speculate(context, 4, factor=4.0, min_probability=0.0)
        if held.speculate(context, 4, 4.0, 0.0)[0]:
            drafted, last = context[-found.matched :] + found.tokens, text[-600:]
            assert len(drafted) > found.matched
            assert any(last[at : at + len(drafted)] == drafted for at in range(len(last)))
            found_something += 1
    assert found_something > 100


def test_evicted_tokens_are_never_proposed() -> None:
    index, size = SuffixIndex(1_000), 0
    for token in range(0, 5_000, 10):
        index.extend(token % 30, range(token, token + 10))  # three streams in turns; no token comes twice
        size = max(size, len(index))
        if token >= 1_000:
            assert index.speculate([token - 1_000], 4).tokens == []
            assert index.speculate(list(range(token - 1_000, token - 992)), 4).tokens == []
        assert index.speculate([token, token + 1, token + 2], 4).tokens[:1] == [token + 3]
    assert size == 1_000


def test_a_full_ring_still_holds_all_that_fits() -> None:
    """Only its unused beginning, one repeated passage and the ends of two pieces are not a single stream's tokens."""
    index = SuffixIndex(1_000)
    for count in range(100, 4_000, 7):
        index.extend(0, range(0 if count == 100 else count - 7, count))
        oldest = max(0, count - (1_000 - 32 - 32 - 4))
        assert index.speculate([oldest], 1, min_probability=0.0).tokens == [oldest + 1]


def test_a_stream_that_begins_exactly_at_the_end_of_the_ring_is_found() -> None:
    for count in range(80, 100):
        index = SuffixIndex(128)
        index.extend("a", range(100, 100 + count))
        index.extend("b", [1, 2, 3, 4])
        found = index.speculate([9, 1, 2], 1)
        assert (found.tokens, found.matched) == ([3], 2)


def test_memory_stays_bounded_when_streams_never_end() -> None:
    index = SuffixIndex(500)
    for stream in range(3_000):
        index.extend(stream, [stream % 7, stream % 11, 5])
    assert len(index._ring._open) <= 500
    assert len(index._ring.tokens) == 500
    for chains in index._chains:
        assert len(chains.older) == len(chains._keys) == len(chains._beside) == 500
        assert len(chains._buckets) <= 500


def test_buckets_stay_short_and_list_each_ngram_once() -> None:
    index, rng = SuffixIndex(2_000), random.Random(0)
    for at in range(400):
        index.extend(0, [rng.randrange(4) for _ in range(5)] + [1_000 + at])
    for chains in index._chains:
        walked = 0
        for position in chains._buckets:
            keys = []
            while position >= index._ring.oldest:
                keys.append(chains._keys[position % 2_000])
                position = chains._beside[position % 2_000]
            assert len(keys) == len(set(keys))
            walked += len(keys)
        assert walked <= 2 * len(chains._buckets)


def test_an_index_takes_memory_for_what_it_holds_only() -> None:
    index = SuffixIndex(1_000_000)
    index.extend(0, range(100))
    assert len(index._ring.tokens) < 300


def test_a_stream_is_followed_across_the_pieces_it_lies_in() -> None:
    """Streams that grow in turns are found as if each had come at once, also where the ring wraps around."""
    index = SuffixIndex(700)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for at in range(0, 600, 3):
        for stream, text in texts.items():
            new = [10_000 * stream + at + i for i in range(3)]
            index.extend(stream, new)
            text += new
            if at >= 12:
                context = text[-12:-6]
                assert index.speculate(context, 5, min_probability=0.0).tokens == text[-6:-1], (stream, at)


def test_a_match_reaches_its_whole_length_across_pieces() -> None:
    index = SuffixIndex(1_000)
    for at in range(0, 40, 2):
        index.extend("a", [100 + at, 101 + at])
        index.extend("b", [7])
    assert index.speculate(list(range(100, 138)), 2) == index.speculate(list(range(106, 138)), 2)
    assert index.speculate(list(range(100, 138)), 2).matched == 32


def test_a_match_does_not_reach_into_another_stream() -> None:
    index = SuffixIndex(1_000)
    index.extend("a", [1, 2, 3])
    index.extend("b", [4, 5, 6])
    found = index.speculate([2, 3, 4, 5], 4)
    assert (found.tokens, found.matched) == ([6], 2)
    assert index.speculate([2, 3], 4).tokens == []


def test_each_token_is_found_as_soon_as_it_is_in() -> None:
    index, text = SuffixIndex(1_000), [5, 6, 7, 8, 9]
    for count, token in enumerate(text, 1):
        index.extend(0, [token])
        if count > 1:
            assert index.speculate(text[: count - 1], 1, min_probability=0.0).tokens == [token]


def test_the_same_name_after_its_end_is_another_stream() -> None:
    index = SuffixIndex(1_000)
    index.extend("a", [1, 2])
    index.end("a")
    index.end("a")
    index.extend("a", [3, 4])
    assert index.speculate([1, 2], 2).tokens == []
    assert index.speculate([3], 2).tokens == [4]


def test_only_the_most_recent_occurrences_count() -> None:
    index = SuffixIndex(10_000, recent=8)
    for _ in range(20):
        index.extend(0, [1, 2, 9])
    for _ in range(8):
        index.extend(0, [1, 3, 9])
    # All eight are followed by 3; the twenty older ones no longer count.
    assert index.speculate([1], 1).tokens == [3]
    assert index.speculate([1], 1).confidence == [pytest.approx(8 / (8 + ESCAPE / (ALIKE + 1)))]


def test_a_frequent_ngram_does_not_hide_a_rare_one() -> None:
    """Wherever keys fall, each n-gram has a chain of its own."""
    index, rare = SuffixIndex(20_000), list(range(1_000, 1_300))
    index.extend("rare", rare)
    for _ in range(3_000):
        index.extend("frequent", [1, 2, 3])
    for token in rare[:-1]:
        assert index.speculate([token], 1).tokens == [token + 1]


def test_many_short_occurrences_beat_one_long_match_that_promises_less() -> None:
    index = SuffixIndex(10_000)
    index.extend("once", [50, 1, 2, 3, 77])
    for lead in range(12):
        index.extend(f"often {lead}", [60 + lead, 2, 3, 4, 5, 6, 7])
    found = index.speculate([50, 1, 2, 3], 8)
    assert (found.tokens, found.matched) == ([4, 5, 6, 7], 2)
    assert index.speculate([50, 1, 2, 3], 8, factor=0.25).matched == 4  # a draft of one token: the long match's own


def test_confidence_grows_with_evidence() -> None:
    def first(count: int, matched: int, against: int = 0) -> float:
        followings = {b"\1\0\0\0": count} | ({b"\2\0\0\0": against} if against else {})
        return vote(followings, matched, 1, 0.0)[2][0]

    for matched in (1, 2, 8, 31):
        chances = [first(count, matched) for count in (1, 2, 4, 8)]
        assert chances == sorted(set(chances))
    for count in (1, 3, 16):
        chances = [first(count, matched) for matched in (1, 2, 4, 8, 16, 32)]
        assert chances == sorted(set(chances))
    assert first(8, 4) > first(8, 4, against=1) > first(8, 4, against=4)
    assert first(1, 1) < 0.5
    assert first(1, 32) > 0.9


def test_a_draft_ends_before_its_chance_falls_under_the_floor() -> None:
    index = SuffixIndex(1_000)
    index.extend(0, range(100))
    for floor in (0.5, 0.1, 0.01):
        found = index.speculate([7, 8, 9], 50, factor=20, min_probability=floor)
        product = 1.0
        for chance in found.confidence:
            product *= chance
        assert product >= floor
        longer = index.speculate([7, 8, 9], len(found.tokens) + 1, factor=20, min_probability=0.0).confidence
        assert product * longer[-1] < floor


def test_a_draft_is_bounded_by_its_match_and_by_what_is_wanted() -> None:
    index = SuffixIndex(1_000)
    index.extend(0, range(100))
    assert len(index.speculate([8, 9], 50, factor=2, min_probability=0.0).tokens) == 4
    assert len(index.speculate([8, 9], 3, factor=2, min_probability=0.0).tokens) == 3
    assert index.speculate([8, 9], 0) == Continuation([], [], 0)
    assert index.speculate([], 5) == Continuation([], [], 0)
    assert index.speculate([8, 9], 5, min_probability=1.0) == Continuation([], [], 0)
    assert SuffixIndex(1_000).speculate([1], 5) == Continuation([], [], 0)


def test_largest_ids_are_found() -> None:
    index, largest = SuffixIndex(1_000), 2**31 - 1
    index.extend(0, [largest, largest - 1, 0, 2**24 - 1, largest])
    assert index.speculate([largest - 1, 0], 2).tokens == [2**24 - 1, largest]
    with pytest.raises(OverflowError):
        index.extend(0, [2**31])
    assert len(index) == 5


def test_positions_that_count_from_low_numbers_again_lead_to_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    index, plain = SuffixIndex(512), SuffixIndex(512)
    monkeypatch.setattr(suffix_index, "RENUMBER_AT", 2_000)
    highest = 0
    for _ in range(1_000):
        stream, tokens = rng.randrange(2), [rng.randrange(6) for _ in range(9)]
        index.extend(stream, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(suffix_index, "RENUMBER_AT", 2**30)
            plain.extend(stream, tokens)
        assert index.speculate(tokens[:7], 8) == plain.speculate(tokens[:7], 8)
        highest = max(highest, index._ring.next)
    assert highest < 3_000 < plain._ring.next


def test_threads_extend_and_look_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    index, failures = SuffixIndex(2_000), list[BaseException]()
    inside: list[int] = []

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            assert not inside
            inside.append(1)
            time.sleep(1e-5)  # lets another thread in, if it can
            try:
                return method(*arguments)
            finally:
                inside.pop()

        return wrapped

    monkeypatch.setattr(index._ring, "extend", alone(index._ring.extend))
    monkeypatch.setattr(index, "_search", alone(index._search))
    monkeypatch.setattr(index, "_search_by_kernels", alone(index._search_by_kernels))

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(100):
                start = rng.randrange(50)
                index.extend(number, [100 * number + start + i for i in range(20)])
                found = index.speculate([100 * number + start, 100 * number + start + 1], 8)
                assert all(100 * number <= token < 100 * number + 100 for token in found.tokens)
                if rng.random() < 0.1:
                    index.end(number)
        except BaseException as failure:  # a thread's failure has to reach the test
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_tenants_see_their_own_text_only() -> None:
    history = SuffixHistory(max_tokens=1_000)
    history.index("a").extend(0, [1, 2, 3])
    assert history.index("b").speculate([1, 2], 2).tokens == []
    assert history.index("a").speculate([1, 2], 2).tokens == [3]


def test_the_tenant_unused_for_longest_is_dropped() -> None:
    history = SuffixHistory(max_tokens=1_000, max_tenants=2)
    for tenant in ("a", "b"):
        history.index(tenant).extend(0, [1, 2, 3])
    history.index("a")
    history.index("c")
    assert len(history) == 2
    assert history.index("a").speculate([1, 2], 2).tokens == [3]
    assert history.index("b").speculate([1, 2], 2).tokens == []


def test_sizes_that_cannot_work_are_refused_in_one_line() -> None:
    with pytest.raises(PacelineError, match="max_tokens=100"):
        SuffixIndex(100)
    with pytest.raises(PacelineError, match="max_tokens=2147483648"):
        SuffixIndex(2**31)
    with pytest.raises(PacelineError, match="max_tenants=0"):
        SuffixHistory(max_tenants=0)
