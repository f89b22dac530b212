"""Tiny heads for the laboratory, and what they would draft if every row were computed anew for every node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import CONFIG, FP32, model, on, pool_for, run
from torch import Tensor
from views import Text

from paceline.cache.pool import BlockPool
from paceline.device import Backend
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig
from paceline.heads.config import HeadFolder
from paceline.heads.eagle import Eagle1Head, EagleHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.formats import eagle1, eagle3, mtp
from paceline.heads.mtp import MtpHead
from paceline.heads.tensors import Entry, HeadTensors
from paceline.model.attention import Span
from paceline.model.config import ModelConfig
from paceline.model.decoder import Batch
from paceline.native.chain import NativeChain
from paceline.propose.base import Budget, Proposer
from paceline.propose.eagle import EagleProposer
from paceline.propose.mtp import MtpProposer, RepeatedDepth
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.noise import Purpose, gumbel, key
from paceline.sampling.params import SamplingParams
from paceline.types import Committed, Draft, View
from paceline.types import Sequence as Request
from paceline.weights.load import LoadedModel

WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
TINY = replace(CONFIG, vocab_size=3, max_positions=256)  # so few tokens that an untrained head often guesses right
Shapes = Mapping[str, tuple[int, ...]]


# Heads with weights drawn from a seed


def folder(config: ModelConfig, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadFolder:
    """A folder that was never on a disk, of a head with layers like a target's of this config."""
    base = {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "num_hidden_layers": 1, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    entries = {name: _entry(name, tensor) for name, tensor in tensors.items()}
    return HeadFolder("random", {**base, **raw}, HeadTensors(Path(), entries))


def _entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tuple(tensor.shape), lambda: tensor)


def draw(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.3 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])

    return {name: one(shape) for name, shape in shapes.items()}


def layer(config: ModelConfig, at: str, inputs: int) -> Shapes:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    return {
        f"{at}self_attn.q_proj.weight": (config.num_heads * dim, inputs),
        f"{at}self_attn.k_proj.weight": (config.num_kv_heads * dim, inputs),
        f"{at}self_attn.v_proj.weight": (config.num_kv_heads * dim, inputs),
        f"{at}self_attn.o_proj.weight": (hidden, config.num_heads * dim),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        f"{at}post_attention_layernorm.weight": (hidden,),
    }


def eagle1_head(target: LoadedModel, seed: int = 0, backend: Backend = FP32) -> Eagle1Head:
    """With the target's embedding and output head."""
    config = target.config
    hidden = config.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer(config, "layers.0.", hidden)}
    return eagle1.load(folder(config, {}, draw(shapes, seed)), config, backend)


def eagle3_head(
    target: LoadedModel, seed: int = 0, *, ids: Sequence[int] | None = None, own_embedding: bool = False,
    sharpness: float = 2.0, backend: Backend = FP32, flags: Mapping[str, bool] | None = None,
) -> Eagle3Head:  # fmt: skip
    """Reads the inputs of both layers and the last one's output. `ids`: the target's tokens that it scores. `flags`: of
    its config.json."""
    config = target.config
    hidden, rows = config.hidden_size, config.vocab_size if ids is None else len(ids)
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (rows, hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in norms} | dict(layer(config, "midlayer.", 2 * hidden))
    shapes |= {"embed_tokens.weight": (config.vocab_size, hidden)} if own_embedding else {}
    tensors = draw(shapes, seed)
    tensors["lm_head.weight"] *= sharpness
    if ids is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
    raw = {"eagle_aux_hidden_state_layer_ids": list(range(config.num_layers + 1)), "draft_vocab_size": rows}
    raw |= flags or {}
    return eagle3.load(folder(config, raw, tensors), config, backend)


def mtp_head(target: LoadedModel, depths: int, seed: int = 0, backend: Backend = FP32) -> MtpHead:
    """In MiMo's layout."""
    config = target.config
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for depth in range(depths):
        at = f"model.mtp_layers.{depth}."
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
        shapes |= {f"{at}{name}.weight": (hidden,) for name in norms}
        shapes |= {f"{at}input_proj.weight": (hidden, 2 * hidden)} | dict(layer(config, at, hidden))
    stored = folder(config, {"num_nextn_predict_layers": depths}, draw(shapes, seed))
    return mtp.load(stored, config, backend)


def successor_model() -> LoadedModel:
    """What follows a token depends on that token alone: neither attention nor MLP adds anything."""
    loaded = model(0, config=WIDE, sharpness=2.0)
    for layer in loaded.decoder.layers:
        layer.output = layer.down = lambda x: x.new_zeros(x.shape[0], CONFIG.hidden_size)
    chain = torch.randperm(WIDE.vocab_size, generator=torch.Generator().manual_seed(3))
    embedding = loaded.decoder.embedding
    loaded.decoder.head = lambda x: (x @ embedding.T)[:, chain.to(x.device)]
    return loaded


AnyHead = EagleHead | MtpHead


def head(kind: str, target: LoadedModel, backend: Backend = FP32) -> AnyHead:
    """By name, for tests that go through all of them."""
    vocabulary = target.config.vocab_size
    if kind == "eagle-1":
        return eagle1_head(target, backend=backend)
    if kind == "eagle-3":
        return eagle3_head(target, ids=range(0, vocabulary, 2), backend=backend)
    if kind == "eagle-3 own embedding":
        return eagle3_head(target, ids=range(1, vocabulary), own_embedding=True, backend=backend)
    return mtp_head(target, int(kind.removeprefix("mtp ")), backend=backend)


EAGLE = ["eagle-1", "eagle-3", "eagle-3 own embedding", "mtp 1"]
DEPTHS = ["mtp 2", "mtp 3"]
KINDS = [*EAGLE, *DEPTHS]


def pool_of(target: LoadedModel, head: AnyHead, blocks: int = 4096) -> BlockPool:
    return BlockPool(head.config, blocks, target.backend.device, head.cache_dtype, 4, "head")


def head_proposer(
    target: LoadedModel, head: AnyHead, shape: Shape = CHAIN, *, blocks: int = 4096, stop_below: float = 0.0
) -> EagleProposer | MtpProposer:
    """The proposer that is made for this head; `blocks` of four positions in its cache."""
    vocab_size, decoder, pool = target.vocab_size, target.decoder, pool_of(target, head, blocks)
    if isinstance(head, MtpHead) and len(head.depths) > 1:
        return MtpProposer(head, decoder, pool, vocab_size=vocab_size, stop_below=lambda: stop_below, shape=shape)
    once = RepeatedDepth(head) if isinstance(head, MtpHead) else head
    chain = None if isinstance(head, MtpHead) else NativeChain.of(head, decoder, vocab_size)
    return EagleProposer(
        once, decoder, pool, vocab_size=vocab_size, stop_below=lambda: stop_below, shape=shape, chain=chain
    )


# What they should draft


def taps(target: LoadedModel, tokens: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
    """The target's hidden states [n, H] of a whole text, computed at once."""
    pool = pool_for(target, blocks=len(tokens))
    cache = pool.open([], len(tokens))
    cache.append(len(tokens))
    batch = Batch(on(tokens), [Span(cache, 0, len(tokens), 0)], pool, taps=layers)
    found = target.decoder.forward(batch)[1]
    return [found[tap] for tap in layers]


def _whole(target: LoadedModel, head: AnyHead, count: int) -> tuple[list[Span], BlockPool]:
    """Spans and an empty cache for rows 0 .. count - 1."""
    pool = pool_of(target, head, blocks=count)
    cache = pool.open([], count)
    cache.append(count)
    return [Span(cache, 0, count, 0)], pool


def eagle_logits(
    target: LoadedModel, head: EagleHead, tokens: Sequence[int], path: Sequence[int], first: int = 0
) -> Tensor:
    """Scores [V] of the token behind `tokens` and the drafted `path`: each row (x_{t+1}, f_t), f_t the target's as far
    as it has read (all but the last token), then the head's own. `first`: the first row that the head knows."""
    features = head.fuse(taps(target, tokens[:-1], head.taps))[first:]
    text = [*tokens, *path]
    for end in range(len(tokens), len(text) + 1):
        rows = len(features)
        embeds = head.embed(on(text[first + 1 : end]), target.decoder.embed)
        out = head.forward(embeds, features, *_whole(target, head, rows))
        features = torch.cat((features, out[-1:]))
    return _scatter(target, head.target_ids, head.logits(features[-1:], target.decoder.head)[0])


def repeated_logits(
    target: LoadedModel, head: MtpHead, tokens: Sequence[int], path: Sequence[int], first: int = 0
) -> Tensor:
    """The same for one depth that is applied again to what it gave."""
    (hidden,) = (states[first:] for states in taps(target, tokens[:-1], head.taps))
    text = [*tokens, *path]
    for end in range(len(tokens), len(text) + 1):
        embeds = head.embed(on(text[first + 1 : end]), target.decoder.embed)
        out = head.forward(0, embeds, hidden, *_whole(target, head, len(hidden)))
        hidden = torch.cat((hidden, out[-1:]))
    return head.logits(hidden[-1:], target.decoder.head)[0]


def depths_logits(
    target: LoadedModel, head: MtpHead, tokens: Sequence[int], path: Sequence[int], first: int = 0
) -> Tensor:
    """The same for several depths: depth k reads x_{t+k} and h^{k-1}_t in every row t that the target has computed."""
    (hidden,) = (states[first:] for states in taps(target, tokens[:-1], head.taps))
    text, rows = [*tokens, *path], len(hidden)
    for k in range(1, len(path) + 2):
        ahead = text[first + k : first + k + rows]
        embeds = head.embed(on(ahead), target.decoder.embed)
        hidden = head.forward(k - 1, embeds, hidden, *_whole(target, head, rows))
    return head.logits(hidden[-1:], target.decoder.head)[0]


def expected_logits(
    target: LoadedModel, head: AnyHead, tokens: Sequence[int], path: Sequence[int], first: int = 0
) -> Tensor:
    if isinstance(head, EagleHead):
        return eagle_logits(target, head, tokens, path, first)
    logits = repeated_logits if len(head.depths) == 1 else depths_logits
    return logits(target, head, tokens, path, first)


def _scatter(target: LoadedModel, ids: Tensor | None, logits: Tensor) -> Tensor:
    if ids is None:
        return logits
    return logits.new_full((target.config.vocab_size,), float("-inf")).index_copy(0, ids, logits)


@dataclass(frozen=True)
class Node:
    """One drafted token of a tree, told by the tokens that lead to it."""

    path: tuple[int, ...]
    confidence: float
    survival: float


def expected_draft(
    target: LoadedModel, head: AnyHead, view: View, budget: Budget, shape: Shape, first: int = 0
) -> dict[tuple[int, ...], float]:
    """Confidence of every node that belongs in the draft of a greedy or coupled request: EAGLE-2's growth, with each
    node's logits from nothing but its text. Chains are trees of width 1."""
    depths = len(head.depths) if isinstance(head, MtpHead) else 1
    rows, level, grown = len(view.tokens) - 1 - first, [Node((), 1.0, 1.0)], list[Node]()
    if rows < max(1, depths - 1):  # the last depth's first row needs as many tokens behind the first
        return {}
    for _ in range(min(budget.depth, shape.depth, depths if depths > 1 else shape.depth)):
        children = [child for node in level for child in _children(target, head, view, node, shape.width, first)]
        grown += children
        level = sorted(children, key=lambda node: -node.survival)[: shape.width]
    kept = sorted(grown, key=lambda node: -node.survival)[: min(shape.nodes, budget.nodes)]
    return {node.path: node.confidence for node in kept}


def _children(target: LoadedModel, head: AnyHead, view: View, node: Node, width: int, first: int) -> Iterable[Node]:
    logits = expected_logits(target, head, view.tokens, node.path, first)
    law = (logits / (view.params.temperature or 1.0)).log_softmax(dim=0)
    favour = law.double()
    if not view.params.greedy:
        words = on(key(view.seed, len(view.tokens) + len(node.path), Purpose.SAMPLE))
        favour = favour + gumbel(words, torch.arange(len(law), device=law.device))
    for token in favour.topk(min(width, len(law))).indices.tolist():
        if law[token] > float("-inf"):
            confidence = float(law[token].exp())
            yield Node((*node.path, token), confidence, node.survival * confidence)


# Looking on


@dataclass
class Watched(Proposer):
    """Passes everything on, and keeps what was drafted for whom, with which budget, and what was accepted of it."""

    inner: EagleProposer | MtpProposer
    drafts: list[tuple[Text, Budget, Draft]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.needs = self.inner.name, self.inner.needs

    def open(self, view: View) -> int:
        return self.inner.open(view)

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self.inner.propose(views, budgets)
        for view, budget, draft in zip(views, budgets, drafts, strict=True):
            if budget.depth:
                seen = Text(list(view.tokens), view.id, params=view.params, seed=view.seed)
                self.drafts.append((seen, budget, self._as_stated(view, draft)))
        return drafts

    def _as_stated(self, view: View, draft: Draft) -> Draft:
        """With the head's probabilities as confidence, not with what such probabilities have been worth."""
        if not isinstance(self.inner, EagleProposer) or self.inner._worth(view) is None or not draft.size:
            return draft
        return replace(draft, confidence=self.inner._states[view.id].stated)

    def observe(self, view: View, committed: Committed) -> None:
        if committed.verdict is not None and committed.verdict.drafted:
            self.accepted.append(committed.verdict.accepted)
        self.inner.observe(view, committed)

    def close(self, view: View) -> None:
        self.inner.close(view)


def nodes_of(draft: Draft) -> dict[tuple[int, ...], float]:
    """Confidence of each node by the tokens that lead to it."""
    tokens, paths = draft.tokens.tolist(), list[tuple[int, ...]]()
    for token, parent in zip(tokens, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    confidence = draft.confidence if draft.confidence is not None else [math.nan] * len(tokens)
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, confidence, strict=True))


def assert_drafts_from_scratch(
    watched: Watched, target: LoadedModel, head: AnyHead, shape: Shape, first: int = 0
) -> None:
    """Every draft that was seen has the nodes and the confidences that its text alone gives."""
    for view, budget, draft in watched.drafts:
        want = expected_draft(target, head, view, budget, shape, first)
        assert nodes_of(draft) == pytest.approx(want, abs=1e-4), f"behind {len(view.tokens)} tokens"


def small_engine(target: LoadedModel, proposer: Proposer, *, blocks: int, k: int) -> Engine:
    """The target's cache holds `blocks` blocks of four positions."""
    return Engine(target, proposer, pool_for(target, blocks), Controller(fixed=k), EngineConfig(max_batch=16))


def drafted(machine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[Request, list[Draft]]:
    """A request alone, and all its drafts."""
    watched = machine.proposer
    assert isinstance(watched, Watched)
    before = len(watched.drafts)
    (request,) = run(machine, [prompt], [params])
    return request, [draft for _, _, draft in watched.drafts[before:]]


def assert_same_drafts(ours: Sequence[Draft], theirs: Sequence[Draft]) -> None:
    """Steps without a draft do not count."""
    ours, theirs = [draft for draft in ours if draft.size], [draft for draft in theirs if draft.size]
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert nodes_of(one) == pytest.approx(nodes_of(other), abs=1e-5)
