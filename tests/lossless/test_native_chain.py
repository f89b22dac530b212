"""Chains that the kernels grow in one call are those that the rollout grows level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from lab import engine, output, run
from lab_heads import Watched, assert_same_drafts, drafted, eagle3_head, head, head_proposer
from native_lab import NATIVE, needs_kernels
from test_native_target import PROMPTS, target

from paceline.heads.eagle3 import Eagle3Head
from paceline.native.chain import NativeChain
from paceline.propose.calibration import Calibration, tenth
from paceline.propose.eagle import EagleProposer
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams
from paceline.types import Draft

pytestmark = needs_kernels

GREEDY = SamplingParams(max_tokens=30)
HEATED = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
VARIANTS = {
    "as published": {}, "residual normed": {"norm_before_residual": True}, "normed fed": {"norm_output": True},
}  # fmt: skip


def a_head(variant: str = "as published", every: int = 2) -> Eagle3Head:
    """It scores every second token of the target, or with 0 all of them."""
    small = target(40)
    ids = range(0, 40, every) if every else None
    return eagle3_head(small, ids=ids, sharpness=6.0, backend=NATIVE, flags=VARIANTS[variant])


def proposer(own: Eagle3Head, *, stop_below: float = 0.0, shape: Shape = CHAIN) -> EagleProposer:
    made = head_proposer(target(40), own, shape, stop_below=stop_below)
    assert isinstance(made, EagleProposer)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the kernels drafted."""
    seen: list[int] = []
    original = NativeChain.draft

    def counted(self: NativeChain, *args: object, **kwargs: object) -> tuple[list[int], list[float]]:
        tokens, chances = original(self, *args, **kwargs)  # type: ignore[arg-type]
        seen.append(len(tokens))
        return tokens, chances

    monkeypatch.setattr(NativeChain, "draft", counted)
    return seen


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("stop_below", [0.0, 0.25])
@pytest.mark.parametrize("params", [GREEDY, HEATED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_drafts_as_level_by_level(
    variant: str, params: SamplingParams, stop_below: float, every: int, calls: list[int]
) -> None:
    own = a_head(variant, every)
    fast, slow = (Watched(proposer(own, stop_below=stop_below)) for _ in range(2))
    slow.inner.chain = None  # type: ignore[union-attr]
    for prompt in PROMPTS:
        ours, at_once = drafted(engine(target(40), fast, k=5, chunk=8), prompt, params)
        before = len(calls)
        theirs, by_level = drafted(engine(target(40), slow, k=5, chunk=8), prompt, params)
        assert len(calls) == before > 0
        assert output(ours) == output(theirs)
        assert_same_drafts(at_once, by_level)
    if stop_below > 0:
        assert 0 < min(calls) < max(calls)


@pytest.mark.parametrize(
    "params",
    [
        replace(HEATED, seed=None), replace(HEATED, verify="rejection"), replace(HEATED, top_k=5),
        replace(HEATED, top_p=0.9), replace(HEATED, min_p=0.1), replace(GREEDY, repetition_penalty=1.2),
        replace(GREEDY, logit_bias={3: 1.0}),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_draw_is_drafted_level_by_level(params: SamplingParams, calls: list[int]) -> None:
    (request,) = run(engine(target(40), proposer(a_head()), k=4), PROMPTS[:1], [params])
    assert request.stats.drafted > 0
    assert calls == []


def test_a_coupled_token_counts_by_what_its_probability_has_been_worth(calls: list[int]) -> None:
    """The same in the kernels and level by level; greedy probabilities are taken as they are."""
    made = proposer(a_head())
    confidences: dict[bool, list[Sequence[float]]] = {}
    for at_once in (True, False):
        made.calibration = Calibration(lambda stated: 1 - stated)
        chain, made.chain = made.chain, made.chain if at_once else None
        original, seen = made.propose, confidences.setdefault(at_once, [])

        def watched(*args: Any, original: Any = original, seen: list[Sequence[float]] = seen) -> list[Draft]:
            drafts: list[Draft] = original(*args)
            for view, draft in zip(args[0], drafts, strict=True):
                stated = made._states[view.id].stated
                if draft.size and not view.params.greedy:
                    worth = made.calibration.worth("eagle")
                    assert draft.confidence == [worth[tenth(each)] for each in stated]
                elif draft.size:
                    assert draft.confidence == stated
                seen.append(draft.confidence or ())
            return drafts

        made.propose = watched  # type: ignore[assignment]
        run(engine(target(40), made, k=4), [PROMPTS[0]], [HEATED])
        run(engine(target(40), made, k=4), [PROMPTS[0]], [GREEDY])
        made.propose, made.chain = original, chain  # type: ignore[method-assign]
    assert calls
    assert len(confidences[True]) == len(confidences[False])
    for ours, theirs in zip(confidences[True], confidences[False], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert made.calibration.worth("eagle") != Calibration(lambda stated: 1 - stated).worth("eagle")  # it has learned


def test_requests_that_share_a_step_share_its_levels(calls: list[int]) -> None:
    """One call for each would read the head's weights as often as there are requests."""
    machine = engine(target(40), proposer(a_head()), k=3, max_batch=2)
    requests = run(machine, PROMPTS[:2], [GREEDY, replace(GREEDY, max_tokens=60)])
    assert all(request.stats.drafted for request in requests)
    assert calls  # of the longer one, once it was alone
    assert len(calls) < sum(request.stats.target_forwards for request in requests) - 20


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3 own embedding"])
def test_other_heads_have_no_such_chain(kind: str) -> None:
    small = target(40)
    other = head(kind, small, NATIVE)
    assert isinstance(other, Eagle3Head) == (kind != "eagle-1")
    assert NativeChain.of(other, small.decoder, small.vocab_size) is None  # type: ignore[arg-type]


def test_neither_have_trees_nor_outputs_of_rows_that_are_no_tokens() -> None:
    assert proposer(a_head(), shape=Shape(3, 3, 12)).chain is None
    assert NativeChain.of(a_head(), target(40).decoder, 38) is None
