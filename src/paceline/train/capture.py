"""Stage 2: what the target computes while it reads the conversations, either stored or handed on as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.model.attention import Span
from paceline.model.decoder import NORMED, Batch
from paceline.sampling.best import likeliest
from paceline.train.responses import Response
from paceline.train.shards import HELD_OUT, Index, Passage, Shards
from paceline.train.split import Split
from paceline.weights.load import LoadedModel

ROWS = 1024  # of a forward
SCORED = 256  # rows whose logits are held at once
SHARD_TOKENS = 65_536
LARGEST = 65_504.0  # of fp16: a few hidden states of a text's first token can be larger
BLOCK = 16


@dataclass(frozen=True)
class Capture:
    """Reads conversations with the target. taps: as `Decoder.forward` numbers them."""

    target: LoadedModel
    taps: Sequence[int]

    def passages(self, responses: Iterable[Response]) -> Iterator[Passage]:
        """In the order given."""
        group: list[Response] = []
        rows = 0
        for response in responses:
            length = len(response.prompt) + len(response.response)
            if group and rows + length > ROWS:
                yield from self._read(group)
                group, rows = [], 0
            group.append(response)
            rows += length
        if group:
            yield from self._read(group)

    @torch.inference_mode()
    def _read(self, group: Sequence[Response]) -> list[Passage]:
        decoder, backend = self.target.decoder, self.target.backend
        texts = [torch.tensor(each.prompt + each.response) for each in group]
        blocks = sum(-(-len(text) // BLOCK) for text in texts)
        pool = BlockPool(self.target.config, blocks, backend.device, backend.cache_dtype, BLOCK)
        spans, start = [], 0
        for text in texts:
            cache = pool.open((), len(text))
            cache.append(len(text))
            spans.append(Span(cache, start, len(text), 0))
            start += len(text)
        batch = Batch(torch.cat(texts).to(backend.device), spans, pool, taps=[*self.taps, NORMED])
        hidden, taps = decoder.forward(batch)
        last = _half(taps[NORMED])
        read = last[:, None][:, :0] if not self.taps else torch.stack([_half(taps[tap]) for tap in self.taps], dim=1)
        found = []
        for each, text, span in zip(group, texts, spans, strict=True):
            rows = slice(span.start, span.start + span.count)
            best = torch.full((span.count,), -1)
            best[len(each.prompt) - 1 :] = self._best(hidden[rows][len(each.prompt) - 1 :])
            found.append(Passage(text, len(each.prompt), read[rows], last[rows], best))
        return found

    def _best(self, hidden: Tensor) -> Tensor:
        known = self.target.vocab_size
        parts = [
            likeliest(self.target.decoder.logits(part)[:, :known].contiguous()) for part in torch.split(hidden, SCORED)
        ]
        return torch.cat(parts).cpu()


def store(
    shards: Shards, capture: Capture, responses: Sequence[Response], most_bytes: int,
    progress: Callable[[int], None], expired: Callable[[], bool],
) -> None:  # fmt: skip
    """Capture what `shards` does not have yet, until the budget is used up or the time is. `progress` gets tokens."""
    written = sum(shards.index.tokens)
    progress(written)
    if shards.count == 0:
        split = Split.of([each.prompt for each in responses])
        shards.append(list(capture.passages(split.judging(responses))))
        written = sum(shards.index.tokens)
        progress(written)
    else:
        split = Split.of([each.tokens[: each.prompt].tolist() for each in shards.read(HELD_OUT)])
    bytes_a_token = 2 * shards.index.hidden * (len(shards.index.taps) + 1) + 8
    waiting = capture.passages(split.training(responses)[sum(shards.index.sequences[HELD_OUT + 1 :]) :])
    shard: list[Passage] = []
    held = 0
    for passage in waiting:
        shard.append(passage)
        held += len(passage.tokens)
        progress(len(passage.tokens))
        if held >= SHARD_TOKENS:
            shards.append(shard)
            written, held, shard = written + held, 0, []
            if expired() or (written + SHARD_TOKENS) * bytes_a_token > most_bytes:
                return
    if shard:
        shards.append(shard)


def new_index(target: LoadedModel, taps: Sequence[int]) -> Index:
    return Index(target.key, list(taps), target.config.hidden_size, [], [])


def _half(hidden: Tensor) -> Tensor:
    return hidden.float().clamp(-LARGEST, LARGEST).half().cpu()
