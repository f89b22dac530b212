"""Medusa heads on disk: the authors' layout, alone or inside a whole model's checkpoint, and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.config import HeadFolder
from paceline.heads.expected import check_tensors
from paceline.heads.medusa import MedusaHead
from paceline.heads.tensors import HeadTensors, Rename, Shape
from paceline.model.config import ModelConfig
from paceline.model.linear import DenseLinear, Int8Linear, Linear, quantize_rows
from paceline.native.linear import NativeLinear
from paceline.native.packed import Format, quantize

_MODULE = re.compile(r"medusa_heads?\.")  # what the heads are called inside a model
_SHARED = "lm_head"


@dataclass(frozen=True)
class Layout:
    """Names of one format. `known` matches weights by (head, block), or by (, , head) where there are no blocks."""

    block: Callable[[int, int], str]  # of head, block
    output: Callable[[int, int], str]  # of head, number of blocks
    known: re.Pattern[str]
    heads: tuple[str, ...]  # what config.json may call their number
    blocks: tuple[str, ...]  # and that of residual blocks in each


AUTHORS = Layout(
    block=lambda head, block: f"{head}.{block}.linear",
    output=lambda head, blocks: f"{head}.{blocks}",
    known=re.compile(r"(\d+)\.(\d+)\.linear\.weight|(\d+)\.0\.weight"),
    heads=("medusa_num_heads", "num_medusa_heads"),
    blocks=("medusa_num_layers", "num_medusa_layers"),
)
VLLM = Layout(
    block=lambda head, block: f"blocks.{head}.layers.{block}",
    output=lambda head, blocks: f"lm_heads.{head}",
    known=re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight|lm_heads\.(\d+)\.weight"),
    heads=("num_heads", "medusa_num_heads"),
    blocks=("num_hidden_layers", "medusa_num_layers"),
)


def matches(folder: HeadFolder) -> bool:
    return folder.speculators_type is None and _layout(folder.tensors.rename(_rule(folder))) is not None


def load(folder: HeadFolder, target: ModelConfig, backend: Backend) -> MedusaHead:
    """Raises PacelineError for heads of another model and for tensors that are missing or too many."""
    tensors = folder.tensors.rename(_rule(folder))
    layout = _layout(tensors)
    if layout is None:
        raise PacelineError(f"'{folder.name}' holds no Medusa heads; give the directory of the heads")
    stored = Stored(folder, tensors, layout, target)
    stored.check()
    ids = stored.target_ids()
    return MedusaHead(
        blocks=[[stored.linear(module, backend) for module in modules] for modules in stored.modules],
        outputs=[stored.linear(module, backend, ids) for module in stored.outputs],
        dtype=backend.dtype,
        target_ids=None if ids is None else ids.to(backend.device),
        logit_scale=float(folder.raw.get("logit_scale", 1.0)),
    )


def _rule(folder: HeadFolder) -> Rename:
    """In a whole model's checkpoint the heads are a module of it, and the rest belongs to the target."""
    inside = any(_MODULE.match(name) for name in folder.tensors.entries)

    def rename(name: str) -> str | None:
        if _MODULE.match(name):
            return _MODULE.sub("", name, count=1)
        return None if inside and name.startswith(("model.", _SHARED + ".")) else name

    return rename


def _layout(tensors: HeadTensors) -> Layout | None:
    return next((each for each in (AUTHORS, VLLM) if any(each.known.fullmatch(name) for name in tensors.entries)), None)


@dataclass(frozen=True)
class Stored:
    """Medusa heads in a folder, held against a target."""

    folder: HeadFolder
    tensors: HeadTensors
    layout: Layout
    target: ModelConfig

    @cached_property
    def modules(self) -> list[list[str]]:
        """The residual blocks of each head.

        As many as the file has (more heads than config.json tells of may be there), or as config.json promises, where
        that is more: then some are missing.
        """
        found = [match for name in self.tensors.entries if (match := self.layout.known.fullmatch(name))]
        heads = max(int(match[1] or match[3]) for match in found) + 1
        blocks = max((int(match[2]) for match in found if match[2]), default=-1) + 1
        heads, blocks = max(heads, self._told(self.layout.heads)), max(blocks, self._told(self.layout.blocks))
        return [[self.layout.block(head, block) for block in range(blocks)] for head in range(heads)]

    @cached_property
    def outputs(self) -> list[str]:
        """The output of each head, or one for all, or none: then they use the target's.

        None: vLLM's `original_lm_head` where the file has no copy of it, and the authors' `version` 2.
        """
        own = self._own_outputs()
        if self.folder.raw.get("original_lm_head"):
            return [name for name in (_SHARED, own[0]) if self._has(name)][:1]
        if self.layout is AUTHORS and not any(self._has(name) for name in own):
            return []
        return own

    @property
    def vocabulary(self) -> int:
        """Tokens that the heads score: fewer than the target's where a `token_map` picks them (vLLM)."""
        return int(self.folder.raw.get("truncated_vocab_size") or self.target.vocab_size)

    def check(self) -> None:
        """Raises PacelineError: one of another model, told from one whose file is broken."""
        outputs = [self.tensors.shape(f"{name}.weight") for name in self.outputs if self._has(name)]
        blocks = [self.tensors.shape(f"{name}.weight") for each in self.modules for name in each if self._has(name)]
        vocabulary = int(self.folder.raw.get("vocab_size") or max((shape[0] for shape in outputs), default=0))
        hidden, target = (outputs + blocks)[0][-1], self.target
        if hidden != target.hidden_size:
            raise self.folder.misfit(f"it reads hidden states of size {hidden}, this model's are {target.hidden_size}")
        if vocabulary not in (0, target.vocab_size):
            raise self.folder.misfit(f"its vocabulary has {vocabulary} tokens, this model's {target.vocab_size}")
        check_tensors(self.folder.name, self.tensors, self._required(), self._unused())

    def target_ids(self) -> Tensor | None:
        """Ids [D] of a truncated vocabulary's rows."""
        if not self.outputs or self.vocabulary == self.target.vocab_size:
            return None
        ids, most = self.tensors.get("token_map").to(torch.int64), self.target.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= most or len(set(ids.tolist())) < len(ids):
            raise PacelineError(
                f"head '{self.folder.name}' has a token_map that does not list different ids below {most}"
            )
        return ids

    def linear(self, module: str, backend: Backend, ids: Tensor | None = None) -> Linear:
        """`ids`: only these rows, where the file has them all. Beside an int8 target in int8 too: outputs in fp32 would
        take longer than the target's whole step, and a draft's rounding costs acceptance, never exactness."""
        weight, bias = self.tensors.get(f"{module}.weight"), None
        if ids is not None and weight.shape[0] > ids.shape[0]:
            weight = weight[ids]
        if f"{module}.bias" in self.tensors:
            bias = self.tensors.get(f"{module}.bias").to(backend.device, backend.dtype)
        if backend.native:
            return NativeLinear([quantize(weight, Format.Q8_0)], bias)
        if backend.int8:
            return Int8Linear(*quantize_rows(weight), bias, split=False)
        return DenseLinear(weight.to(backend.device, backend.dtype), bias)

    def _required(self) -> dict[str, Shape]:
        hidden = self.target.hidden_size
        shapes: dict[str, Shape] = {}
        for module in (module for modules in self.modules for module in modules):
            shapes[f"{module}.weight"] = (hidden, hidden)
            if self._biased:
                shapes[f"{module}.bias"] = (hidden,)
        for module in self.outputs:
            whole = self._has(module) and self.tensors.shape(f"{module}.weight")[0] == self.target.vocab_size
            shapes[f"{module}.weight"] = (self.target.vocab_size if whole else self.vocabulary, hidden)
        if self.outputs and self.vocabulary < self.target.vocab_size:
            shapes["token_map"] = (self.vocabulary,)
        return shapes

    def _unused(self) -> dict[str, Shape]:
        """What vLLM passes over: outputs where one is shared, the map of a vocabulary that is not truncated."""
        if self.layout is AUTHORS:
            return {}
        names = [f"{name}.weight" for name in (_SHARED, *self._own_outputs())] + ["token_map"]
        return {name: self.tensors.shape(name) for name in names if name in self.tensors}

    @property
    def _biased(self) -> bool:
        told = self.layout is AUTHORS or bool(self.folder.raw.get("medusa_fc_bias"))
        return told or any(f"{module}.bias" in self.tensors for module in self.modules[0])

    def _own_outputs(self) -> list[str]:
        return [self.layout.output(head, len(blocks)) for head, blocks in enumerate(self.modules)]

    def _told(self, keys: tuple[str, ...]) -> int:
        return next((int(self.folder.raw[key]) for key in keys if key in self.folder.raw), 0)

    def _has(self, module: str) -> bool:
        return f"{module}.weight" in self.tensors
