"""`verify --bitwise`: what it runs, that sound models pass, and that it sees what must not be there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lab import CONFIG, RandomSource, letters
from torch import Tensor

from paceline.bench.adversary import AdversaryProposer, KnownAnswer
from paceline.bench.bits import compare, same_bits
from paceline.bench.bitwise import Bitwise, BitwiseConfig, Finding, Variant, spread
from paceline.bench.tasks import BenchPrompt
from paceline.build import Models, Options
from paceline.cache.pool import BlockPool, SequenceCache
from paceline.cache.tree import is_chain
from paceline.device import Backend
from paceline.engine.output import Output, TokenLogprobs
from paceline.errors import PacelineError
from paceline.model.attention import Span
from paceline.model.linear import DenseLinear, Int8Linear
from paceline.native.library import library
from paceline.native.linear import NativeLinear
from paceline.propose.base import Budget, check_draft
from paceline.sampling.params import SamplingParams
from paceline.types import Draft, Sequence
from paceline.weights.assemble import assemble
from paceline.weights.convert import convert
from paceline.weights.load import LoadedModel

CPU = torch.device("cpu")
FP32 = Backend(CPU, "fp32", torch.float32)
ONEDNN = Backend(CPU, "int8", torch.float32)
NATIVE = Backend(CPU, "int8", torch.float32, native=True)
without_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="oneDNN's int8 needs VNNI")
without_kernels = pytest.mark.skipif(library() is None, reason="the native library was not built")
exact = pytest.mark.parametrize(
    "backend",
    [pytest.param(ONEDNN, marks=without_vnni, id="onednn"), pytest.param(NATIVE, marks=without_kernels, id="native")],
)
# What is wrong in cache or tree shows on either; the kernels are the quicker.
either = pytest.mark.parametrize(
    "backend",
    [pytest.param(ONEDNN, marks=without_vnni) if library() is None else pytest.param(NATIVE, id="native")],
)
WIDE = replace(CONFIG, vocab_size=40, max_positions=192, hidden_size=32, head_dim=16, intermediate_size=32)
TEXTS = {"long": "abcdefghij" * 4, "longer": "jihgfedcba" * 4 + "klmno", "short": "hello"}
PROMPTS = [BenchPrompt(name, "text", [{"role": "user", "content": text}]) for name, text in TEXTS.items()]


def tiny(backend: Backend, seed: int = 0) -> LoadedModel:
    tensors = dict(convert(RandomSource(seed, config=WIDE), backend))
    name = f"tiny-{seed}-{backend.key}"
    return LoadedModel(name, assemble(WIDE, tensors, backend), letters(WIDE.vocab_size), backend, name)


Check = Callable[..., dict[str, Finding]]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Findings by name, on a tiny model whose draft is another one."""

    def check(backend: Backend, *methods: str, tree: str | None = None, tokens: int = 10) -> dict[str, Finding]:
        target, draft = tiny(backend), tiny(FP32, seed=3)

        def load(options: Options, _: LoadedModel | None = None) -> Models:
            return Models(target, draft if options.used_draft else None)

        monkeypatch.setattr("paceline.bench.bitwise.load_models", load)
        options = Options("tiny", draft="other", tree=tree)
        found = list(Bitwise.load(BitwiseConfig(options, PROMPTS, methods, tokens)).run())
        return {finding.name: finding for finding in found}

    return check


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.passed is False}


def names(method: str) -> list[str]:
    alone, company = f"{method}, batch 1", f"{method}, batch 8"
    prompts = ("whole prompts", "prompts in chunks of 32")
    return [
        *(f"{who}, {how}" for who in (alone, company) for how in prompts),
        f"{alone}, half the answer from the cache",
    ]


@exact
def test_a_sound_model_is_equal_in_every_variant(findings: Check, backend: Backend) -> None:
    found = findings(backend, "none", "ngram", "draft", "auto", "adversary")
    assert list(found) == [name for method in ("none", "ngram", "draft", "auto", "adversary") for name in names(method)]
    for finding in found.values():
        assert finding.passed is True, finding
        assert (finding.first, finding.gap) == (None, 0.0)
        assert finding.equal_prompts == finding.prompts_compared == len(PROMPTS)
        assert finding.answers_same_ids == finding.answers
        assert finding.tokens >= 9 * 10
    for name in names("draft") + names("adversary"):
        assert found[name].drafted > found[name].accepted > 0
    for method in ("none", "ngram", "draft"):
        counts = [found[name].cached_tokens for name in names(method)]
        assert counts[:2] == [0, 0], "alone, nothing may come from the cache"
        assert counts[4] > 3 * 3 * 16


@either
def test_a_draft_models_trees_are_verified(findings: Check, backend: Backend) -> None:
    found = findings(backend, "draft", tree="3x4x12")
    assert not failed(found)
    assert all(finding.drafted > 9 * 10 for finding in found.values()), "trees are larger than what they yield"


@either
def test_a_second_run_drafts_the_same(findings: Check, backend: Backend) -> None:
    """What is drafted must not follow from how busy the machine was, or a failure could not be repeated."""
    assert findings(backend, "draft", "adversary", tokens=6) == findings(backend, "draft", "adversary", tokens=6)


def in_company(linear: type[DenseLinear | Int8Linear | NativeLinear], factor: float) -> Callable[..., Tensor]:
    """A product whose rows are `factor` larger where four or more are computed together."""
    alone = linear.__call__

    def product(self: DenseLinear, x: Tensor) -> Tensor:
        out: Tensor = alone(self, x)  # type: ignore[arg-type]
        return out if x.shape[0] < 4 else out * factor

    return product


@exact
def test_a_product_that_depends_on_the_number_of_rows_is_seen(
    findings: Check, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = NativeLinear if backend.native else Int8Linear
    monkeypatch.setattr(linear, "__call__", in_company(linear, 1 + 2**-22))
    found = findings(backend, "none", "draft", "adversary")
    sound, *company = names("none")
    assert found[sound].passed is True, "nothing but plain decoding alone is left as it was"
    assert {*company[1:3], *names("draft"), *names("adversary")} <= failed(found)
    finding = found["adversary, batch 1, whole prompts"]
    assert finding.first is not None
    assert finding.first.plain != finding.first.other
    assert "0x" in finding.first.plain
    assert finding.first_case is not None
    assert finding.first_case.split()[0] in TEXTS
    assert finding.equal_prompts < finding.prompts_compared
    assert 0 < finding.gap < 1


@either
def test_an_accepted_branch_that_is_not_moved_into_place_is_seen_in_trees(
    findings: Check, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SequenceCache, "_gather", lambda *_: None)
    assert failed(findings(backend, "draft", "adversary")) == set(names("adversary"))


@either
def test_a_tree_whose_branches_see_each_other_is_seen(
    findings: Check, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tree is computed as if it were a chain."""

    def chain(cache: SequenceCache, start: int, count: int, position: int, parents: object = None) -> Span:
        return Span(cache, start, count, position)

    monkeypatch.setattr("paceline.engine.step.Span", chain)
    assert failed(findings(backend, "draft", "adversary")) == set(names("adversary"))


@either
def test_a_prefix_of_other_tokens_is_seen_where_prefixes_are_shared(
    findings: Check, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = BlockPool._digest
    monkeypatch.setattr(BlockPool, "_digest", lambda self, parent, tokens: digest(self, parent, [len(tokens)]))
    found = findings(backend, "none")
    *alone, whole, chunked, resumed = names("none")
    assert failed(found) == {whole, chunked, resumed}
    assert all(found[name].passed for name in alone)


def test_bits_that_were_not_promised_are_shown_and_do_not_fail(
    findings: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseLinear, "__call__", in_company(DenseLinear, 1 + 2**-22))
    finding = findings(FP32, "adversary")["adversary, batch 1, whole prompts"]
    assert finding.passed is None
    assert finding.first is not None


def test_more_than_rounding_fails_where_bits_were_not_promised(
    findings: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseLinear, "__call__", in_company(DenseLinear, 2.0))
    found = findings(FP32, "none", "adversary")
    assert found["none, batch 1, whole prompts"].passed is True
    assert found["adversary, batch 1, whole prompts"].passed is False


class TestComparison:
    PLAIN = (TokenLogprobs(7, -0.5, {7: -0.5, 3: -1.25}), TokenLogprobs(4, -2.0, {9: -0.25, 4: -2.0}))

    def changed(self, at: int, **fields: object) -> list[TokenLogprobs]:
        return [replace(entry, **fields) if i == at else entry for i, entry in enumerate(self.PLAIN)]  # type: ignore[arg-type]

    def test_equal_answers(self) -> None:
        assert compare(self.PLAIN, list(self.PLAIN)).equal
        assert compare(self.PLAIN, self.PLAIN).tokens == 2

    def test_one_bit_of_the_emitted_tokens_log_probability(self) -> None:
        other = math.nextafter(-2.0, 0)
        seen = compare(self.PLAIN, self.changed(1, logprob=other))
        assert seen.difference is not None
        assert (seen.difference.position, seen.difference.what) == (1, "log probability of token 4")
        assert (seen.difference.plain, seen.difference.other) == ("-0x1.0000000000000p+1 (-2)", f"{other.hex()} (-2)")
        assert seen.same_ids
        assert seen.gap == 2.0 + other

    @pytest.mark.parametrize("top", [{7: -0.5, 3: -1.2500001}, {7: -0.5, 5: -1.25}, {3: -1.25, 7: -0.5}])
    def test_the_likeliest_differ(self, top: dict[int, float]) -> None:
        seen = compare(self.PLAIN, self.changed(0, top=top))
        assert seen.difference is not None
        assert seen.difference.position == 0
        assert seen.difference.what.endswith("of the likeliest")

    def test_nothing_is_compared_past_another_token(self) -> None:
        """From there on the two have read different texts."""
        other = self.changed(0, token_id=3, logprob=-1.25)
        other[1] = TokenLogprobs(1, -90.0, {1: -90.0})
        seen = compare(self.PLAIN, other)
        assert (seen.tokens, seen.same_ids, seen.gap) == (1, False, 0.0)
        assert seen.difference is not None
        assert seen.difference.plain == "7 at -0x1.0000000000000p-1 (-0.5)"
        assert seen.difference.other == "3 at -0x1.4000000000000p+0 (-1.25)"

    @pytest.mark.parametrize("count", [0, 1])
    def test_an_answer_that_ends_early(self, count: int) -> None:
        for seen in (compare(self.PLAIN, self.PLAIN[:count]), compare(self.PLAIN[:count], self.PLAIN)):
            assert seen.difference is not None
            assert (seen.difference.position, seen.difference.what) == (count, "length")

    def test_what_is_not_a_number_equals_nothing(self) -> None:
        broken = self.changed(0, logprob=math.nan)
        assert not compare(broken, broken).equal
        assert compare(broken, broken).gap == math.inf

    def test_impossible_tokens_are_equal(self) -> None:
        never = self.changed(0, top={7: 0.0, 3: -math.inf})
        assert compare(never, never).equal
        assert compare(never, never).gap == 0.0

    def test_the_sign_of_zero_is_a_bit(self) -> None:
        assert same_bits(0.0, 0.0)
        assert not same_bits(0.0, -0.0)


class TestAdversary:
    BUDGET = Budget(6, 20)

    def view(self, tokens: list[int], seed: int | None = None) -> Sequence:
        params = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed)
        return Sequence(0, tokens, 2, params, seed or 0, 400, Output())

    def drafts(self, answers: list[KnownAnswer], budget: Budget = BUDGET, seed: int | None = None) -> list[Draft]:
        """A draft at each of 200 places of the answer 0, 1, 2, ..."""
        proposer, found = AdversaryProposer(answers, vocab_size=300), []
        for length in range(2, 202):
            view = self.view(list(range(length)), seed)
            proposer.open(view)
            (draft,) = proposer.propose([view], [budget])
            check_draft("adversary", draft, budget, 300)
            proposer.close(view)
            found.append(draft)
        return found

    def test_shapes_of_all_kinds_keep_to_their_budget(self) -> None:
        drafts = self.drafts([KnownAnswer(None, range(300))])
        sizes = {draft.size for draft in drafts}
        assert {0, 1, 20} <= sizes
        chains = [draft for draft in drafts if draft.size > 2 and is_chain(draft.parents)]
        assert chains
        assert any(draft.parents.count(-1) > 4 for draft in drafts)
        assert any(draft.depth == 6 and draft.size > 12 for draft in drafts)
        assert not any(draft.size for draft in self.drafts([], Budget(0, 20)))

    def test_right_tokens_come_at_every_depth_and_rank_beside_wrong_ones(self) -> None:
        reached, ranks = set(), set()
        for length, draft in enumerate(self.drafts([KnownAnswer(None, range(300))]), start=2):
            node, deep = -1, 0
            while True:
                below = [n for n, parent in enumerate(draft.parents) if parent == node]
                right = [n for n in below if int(draft.tokens[n]) == length + deep]
                if not right:
                    break
                ranks.add(below.index(right[0]))
                node, deep = right[0], deep + 1
            reached.add(deep)
        assert reached == set(range(7))
        assert {0, 1, 2, 3} <= ranks

    def test_only_the_answer_of_its_own_seed_is_known(self) -> None:
        def told(answer: KnownAnswer) -> int:
            drafts = self.drafts([answer], seed=4)
            return sum(length in d.tokens[: d.parents.count(-1)] for length, d in enumerate(drafts, start=2))

        assert told(KnownAnswer(4, range(300))) > 60
        for other in (KnownAnswer(5, range(300)), KnownAnswer(None, range(300)), KnownAnswer(4, [0, 2, *range(300)])):
            assert told(other) < 20


def test_prompts_are_taken_of_each_kind_in_turn() -> None:
    prompts = [BenchPrompt(f"{kind}{i}", kind, []) for kind in "abc" for i in range(3)]
    assert [prompt.id for prompt in spread(prompts, 5)] == ["a0", "b0", "c0", "a1", "b1"]
    assert len(spread(prompts, 40)) == 9


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"methods": ["magic"]}, "unknown method 'magic'; one of none"),
        ({"methods": ["draft"]}, "method 'draft' needs a draft model"),
        ({"methods": ["eagle"]}, "method 'eagle' needs a head"),
        ({"prompts": []}, "no prompts"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(wrong: dict[str, list[str]], said: str) -> None:
    with pytest.raises(PacelineError) as raised:
        BitwiseConfig(**{"options": Options("tiny"), "prompts": PROMPTS, **wrong})  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_there_are_always_enough_answers_to_fill_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(FP32)
    monkeypatch.setattr("paceline.bench.bitwise.load_models", lambda *_: Models(target))
    check = Bitwise.load(BitwiseConfig(Options("tiny"), PROMPTS[:1], ["none"], 20))
    assert [case.kind for case in check.cases] == ["greedy", *(f"seed {i}" for i in range(7))]
    running = []
    engine = check.engine(Variant("none", batch=8))
    step = engine.step

    def counted() -> list[Sequence]:
        finished = step()
        running.append(len(engine.scheduler.running) + len(finished))
        return finished

    monkeypatch.setattr(engine, "step", counted)
    monkeypatch.setattr(check, "engine", lambda _: engine)
    check.answers(Variant("none", batch=8), check.cases)
    assert running[:6] == [4, 5, 6, 7, 8, 8]
