"""Tiny random models of the original library, the same weights through Paceline, and the two ways of running them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.cache.pool import BlockPool, SequenceCache
from paceline.device import Backend
from paceline.model.attention import PaddedAttention, RowInvariantAttention, Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch, Decoder
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert
from paceline.weights.safetensors import SafetensorsSource
from paceline.weights.source import TensorSource

FP32 = Backend(torch.device("cpu"), "fp32", torch.float32)
TOLERANCE = 1e-4
ATTENTIONS = {"rows": RowInvariantAttention, "padded": PaddedAttention}

VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PLAIN_SIZES = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
WINDOW = 24
SLIDING_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, Any] = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=32, rms_norm_eps=1e-3),
    "mistral-window": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mistral-full": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3-bias": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=SLIDING_FULL * 2,
    ),
    "opt": OPTConfig(**PLAIN_SIZES, ffn_dim=96, word_embed_proj_dim=64),
    "opt-gelu": OPTConfig(**PLAIN_SIZES, ffn_dim=96, word_embed_proj_dim=64, activation_function="gelu"),
    "gpt2": GPT2Config(**PLAIN_SIZES),
    "gpt2-n-inner": GPT2Config(**PLAIN_SIZES, n_inner=80, layer_norm_epsilon=1e-3),
}


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A model of transformers with every weight, bias and norm random: one that is dropped or swapped shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        weight.copy_(_random_like(name, weight, offset=0.0 if config.model_type == "gemma3_text" else 1.0))
    model.tie_weights()
    return model


def _random_like(name: str, weight: Tensor, offset: float) -> Tensor:
    noise = torch.randn_like(weight)
    if weight.dim() == 1:
        is_gain = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
        return 0.3 * noise + (offset if is_gain else 0.0)
    return noise / math.sqrt(weight.shape[-1])


def from_source(source: TensorSource) -> Decoder:
    return assemble(source.config, dict(convert(source, FP32)), FP32)


def from_folder(folder: Path) -> Decoder:
    return from_source(SafetensorsSource(folder))


@cache
def family(name: str) -> tuple[Any, Decoder]:
    """The model of transformers and Paceline's decoder of the same weights, through a checkpoint folder."""
    return pair(FAMILIES[name])


def pair(config: Any, seed: int = 0) -> tuple[Any, Decoder]:
    model = tiny_model(config, seed)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, from_folder(Path(folder))


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return logits


def use_attention(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """`rows` is what a CPU uses; `padded` is the accelerators', run here on the CPU."""
    monkeypatch.setattr("paceline.model.decoder.plan_attention", ATTENTIONS[kind])


@dataclass
class Run:
    """One sequence being run: its cache, all its tokens, and the logits so far."""

    cache: SequenceCache
    tokens: Sequence[int]
    logits: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.cache.length


def dirty_pool(config: ModelConfig, blocks: int = 64) -> BlockPool:
    """A pool whose unwritten slots hold large numbers: reading one that should be masked shows."""
    pool = BlockPool(config, blocks, FP32.device, FP32.dtype)
    for store in (*pool.keys, *pool.values):
        store.normal_(std=30.0)
    return pool


def contiguous(pool: BlockPool, tokens: Sequence[int]) -> Run:
    return Run(pool.open([], room=len(tokens)), tokens)


def scattered(pool: BlockPool, tokens: Sequence[int]) -> Run:
    """A sequence whose blocks are not consecutive: another one grows in between."""
    cache, other = pool.open([], room=1), pool.open([], room=1)
    for room in range(pool.block_size, len(tokens) + pool.block_size, pool.block_size):
        cache.reserve(room)
        other.reserve(room)
    assert len(cache.blocks) > 1
    assert all(b - a > 1 for a, b in zip(cache.blocks, cache.blocks[1:], strict=False))
    return Run(cache, tokens)


def step(decoder: Decoder, rows: Sequence[tuple[Run, int]]) -> None:
    """One forward: the next `count` tokens of each sequence, as one flat ragged batch."""
    tokens: list[int] = []
    spans: list[Span] = []
    for sequence, count in rows:
        sequence.cache.append(count)
        at = sequence.cache.length
        spans.append(Span(sequence.cache, len(tokens), count, at))
        tokens += sequence.tokens[at : at + count]
    pool = rows[0][0].cache.pool
    hidden, _ = decoder.forward(Batch(torch.tensor(tokens), spans, pool))
    logits = decoder.logits(hidden)
    for (sequence, count), span in zip(rows, spans, strict=True):
        sequence.logits.append(logits[span.start : span.start + count])
        sequence.cache.commit(range(count), sequence.tokens[: span.position + count])


def run_in_chunks(decoder: Decoder, sequence: Run, sizes: Sequence[int]) -> Tensor:
    """Logits of the whole sequence, computed `sizes[0]` rows at once, then `sizes[1]`, ..., round and round."""
    turn = 0
    while sequence.left:
        step(decoder, [(sequence, min(sizes[turn % len(sizes)], sequence.left))])
        turn += 1
    return torch.cat(sequence.logits)


def assert_parity(decoder: Decoder, model: Any, tokens: Sequence[int]) -> None:
    """One forward over the whole prompt gives the logits of transformers."""
    ours = run_in_chunks(decoder, contiguous(dirty_pool(decoder.config), tokens), [len(tokens)])
    assert_close(ours, reference_logits(model, tokens))


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.3, "a reference this flat would hide an error"
    worst = (ours - theirs).abs().max().item()
    assert worst <= tolerance, f"logits differ by {worst:.3g}"
