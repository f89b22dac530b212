"""What a precision costs: KL divergence to fp32 and top-1 agreement, teacher-forced on real text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.sampling.transform import NEVER
from paceline.weights.load import LoadedModel, load_model

CHUNK = 64


@dataclass(frozen=True)
class Quality:
    """Against fp32 over `positions`: mean KL(fp32 || precision) in nats, share of equal argmaxes."""

    precision: str
    positions: int
    kl: float
    top1: float


def measure(model: str, precisions: list[str], texts: list[str], positions: int) -> list[Quality]:
    """Up to `positions` positions of each precision against the same model in fp32, on the CPU."""
    reference = load_model(model, device="cpu", precision="fp32")
    passages = passages_of(reference, texts, positions)
    truth = [log_probabilities(reference, ids) for ids in passages]
    del reference
    return [
        _compare(precision, truth, load_model(model, device="cpu", precision=precision), passages)
        for precision in precisions
    ]


def passages_of(model: LoadedModel, texts: list[str], positions: int) -> list[list[int]]:
    """Token ids of the texts, cut so that they come to `positions` in all."""
    passages = []
    for text in texts:
        ids = model.tokenizer.encode(text)[:positions]
        positions -= len(ids)
        if ids:
            passages.append(ids)
    return passages


@torch.inference_mode()
def log_probabilities(model: LoadedModel, ids: list[int]) -> Tensor:
    """[n, V] of the token behind each of `ids` [n]; -infinity for those that a draft does not score."""
    pool = BlockPool(model.config, len(ids) // 16 + 1, model.backend.device, model.backend.cache_dtype)
    cache = pool.open([], len(ids))
    rows = []
    for begin in range(0, len(ids), CHUNK):
        part = ids[begin : begin + CHUNK]
        cache.append(len(part))
        batch = Batch(torch.tensor(part), [Span(cache, 0, len(part), begin)], pool)
        hidden, _ = model.decoder.forward(batch)
        cache.commit(range(len(part)), ids)
        logits = model.decoder.logits(hidden)
        if (scored := model.decoder.head_ids) is not None:
            logits = logits.new_full((len(part), model.vocab_size), NEVER).index_copy_(1, scored, logits)
        rows.append(logits[:, : model.vocab_size].log_softmax(dim=1))
    return torch.cat(rows)


def _compare(precision: str, truth: list[Tensor], model: LoadedModel, passages: list[list[int]]) -> Quality:
    divergence, agreed, count = 0.0, 0, 0
    for expected, ids in zip(truth, passages, strict=True):
        got = log_probabilities(model, ids)
        divergence += float((expected.exp() * (expected - got)).sum())
        agreed += int((expected.argmax(dim=1) == got.argmax(dim=1)).sum())
        count += len(ids)
    return Quality(precision, count, divergence / count, agreed / count)
