"""Does a head fit its target at all? One short text tells, before a user wonders why nothing is accepted."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.eagle import EagleHead
from paceline.heads.exit import ExitHead
from paceline.heads.load import Head
from paceline.heads.medusa import MedusaHead
from paceline.heads.mtp import MtpHead
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.propose.early_exit import norm_like
from paceline.weights.load import LoadedModel

TEXT = (
    "The capital of France is Paris. The capital of Italy is Rome. Water boils at one hundred degrees. One, two, "
    "three, four, five, six, seven, eight, nine, ten. The sun rises in the east and sets in the west."
)
USELESS = 0.03  # share of next-but-one tokens guessed; an untrained head gets about 1 in the vocabulary's size


@torch.inference_mode()
def agreement(head: Head, target: LoadedModel) -> float:
    """Share of positions of a fixed text at which the head's first guess is what the target itself says next.

    Row t of a head has read x_{t+1}; its guess of x_{t+2} is held against the target's own argmax at row t + 1. An exit
    has read no more than row t: it is held against that row's.
    """
    tokens = torch.tensor(target.tokenizer.encode(TEXT), device=target.decoder.device)
    count, decoder = len(tokens), target.decoder
    pool = BlockPool(target.config, -(-count // 16), decoder.device, target.backend.cache_dtype)
    cache = pool.open((), count)
    cache.append(count)
    read = (head.layers,) if isinstance(head, ExitHead) else head.taps
    batch = Batch(tokens, [Span(cache, 0, count, 0)], pool, taps=read)
    hidden, taps = decoder.forward(batch)
    chosen = decoder.logits(hidden).argmax(dim=1)
    if isinstance(head, ExitHead):
        guesses = decoder.head(norm_like(decoder, head.norm)(taps[head.layers])).argmax(dim=1)
        return float((guesses == chosen).double().mean())
    guesses = _guesses(head, target, tokens, [taps[tap][:-1] for tap in head.taps])
    return float((guesses == chosen[1:]).double().mean())


def _guesses(head: EagleHead | MtpHead | MedusaHead, target: LoadedModel, tokens: Tensor, taps: list[Tensor]) -> Tensor:
    """Token ids [count - 1] that the head expects after rows 0 .. count - 2 and the token behind each."""
    decoder, count = target.decoder, len(tokens) - 1
    if isinstance(head, MedusaHead):
        return _target_ids(head, head.logits(taps[0], 1, decoder.head)[:, 0])
    pool = BlockPool(head.config, -(-count // 16), decoder.device, head.cache_dtype)
    cache = pool.open((), count)
    cache.append(count)
    spans = [Span(cache, 0, count, 0)]
    embeds = head.embed(tokens[1:], decoder.embed)
    if isinstance(head, MtpHead):
        return head.logits(head.forward(0, embeds, taps[0], spans, pool), decoder.head).argmax(dim=1)
    return _target_ids(head, head.logits(head.forward(embeds, head.fuse(taps), spans, pool), decoder.head))


def _target_ids(head: EagleHead | MedusaHead, logits: Tensor) -> Tensor:
    picked = logits.argmax(dim=1)
    return picked if head.target_ids is None else head.target_ids[picked]


def warn_if_useless(name: str, head: Head, target: LoadedModel) -> None:
    share = agreement(head, target)
    if share < USELESS:
        print(
            f"warning: head '{name}' guesses {share:.0%} of {target.name}'s tokens on a test sentence; its drafts will "
            "be refused and only cost time (is it a head of another model, or untrained?)",
            file=sys.stderr,
        )
