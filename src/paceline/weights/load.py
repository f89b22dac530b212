"""A model, ready to run: decoder, tokenizer, backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.device import Backend, choose_backend
from paceline.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.native.decoder import runs_natively
from paceline.native.packed import Packed
from paceline.text.tokenizer import Tokenizer
from paceline.weights.assemble import assemble
from paceline.weights.cache_dir import converted_dir
from paceline.weights.convert import convert
from paceline.weights.draft_vocab import trained_ids
from paceline.weights.fingerprint import fingerprint
from paceline.weights.gguf import GGUFSource
from paceline.weights.resolve import Checkpoint, resolve
from paceline.weights.safetensors import SafetensorsSource
from paceline.weights.source import TensorSource
from paceline.weights.store import Converted, load_converted, save_converted


@dataclass
class LoadedModel:
    """`key` names checkpoint and precision: prefix hashes are salted with it."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    backend: Backend
    key: str

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def vocab_size(self) -> int:
        """Ids that can be emitted: checkpoints may pad their output rows past the tokenizer's."""
        return min(self.config.vocab_size, self.tokenizer.vocab_size)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.tokenizer.eos_ids, *self.config.eos_ids)))


def load_model(
    name: str,
    *,
    device: str | None = None,
    precision: str = "auto",
    head_vocab: int | None = None,
    as_draft: bool = False,
    progress: bool = False,
) -> LoadedModel:
    """Load a preset, directory, .gguf file or hub id. Raises PacelineError with what to do about it.

    `as_draft`: `auto` may take fewer bits than the checkpoint has, and only what it was trained to score is scored (see
    `draft_vocab.py`); of that, with `head_vocab`, the first so many token ids and the special ones.
    """
    checkpoint = resolve(name, progress=progress)
    key = fingerprint(checkpoint)
    choose = partial(choose_backend, device, precision, may_round=as_draft)
    backend, converted = _load_weights(checkpoint, key, choose, progress)
    tokenizer = load_tokenizer(checkpoint)
    head_ids = _scored(checkpoint, tokenizer, converted.config.vocab_size, head_vocab) if as_draft else None
    decoder = assemble(converted.config, converted.tensors, backend, head_ids)
    return LoadedModel(name, decoder, tokenizer, backend, f"{key}-{backend.key}")


def _scored(checkpoint: Checkpoint, tokenizer: Tokenizer, rows: int, count: int | None) -> Tensor | None:
    """The ids that a draft scores, ascending; None: all."""
    known = min(rows, tokenizer.vocab_size)
    trained = trained_ids(checkpoint.path, rows) if checkpoint.kind == "directory" else None
    if trained is not None:
        trained = trained[trained < known]  # rows that only pad the output
    if count is None:
        return trained
    if not 1 <= count <= known:
        raise PacelineError(f"draft_vocab must be between 1 and {known}, not {count}")
    first = torch.tensor(sorted({*range(count), *(token for token in tokenizer.special_ids if token < known)}))
    if trained is None:
        return first
    if not (both := first[torch.isin(first, trained)]).numel():
        raise PacelineError(f"draft_vocab {count} leaves no token that {checkpoint.name} is trained to score; raise it")
    return both


def open_source(checkpoint: Checkpoint) -> TensorSource:
    if checkpoint.kind == "gguf":
        return GGUFSource(checkpoint.path)
    return SafetensorsSource(checkpoint.path)


def _load_weights(
    checkpoint: Checkpoint, key: str, choose: Callable[..., Backend], progress: bool
) -> tuple[Backend, Converted]:
    found = _load_converted(checkpoint, key, choose)
    if found is not None:
        return found
    source = open_source(checkpoint)
    backend = choose(quantized_checkpoint=source.quantized, native=runs_natively(source.config))
    tensors = _convert(source, backend, f"converting {checkpoint.name} to {backend.precision}, once", progress)
    converted = Converted(source.config, source.quantized, tensors)
    if backend.native or backend.int8 or backend.int4 or (source.quantized and backend.precision != "fp32"):
        save_converted(key, backend, converted)
    # What was stored lies better in memory than what was converted piece by piece.
    return backend, (load_converted(key, backend) if backend.native else None) or converted


def _load_converted(
    checkpoint: Checkpoint, key: str, choose: Callable[..., Backend]
) -> tuple[Backend, Converted] | None:
    """What was stored for the backend that this checkpoint gets. Whether the kernels have what the model is made of is
    known from the config that is stored with the weights, so both are tried."""
    for native in (True, False):
        try:
            likely = choose(quantized_checkpoint=checkpoint.kind == "gguf", native=native)
        except PacelineError:
            if native:
                raise
            return None  # the precision that was asked for is the kernels' own
        stored = load_converted(key, likely)
        if stored is not None:
            backend = choose(quantized_checkpoint=stored.quantized, native=runs_natively(stored.config))
            if backend == likely:
                return backend, stored
    return None


def _convert(source: TensorSource, backend: Backend, label: str, progress: bool) -> dict[str, Tensor | Packed]:
    """All converted tensors, with a bar that moves a layer at a time."""
    if not progress:
        return dict(convert(source, backend))
    from rich.console import Console
    from rich.progress import Progress

    console, tensors = Console(stderr=True), dict[str, Tensor | Packed]()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=source.config.num_layers)
        for name, tensor in convert(source, backend):
            tensors[name] = tensor
            bar.advance(task, name.endswith((".down.weight", ".down.0")))
    return tensors


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.path, cache_dir=converted_dir())
    return Tokenizer.from_directory(checkpoint.path)
