"""A draft with another vocabulary: it may read and write differently, and changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lab import (
    CONFIG,
    FP32,
    PROMPT,
    RandomSource,
    dense,
    engine,
    exact_law,
    model,
    output,
    p_value,
    pool_for,
    run,
    sample_outputs,  # fmt: skip
)
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend_
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from paceline.cache.pool import BlockPool
from paceline.engine.controller import Controller
from paceline.engine.engine import Engine, EngineConfig
from paceline.errors import PacelineError
from paceline.model.attention import Span
from paceline.model.decoder import Batch
from paceline.propose.base import Budget
from paceline.propose.none import NoProposer
from paceline.propose.other_vocabulary import Mode, OtherVocabularyProposer
from paceline.propose.retokenised import RetokenisedView
from paceline.propose.rollout import CHAIN, Shape
from paceline.sampling.params import SamplingParams, Verify
from paceline.text.pieces import BYTE_OF
from paceline.text.tokenizer import Tokenizer
from paceline.types import Draft, View
from paceline.weights.assemble import assemble
from paceline.weights.load import LoadedModel, load_model
from paceline.weights.presets import preset_is_cached

LENGTH = 3
DRAWS = 1500
SIGNIFICANT = 1e-4
TREE = Shape(width=2, depth=3, nodes=10)
SAMPLED_TREE = replace(TREE, sampled=True)
MODES: list[Mode] = ["tokens", "strings", "auto"]
BOTH_MODES_AND_LENGTHS: list[tuple[Mode, int | None]] = [("tokens", 4), ("tokens", None), ("strings", None)]


def spelling(tokens: Sequence[str], *, special: Sequence[str] = (), eos: Sequence[str] = ()) -> Tokenizer:
    """Byte-level; a token of several letters is merged from its first letters and its last one."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(token[:-1], token[-1]) for token in tokens if len(token) > 1 and {token[:-1], token[-1]} <= vocab.keys()]
    backend = Backend_(BPE(vocab, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return Tokenizer(backend, eos_ids=tuple(vocab[name] for name in eos))


def speaking(loaded: LoadedModel, tokenizer: Tokenizer) -> LoadedModel:
    return replace(loaded, tokenizer=tokenizer)


def proposer(
    target: LoadedModel, draft: LoadedModel, mode: Mode, *, shape: Shape = CHAIN, stop_below: float = 0.0
) -> OtherVocabularyProposer:
    return OtherVocabularyProposer(
        draft, pool_for(draft), target_tokenizer=target.tokenizer, vocab_size=target.vocab_size,
        width=target.config.vocab_size, stop_below=lambda: stop_below, mode=mode, shape=shape, prefill_chunk=8,
    )  # fmt: skip


# --- small vocabularies, whose joint law can be enumerated ----------------------------------------------------------

SMALL = ["a", "b", "c", "d", "ab", "cd"]
DRAFTS = {
    "reordered, other pairs": ["d", "b", "a", "bc", "c", "dd"],
    "a letter is missing": ["d", "ab", "b", "a", "abd", "bb", "e"],
    "more rows than tokens": ["ab", "b", "a", "d"],
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return speaking(model(0), spelling(SMALL))


def small_draft(kind: str, sharpness: float = 1.0) -> LoadedModel:
    return speaking(model(7, config=replace(CONFIG, vocab_size=7), sharpness=sharpness), spelling(DRAFTS[kind]))


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
@pytest.mark.parametrize("mode", ["tokens", "strings"])
@pytest.mark.parametrize(
    ("kind", "k"), [*(("reordered, other pairs", k) for k in (1, 2, 4)), *((kind, 3) for kind in list(DRAFTS)[1:])]
)
def test_joint_law_of_three_tokens_is_the_targets(
    kind: str, k: int, mode: Mode, verify: Verify, target: LoadedModel
) -> None:
    params = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=LENGTH, verify=verify)
    machine = engine(target, proposer(target, small_draft(kind), mode), k=k)
    assert p_value(sample_outputs(machine, params, DRAWS), exact_law(target, params, LENGTH)) > SIGNIFICANT


@pytest.mark.parametrize("shape", [TREE, SAMPLED_TREE], ids=["likeliest", "sampled"])
def test_joint_law_under_trees_of_shared_tokens(shape: Shape, target: LoadedModel) -> None:
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    drafting = proposer(target, small_draft("reordered, other pairs"), "tokens", shape=shape)
    outcomes = sample_outputs(engine(target, drafting, k=3), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_penalties_and_bias_of_the_request_reach_a_draft_of_shared_tokens(target: LoadedModel) -> None:
    """Its ids are the target's there; the law holds with each row's own history."""
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={0: 1.0, 3: -0.7}, max_tokens=LENGTH,
        verify="rejection",
    )  # fmt: skip
    for mode in MODES[:2]:
        drafting = proposer(target, small_draft("a letter is missing"), mode)
        outcomes = sample_outputs(engine(target, drafting, k=3), params, DRAWS)
        assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_stopping_after_a_weak_token_is_exact(target: LoadedModel) -> None:
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    law = exact_law(target, params, LENGTH)
    for mode, k in BOTH_MODES_AND_LENGTHS:
        drafting = proposer(target, small_draft("reordered, other pairs"), mode, stop_below=0.35)
        assert p_value(sample_outputs(engine(target, drafting, k=k), params, DRAWS), law) > SIGNIFICANT


def test_a_reduced_head_is_exact(target: LoadedModel) -> None:
    """The draft scores few of its ids, and not all of those are shared."""
    few = model(7, config=replace(CONFIG, vocab_size=7), head_ids=torch.tensor([0, 2, 3, 6]))
    draft = speaking(few, spelling(DRAFTS["reordered, other pairs"]))
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    for mode in MODES[:2]:
        machine = engine(target, proposer(target, draft, mode), k=3)
        assert p_value(sample_outputs(machine, params, DRAWS), exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_in_a_mixed_batch_sampled_requests_keep_their_law_and_greedy_ones_their_answer(target: LoadedModel) -> None:
    """ "auto" drafts shared tokens for the one kind and writes text for the other, in the same step."""
    sampled = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    greedy = SamplingParams(max_tokens=LENGTH)
    params = [replace(sampled, seed=i) if i % 4 else greedy for i in range(DRAWS * 4 // 3)]
    machine = engine(target, proposer(target, small_draft("reordered, other pairs"), "auto"), k=3)
    answers = [tuple(output(request)) for request in run(machine, [PROMPT] * len(params), params)]
    assert set(answers[::4]) == {tuple(plain(target, PROMPT, greedy))}
    outcomes = [answer for i, answer in enumerate(answers) if i % 4]
    assert p_value(outcomes, exact_law(target, sampled, LENGTH)) > SIGNIFICANT


class ReportsUnsharedMass(OtherVocabularyProposer):
    """The planted bug: q is the draft's own distribution, while its tokens are drawn from the shared part of it."""

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = super().propose(views, budgets)
        return [draft if draft.q is None else replace(draft, q=draft.q * 0.5) for draft in drafts]


def test_a_q_that_is_not_renormalised_is_caught(target: LoadedModel) -> None:
    draft = small_draft("reordered, other pairs")
    biased = ReportsUnsharedMass(
        draft, pool_for(draft), target_tokenizer=target.tokenizer, vocab_size=6, width=6, stop_below=lambda: 0.0,
        mode="tokens",
    )  # fmt: skip
    params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify="rejection")
    outcomes = sample_outputs(engine(target, biased, k=2), params, DRAWS)
    assert p_value(outcomes, exact_law(target, params, LENGTH)) < 1e-8


def test_a_request_that_allows_no_shared_token_is_answered_all_the_same(target: LoadedModel) -> None:
    """As a grammar may: only "ab" and "cd", of which the draft has neither."""

    def pairs_only(logits: Tensor, history: Sequence[int]) -> Tensor:
        return torch.cat((logits[:4].new_full((4,), float("-inf")), logits[4:]))

    both: list[Verify] = ["rejection", "coupled"]
    for verify in both:
        params = SamplingParams(temperature=1.1, max_tokens=LENGTH, verify=verify, processors=(pairs_only,))
        drafting = proposer(target, small_draft("reordered, other pairs"), "tokens")
        outcomes = sample_outputs(engine(target, drafting, k=3), params, DRAWS)
        assert p_value(outcomes, exact_law(target, params, LENGTH)) > SIGNIFICANT


def test_vocabularies_without_a_common_token_are_refused(target: LoadedModel) -> None:
    stranger = speaking(model(7), spelling(["x", "y"]))
    with pytest.raises(PacelineError, match="no token in common"):
        proposer(target, stranger, "tokens")


# --- token for token ------------------------------------------------------------------------------------------------

LETTERS = [chr(ord("a") + i) for i in range(20)]
PAIRS = ["ab", "bc", "cd", "de", "ef", "aa", "abc", "gh"]
OTHER_PAIRS = ["ba", "bc", "bcd", "fe", "aa", "hg", "ij", "aaa"]
BYTES = [token for token, byte in BYTE_OF.items() if byte in "é😀".encode()]
SPECIAL = ["<e>", "<s>"]
WIDE = replace(CONFIG, vocab_size=40, max_positions=256)
PROMPTS = [[1, 5, 9, 1, 5], [3], [7, 7, 7, 7], list(range(30)), [2, 4] * 20]


def wide_tokenizer(eos: Sequence[str] = ()) -> Tokenizer:
    return spelling([*LETTERS, *PAIRS, *BYTES], special=["<e>", "<s>", "<only here>"], eos=eos)


def wide_target(eos: Sequence[str] = ()) -> LoadedModel:
    return speaking(model(0, config=WIDE, sharpness=2.0), wide_tokenizer(eos))


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    return wide_target()


def wide_draft(seed: int = 3) -> LoadedModel:
    """Letters in another order, two of them missing, other pairs, other special tokens."""
    tokens = [*BYTES, *OTHER_PAIRS, *LETTERS[:1:-1][1:], *"ab"]
    draft = model(seed, config=replace(WIDE, vocab_size=42), sharpness=2.0)
    return speaking(draft, spelling(tokens, special=["<other>", "<s>", "<e>"]))


def renumbered(loaded: LoadedModel, tokens: Sequence[str], *, special: Sequence[str] = ()) -> LoadedModel:
    """The same model under other ids: token i of `tokens` is what the original calls by that name."""
    tokenizer = spelling(tokens, special=special)
    names = [loaded.tokenizer.backend.token_to_id(tokenizer.token_string(i)) for i in range(tokenizer.vocab_size)]
    order = torch.tensor(names)
    tensors = dense(RandomSource(0, 2.0, WIDE))
    tensors["head.weight"] = tensors["head.weight"][order] * 2.0
    tensors["embedding"] = tensors["embedding"][order]
    config = replace(WIDE, vocab_size=len(names))
    return LoadedModel("renumbered", assemble(config, tensors, FP32, None), tokenizer, FP32, "renumbered")


def plain(target: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return output(run(engine(target, NoProposer()), [prompt], [params])[0])


@pytest.mark.parametrize("k", [1, 3, 7, None])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_equals_plain(mode: Mode, k: int | None, wide: LoadedModel) -> None:
    params = SamplingParams(max_tokens=40)
    requests = run(engine(wide, proposer(wide, wide_draft(), mode), k=k), PROMPTS, [params] * len(PROMPTS))
    assert [output(r) for r in requests] == [plain(wide, p, params) for p in PROMPTS]


@pytest.mark.parametrize("mode", MODES)
def test_coupled_equals_plain_under_twenty_seeds(mode: Mode, wide: LoadedModel) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=24, seed=seed, verify="coupled")
        for seed in range(20)
    ]
    requests = run(engine(wide, proposer(wide, wide_draft(), mode), k=4), [PROMPTS[0]] * 20, params)
    assert [output(r) for r in requests] == [plain(wide, PROMPTS[0], each) for each in params]


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_whose_confidence_is_not_read_changes_no_answer(mode: Mode, wide: LoadedModel) -> None:
    """As on an accelerator."""
    drafting = proposer(wide, wide_draft(), mode)
    drafting.rollout.looks = drafting.own_rollout.looks = False
    params = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.9, seed=3)]
    requests = run(engine(wide, drafting, k=3), PROMPTS[:2], params)
    assert [output(r) for r in requests] == [plain(wide, *both) for both in zip(PROMPTS[:2], params, strict=True)]
    assert sum(r.stats.drafted for r in requests) > 0


@pytest.mark.parametrize(
    ("params", "writes"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1.0, verify="coupled"), True),
        (SamplingParams(temperature=1.0, verify="rejection"), False),
        (SamplingParams(frequency_penalty=0.5), False),
    ],
)
def test_auto_writes_text_unless_the_draft_can_follow_what_the_request_does_to_logits(
    params: SamplingParams, writes: bool, wide: LoadedModel
) -> None:
    drafting = proposer(wide, wide_draft(), "auto")
    machine = engine(wide, drafting, k=3)
    request = machine.add(PROMPTS[0], params)
    machine.step()
    machine.stepper.propose(machine.scheduler.schedule())
    growth = drafting._states[request.id].growth
    assert growth is not None
    assert isinstance(growth.view, RetokenisedView) == writes


def test_trees_of_shared_tokens_change_no_answer(wide: LoadedModel) -> None:
    params = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.9, seed=3)]
    for shape in (TREE, SAMPLED_TREE):
        machine = engine(wide, proposer(wide, wide_draft(), "tokens", shape=shape), k=3)
        requests = run(machine, PROMPTS[:2], params)
        assert [output(r) for r in requests] == [plain(wide, *both) for both in zip(PROMPTS[:2], params, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_does_not_depend_on_the_batch(mode: Mode, wide: LoadedModel) -> None:
    """Requests of every kind share steps, joining and leaving, prompts come in chunks; each answers as if alone."""
    params = [
        SamplingParams(max_tokens=9), SamplingParams(max_tokens=33, temperature=0.8, seed=1),
        SamplingParams(max_tokens=21, temperature=1.2, top_k=5, seed=2, verify="coupled"),
        SamplingParams(max_tokens=40, frequency_penalty=0.5), SamplingParams(max_tokens=3),
    ]  # fmt: skip
    alone = [plain(wide, p, each) for p, each in zip(PROMPTS, params, strict=True)]
    for max_batch in (2, 5):
        machine = engine(wide, proposer(wide, wide_draft(), mode), k=3, max_batch=max_batch, chunk=8)
        assert [output(r) for r in run(machine, PROMPTS, params)] == alone


@pytest.mark.parametrize("mode", MODES)
def test_a_rejection_answer_depends_on_its_seed_alone_at_fixed_draft_length(mode: Mode, wide: LoadedModel) -> None:
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=s, verify="rejection") for s in range(4)]
    together = run(engine(wide, proposer(wide, wide_draft(), mode), k=3), [PROMPTS[0]] * 4, params)
    alone = [run(engine(wide, proposer(wide, wide_draft(), mode), k=3), [PROMPTS[0]], [each])[0] for each in params]
    assert [output(r) for r in together] == [output(r) for r in alone]


@pytest.mark.parametrize("mode", MODES)
def test_the_end_inside_a_draft_ends_the_answer(mode: Mode) -> None:
    """The end token is one of the letters the target writes, or special and known to both, or the length runs out."""
    answer = plain(wide_target(), PROMPTS[3], SamplingParams(max_tokens=12))
    for cut in range(1, 7):
        ending = wide_target(eos=[wide_tokenizer().token_string(answer[cut - 1])])
        twin = renumbered(wide_target(), [*PAIRS, *BYTES, *LETTERS[::-1]], special=["<only here>", *SPECIAL])
        for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=cut, ignore_eos=True)):
            (request,) = run(engine(ending, proposer(ending, twin, mode), k=5), [PROMPTS[3]], [params])
            assert output(request) == plain(ending, PROMPTS[3], params)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_request_with_the_same_prefix_computes_only_the_rest(mode: Mode, wide: LoadedModel) -> None:
    drafting = proposer(wide, wide_draft(), mode)
    machine = engine(wide, drafting, k=3)
    params = SamplingParams(max_tokens=12)
    (first,) = run(machine, [PROMPTS[3]], [params])
    again = PROMPTS[3] + output(first) + [3, 1]
    rows = drafted_rows(drafting)
    (second,) = run(machine, [again], [params])
    assert second.stats.cached_tokens > 0
    assert output(second) == plain(wide, again, params)
    assert rows[0] < len(drafting.translation.draft.encode(wide.tokenizer.decode(again))) / 2


def drafted_rows(drafting: OtherVocabularyProposer) -> list[int]:
    """Rows of each forward of the draft from here on."""
    rows: list[int] = []
    forward = drafting.decoder.forward

    def counted(batch):  # type: ignore[no-untyped-def]
        rows.append(batch.tokens.shape[0])
        return forward(batch)

    drafting.decoder = replace(drafting.decoder)
    drafting.decoder.forward = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_past_the_drafts_context_it_decodes_plainly(mode: Mode, wide: LoadedModel) -> None:
    draft = wide_draft()
    short = speaking(model(3, config=replace(draft.config, max_positions=48)), draft.tokenizer)
    (request,) = run(engine(wide, proposer(wide, short, mode), k=4), [PROMPTS[3]], [SamplingParams(max_tokens=60)])
    assert output(request) == plain(wide, PROMPTS[3], SamplingParams(max_tokens=60))
    assert request.stats.drafted > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_needs_more_ids_than_were_reserved_does_without(mode: Mode, wide: LoadedModel) -> None:
    """The prompt's tokens are pairs, each of them two letters of the draft's: its cache runs full along the way."""
    letters_only = speaking(model(3, config=WIDE), spelling(LETTERS[::-1]))
    drafting = OtherVocabularyProposer(
        letters_only, pool_for(letters_only, blocks=8), target_tokenizer=wide.tokenizer, vocab_size=wide.vocab_size,
        width=wide.config.vocab_size, stop_below=lambda: 0.0, mode=mode, prefill_chunk=8,
    )  # fmt: skip
    pairs = [wide.tokenizer.token_strings().index(name) for name in ("ab", "cd", "gh")]
    params = SamplingParams(max_tokens=22, logit_bias=dict.fromkeys(pairs, 30.0))
    (request,) = run(engine(wide, drafting, k=3), [[3, 4, 3]], [params])
    assert output(request) == plain(wide, [3, 4, 3], params)
    assert request.stats.drafted > 0
    assert drafting.pool.available == drafting.pool.blocks


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_of_a_request_that_ended_or_was_aborted(mode: Mode, wide: LoadedModel) -> None:
    drafting = proposer(wide, wide_draft(), mode)
    machine = engine(wide, drafting, k=3, max_batch=3)
    run(machine, PROMPTS, [SamplingParams(max_tokens=20, temperature=1, seed=4)] * len(PROMPTS))
    aborted = machine.add(PROMPTS[0], SamplingParams(max_tokens=50))
    machine.step()
    machine.abort(aborted)
    assert machine.pool.available == machine.pool.blocks
    assert drafting.pool.available == drafting.pool.blocks
    assert not drafting._texts


# --- the cache follows the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 5])
def test_the_same_model_under_other_ids_is_always_accepted(seed: int | None, mode: Mode) -> None:
    """Letters only, so there is one way to cut a text: every draft must be what the target says itself."""
    config = replace(WIDE, vocab_size=20)
    target = speaking(model(0, config=config, sharpness=2.0), spelling(LETTERS))
    order = torch.arange(19, -1, -1)
    tensors = dense(RandomSource(0, 2.0, config))
    tensors["head.weight"], tensors["embedding"] = tensors["head.weight"][order] * 2.0, tensors["embedding"][order]
    twin = LoadedModel("twin", assemble(config, tensors, FP32, None), spelling(LETTERS[::-1]), FP32, "twin")
    drafting = proposer(target, twin, mode)
    rows = drafted_rows(drafting)
    temperature = 0.0 if seed is None else 1.0
    params = SamplingParams(max_tokens=31, temperature=temperature, seed=seed)
    (request,) = run(engine(target, drafting, k=4), [PROMPTS[0]], [params])
    assert output(request) == plain(target, PROMPTS[0], params)
    if seed is not None and mode != "tokens":
        return  # drafted without the request's noise
    assert request.stats.accepted == request.stats.drafted
    assert request.stats.target_forwards == 1 + 30 // 5
    # Accepted rows stay: a step feeds the one or two letters that are new, then its own drafts.
    assert rows[0] == len(PROMPTS[0]) - 1  # in the step of the target's own prefill
    assert max(rows[1:]) <= 2


@pytest.mark.parametrize(("mode", "shape"), [("tokens", CHAIN), ("tokens", TREE), ("strings", CHAIN)])
def test_the_drafts_cache_after_every_step_equals_a_fresh_prefill_of_the_text(
    mode: Mode, shape: Shape, wide: LoadedModel
) -> None:
    drafting = proposer(wide, wide_draft(), mode, shape=shape)
    machine = engine(wide, drafting, k=4)
    request = machine.add(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.9, seed=1))
    lengths = []
    while not machine.stepper.step(machine.scheduler.schedule()):
        cache, ids = drafting._states[request.id].cache, drafting._texts[request.id].ids
        lengths.append(cache.length)
        if cache.length:
            fresh = prefilled(drafting, ids[: cache.length])
            for layer in range(drafting.decoder.config.num_layers):
                pairs = zip(cache.views(cache.length)(layer), fresh[layer], strict=True)
                for got, want in pairs:
                    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert len(lengths) > 5
    assert max(lengths) > 20


def prefilled(drafting: OtherVocabularyProposer, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    decoder = drafting.decoder
    pool = BlockPool(decoder.config, 128, decoder.device, decoder.dtype, 4)
    cache = pool.open([], len(ids))
    cache.append(len(ids))
    tokens = torch.tensor(list(ids), device=decoder.device)
    decoder.forward(Batch(tokens, [Span(cache, 0, len(ids), 0)], pool))
    cache.commit(range(len(ids)), ids)
    return [cache.views(len(ids))(layer) for layer in range(decoder.config.num_layers)]


def test_inside_a_character_nothing_is_drafted_and_drafting_goes_on_behind_it(wide: LoadedModel) -> None:
    """The target is made to write an emoji, four tokens for the one character, then letters."""
    emoji = [wide.tokenizer.backend.token_to_id(name) for name in spelled("😀")]
    script = [*emoji, 1, 2, 3, *emoji, 4, 5, 6, 1, 2]

    def forced(logits: Tensor, history: Sequence[int]) -> Tensor:
        wanted = script[min(len(history) - len(PROMPTS[0]), len(script) - 1)]
        only = torch.full_like(logits, float("-inf"))
        only[wanted] = 0.0
        return only

    for mode in MODES:
        drafting = proposer(wide, wide_draft(), mode)
        machine = engine(wide, drafting, k=3)
        request = machine.add(PROMPTS[0], SamplingParams(max_tokens=len(script), processors=(forced,)))
        drafted = []
        while request.finish_reason is None:
            work = machine.scheduler.schedule()
            inside = incomplete(wide, request.tokens)
            before = request.stats.drafted
            machine.stepper.step(work)
            drafted.append((inside, request.stats.drafted - before))
        assert output(request) == script
        assert [count for inside, count in drafted if inside] == [0] * sum(inside for inside, _ in drafted)
        assert any(inside for inside, _ in drafted)
        behind = [count for inside, count in drafted[len(emoji) :] if not inside]
        assert sum(behind) > 0


def spelled(text: str) -> list[str]:
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    return [letters[byte] for byte in text.encode()]


def incomplete(target: LoadedModel, tokens: Sequence[int]) -> bool:
    return target.tokenizer.decode(tokens).endswith("\ufffd")


@pytest.mark.real_model
@pytest.mark.parametrize("mode", MODES)
def test_gemma_drafts_for_smollm_without_changing_its_answer(mode: Mode) -> None:
    """A SentencePiece vocabulary drafts for a byte-level one, in a chat whose special tokens only the target has."""
    if not (preset_is_cached("smollm2-135m") and preset_is_cached("gemma3-270m")):
        pytest.skip("presets are not cached")
    target, draft = load_model("smollm2-135m"), load_model("gemma3-270m")
    chat = target.tokenizer.render_chat([{"role": "user", "content": "Count from 1 to 9 and add an emoji."}])
    prompt, params = target.tokenizer.encode(chat), SamplingParams(max_tokens=24)
    drafting = OtherVocabularyProposer(
        draft, pool_for(draft, blocks=64, block_size=16), target_tokenizer=target.tokenizer,
        vocab_size=target.vocab_size, width=target.config.vocab_size, stop_below=lambda: 0.0, mode=mode,
    )  # fmt: skip
    pool = pool_for(target, blocks=64, block_size=16)
    (request,) = run(Engine(target, drafting, pool, Controller(fixed=3), EngineConfig()), [prompt], [params])
    plainly = Engine(target, NoProposer(), pool_for(target, blocks=64, block_size=16), Controller(), EngineConfig())
    assert output(request) == output(run(plainly, [prompt], [params])[0])
    assert request.stats.accepted > 0
