"""Counter-based noise: a pure function of (seed, position, purpose, token id), so that nothing else can change it."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from paceline.native.interface import kernels
from paceline.sampling.best import natively

MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """Draws for different ends are independent; only coupled verification shares SAMPLE with its drafts."""

    SAMPLE = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def key(seed: int, position: int, purpose: Purpose) -> tuple[int, int]:
    """Two 32-bit words for `uniform`; `position` is the absolute position of the token that is drawn."""
    state = _splitmix(seed & 0xFFFFFFFFFFFFFFFF)
    state = _splitmix(state ^ (position * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))
    state = _splitmix(state ^ int(purpose))
    return state & MASK, state >> 32


def uniform(keys: Tensor, index: Tensor) -> Tensor:
    """u in (0, 1), float64, for key words [..., 2] and token ids; shapes broadcast as keys[..., 0] with index."""
    bits = _mix(_mix(index + keys[..., 0] & MASK) ^ keys[..., 1])
    return (bits.double() + 0.5) * 2.0**-32


def gumbel(keys: Tensor, index: Tensor) -> Tensor:
    """-log(-log u), float64, of the same u."""
    return uniform(keys, index).log_().neg_().log_().neg_()


def sample(scores: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """argmax over v of scores[r, v] + Gumbel(keys[r], v): a draw from softmax(scores) for each row [R, V].

    ids [V]: the tokens that the columns stand for, whose noise it is; by default their own numbers.

    Exact up to the 32 bits of u: a token less likely than the best by more than e^26 never comes.

    On the CPU's kernels only the tokens that can still win get noise. Same result.
    """
    if natively(scores):
        return _draw(scores, keys, ids)
    index = torch.arange(scores.shape[1], device=scores.device) if ids is None else ids
    return (scores.double() + gumbel(keys[:, None, :], index)).argmax(dim=1)


def _draw(scores: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
    drawn = torch.empty(scores.shape[0], dtype=torch.int64)
    keys, ids = keys.contiguous(), None if ids is None else ids.contiguous()
    names = None if ids is None else ids.data_ptr()
    kernels().pl_draw(scores.data_ptr(), *scores.shape, names, keys.data_ptr(), drawn.data_ptr())
    return drawn


def _splitmix(state: int) -> int:
    """One step of splitmix64 (Steele et al. 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return state ^ state >> 31


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit words with full avalanche (Wellons' lowbias32); int64 wraps, its low words are right."""
    bits = (bits ^ bits >> 16) * 0x7FEB352D & MASK
    bits = (bits ^ bits >> 15) * 0x846CA68B & MASK
    return bits ^ bits >> 16
