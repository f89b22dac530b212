"""The nouns that every part shares: Sequence, Draft, Verdict, Committed, RequestStats."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from paceline.cache.tree import Parents, chain, depths, subtree
from paceline.device import send
from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.cache.pool import SequenceCache
    from paceline.engine.output import Output

FinishReason = Literal["stop", "length", "aborted"]


@dataclass
class RequestStats:
    """What speculation did for one request. Times in seconds; a batch's step counts whole for each of its requests."""

    target_forwards: int = 0  # those that emitted tokens; prompt chunks before the last are not among them
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the cache
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_from: dict[str, int] = field(default_factory=dict)  # by the method that drafted them
    drafted_at: list[int] = field(default_factory=list)  # by position in the draft
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from admission to the first token
    first_step_tokens: int = 0  # emitted by the step that ended the prompt: their time is not decoding time
    decode_seconds: float = 0.0  # from the first token's step to the last

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens (0 when nothing was drafted)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Chance that a drafted token at depth i is accepted, given that the draft was so deep."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward, the correction or bonus token included (tau)."""
        return self.generated_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first step over the time after it (0 when there were none)."""
        rest = self.generated_tokens - self.first_step_tokens
        return rest / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def record(self, verdict: Verdict, source: str) -> None:
        """`source`: the method that drafted."""
        if verdict.accepted:
            self.accepted_from[source] = self.accepted_from.get(source, 0) + verdict.accepted
        missing = verdict.depth - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for i in range(verdict.depth):
            self.drafted_at[i] += 1
        for i in range(verdict.accepted):
            self.accepted_at[i] += 1
        self.drafted += verdict.drafted
        self.accepted += verdict.accepted


class View(Protocol):
    """What a proposer sees of a sequence; read-only."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> abc.Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def room(self) -> int:
        """Most tokens, prompt included, that the sequence can come to."""
        ...

    @property
    def committed(self) -> int:
        """Tokens that the target has computed: after a step all but the last."""
        ...

    @property
    def prediction(self) -> abc.Sequence[int]:
        """The request's own likely answer, token ids; empty if it brought none."""
        ...

    @property
    def tenant(self) -> str: ...
    @property
    def cache(self) -> SequenceCache | None:
        """The target's cache. Only for proposers whose `Needs` say that they run the target's layers, inside
        `cache.scratch`."""
        ...


@dataclass
class Sequence:
    """One request in the engine. `tokens` is prompt and output; all but the last are in the cache after a step."""

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    room: int
    output: Output
    prediction: list[int] = field(default_factory=list)
    tenant: str = ""
    cache: SequenceCache | None = None
    trace: list[TracedStep] | None = None  # a list where the request is to be explained
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def committed(self) -> int:
        return 0 if self.cache is None else self.cache.length

    @property
    def pending(self) -> int:
        """Tokens that the target has not computed yet: the prompt's rest, or one."""
        return len(self.tokens) - self.committed


Draw = Literal["point", "iid", "without_replacement"]
"""How drafted tokens came: chosen deterministically, drawn one by one, or drawn so that siblings differ."""


@dataclass(frozen=True)
class Draft:
    """A tree of drafted tokens [n], ids in the target's vocabulary; a chain unless `parents` says otherwise.

    parents [n]: see `cache/tree.py`. `draw`: how children were chosen; all but `point` need `q` [m, V], whose row p + 1
    is exactly the distribution that node p's children were drawn from (row 0: the last token's children; rows past the
    last parent may be left out). `confidence` [n]: the proposer's estimate that a token is accepted given that its
    parent is; None if it has none. `origin` [n]: which of the proposer's own nodes these are, once some were cut.
    `read`: rows that had waited and had to be read first, which a draft in every step would not have to.
    """

    tokens: Tensor
    parents: Parents = ()
    draw: Draw = "point"
    q: Tensor | None = None
    confidence: abc.Sequence[float] | None = None
    origin: tuple[int, ...] | None = None
    source: str = ""  # the method that drafted it, where several share a step
    read: int = 0

    def __post_init__(self) -> None:
        if not self.parents:
            object.__setattr__(self, "parents", chain(self.size))

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def depth(self) -> int:
        """Length of its longest branch."""
        return max(depths(self.parents), default=0)

    def on(self, device: torch.device) -> Draft:
        """The same draft with its tokens on the target's device (proposers without a model draft on the host)."""
        if self.tokens.device.type == device.type:
            return self
        return replace(self, tokens=send(self.tokens, device))

    def keep(self, nodes: abc.Sequence[int]) -> Draft:
        """Only `nodes` (ascending, closed under parents). For sampled drafts they must be chosen without looking at
        what was drawn: the kept siblings are then a prefix of those drawn."""
        if len(nodes) == self.size:
            return self
        index = torch.tensor(nodes, dtype=torch.int64, device=self.tokens.device)
        q = None
        if self.q is not None:
            rows = [0, *(node + 1 for node in nodes if node + 1 < self.q.shape[0])]
            q = self.q[torch.tensor(rows, device=self.q.device)]
        confidence = None if self.confidence is None else [self.confidence[node] for node in nodes]
        origin = tuple(nodes) if self.origin is None else tuple(self.origin[node] for node in nodes)
        return replace(
            self, tokens=self.tokens[index], parents=subtree(self.parents, nodes), q=q, confidence=confidence,
            origin=origin,
        )  # fmt: skip

    def original(self, nodes: abc.Iterable[int]) -> tuple[int, ...]:
        """The proposer's own numbers of `nodes`."""
        return tuple(nodes) if self.origin is None else tuple(self.origin[node] for node in nodes)


NO_DRAFT = Draft(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Verdict:
    """What verification and truncation left of a draft of `drafted` nodes: `path`, accepted nodes from root to leaf.

    Nodes have the proposer's own numbers. `depth`: of the verified tree. `kept`: tokens that the step added, the
    correction or bonus token included unless truncation came first.
    """

    drafted: int
    path: tuple[int, ...]
    depth: int
    kept: int

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class Committed:
    """Rows of one sequence that became final: a prompt chunk, or the last token and the accepted path.

    Their tokens are `view.tokens[position : position + count]`. `taps`: for each layer of `Needs.taps` the hidden
    states [count, H] of these rows. `verdict`: None while the prompt is being computed.
    """

    position: int
    count: int
    taps: abc.Mapping[int, Tensor]
    verdict: Verdict | None = None


Origin = Literal["plain", "accepted", "correction", "bonus"]


@dataclass(frozen=True)
class TracedStep:
    """One step of one request, for `paceline explain`: the draft that was verified and what came of it.

    tokens, parents, confidence [n]: the draft; path: accepted nodes; emitted: the tokens that the step added, `origins`
    how each came; seconds of drafting and of the target's forward.
    """

    method: str
    tokens: list[int]
    parents: Parents
    confidence: list[float] | None
    path: tuple[int, ...]
    emitted: list[int]
    origins: list[Origin]
    draft_seconds: float
    target_seconds: float
