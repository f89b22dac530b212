"""Stage 1: the target answers the prompts, so that what is trained sees the text it will draft (self-distillation).

Every answer is a line of `responses.jsonl`, in the order of asking: what a budget or a kill leaves is a fair sample;
those that are finished first are the short ones. A run that was killed goes on with the prompts that have none.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from paceline.bench.evidence import encode
from paceline.bench.tasks import BenchPrompt
from paceline.build import Models, Options, build_engine
from paceline.engine.engine import Engine, EngineConfig
from paceline.errors import PacelineError
from paceline.sampling.params import SamplingParams
from paceline.train.disk import said_plainly
from paceline.types import Sequence as Request

BATCH = 32
LONGEST_PROMPT = 768  # tokens; longer ones cost the time of several answers
TEMPERATURE, TOP_K = 0.8, 64  # of every second prompt; the others are answered greedily


@dataclass(frozen=True)
class Response:
    """One conversation in token ids: the rendered prompt, and the target's answer with its end token."""

    id: str
    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class ResponseConfig:
    """max_tokens: longest answer. tokens: stop once this many were written (None: answer every prompt)."""

    max_tokens: int = 256
    tokens: int | None = None
    seed: int = 0


def write_responses(
    models: Models, prompts: Sequence[BenchPrompt], path: Path, config: ResponseConfig,
    progress: Callable[[int], None], expired: Callable[[], bool],
) -> int:  # fmt: skip
    """Answer the prompts that have no answer in `path` yet, and append; returns the tokens of all answers there.

    `progress` gets the tokens of each answer, `expired` says that the time is up. Raises PacelineError when the disk is
    full; what was written stays.
    """
    kept = drop_torn_line(path)
    total = sum(len(each.response) for each in kept)
    progress(total)
    done = {each.id for each in kept}
    enough = config.tokens is not None and total >= config.tokens
    waiting = iter([] if enough else [prompt for prompt in shuffled(prompts, config.seed) if prompt.id not in done])
    engine = build_engine(Options(models.target.name, method="none", engine=EngineConfig(max_batch=BATCH)), models)
    with said_plainly(path), path.open("a", encoding="utf-8") as file:
        for response in _answers(engine, waiting, config):
            file.write(json.dumps(asdict(response), separators=(",", ":")) + "\n")
            file.flush()
            total += len(response.response)
            progress(len(response.response))
            if expired() or (config.tokens is not None and total >= config.tokens):
                break
    if total == 0:
        raise PacelineError(f"none of the {len(prompts)} prompts was answered: each is empty or too long; give others")
    return total


def read_responses(path: Path) -> list[Response]:
    """All answers of a file. Raises PacelineError for a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PacelineError(
            f"cannot read the responses '{path}': {error.strerror}; the stage 'responses' writes them"
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(Response(**json.loads(line)))
        except (ValueError, TypeError):
            raise PacelineError(f"{path}:{number}: not an answer; remove the line or the file") from None
    return found


def drop_torn_line(path: Path) -> list[Response]:
    """What a killed run left behind, without the line that it did not finish."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return read_responses(path)


def shuffled(prompts: Sequence[BenchPrompt], seed: int) -> list[BenchPrompt]:
    """In an order that depends on nothing but the seed, so that any beginning is a fair mixture."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return order


def _answers(engine: Engine, waiting: Iterator[BenchPrompt], config: ResponseConfig) -> Iterator[Response]:
    """In the order of `waiting`; the batch is kept full until the prompts are used up."""
    asked: deque[tuple[int, BenchPrompt]] = deque()
    running: set[int] = set()
    finished: dict[int, Request] = {}

    def join() -> None:
        while len(running) < BATCH and (prompt := next(waiting, None)) is not None:
            sequence = _ask(engine, prompt, config)
            if sequence is not None:
                asked.append((sequence.id, prompt))
                running.add(sequence.id)

    join()
    while running:
        for sequence in engine.step():
            running.remove(sequence.id)
            finished[sequence.id] = sequence
        while asked and asked[0][0] in finished:
            name, prompt = asked.popleft()
            sequence = finished.pop(name)
            split = sequence.prompt_length
            yield Response(prompt.id, sequence.tokens[:split], sequence.tokens[split:])
        join()


def _ask(engine: Engine, prompt: BenchPrompt, config: ResponseConfig) -> Request | None:
    """None for a prompt that is too long to be worth it."""
    tokens = encode(engine.model.tokenizer, prompt.messages)
    if not tokens or len(tokens) > min(LONGEST_PROMPT, engine.model.config.max_positions // 2):
        return None
    digest = int.from_bytes(blake2b(prompt.id.encode(), digest_size=7).digest(), "little")
    temperature = TEMPERATURE if digest % 2 else 0.0
    params = SamplingParams(
        temperature=temperature, top_k=TOP_K, max_tokens=config.max_tokens, seed=digest + config.seed
    )
    return engine.add(tokens, params)
