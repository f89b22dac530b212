"""The guarantee bit for bit on a user's own model: every method, alone and in company, against plain decoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from paceline.bench.adversary import AdversaryProposer, KnownAnswer
from paceline.bench.bits import Answer, Comparison, Difference, compare
from paceline.bench.evidence import encode
from paceline.bench.tasks import BenchPrompt
from paceline.build import Models, Options, build_engine, load_models
from paceline.cache.pool import ROUND, BlockPool
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig, make_pool
from paceline.errors import PacelineError
from paceline.methods import available_methods, known_methods
from paceline.result import GenerationResult
from paceline.sampling.params import SamplingParams
from paceline.types import Sequence as Request
from paceline.weights.load import LoadedModel

PLAIN, ADVERSARY, AUTO = "none", "adversary", "auto"
BATCH = 8
CHUNK = 32  # prompt tokens of a step where prompts are read in chunks
TOP = 5  # likeliest tokens whose log probabilities are compared as well
TEMPERATURE = 0.8
DRAFT_LENGTH = 4  # fixed: what is drafted must not follow from how busy the machine was
DEEPEST, LARGEST = 8, 32  # the adversary's trees
ROUNDING = 1.0  # nats: no precision moves a log probability so far; a wrong key or value does


@dataclass(frozen=True)
class BitwiseConfig:
    """methods: None for all that can run. seeds: coupled answers to each prompt beside the greedy one; there are more
    where it takes more to fill a batch. Raises PacelineError for what cannot be run."""

    options: Options
    prompts: Sequence[BenchPrompt]
    methods: Sequence[str] | None = None
    max_tokens: int = 64
    seeds: int = 1

    def __post_init__(self) -> None:
        if not self.prompts:
            raise PacelineError("no prompts to run")
        for method in self.methods or ():
            if method != ADVERSARY and method not in known_methods():
                raise PacelineError(f"unknown method '{method}'; one of {', '.join(known_methods())}, {ADVERSARY}")
            options_of(method, self.options)


@dataclass(frozen=True)
class Case:
    """One request and what plain decoding says to it, alone and with its prompt read at once."""

    prompt: str
    kind: str
    tokens: list[int]
    params: SamplingParams
    plain: Answer = ()

    @property
    def ids(self) -> list[int]:
        return [entry.token_id for entry in self.plain]

    @property
    def second_half(self) -> Case:
        """The same request once half of its answer is known: noise goes by position, so the rest must not change."""
        half = len(self.plain) // 2
        params = replace(self.params, max_tokens=len(self.plain) - half)
        kind = f"{self.kind}, from token {half} on"
        return Case(self.prompt, kind, [*self.tokens, *self.ids[:half]], params, self.plain[half:])


@dataclass(frozen=True)
class Variant:
    """How answers are produced. batch: requests together, which join one after the other and share prefixes; alone, a
    request finds nothing in the cache unless it `resumes`: then it follows one that left half of its answer there.
    chunk: prompt tokens of a step, None for the whole prompt."""

    method: str
    batch: int = 1
    chunk: int | None = None
    resumes: bool = False

    @property
    def name(self) -> str:
        prompts = "whole prompts" if self.chunk is None else f"prompts in chunks of {self.chunk}"
        return f"{self.method}, batch {self.batch}, {'half the answer from the cache' if self.resumes else prompts}"


REFERENCE = Variant(PLAIN)


@dataclass(frozen=True)
class Finding:
    """What one variant showed. `passed` is None where a difference breaks no promise. gap: see `Comparison`.

    equal_prompts: those to which every answer was equal, of `prompts_compared`. first: the first difference, in
    `first_case`.
    """

    name: str
    passed: bool | None
    tokens: int
    equal_prompts: int
    prompts_compared: int
    answers_same_ids: int
    answers: int
    gap: float
    drafted: int
    accepted: int
    cached_tokens: int
    first_case: str | None
    first: Difference | None


@dataclass
class Bitwise:
    """Loaded models, the plain answers, and the variants to hold against them. One engine lives at a time."""

    config: BitwiseConfig
    target: LoadedModel
    methods: Sequence[str]
    cases: list[Case]
    loaded: dict[tuple[str | None, str | None], Models] = field(default_factory=dict)

    @classmethod
    def load(cls, config: BitwiseConfig) -> Bitwise:
        """Load the target and decode plainly, which is what all variants are compared with."""
        options = config.options
        target = load_models(replace(options, method=PLAIN)).target
        able = [*available_methods(options.draft, options.known_head, target.config.num_layers), ADVERSARY]
        check = cls(config, target, list(dict.fromkeys(config.methods or able)), _cases(config, target))
        for method in check.methods:  # a draft that cannot be had is told now
            check.models(options_of(method, options))
        plain = check.answers(REFERENCE, check.cases)
        check.cases = [
            replace(case, plain=result.logprobs or ()) for case, result in zip(check.cases, plain, strict=True)
        ]
        return check

    @property
    def promised(self) -> bool:
        return self.target.backend.row_invariant

    @property
    def variants(self) -> list[Variant]:
        """Every method alone and in company, prompts whole and in chunks, and once more from a filled cache."""
        each = product(self.methods, (1, BATCH), (None, CHUNK))
        found = [Variant(method, batch, chunk) for method, batch, chunk in each]
        found += [Variant(method, resumes=True) for method in self.methods]
        return sorted(found, key=lambda variant: self.methods.index(variant.method))

    def run(self) -> Iterator[Finding]:
        """Findings as variants finish."""
        for variant in self.variants:
            cases = self.cases
            if variant.resumes:
                cases = [each for case in self.cases for each in (case, case.second_half)]
            yield self.judge(variant, cases, self.answers(variant, cases))

    def answers(self, variant: Variant, cases: Sequence[Case]) -> list[GenerationResult]:
        return serve(self.engine(variant), cases)

    def engine(self, variant: Variant) -> Engine:
        """A fresh engine over the loaded weights."""
        options = replace(options_of(variant.method, self.config.options), engine=self.engine_config(variant))
        if variant.method == ADVERSARY:
            return _adversary(options, self.target, self.cases)
        return build_engine(options, self.models(options))

    def models(self, options: Options) -> Models:
        """A draft or head serves every method that uses it."""
        used = (options.used_draft, options.used_head)
        if used not in self.loaded:
            self.loaded[used] = load_models(options, self.target)
        return self.loaded[used]

    def engine_config(self, variant: Variant) -> EngineConfig:
        """Room for twice the batch. Where nothing may be found again, a block holds a whole request: none is ever
        full."""
        longest = max(len(case.tokens) for case in self.cases) + self.config.max_tokens
        room = -(-(longest + LARGEST) // ROUND) * ROUND
        shares = variant.batch > 1 or variant.resumes
        block = EngineConfig.block_size if shares else room
        models = self.models(options_of(variant.method, self.config.options))
        size = max(
            BlockPool.bytes_per_block(model.config, model.backend.cache_dtype, block)
            for model in (models.target, models.draft)
            if model is not None
        )
        requests = 2 * variant.batch * (1 if models.draft is None else 2)  # a draft gets half
        return EngineConfig(
            max_batch=variant.batch, prefill_chunk=variant.chunk or longest, block_size=block,
            cache_bytes=requests * -(-room // block) * size,
        )  # fmt: skip

    def judge(self, variant: Variant, cases: Sequence[Case], results: Sequence[GenerationResult]) -> Finding:
        compared = [compare(case.plain, result.logprobs or ()) for case, result in zip(cases, results, strict=True)]
        parted = [(case, each.difference) for case, each in zip(cases, compared, strict=True) if not each.equal]
        prompts = {case.prompt for case in cases}
        first_case, first = parted[0] if parted else (None, None)
        return Finding(
            name=variant.name,
            passed=_passed(compared, self.promised),
            tokens=sum(each.tokens for each in compared),
            equal_prompts=len(prompts - {case.prompt for case, _ in parted}),
            prompts_compared=len(prompts),
            answers_same_ids=sum(each.same_ids for each in compared),
            answers=len(compared),
            gap=max(each.gap for each in compared),
            drafted=sum(result.stats.drafted for result in results),
            accepted=sum(result.stats.accepted for result in results),
            cached_tokens=sum(result.stats.cached_tokens for result in results),
            first_case=None if first_case is None else f"{first_case.prompt} ({first_case.kind})",
            first=first,
        )


def options_of(method: str, options: Options) -> Options:
    """A draft length of its own where none was given; `auto` alone adapts it, as it always does."""
    if method in (PLAIN, ADVERSARY):
        return replace(options, method=PLAIN)
    length = options.shape.depth if options.tree is not None else DRAFT_LENGTH
    return replace(options, method=method, k=options.k if method == AUTO else options.k or length)


def spread(prompts: Sequence[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """`limit` prompts, one of each kind in turn."""
    if limit < 1:
        raise PacelineError(f"limit must be at least 1, not {limit}")
    seen: Counter[str] = Counter()
    rounds = []
    for prompt in prompts:
        rounds.append(seen[prompt.kind])
        seen[prompt.kind] += 1
    order = sorted(range(len(prompts)), key=rounds.__getitem__)
    return [prompts[index] for index in order[:limit]]


def serve(engine: Engine, cases: Sequence[Case]) -> list[GenerationResult]:
    """Half a batch at once, then one more before every step: it joins while others decode, and prompts are read beside
    drafts that are verified."""
    requests: list[Request] = []
    while len(requests) < len(cases) or not engine.idle:
        joining = 1 if requests else max(1, engine.config.max_batch // 2)
        for case in cases[len(requests) : len(requests) + joining]:
            requests.append(engine.add(case.tokens, case.params))
        engine.step()
    return [GenerationResult.of(request) for request in requests]


def _cases(config: BitwiseConfig, target: LoadedModel) -> list[Case]:
    """Greedy and coupled requests in turn, at least a batch of them."""
    greedy = SamplingParams(max_tokens=config.max_tokens, logprobs=TOP)
    seeds = max(config.seeds, math.ceil(BATCH / len(config.prompts)) - 1)
    coupled = [replace(greedy, temperature=TEMPERATURE, seed=seed, verify="coupled") for seed in range(seeds)]
    kinds = {"greedy": greedy} | {f"seed {params.seed}": params for params in coupled}
    cases = []
    for prompt in config.prompts:
        ids = encode(target.tokenizer, prompt.messages)
        cases += [Case(prompt.id, kind, ids, params) for kind, params in kinds.items()]
    return cases


def _adversary(options: Options, target: LoadedModel, cases: Sequence[Case]) -> Engine:
    known = [KnownAnswer(case.params.seed, [*case.tokens, *case.ids]) for case in cases]
    pool = make_pool(target.config, target.backend, target.key, options.engine)
    controller = Controller(fixed=DEEPEST, nodes=LARGEST)
    return Engine(target, AdversaryProposer(known, target.vocab_size), pool, controller, options.engine)


def _passed(compared: Sequence[Comparison], promised: bool) -> bool | None:
    """Any difference fails where bits are promised; elsewhere only one that rounding cannot explain."""
    if all(each.equal for each in compared):
        return True
    return False if promised or max(each.gap for each in compared) >= ROUNDING else None
