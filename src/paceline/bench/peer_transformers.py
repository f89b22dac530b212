"""The peer: Hugging Face transformers' own greedy decoding of the same checkpoint, in bf16, on the same token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from paceline.bench.runner import Measurement, Runner
from paceline.build import Options
from paceline.errors import PacelineError
from paceline.weights.resolve import Checkpoint, resolve

PEERS = ("transformers", "transformers-lookup", "transformers-draft")
LOOKUP_TOKENS = 10


@dataclass
class TokenTimes:
    """A streamer that notes when tokens come. The first `put` brings the prompt, which is not counted.

    An assisted step brings several tokens at once, the first step too: the rate is of what came after the first step.
    """

    started: float
    token_ids: list[int] = field(default_factory=list)
    in_first_step: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    _prompt_seen: bool = False

    def put(self, tokens: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.token_ids += tokens.flatten().tolist()
        self.last_at = time.perf_counter()
        if not self.first_at:
            self.first_at, self.in_first_step = self.last_at, len(self.token_ids)

    def end(self) -> None:
        """Nothing is held back."""

    def measurement(self) -> Measurement:
        seconds = self.last_at - self.first_at
        rate = (len(self.token_ids) - self.in_first_step) / seconds if seconds > 0 else 0.0
        return Measurement(self.token_ids, rate, self.first_at - self.started)


@dataclass(frozen=True)
class TransformersRunner:
    """`arguments` to `generate` choose how to draft: none, prompt lookup or an assistant model."""

    model: Any
    max_tokens: int
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, prompt: Sequence[int]) -> Measurement:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        times = TokenTimes(started=time.perf_counter())
        with torch.no_grad():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.max_tokens,
                do_sample=False,
                streamer=times,
                **self.arguments,
            )
        return times.measurement()


def load_peers(methods: Sequence[str], options: Options, max_tokens: int, eos_ids: Sequence[int]) -> dict[str, Runner]:
    """A runner for each of `methods`; they share one loaded model. Raises PacelineError when transformers cannot."""
    if not methods:
        return {}
    model = _load(options.model, options.device, eos_ids)
    runners: dict[str, Runner] = {}
    for method in methods:
        runners[method] = TransformersRunner(model, max_tokens, _drafting(method, model, options, eos_ids))
    return runners


def _drafting(method: str, model: Any, options: Options, eos_ids: Sequence[int]) -> dict[str, Any]:
    if method == "transformers-lookup":
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if method == "transformers-draft":
        assert options.draft is not None
        assistant = _load(options.draft, options.device, eos_ids)
        _require_same_rows(model, assistant, options)
        return {"assistant_model": assistant}
    return {}


def _load(name: str, device: str | None, eos_ids: Sequence[int]) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = resolve(name)
    try:
        with redirect_stderr(StringIO()):  # one of its progress bars has no switch
            model = AutoModelForCausalLM.from_pretrained(**_where(checkpoint), dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PacelineError(f"transformers cannot load '{name}': {error}; leave its methods out") from error
    # A checkpoint's own defaults may hold penalties, which greedy decoding would heed and Paceline's does not.
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids), pad_token_id=eos_ids[0] if eos_ids else 0)
    return model.eval().to(place)


def _where(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.path
    if checkpoint.kind == "gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name} | _unpacked()
    return {"pretrained_model_name_or_path": str(path)}


def _unpacked() -> dict[str, Any]:
    """Newer releases keep GGUF weights packed unless told otherwise, which slows bf16 down; older ones never do."""
    import transformers

    packing = getattr(transformers, "GgufConfig", None)
    return {} if packing is None else {"quantization_config": packing(dequantize=True)}


def _require_same_rows(model: Any, assistant: Any, options: Options) -> None:
    ours, drafts = model.config.get_text_config().vocab_size, assistant.config.get_text_config().vocab_size
    if ours != drafts:
        raise PacelineError(
            f"transformers-draft needs output rows alike: {options.model} has {ours}, {options.draft} has {drafts}; "
            "leave it out"
        )
