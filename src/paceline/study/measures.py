"""What a draft is worth on its own, teacher-forced through the engine's own kernels and precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.bench.quality import log_probabilities
from paceline.errors import PacelineError
from paceline.sampling.transform import NEVER
from paceline.train.acceptance import walk
from paceline.train.batches import LONGEST
from paceline.train.shards import Passage
from paceline.weights.load import LoadedModel

DEPTH = 5  # of the chains that are judged
LARGEST = 700.0  # nats a token that a float's exponential takes


@dataclass(frozen=True)
class Measures:
    """acceptance_length, by_depth: of greedy answers, as `train/acceptance.py` counts them. perplexity: of those
    of all held-out answers' tokens that the draft scores. accuracy: the share of tokens of text by people that are the
    draft's likeliest next one. answer_tokens, text_tokens: how many were judged."""

    acceptance_length: float
    by_depth: list[float]
    perplexity: float
    accuracy: float
    answer_tokens: int
    text_tokens: int


def measure(draft: LoadedModel, held_out: Sequence[Passage], texts: Sequence[Sequence[int]]) -> Measures:
    """held_out: passages that the target wrote; texts: token ids of what people wrote."""
    agrees, surprise, answered = [], 0.0, 0
    for passage in answers(held_out):
        logs = log_probabilities(draft, passage.tokens.tolist())
        guessed = logs[passage.prompt - 1 : -1]  # row r guesses the answer's token r
        own = passage.tokens[passage.prompt :]
        stated = guessed.gather(1, own[:, None])
        scored = stated > NEVER
        surprise -= float(stated[scored].sum())
        answered += int(scored.sum())
        if passage.greedy:
            agrees.append(chains(guessed.argmax(1) == own, DEPTH))
    found = walk(agrees)
    right, read = _next_tokens(draft, texts)
    perplexity = math.exp(min(surprise / max(answered, 1), LARGEST))
    return Measures(found.length, found.by_depth, perplexity, right / read, answered, read)


def answers(held_out: Sequence[Passage]) -> list[Passage]:
    """Those with something to judge, as far as training reads."""
    return [each.cut(LONGEST) for each in held_out if each.prompt + 2 < min(len(each.tokens), LONGEST)]


def check_held_out(held_out: Sequence[Passage]) -> None:
    if not any(each.greedy for each in answers(held_out)):
        raise PacelineError(
            "none of the held-out answers is what greedy decoding says, so acceptance cannot be measured; "
            "give `paceline train --stages responses,capture` more prompts and another --data"
        )


def chains(right: Tensor, depth: int) -> Tensor:
    """right [n]: whether each token of an answer was guessed -> [n - 1, depth]: whether a draft that begins behind
    token r has each of the next ones. The first token is the target's own in every step."""
    padded = torch.cat([right[1:], torch.zeros(depth - 1, dtype=torch.bool)])
    return padded.unfold(0, depth, 1)


def _next_tokens(draft: LoadedModel, texts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens that were guessed, and all that were to be guessed."""
    right, read = 0, 0
    for ids in texts:
        guessed = log_probabilities(draft, list(ids))[:-1].argmax(1)
        right += int((guessed == torch.tensor(ids[1:])).sum())
        read += len(ids) - 1
    return right, read


def human_texts(target: LoadedModel, texts: Sequence[str], most: int) -> list[list[int]]:
    """Token ids of at most `most` tokens in all. Raises PacelineError where there is nothing to guess."""
    found = list(_texts(target, texts, most))
    if not found:
        raise PacelineError("the prompts are too short to measure accuracy on; give longer ones with --prompts")
    return found


def _texts(target: LoadedModel, texts: Sequence[str], most: int) -> Iterator[list[int]]:
    for text in texts:
        ids = target.tokenizer.encode(text)[: min(most, LONGEST)]
        most -= len(ids)
        if len(ids) > 1:
            yield ids
