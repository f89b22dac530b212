"""What was captured of the target, in files that are mapped into memory: a run trains on more than memory holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import PacelineError
from paceline.train.disk import write_json, write_whole


@dataclass(frozen=True)
class Passage:
    """One conversation of n tokens as the target read it.

    tokens [n]; prompt: how many of them are the prompt's; taps [n, K, H]: hidden states of the layers that the index
    names; last [n, H]: the last one's output after the final norm, from which the target's distribution follows; best
    [n]: its likeliest next token behind each row, -1 for rows inside the prompt.
    """

    tokens: Tensor
    prompt: int
    taps: Tensor
    last: Tensor
    best: Tensor

    @property
    def greedy(self) -> bool:
        """The answer is what greedy decoding says."""
        return bool((self.best[self.prompt - 1 : -1] == self.tokens[self.prompt :]).all())

    def cut(self, longest: int) -> Passage:
        """Its first `longest` tokens."""
        keep = slice(longest)
        return Passage(self.tokens[keep], self.prompt, self.taps[keep], self.last[keep], self.best[keep])


@dataclass(frozen=True)
class Index:
    """`index.json`. target: key of the model that was captured (checkpoint and precision); sequences, tokens: of each
    shard in turn. The first shard is held out of training."""

    target: str
    taps: list[int]
    hidden: int
    sequences: list[int]
    tokens: list[int]


HELD_OUT = 0


@dataclass
class Shards:
    """A folder of shards. What is not in the index was not finished and is written anew."""

    folder: Path
    index: Index

    @classmethod
    def open(cls, folder: Path) -> Shards | None:
        """None where nothing was captured yet. Raises PacelineError for an index that cannot be read."""
        path = folder / "index.json"
        if not path.exists():
            return None
        try:
            return cls(folder, Index(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise PacelineError(f"cannot read {path}: {error}; delete {folder} to capture again") from None

    @property
    def count(self) -> int:
        return len(self.index.sequences)

    @property
    def training(self) -> range:
        return range(HELD_OUT + 1, self.count)

    def check(self, target: str, taps: Sequence[int]) -> None:
        """Raises PacelineError if these are another model's states, or lack some that are wanted."""
        if self.index.target != target:
            raise PacelineError(f"{self.folder} holds another model's hidden states; use another --data, or delete it")
        if missing := [tap for tap in taps if tap not in self.index.taps]:
            raise PacelineError(f"{self.folder} lacks the hidden states of layers {missing}; use another --data")

    def append(self, passages: Sequence[Passage]) -> None:
        """Write one shard, then the index that counts it. Raises PacelineError on a full disk."""
        tensors = {
            "lengths": torch.tensor([len(each.tokens) for each in passages]),
            "prompts": torch.tensor([each.prompt for each in passages]),
            "tokens": torch.cat([each.tokens for each in passages]).int(),
            "best": torch.cat([each.best for each in passages]).int(),
            "taps": torch.cat([each.taps for each in passages]),
            "last": torch.cat([each.last for each in passages]),
        }
        write_whole(self._file(self.count), partial(save_file, tensors))
        self.index.sequences.append(len(passages))
        self.index.tokens.append(len(tensors["tokens"]))
        write_json(self.folder / "index.json", asdict(self.index))

    def read(self, number: int) -> list[Passage]:
        """The passages of one shard; their tensors lie in the mapped file until they are used."""
        stored = load_file(self._file(number))
        return list(_passages(stored))

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"


def _passages(stored: dict[str, Tensor]) -> Iterator[Passage]:
    start = 0
    for length, prompt in zip(stored["lengths"].tolist(), stored["prompts"].tolist(), strict=True):
        rows = slice(start, start + length)
        tokens, best = stored["tokens"][rows].long(), stored["best"][rows].long()
        yield Passage(tokens, prompt, stored["taps"][rows], stored["last"][rows], best)
        start += length
