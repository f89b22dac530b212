"""An EAGLE-3 head's whole chain of drafts in one call of the kernels (native/src/chain.cpp).

A level of a small target's head takes less time than the calls that would lead through it one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref

from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.heads.block import same
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.model.attention import Span
from paceline.model.decoder import Decoder
from paceline.native import interface
from paceline.native.block import NativeBlock
from paceline.native.decoder import NativeDecoder
from paceline.native.interface import kernels
from paceline.native.layers import Histories
from paceline.native.linear import NativeLinear
from paceline.native.memory import aligned
from paceline.native.norm import NativeNorm
from paceline.native.packed import Packed


class NativeChain:
    """`draft` feeds what the target has computed and goes on alone; `of` says for which heads."""

    def __init__(self, head: Eagle3Head, block: NativeBlock, output: NativeLinear, embedding: Packed) -> None:
        assert isinstance(head.fc, NativeLinear)
        assert isinstance(head.output_norm, NativeNorm)
        self.head, self.stack = head, block.stack
        (layer,) = block.stack.structs
        self.ids = None if head.target_ids is None else head.target_ids.contiguous()
        residual = head.residual_norm.plain.data_ptr() if isinstance(head.residual_norm, NativeNorm) else None
        self.struct = interface.Head(
            layer, head.fc.struct, output.struct,
            interface.Matrix(embedding.format, embedding.rows, embedding.columns, 0, embedding.data.data_ptr()),
            residual, head.output_norm.plain.data_ptr(), None if self.ids is None else self.ids.data_ptr(),
            head.feeds_normed,
        )  # fmt: skip
        self.alive = (head, output, embedding)
        self._library, self._pointer = kernels(), byref(self.struct)
        self._work, self._rows = aligned(0), 0

    @classmethod
    def of(cls, head: EagleHead, target: Decoder, vocab_size: int) -> NativeChain | None:
        """None for heads of several layers or with embeddings of their own, where either is not on the kernels, and
        where an output could name a row that is no token."""
        if not isinstance(head, Eagle3Head) or not isinstance(target, NativeDecoder) or head.embedding is not None:
            return None
        output = target.head if head.output is None else head.output
        if not isinstance(output, NativeLinear) or not isinstance(head.block, NativeBlock):
            return None
        if len(head.block.stack.layers) != 1 or not (
            head.residual_norm is same or isinstance(head.residual_norm, NativeNorm)
        ):
            return None
        largest = output.out_features - 1 if head.target_ids is None else int(head.target_ids.max())
        return cls(head, head.block, output, target.packed_embedding) if largest < vocab_size else None

    def draft(
        self, taps: Sequence[Tensor], tokens: Sequence[int], span: Span, pool: BlockPool, *, depth: int,
        stop_below: float, temperature: float, keys: Sequence[tuple[int, int]], worth: Sequence[float] | None = None,
    ) -> tuple[list[int], list[float]]:  # fmt: skip
        """Tokens, at most `depth`, and the head's probability of each.

        taps, each [T, H]: the target's states of T rows; tokens [T]: those behind them. `span` has slots for these rows
        and for `depth - 1` more. `keys`: the noise of each token (see `pl_draw`), not looked at with temperature 0. A
        token whose chance, times those before it, is below `stop_below` is the last; `worth`, of each tenth of a
        probability, says what counts as its chance instead.
        """
        rows, joined = len(tokens), self.head.joined(taps).float().contiguous()
        if rows > self._rows:
            self._work, self._rows = aligned(self._library.pl_chain_work(self._pointer, rows)), rows
        histories = Histories([span])
        batch = histories.struct(self._work, None)
        batch.rows = rows
        fed, noise = array("q", tokens), array("q", [word for pair in keys for word in pair])
        drafted, chance = array("q", bytes(8 * depth)), array("f", bytes(4 * depth))
        chances_worth = None if worth is None else array("f", worth)
        asked = interface.Draft(
            joined.data_ptr(), fed.buffer_info()[0], depth, stop_below, temperature, 0, noise.buffer_info()[0],
            None if chances_worth is None else chances_worth.buffer_info()[0],
        )  # fmt: skip
        at = self.stack.places(pool, span.end).structs[0]
        count = self._library.pl_chain(
            self._pointer, byref(batch), byref(asked), at.keys, at.values, at.cos, at.sin, drafted.buffer_info()[0],
            chance.buffer_info()[0],
        )  # fmt: skip
        return drafted[:count].tolist(), chance[:count].tolist()
