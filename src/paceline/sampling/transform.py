"""The one transform from logits to the target's distribution, applied at every verified row with that row's history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.device import send
from paceline.native.interface import kernels
from paceline.sampling.best import natively
from paceline.sampling.params import SamplingParams

NEVER = float("-inf")
NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of one sequence. Row `start + i` follows its tokens and the nodes `before[i]` of `draft` [n].

    `prompt` is how many of `tokens` are prompt. `draft` lies on the logits' device.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt: int
    start: int
    draft: Tensor = NO_TOKENS
    before: Sequence[Sequence[int]] = ((),)

    @property
    def count(self) -> int:
        return len(self.before)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)


def transform(logits: Tensor, spans: Sequence[RowSpan]) -> Tensor:
    """Logits [R, V] -> scores [R, V]: softmax(scores) is the distribution to sample; excluded tokens are -inf.

    Greedy rows keep their order and are not truncated: their argmax is what is wanted. `logits` is not changed.
    """
    if all(span.params.plain_argmax for span in spans):
        return logits
    cuts = {Cut.of(span.params) for span in spans}
    as_one = len(cuts) == 1 and not any(span.params.greedy or span.params.adjusts_logits for span in spans)
    if as_one and sum(span.count for span in spans) == logits.shape[0]:
        return truncate(logits, *cuts)  # the usual case, without copies to and fro
    scores = logits.clone()
    alike: dict[Cut, list[RowSpan]] = {}
    for span in spans:
        if span.params.adjusts_logits:
            scores[span.rows] = adjust(scores[span.rows], span)
        if not span.params.greedy:
            alike.setdefault(Cut.of(span.params), []).append(span)
    for cut, members in alike.items():
        rows = torch.cat([torch.arange(m.start, m.start + m.count) for m in members])
        rows = send(rows, scores.device)
        scores[rows] = truncate(scores[rows], cut)
    return scores


def adjust(scores: Tensor, span: RowSpan) -> Tensor:
    """Processors, bias and penalties for one sequence's rows [count, V], each with its own history."""
    params = span.params
    if params.processors:
        scores = _process(scores, span)
    if params.logit_bias:
        scores = scores + _bias(params, scores)
    return _penalise(scores, span) if params.penalised else scores


class Cut(NamedTuple):
    """The part of the chain that looks at one row alone; rows that share it are cut together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> Cut:
        return cls(params.temperature, params.top_k, params.top_p, params.min_p)


def truncate(scores: Tensor, params: Cut) -> Tensor:
    """Temperature, top_k, top_p, min_p in this order, each on what the one before left; rows [R, V]."""
    scores = tempered(scores, params.temperature)
    if 0 < params.top_k < scores.shape[1]:
        kth = scores.topk(params.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, NEVER)
    if params.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_edge(scores, params.top_p), NEVER)
    if params.min_p > 0:
        edge = scores.amax(dim=1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < edge, NEVER)
    return scores


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """The maximum goes first, so that a tiny temperature overflows to -inf below it and never to inf."""
    if not natively(scores):
        return (scores - scores.amax(dim=1, keepdim=True)).div_(temperature)
    out = torch.empty_like(scores)
    kernels().pl_temper(scores.data_ptr(), *scores.shape, temperature, out.data_ptr())
    return out


def _nucleus_edge(scores: Tensor, top_p: float) -> Tensor:
    """Lowest score [R, 1] of the smallest set of likeliest tokens whose probabilities reach top_p (ties stay)."""
    total = scores.logsumexp(dim=1, keepdim=True)
    width = scores.shape[1]
    # On the CPU a full sort of a large vocabulary costs more than the model's head: look at the likeliest first.
    first = min(width, 256) if scores.device.type == "cpu" else width
    while True:
        ranked = scores.topk(first, dim=1).values
        mass = (ranked - total).exp().cumsum(dim=1)
        before = mass - (ranked - total).exp()
        if first == width or bool((mass[:, -1] >= top_p).all()):
            kept = (before < top_p).sum(dim=1, keepdim=True).clamp_min(1)
            return ranked.gather(1, kept - 1)
        first = min(width, first * 16)


def _bias(params: SamplingParams, scores: Tensor) -> Tensor:
    row = scores.new_zeros(scores.shape[1])
    for token, value in params.logit_bias.items():
        if token < row.shape[0]:
            row[token] = value
    return row


def _process(scores: Tensor, span: RowSpan) -> Tensor:
    draft = span.draft.tolist()
    history = list(span.tokens)
    rows = []
    for row, path in zip(scores, span.before, strict=True):
        for processor in span.params.processors:
            row = processor(row, history + [draft[node] for node in path])
        rows.append(row)
    return torch.stack(rows)


def _penalise(scores: Tensor, span: RowSpan) -> Tensor:
    """Repetition as in CTRL (Keskar et al. 2019); presence and frequency as in OpenAI's API."""
    params, width = span.params, scores.shape[1]
    output = _counts(span.tokens[span.prompt :], width, scores.device) + _draft_counts(span, scores)
    if params.repetition_penalty != 1:
        seen = (output > 0) | (_counts(span.tokens[: span.prompt], width, scores.device) > 0)
        factor = torch.where(scores > 0, 1 / params.repetition_penalty, params.repetition_penalty)
        scores = torch.where(seen, scores * factor, scores)
    if params.frequency_penalty != 0:
        scores = scores - params.frequency_penalty * output
    if params.presence_penalty != 0:
        scores = scores - params.presence_penalty * (output > 0).to(scores.dtype)
    return scores


def _counts(tokens: Sequence[int], width: int, device: torch.device) -> Tensor:
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=width)
    return send(counts.float(), device)


def _draft_counts(span: RowSpan, scores: Tensor) -> Tensor:
    """[count, V]: how often each token stands among the drafts before each row."""
    counts = torch.zeros_like(scores)
    for row, path in zip(counts, span.before, strict=True):
        if path:
            before = span.draft[send(torch.tensor(path), scores.device)]
            row.index_add_(0, before, torch.ones(len(path), device=scores.device))
    return counts
