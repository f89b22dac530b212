"""Timing methods against plain decoding, interleaved: one after the other on each prompt, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.bench.margin import PlainOutput, plain_output
from paceline.bench.methods import options_of
from paceline.bench.noise import CpuClock, other_cores
from paceline.bench.peer_transformers import PEERS, load_peers
from paceline.bench.runner import EngineRunner, Measurement, Runner
from paceline.bench.tasks import BenchPrompt
from paceline.build import Models, Options, load_models
from paceline.cache.pool import ROUND
from paceline.engine.engine import EngineConfig
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

PLAIN = "none"
ENOUGH_REPEATS = 5


@dataclass(frozen=True)
class BenchConfig:
    """What to compare. `none` is always among the methods, first. Raises PacelineError for what cannot be run."""

    options: Options
    methods: Sequence[str]
    prompts: Sequence[BenchPrompt]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    repeats: int = ENOUGH_REPEATS

    def __post_init__(self) -> None:
        methods = tuple(dict.fromkeys((PLAIN, *self.methods)))
        object.__setattr__(self, "methods", methods)
        for method in methods:
            self._check(method)
        if self.max_tokens < 2:
            raise PacelineError(
                f"max_tokens must be at least 2, not {self.max_tokens}: the first is prefill, not decoding"
            )
        if self.repeats < 1:
            raise PacelineError(f"repeats must be at least 1, not {self.repeats}")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)

    @property
    def peers(self) -> list[str]:
        return [method for method in self.methods if method in PEERS]

    def _check(self, method: str) -> None:
        if method not in PEERS:
            options_of(method, self.options)
        elif method == "transformers-draft" and self.options.draft is None:
            raise PacelineError(f"method '{method}' needs a draft model: give --draft")
        if method in PEERS and self.temperature > 0:
            raise PacelineError(f"method '{method}' decodes greedily; use temperature 0, not {self.temperature}")


@dataclass(frozen=True)
class Run:
    """One timed answer. `turn`: its place among the methods of this prompt and repeat."""

    prompt: BenchPrompt
    method: str
    repeat: int
    turn: int
    measured: Measurement


@dataclass
class Outcome:
    """All timed runs, the plain greedy outputs by prompt id (none at a temperature), and how quiet the machine was."""

    config: BenchConfig
    runs: list[Run]
    plain: dict[str, PlainOutput] = field(default_factory=dict)
    other_cores: float = 0.0
    precision: str = ""
    draft_precisions: dict[str, str] = field(default_factory=dict)  # by draft model

    def first_plain_ids(self) -> dict[str, list[int]]:
        """By prompt id, what plain decoding said the first time: what all others are held against."""
        return {run.prompt.id: run.measured.token_ids for run in self.runs if run.method == PLAIN and run.repeat == 0}


OnRun = Callable[[int, int, str], None]
"""(runs done, runs in all, method that comes next). Called between timed runs."""


def run_bench(config: BenchConfig, on_run: OnRun | None = None) -> Outcome:
    """Load once, warm each method up, time them, and decode plainly once more for the margins."""
    models = load_models(replace(config.options, method=PLAIN))
    prompts = encode(config, models)
    llms = engines(config, models, longest=max(map(len, prompts.values())))
    runners: dict[str, Runner] = {method: EngineRunner(llm, config.params) for method, llm in llms.items()}
    runners |= load_peers(config.peers, config.options, config.max_tokens, models.target.eos_ids)
    warm_up(runners, prompts[config.prompts[0].id])
    started = CpuClock.read()
    runs = timed_runs(config, runners, prompts, on_run)
    outcome = Outcome(config, runs, other_cores=other_cores(started, CpuClock.read()))
    if config.params.greedy:
        outcome.plain = {key: plain_output(llms[PLAIN], ids, config.params) for key, ids in prompts.items()}
    outcome.precision = models.target.backend.precision
    drafts = [llm.models.draft for llm in llms.values() if llm.models.draft is not None]
    outcome.draft_precisions = {draft.name: draft.backend.precision for draft in drafts}
    return outcome


def encode(config: BenchConfig, models: Models) -> dict[str, list[int]]:
    """Token ids by prompt id, the same for every method. A prompt that cannot fit is told before anything runs."""
    limit = models.target.config.max_positions
    encoded = {}
    for prompt in config.prompts:
        ids = _encode(models.target.tokenizer, prompt)
        if len(ids) + config.max_tokens > limit:
            raise PacelineError(
                f"prompt '{prompt.id}' has {len(ids)} tokens; with max_tokens of {config.max_tokens} it passes the "
                f"context of {limit}; leave it out or lower max_tokens"
            )
        encoded[prompt.id] = ids
    if not encoded:
        raise PacelineError("no prompts to run; widen the kinds or the limit")
    return encoded


def _encode(tokenizer: Tokenizer, prompt: BenchPrompt) -> list[int]:
    """Rendered as a chat; for a base model, which has no template, the bare text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages))
    return tokenizer.encode(tokenizer.render_chat(prompt.messages))


def engines(config: BenchConfig, models: Models, longest: int) -> dict[str, LLM]:
    """An engine a method over the same weights, for one request at a time.

    A block holds a whole request, so none is ever full and none is found again: every run pays for its prefill, and
    no method decodes over what another left behind.
    """
    block = -(-(longest + config.max_tokens) // ROUND) * ROUND
    engine = EngineConfig(max_batch=1, block_size=block)
    own = [method for method in config.methods if method not in PEERS]
    options = {method: replace(options_of(method, config.options), engine=engine) for method in own}
    loaded: dict[tuple[str | None, str | None], Models] = {}  # a draft or head serves every method that uses it
    llms = {}
    for method, each in options.items():
        used = (each.used_draft, each.used_head)
        if used not in loaded:
            loaded[used] = load_models(each, models.target)
        llms[method] = LLM(models=loaded[used], **vars(each))
    return llms


def warm_up(runners: Mapping[str, Runner], prompt: Sequence[int]) -> None:
    """One whole answer a method, not counted: kernels are chosen, pages touched, the controller's costs learned."""
    for runner in runners.values():
        runner.run(prompt)


def timed_runs(
    config: BenchConfig, runners: Mapping[str, Runner], prompts: Mapping[str, Sequence[int]], on_run: OnRun | None
) -> list[Run]:
    total = config.repeats * len(config.prompts) * len(config.methods)
    runs: list[Run] = []
    for prompt, method, repeat, turn in schedule(config):
        if on_run is not None:
            on_run(len(runs), total, method)
        runs.append(Run(prompt, method, repeat, turn, runners[method].run(prompts[prompt.id])))
    if on_run is not None:
        on_run(total, total, "")
    return runs


def schedule(config: BenchConfig) -> Iterator[tuple[BenchPrompt, str, int, int]]:
    """(prompt, method, repeat, turn). The order turns by one each repeat and prompt: no method is always first."""
    for repeat in range(config.repeats):
        for index, prompt in enumerate(config.prompts):
            for turn, method in enumerate(rotated(config.methods, repeat + index)):
                yield prompt, method, repeat, turn


def rotated(methods: Sequence[str], by: int) -> list[str]:
    by %= len(methods)
    return [*methods[by:], *methods[:by]]
