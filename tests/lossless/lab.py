"""A laboratory: a tiny random model behind the real engine, its exact joint law, and a chi-square test against it."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from scipy.stats import chi2
from tokenizers import Tokenizer as Backend_
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch
from paceline.propose.base import Budget, Proposer
from paceline.propose.draft_model import DraftModelProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams
from paceline.sampling.transform import RowSpan, transform
from paceline.text.tokenizer import Tokenizer
from paceline.types import NO_DRAFT, Committed, Draft, Verdict, View
from paceline.types import Sequence as Request
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert
from paceline.weights.load import LoadedModel

VOCAB = 6
PROMPT = [1, 4, 2, 2, 5]
DEVICE = torch.device(os.environ.get("PACELINE_TEST_DEVICE", "cpu"))  # `make gpu-check` sets it to cuda
FP32 = Backend(DEVICE, "fp32", torch.float32)
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    intermediate_size=24, max_positions=128,
)  # fmt: skip


@dataclass
class RandomSource:
    """Weights drawn from a seed; `sharpness` scales the output head, negative values turn the preferences around."""

    seed: int
    sharpness: float = 1.0
    config: ModelConfig = CONFIG
    quantized: bool = False
    gemma_norm_offset: bool = False

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias") and not name.startswith("lm_head")

    def stored(self, name: str) -> None:
        return None

    def get(self, name: str) -> Tensor:
        config = self.config
        kv = config.num_kv_heads * config.head_dim
        rows = {
            "embed_tokens": config.vocab_size, "q_proj": config.hidden_size, "k_proj": kv, "v_proj": kv,
            "o_proj": config.hidden_size, "gate_proj": config.intermediate_size, "up_proj": config.intermediate_size,
            "down_proj": config.hidden_size,
        }  # fmt: skip
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + sum(map(ord, name)) * 7919 + len(name))
        module = name.split(".")[-2]
        if module not in rows:
            return torch.ones(config.hidden_size)
        columns = config.intermediate_size if module == "down_proj" else config.hidden_size
        return torch.randn(rows[module], columns, generator=generator) * (0.5 if module == "embed_tokens" else 0.35)


def on(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), device=DEVICE)


def letters(count: int, eos: tuple[int, ...] = ()) -> Tokenizer:
    """Token i is the i-th letter."""
    backend = Backend_(BPE({chr(ord("a") + i): i for i in range(count)}, []))
    backend.decoder = ByteLevel()
    return Tokenizer(backend, eos_ids=eos)


def dense(source: RandomSource) -> dict[str, Tensor]:
    """All tensors in fp32, as `assemble` takes them."""
    return {name: tensor for name, tensor in convert(source, FP32) if isinstance(tensor, Tensor)}


def model(
    seed: int = 0,
    *,
    sharpness: float = 1.0,
    eos: tuple[int, ...] = (),
    config: ModelConfig = CONFIG,
    head_ids: Tensor | None = None,
) -> LoadedModel:
    source = RandomSource(seed, sharpness, config)
    tensors = dense(source)
    tensors["head.weight"] = tensors["head.weight"] * sharpness
    decoder = assemble(config, tensors, FP32, head_ids)
    return LoadedModel(f"random-{seed}", decoder, letters(config.vocab_size, eos), FP32, f"random-{seed}-{sharpness}")


def pool_for(loaded: LoadedModel, blocks: int = 4096, block_size: int = 4) -> BlockPool:
    return BlockPool(loaded.config, blocks, loaded.backend.device, loaded.backend.cache_dtype, block_size, loaded.key)


def draft_proposer(
    target: LoadedModel, draft: LoadedModel, *, shape: Shape = CHAIN, stop_below: float = 0.0
) -> DraftModelProposer:
    return DraftModelProposer(
        draft,
        pool_for(draft),
        vocab_size=target.vocab_size,
        width=target.config.vocab_size,
        stop_below=lambda: stop_below,
        shape=shape,
        prefill_chunk=8,
    )


@dataclass
class FixedProposer(Proposer):
    """Deterministic drafts from a rule on the tokens so far: no model, no cache."""

    rule: Callable[[Sequence[int]], list[int]]
    name: str = "fixed"
    seen: list[Verdict] = field(default_factory=list)

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            Draft(torch.tensor(self.rule(view.tokens)[: budget.depth], dtype=torch.int64)) if budget.depth else NO_DRAFT
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, view: View, committed: Committed) -> None:
        if committed.verdict is not None:
            self.seen.append(committed.verdict)


def engine(
    target: LoadedModel, proposer: Proposer, *, k: int | None = 3, max_batch: int = 256, chunk: int = 64
) -> Engine:
    config = EngineConfig(max_batch=max_batch, prefill_chunk=chunk, max_prefill_rows=4096)
    return Engine(target, proposer, pool_for(target), Controller(fixed=k), config)


def run(machine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    requests = [machine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while not machine.idle:
        machine.step()
    return requests


def output(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :]


def sample_outputs(
    machine: Engine, params: SamplingParams, draws: int, prompt: Sequence[int] = PROMPT
) -> list[tuple[int, ...]]:
    """`draws` independent answers to one prompt, seeds 0, 1, 2, ..."""
    several = [replace(params, seed=seed) for seed in range(draws)]
    return [tuple(output(request)) for request in run(machine, [prompt] * draws, several)]


def next_distribution(target: LoadedModel, tokens: Sequence[int], params: SamplingParams, prompt: int) -> Tensor:
    """The target's distribution after its chain, from a fresh prefill."""
    pool = pool_for(target, blocks=64)
    cache = pool.open([], len(tokens))
    cache.append(len(tokens))
    batch = Batch(on(tokens), [Span(cache, 0, len(tokens), 0)], pool)
    hidden, _ = target.decoder.forward(batch)
    logits = target.decoder.logits(hidden[-1:])
    span = RowSpan(params, tokens, prompt, 0)
    return transform(logits, [span]).softmax(dim=1)[0].double().cpu()


def exact_law(
    target: LoadedModel, params: SamplingParams, length: int, prompt: Sequence[int] = PROMPT
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens, by enumeration."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            p = next_distribution(target, [*prompt, *prefix], params, len(prompt))
            for token in range(target.config.vocab_size):
                if p[token] > 0:
                    grown[(*prefix, token)] = mass * float(p[token])
        law = grown
    return law


def p_value(outcomes: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square goodness of fit; cells expected under 5 times are pooled. An impossible outcome gives 0."""
    seen = Counter(outcomes)
    if any(outcome not in law for outcome in seen):
        return 0.0
    total = len(outcomes)
    pairs = [(seen[outcome], mass * total) for outcome, mass in law.items()]
    large = [pair for pair in pairs if pair[1] >= 5]
    small = [pair for pair in pairs if pair[1] < 5]
    if small:
        large.append((sum(s for s, _ in small), sum(e for _, e in small)))
    statistic = sum((s - e) ** 2 / e for s, e in large if e > 0)
    return float(chi2.sf(statistic, max(len(large) - 1, 1)))


def all_outputs(length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(VOCAB), repeat=length))
