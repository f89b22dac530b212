"""What a suffix index of a million tokens costs, in microseconds a lookup and bytes a token, and what it finds.

    python benchmarks/suffix_lookup.py --text zipf      # drawn tokens (Zipf) in texts that repeat each other's passages
    python benchmarks/suffix_lookup.py --text python    # the standard library's source, split into words and marks

Lookups are those of decoding texts that the index has not seen, one at every position.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sysconfig
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from paceline.propose.continuation import Continuation
from paceline.propose.suffix_index import SuffixIndex

VOCABULARY = 32_000
EXPONENT = 1.1
Text = list[int]


def zipf_texts(seed: int) -> Iterator[Text]:
    """Texts of 100 to 1,000 tokens; about half is passages of earlier texts, one token in 50 of these replaced."""
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1 / (rank + 1) ** EXPONENT for rank in range(VOCABULARY)))
    earlier: list[Text] = []
    while True:
        text: Text = []
        for _ in range(rng.randint(2, 10)):
            length = rng.randint(20, 150)
            fresh = rng.choices(range(VOCABULARY), cum_weights=weights, k=length)
            if earlier and rng.random() < 0.5:
                source = rng.choice(earlier)
                start = rng.randrange(len(source))
                passage = source[start : start + length]
                text += [new if rng.random() < 0.02 else old for old, new in zip(passage, fresh, strict=False)]
            else:
                text += fresh
        earlier.append(text)
        yield text


def python_texts(seed: int) -> Iterator[Text]:
    """Files of the standard library in random order; a token is a word, an indentation, a blank or a mark."""
    ids: dict[str, int] = {}
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    random.Random(seed).shuffle(files)
    for file in files:
        pieces = re.findall(r"\w+|\n *|\s|[^\w\s]", file.read_text(encoding="utf-8", errors="replace"))
        if pieces:
            yield [ids.setdefault(piece, len(ids)) for piece in pieces[:20_000]]


def split(texts: Iterator[Text], history: int, lookups: int) -> tuple[list[array[int]], list[Text]]:
    """Texts of `history` tokens in all, then others of `lookups` tokens."""
    past: list[array[int]] = []
    while (missing := history - sum(map(len, past))) > 0:
        past.append(array("i", next(texts)[:missing]))
    fresh: list[Text] = []
    while (missing := lookups - sum(map(len, fresh))) > 0:
        fresh.append(next(texts)[:missing])
    return past, fresh


def build(index: SuffixIndex, past: list[array[int]]) -> tuple[float, float]:
    """(insertions a second, resident bytes a token)."""
    resident = psutil.Process().memory_info().rss
    started = time.perf_counter()
    for number, text in enumerate(past):
        index.extend(number, text)
        index.end(number)
    seconds = time.perf_counter() - started
    return sum(map(len, past)) / seconds, (psutil.Process().memory_info().rss - resident) / len(index)


@dataclass
class Outcome:
    """Every lookup's microseconds, and what verification would have made of the drafts."""

    microseconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)  # without what others took of the machine
    drafted: int = 0
    accepted: int = 0
    expected: float = 0.0
    reliability: dict[int, list[int]] = field(default_factory=dict)  # tenths of confidence: tried, accepted

    def record(self, found: Continuation, truth: Text) -> None:
        self.drafted += len(found.tokens)
        self.expected += found.expected
        for token, confidence, actual in zip(found.tokens, found.confidence, truth, strict=False):
            counts = self.reliability.setdefault(min(9, int(10 * confidence)), [0, 0])
            counts[0] += 1
            if token != actual:
                break
            counts[1] += 1
            self.accepted += 1


def percentiles(samples: list[float]) -> str:
    ordered = sorted(samples)
    return ", ".join(f"p{100 * share:g} {ordered[int(share * len(ordered))]:.1f}" for share in (0.5, 0.9, 0.99, 0.999))


def look_up(index: SuffixIndex, texts: list[Text], max_draft: int, factor: float) -> Outcome:
    outcome = Outcome()
    for text in texts:
        for at in range(1, len(text)):
            context = text[max(0, at - index.max_match) : at]
            worked, started = time.thread_time(), time.perf_counter()
            found = index.speculate(context, max_draft, factor=factor)
            ended = time.perf_counter()
            outcome.processor.append(1e6 * (time.thread_time() - worked))
            outcome.microseconds.append(1e6 * (ended - started))
            outcome.record(found, text[at : at + max_draft])
    return outcome


def report(outcome: Outcome, rate: float, size: float, index: SuffixIndex) -> None:
    lookups = len(outcome.microseconds)
    print(f"{len(index):,} tokens of history: {rate:,.0f} insertions a second, {size:.0f} bytes a token (resident)")
    print(f"{lookups:,} lookups, microseconds: {percentiles(outcome.microseconds)}")
    print(f"  of processor time, the clock's own included: {percentiles(outcome.processor)}")
    print(
        f"a lookup drafts {outcome.drafted / lookups:.2f} tokens, of which {outcome.accepted / lookups:.2f} are right "
        f"({outcome.expected / lookups:.2f} expected)"
    )
    for tenth, (tried, accepted) in sorted(outcome.reliability.items()):
        print(f"  confidence {tenth / 10:.1f} to {(tenth + 1) / 10:.1f}: {accepted / tried:.3f} right of {tried:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", choices=("zipf", "python"), default="zipf")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of history")
    parser.add_argument("--lookups", type=int, default=20_000)
    parser.add_argument("--max-draft", type=int, default=16)
    parser.add_argument("--factor", type=float, default=2.0, help="drafted tokens for each that matched, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = zipf_texts(options.seed) if options.text == "zipf" else python_texts(options.seed)
    past, fresh = split(texts, options.tokens, options.lookups)
    index = SuffixIndex(options.tokens)
    rate, size = build(index, past)
    report(look_up(index, fresh, options.max_draft, options.factor), rate, size, index)


if __name__ == "__main__":
    main()
