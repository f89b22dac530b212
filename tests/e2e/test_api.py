"""The Python API on a tiny checkpoint folder: generate, stream, batches, asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from lab_files import letter_model
from torch import Tensor

from paceline import LLM, AsyncLLM, GenerationResult, PacelineError, SamplingParams
from paceline.engine.engine import Engine
from paceline.types import Sequence as Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(letter_model(tmp_path_factory.mktemp("letters")))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, threads=1, precision="fp32")


LONG = SamplingParams(max_tokens=20)


def test_one_text_gives_one_result_and_a_list_a_list(llm: LLM) -> None:
    one = llm.generate("abc", LONG)
    several = llm.generate(["abc", [0, 1, 2]], LONG)
    assert isinstance(one, GenerationResult)
    assert [r.token_ids for r in several] == [one.token_ids] * 2
    assert one.prompt_token_ids == [0, 1, 2]
    assert one.finish_reason == "length"
    assert len(one.token_ids) == one.stats.generated_tokens == 20


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, long = llm.generate(["abc", "abc"], [SamplingParams(max_tokens=3), LONG])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 20)
    with pytest.raises(PacelineError, match="2 prompts but 1 sampling parameters"):
        llm.generate(["abc", "abc"], [LONG])


def test_the_stream_adds_up_to_the_result(llm: LLM) -> None:
    chunks = list(llm.stream("abc", LONG))
    result = chunks[-1].result
    assert result is not None
    assert "".join(chunk.text for chunk in chunks) == result.text == llm.generate("abc", LONG).text
    assert [t for chunk in chunks for t in chunk.token_ids] == result.token_ids
    assert all(chunk.result is None for chunk in chunks[:-1])


def test_a_stream_closed_early_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("abc", LONG)
    next(stream)
    stream.close()
    assert llm.engine.idle
    assert llm.engine.cache_usage().used == 0


def test_logprobs_are_raw_and_one_a_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, temperature=0.5, top_k=1, seed=1)
    result = llm.generate("abc", params)
    assert result.logprobs is not None
    assert [lp.token_id for lp in result.logprobs] == result.token_ids
    for lp in result.logprobs:
        assert lp.logprob == pytest.approx(max(lp.top.values()))  # top_k=1: the likeliest was taken
        assert lp.logprob < -1e-4  # raw: not the truncated distribution's certainty
        assert len(lp.top) == 3


def test_a_seed_fixes_the_answer_for_every_method(folder: str) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=25)
    answers = [
        LLM(folder, threads=1, precision="fp32", method=method, draft=draft).generate("abcabc", params).token_ids
        for method, draft in (("none", None), ("ngram", None), ("draft", folder))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_reduced_draft_vocabulary_stays_lossless(folder: str) -> None:
    plain = LLM(folder, threads=1, precision="fp32", method="none").generate("abcabc", LONG)
    reduced = LLM(folder, threads=1, precision="fp32", draft=folder, draft_vocab=13, k=3).generate("abcabc", LONG)
    assert reduced.token_ids == plain.token_ids
    assert reduced.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "k must be a whole number of at least 1, not 0"),
        ({"method": "hope"}, "unknown method 'hope'"),
        ({"draft_vocab": 0, "draft": "self"}, "draft_vocab must be between 1 and 26, not 0"),
        ({"device": "cuda"}, "no GPU"),
        ({"ngram_min": 5, "ngram_max": 2}, "ngram_min"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], said: str, folder: str) -> None:
    options = {name: folder if value == "self" else value for name, value in options.items()}
    with pytest.raises(PacelineError, match=said):
        LLM(folder, **{"threads": 1, "precision": "fp32", **options})  # type: ignore[arg-type]


def test_wrong_prompts_are_named(llm: LLM) -> None:
    for prompt, said in (("", "empty"), ([], "empty"), ([99], "token id 99"), ([1] * 64, "context")):
        with pytest.raises(PacelineError, match=said):
            llm.generate([prompt], LONG)
    assert llm.engine.idle


def test_wrong_parameters_are_named(llm: LLM) -> None:
    for params in ({"temperature": 1.0}, [LONG]):
        with pytest.raises(PacelineError, match="params must be SamplingParams"):
            llm.generate("abc", params)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="put one list of ids in another list"):
        llm.generate([0, 1, 2], LONG)  # type: ignore[list-item]


def test_a_step_that_failed_leaves_the_other_requests_whole(folder: str) -> None:
    """A processor that raises ends its own call; a stream that shared the step goes on as it would alone."""

    def broken(logits: Tensor, history: Sequence[int]) -> Tensor:
        raise ValueError("no")

    engine = LLM(folder, threads=1, precision="fp32", draft=folder, k=3)
    want = engine.generate("abcabc", LONG).token_ids
    stream = engine.stream("abcabc", LONG)
    got = list(next(stream).token_ids)
    with pytest.raises(ValueError, match="no"):
        engine.generate("abc", SamplingParams(processors=(broken,)))
    for chunk in stream:
        got += chunk.token_ids
    assert got == want
    assert engine.engine.cache_usage().used == 0


def test_a_request_that_can_never_fit_is_refused_at_once(folder: str) -> None:
    from paceline import EngineConfig

    small = LLM(folder, threads=1, precision="fp32", engine=EngineConfig(cache_bytes=3000))
    with pytest.raises(PacelineError, match="lower max_tokens or raise cache_bytes"):
        small.generate("abc", SamplingParams(max_tokens=60))


def test_async_requests_share_the_engine(folder: str, llm: LLM) -> None:
    async def main() -> list[GenerationResult]:
        async with AsyncLLM(folder, threads=1, precision="fp32") as engine:
            return await asyncio.gather(*(engine.generate(prompt, LONG) for prompt in ("abc", "bca", "xyz")))

    results = asyncio.run(main())
    assert [r.token_ids for r in results] == [r.token_ids for r in llm.generate(["abc", "bca", "xyz"], LONG)]


def test_async_requests_under_way_end_when_the_engine_closes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def slow(self: Engine) -> list[Request]:
        time.sleep(0.01)  # the answer is not to be there before the engine is closed
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)

    async def main() -> None:
        engine = AsyncLLM(folder, threads=1, precision="fp32")
        task = asyncio.create_task(engine.generate("abc", SamplingParams(max_tokens=60)))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        with pytest.raises(PacelineError, match="closed"):
            await asyncio.wait_for(task, timeout=20)
        with pytest.raises(PacelineError, match="closed"):
            await asyncio.wait_for(engine.generate("abc"), timeout=20)

    asyncio.run(main())


def test_async_errors_reach_the_caller_and_cancelling_frees(folder: str) -> None:
    async def main() -> None:
        async with AsyncLLM(folder, threads=1, precision="fp32") as engine:
            with pytest.raises(PacelineError, match="token id 99"):
                await engine.generate([99])
            async for _ in engine.stream("abc", SamplingParams(max_tokens=50)):
                break
            assert (await engine.generate("abc", LONG)).finish_reason == "length"
            assert engine._llm.engine.cache_usage().used == 0

    asyncio.run(main())
