"""One decoder for every family: the flags of `ModelConfig` say what each layer has."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import send
from paceline.model.attention import Span, plan_attention
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear
from paceline.model.rope import Rope, ropes
from paceline.model.sublayers import Layer, Norm, Sublayers, TorchSublayers, write_slots

NORMED = -1  # the tap of the last layer's output after the final norm

Sublayer = tuple[int, Literal["attention", "mlp"]]


@dataclass
class Batch:
    """One forward: a flat ragged batch. tokens [T] ids; spans cover the rows in order."""

    tokens: Tensor
    spans: Sequence[Span]
    pool: BlockPool
    layers: Iterable[int] | None = None  # default: all, in order
    skip: Container[Sublayer] = ()  # sublayers of these that are passed by
    taps: Sequence[int] = ()  # hidden states to return: see `Decoder.forward`

    @property
    def longest(self) -> int:
        return max(span.end for span in self.spans)

    def positions(self, device: torch.device) -> Tensor:
        """Of the rows, [T]."""
        return send(torch.cat([span.positions() for span in self.spans]), device)

    def runs(self, layers: int) -> Sequence[range]:
        """The layers in runs of consecutive ones; of single layers where some are passed by."""
        wanted = range(layers) if self.layers is None else self.layers
        if self.skip or not isinstance(wanted, range):
            return [range(index, index + 1) for index in wanted]
        return [wanted]


@dataclass
class Decoder:
    config: ModelConfig
    embedding: Tensor  # [V, H]
    layers: list[Layer]
    final_norm: Norm
    head: Linear
    device: torch.device
    dtype: torch.dtype  # of the activations and the cache
    positions: Tensor | None = None  # learned positions, [max + offset, H]
    head_ids: Tensor | None = None  # the ids that `head` scores, where it is not all of them
    ropes: dict[bool, Rope] = field(init=False)  # keyed by "is a sliding layer"

    def __post_init__(self) -> None:
        # Gemma rounds the factor to the model's dtype; follow it.
        self.embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        self.ropes = ropes(self.config, self.device)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [T, H] (before the last norm) and the taps asked for, each [T, H].

        Tap i is the input of layer i (`hidden_states[i]` in transformers), `num_layers` the last layer's output, -1
        that output after the final norm. Writes keys and values of every row into its sequence's slots in `batch.pool`.
        """
        hidden = self._embed(batch)
        step = self.plan(batch)
        taps: dict[int, Tensor] = {}
        for run in batch.runs(self.config.num_layers):
            if batch.skip:
                taps |= {index: step.keep(hidden) for index in run if index in batch.taps}
                hidden = self._half_by_half(step, run, batch.skip, hidden)
            else:
                hidden, kept = step.through(run, hidden, batch.taps)
                taps |= kept
        if self.config.num_layers in batch.taps:
            taps[self.config.num_layers] = step.keep(hidden)
        if NORMED in batch.taps:
            taps[NORMED] = self.final_norm(hidden)
        return hidden, taps

    def _half_by_half(self, step: Sublayers, run: range, skip: Container[Sublayer], hidden: Tensor) -> Tensor:
        for index in run:
            if (index, "attention") not in skip:
                hidden = step.attend(index, hidden)
            if (index, "mlp") not in skip:
                hidden = step.mlp(index, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows [R, H] -> fp32 logits [R, V] (or [R, len(head_ids)])."""
        return self.head(self.final_norm(hidden)).float()

    def plan(self, batch: Batch) -> Sublayers:
        """What one step needs to run the layers' two halves."""
        positions = batch.positions(self.device)
        tables = {local: rope.table(positions, batch.longest) for local, rope in self.ropes.items()}
        return TorchSublayers(
            self.config,
            self.layers,
            batch.pool,
            plan_attention(self.config, batch.spans, self.device),
            write_slots(batch.spans, self.device),
            tables,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [T, H] of token ids [T], as stored (Gemma scales them on the way in)."""
        return F.embedding(tokens, self.embedding).to(self.dtype)

    def _embed(self, batch: Batch) -> Tensor:
        hidden = self.embed(batch.tokens)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.positions is not None:
            hidden = hidden + self.positions[batch.positions(self.device) + self.config.position_offset]
        return hidden
