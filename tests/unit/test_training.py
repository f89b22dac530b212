"""Training: what it learns, that it can be killed, and what it says to a user's mistakes."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab_training import LETTERS, Lab, gradients, write_prompts
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.bench.tasks import BenchPrompt, load_prompts
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.train import responses
from paceline.train.acceptance import Acceptance, walk
from paceline.train.batches import batches, whole
from paceline.train.capture import Capture, new_index, store
from paceline.train.drafters import DRAFTERS, Given
from paceline.train.export import Card
from paceline.train.init import Init
from paceline.train.objective import Guesses
from paceline.train.responses import Response, ResponseConfig, read_responses, shuffled, write_responses
from paceline.train.rows import RowGuesses
from paceline.train.shards import Shards
from paceline.train.source import Stored, Streamed
from paceline.train.split import NEVER_TRAINED, Split, digest
from paceline.train.trainer import Position, TrainConfig, Trainer
from paceline.train.vocabulary import commonest, covered, token_counts
from paceline.types import Sequence

CONFIG = TrainConfig(tokens=3000, rows=120, rate=5e-3, depth=3, checkpoint_seconds=1e9)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab.make(tmp_path_factory.mktemp("target"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards and groups that a few answers fill."""
    monkeypatch.setattr("paceline.train.capture.SHARD_TOKENS", 100)
    monkeypatch.setattr("paceline.train.split.HELD_OUT_SEQUENCES", 6)
    monkeypatch.setattr("paceline.train.source.GROUP", 5)


def captured(
    lab: Lab, folder: Path, taps: tuple[int, ...], responses: list[Response], *, in_time: bool = True
) -> Shards:
    shards = Shards.open(folder) or Shards(folder, new_index(lab.models.target, taps))
    store(shards, Capture(lab.models.target, taps), responses, 1 << 30, lambda tokens: None, lambda: not in_time)
    return shards


def read(shards: Shards) -> list[list[int]]:
    """Tokens of all passages."""
    return [passage.tokens.tolist() for number in range(shards.count) for passage in shards.read(number)]


def trainer(lab: Lab, folder: Path, config: TrainConfig = CONFIG, kind: str = "eagle3") -> Trainer:
    torch.manual_seed(0)
    objective, taps = lab.objective(kind)
    source = Streamed(Capture(lab.models.target, taps), lab.responses(40))
    return Trainer(objective, source, config, folder / "checkpoint.pt", folder / "log.jsonl")


def silent(progress: float, position: Position, loss: float, acceptance: Acceptance | None) -> None:
    return None


# Learning


@pytest.mark.parametrize(
    ("kind", "longer", "surer"),
    [("eagle3", 0.1, 0.6), ("medusa", 0.05, 0.9), ("mtp", 0.1, 0.6), ("draft", 0.1, 0.6), ("exit", -0.05, 0.99)],
)
@pytest.mark.usefixtures("small")
def test_training_makes_drafts_that_are_accepted(
    lab: Lab, tmp_path: Path, kind: str, longer: float, surer: float
) -> None:
    """An exit's one vector has little to learn: its loss falls, and one of sixty tokens may go either way."""
    with gradients():
        found = trainer(lab, tmp_path, replace(CONFIG, tokens=15_000, rate=1e-2), kind).run(silent)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert found.length >= lines[0]["length"] + longer
    assert found.length == lines[-1]["length"]
    assert lines[-1]["loss"] < surer * lines[1]["loss"]
    assert lines[-1]["held_out_loss"] < surer * lines[0]["held_out_loss"]


def test_the_walk_counts_what_greedy_decoding_would_accept() -> None:
    """Drafts behind rows 0 and 2 are used: 1 of 2, then 2 of 2; the row between is passed by."""
    agrees = torch.tensor([[True, False], [True, True], [True, True], [False, False], [False, True]])
    found = walk([agrees])
    assert found.length == (2 + 3) / 2
    assert found.by_depth == [1.0, 0.5]


@pytest.mark.usefixtures("small")
def test_rows_that_are_judged_guess_the_answer_alone(lab: Lab) -> None:
    (batch,) = batches(lab.passages((), count=1), 1000, None)
    prompt, length = int(batch.prompts[0]), int(batch.lengths[0])
    for ahead in range(1, 4):
        rows = batch.judged(ahead)[0].nonzero().squeeze(1) + ahead + 1
        assert rows.tolist() == list(range(prompt + 1, length))[max(0, ahead - prompt) :]


@pytest.mark.parametrize("kind", ["draft", "exit"])
def test_one_scoring_judges_every_depth_as_one_a_depth_does(lab: Lab, kind: str) -> None:
    drafter = DRAFTERS[kind]
    taps = drafter.default_taps(lab.weights.config)
    objective = drafter.objective(Given(lab.weights, torch.arange(LETTERS), taps))
    assert isinstance(objective, RowGuesses)
    for batch in batches(lab.passages(taps, count=8), 100, None):
        assert objective.agrees(batch, 4).any()
        assert torch.equal(objective.agrees(batch, 4), Guesses.agrees(objective, batch, 4))


@pytest.mark.parametrize("kind", ["eagle3", "draft"])
def test_what_fills_a_batch_up_does_not_count(lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding, and rows that are scored so that a product has one of few shapes."""
    objective, taps = lab.objective(kind)
    assert isinstance(objective, Guesses)
    losses = []
    for multiple in (1, 32):
        monkeypatch.setattr("paceline.train.batches.WHOLE", multiple)
        monkeypatch.setattr("paceline.train.objective.WHOLE", multiple)
        (batch,) = batches(lab.passages(taps, count=8), 1000, None)
        losses.append(objective.loss(batch))
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_long_drafts_of_a_part_of_the_rows_are_what_they_are_among_all(lab: Lab, kind: str) -> None:
    objective, taps = lab.objective(kind)
    assert isinstance(objective, Guesses)
    for weight in objective.module.parameters():  # as they begin, some parts count for nothing
        weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    (every,) = batches(lab.passages(taps, count=8), 1000, None)
    some = replace(every, begin=torch.tensor([0, 3, 4, 11]))
    for depth, (all_rows, part) in enumerate(zip(objective.guesses(every, 3), objective.guesses(some, 3), strict=True)):
        torch.testing.assert_close(part(None), all_rows(None)[:, some.rows(depth)])


def test_training_draws_anew_where_long_drafts_begin(lab: Lab) -> None:
    passages, generator = lab.passages((), count=8), torch.Generator().manual_seed(0)
    drawn = [next(batches(passages, 1000, generator)).begin for _ in range(60)]
    rows = whole(max(len(each.tokens) for each in passages))
    assert {len(each) for each in drawn} == {rows // 4}
    assert sorted(set(torch.cat(drawn).tolist())) == list(range(rows))
    assert torch.equal(next(batches(passages, 1000, None)).begin, torch.arange(rows))


# Going on from a head


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "draft", "exit"])
def test_training_can_go_on_from_what_was_exported(lab: Lab, tmp_path: Path, kind: str) -> None:
    objective, taps = lab.objective(kind)
    for weight in objective.module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    DRAFTERS[kind].export(tmp_path, Card(str(lab.folder), taps, lab.weights.config, {}), objective)
    fresh, _ = lab.objective(kind)
    Init.open(str(tmp_path)).load_into(fresh.module)
    for ours, theirs in zip(fresh.module.parameters(), objective.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("small")
def test_the_output_of_a_head_stays_when_training_goes_on(lab: Lab, tmp_path: Path) -> None:
    objective, taps = lab.objective("eagle3")
    DRAFTERS["eagle3"].export(tmp_path, Card(str(lab.folder), taps, lab.weights.config, {}), objective)
    with gradients():
        more = trainer(lab, tmp_path, replace(CONFIG, tokens=600))
        Init.open(str(tmp_path)).load_into(more.objective.module)
        more.run(silent)
    begun = Init.open(str(tmp_path)).tensors
    learnt = {
        name for name, each in more.objective.module.state_dict().items() if not torch.equal(each, begun.get(name))
    }
    assert "fc.weight" in learnt
    assert "lm_head.weight" not in learnt


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_vocabulary_of_a_head_stays_when_training_goes_on(lab: Lab, tmp_path: Path, kind: str) -> None:
    drafter = DRAFTERS[kind]
    taps = drafter.default_taps(lab.weights.config)
    given = Given(lab.weights, torch.tensor([2, 3, 7, 25]), taps)
    drafter.export(tmp_path, Card(str(lab.folder), taps, lab.weights.config, {}), drafter.objective(given))
    found = Init.open(str(tmp_path)).vocabulary
    assert found is not None
    assert found.tolist() == [2, 3, 7, 25]


def test_a_head_of_another_kind_or_of_other_sizes_is_refused(lab: Lab, tmp_path: Path) -> None:
    drafter = DRAFTERS["eagle3"]
    taps = drafter.default_taps(lab.weights.config)
    small = drafter.objective(Given(lab.weights, torch.arange(4), taps))
    drafter.export(tmp_path, Card(str(lab.folder), taps, lab.weights.config, {}), small)
    init = Init.open(str(tmp_path))
    with pytest.raises(PacelineError, match=r"lm_head.weight is \[4, 16\] there, \[26, 16\] here"):
        init.load_into(lab.objective("eagle3")[0].module)
    with pytest.raises(PacelineError, match="another kind"):
        init.load_into(lab.objective("mtp")[0].module)


# What the target writes


def test_the_draft_vocabulary_is_what_the_target_writes_most() -> None:
    responses = [Response("a", [9, 9, 9], [3, 3, 5]), Response("b", [9], [5, 3, 7])]
    counts = token_counts(responses, LETTERS)
    chosen = commonest(counts, 2)
    assert chosen.tolist() == [3, 5]
    assert covered(counts, chosen) == pytest.approx(5 / 6)


# Killed and resumed


class Killed(Exception):
    pass


@pytest.mark.usefixtures("small")
def test_a_run_that_was_killed_ends_where_an_uninterrupted_one_does(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    with gradients():
        whole = trainer(lab, tmp_path / "whole")
        expected = whole.run(silent)
        for stop in (900, 2100):  # each time it loses the steps behind its last checkpoint
            cut = trainer(lab, tmp_path / "cut")
            saved = stop - 400

            def report(progress: float, position: Position, loss: float, _: Acceptance | None) -> None:
                if position.tokens > saved and not (tmp_path / f"{saved}").exists():  # noqa: B023
                    (tmp_path / f"{saved}").touch()  # noqa: B023
                    cut.save()  # noqa: B023
                if position.tokens > stop:  # noqa: B023
                    raise Killed

            with pytest.raises(Killed):
                cut.run(report)
        resumed = trainer(lab, tmp_path / "cut")
        assert 0 < resumed.position.tokens < 2100
        assert resumed.run(silent) == expected
    for ours, theirs in zip(resumed.objective.module.parameters(), whole.objective.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.usefixtures("small")
def test_shards_that_were_stored_train_as_the_target_itself_does(lab: Lab, tmp_path: Path) -> None:
    _, taps = lab.objective("eagle3")
    responses = lab.responses(16)
    stored = Stored(captured(lab, tmp_path, taps, responses), taps)
    streamed = Streamed(Capture(lab.models.target, taps), responses)
    both = [[p for unit in source.units for p in source.read(unit)] for source in (stored, streamed)]
    assert len(both[0]) == len(both[1]) == 10
    for ours, theirs in zip(*both, strict=True):
        assert ours.prompt == theirs.prompt
        for name in ("tokens", "taps", "last", "best"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.usefixtures("small")
def test_capturing_goes_on_behind_the_last_whole_shard(lab: Lab, tmp_path: Path) -> None:
    responses = lab.responses(16)
    whole = captured(lab, tmp_path / "whole", (1, 2), responses)
    cut = captured(lab, tmp_path / "cut", (1, 2), responses, in_time=False)
    assert 6 < sum(cut.index.sequences) < 16
    (tmp_path / "cut" / "00007.safetensors").write_bytes(b"torn")
    again = captured(lab, tmp_path / "cut", (1, 2), responses)
    assert sum(again.index.sequences) == sum(whole.index.sequences) == 16
    assert read(again) == read(whole)


@pytest.mark.usefixtures("small")
def test_answers_that_came_later_are_captured_once_and_what_is_held_out_stays(lab: Lab, tmp_path: Path) -> None:
    responses = lab.responses(16)
    first = read(captured(lab, tmp_path, (1, 2), responses[:9]))
    every = captured(lab, tmp_path, (1, 2), responses)
    assert read(every)[:9] == first
    assert sorted(read(every)) == sorted(each.prompt + each.response for each in responses)
    assert every.index.sequences[0] == 6


@pytest.mark.usefixtures("small")
def test_what_is_held_out_of_many_no_run_with_some_of_them_trained_on() -> None:
    def split(responses: list[Response]) -> tuple[set[str], set[str]]:
        parts = Split.of([each.prompt for each in responses])
        return {each.id for each in parts.judging(responses)}, {each.id for each in parts.training(responses)}

    responses = [Response(str(i), [i, 7 * i, i // 3], [i, i + 1]) for i in range(400)]
    for seed in range(20):
        every = random.Random(seed).sample(responses, 400)
        judged, trained = split(every[:300])
        judged_of_all, trained_on_all = split(every)
        assert len(judged) == len(judged_of_all) == 6
        assert not judged & trained
        assert not judged_of_all & (trained | trained_on_all)
        assert len(trained) > 270
        low = {each.id for each in responses if digest(each.prompt) < NEVER_TRAINED}
        assert len(low) > 6
        assert not low & (trained | trained_on_all)
        again = [replace(each, response=each.response[::-1]) for each in every]  # another seed's answers
        assert split(again) == (judged_of_all, trained_on_all)


def test_answers_go_on_behind_the_last_whole_line(lab: Lab, tmp_path: Path) -> None:
    prompts, path = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "responses.jsonl"

    def answer(config: ResponseConfig) -> list[Response]:
        write_responses(lab.models, load_prompts(prompts), path, config, lambda tokens: None, lambda: False)
        return read_responses(path)

    some = answer(ResponseConfig(max_tokens=8, tokens=30))
    assert 0 < len(some) < 12
    path.write_text(path.read_text() + '{"id": "p3", "prom')
    every = answer(ResponseConfig(max_tokens=8))
    assert every[: len(some)] == some
    assert sorted(each.id for each in every) == sorted(f"p{i}" for i in range(12))


def test_answers_stand_in_the_order_of_asking(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that ends a run would else leave the short ones, and the first of them are held out."""
    ask = responses._ask

    def unevenly(engine: Engine, prompt: BenchPrompt, config: ResponseConfig) -> Sequence | None:
        return ask(engine, prompt, replace(config, max_tokens=2 + int(prompt.id[1:]) * 5 % 12))

    monkeypatch.setattr(responses, "_ask", unevenly)
    prompts, path = load_prompts(write_prompts(tmp_path / "prompts.jsonl")), tmp_path / "responses.jsonl"
    order = [prompt.id for prompt in shuffled(prompts, seed=0)]
    for config in (ResponseConfig(tokens=20), ResponseConfig()):
        write_responses(lab.models, prompts, path, config, lambda tokens: None, lambda: False)
        found = read_responses(path)
        assert [each.id for each in found] == order[: len(found)]
    assert len(found) == len(order)
    assert len({len(each.response) for each in found}) > 3


def test_answers_that_are_enough_cost_no_more(lab: Lab, tmp_path: Path) -> None:
    prompts = load_prompts(write_prompts(tmp_path / "prompts.jsonl"))
    path, config = tmp_path / "responses.jsonl", ResponseConfig(max_tokens=8, tokens=30)
    for _ in range(2):
        write_responses(lab.models, prompts, path, config, lambda tokens: None, lambda: False)
    once = path.read_text()
    write_responses(lab.models, prompts, path, config, lambda tokens: None, lambda: False)
    assert path.read_text() == once
    assert len(once.splitlines()) < 12


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "draft", "exit"])
def test_the_memory_estimate_counts_the_weights_that_are_trained(lab: Lab, kind: str) -> None:
    """Norms aside."""
    objective, _ = lab.objective(kind)
    matrices = sum(each.numel() for each in objective.module.parameters() if each.dim() > 1)
    told = DRAFTERS[kind].weights(lab.weights.config, LETTERS)
    assert told == (matrices or lab.weights.config.hidden_size)


# Mistakes and misfortunes


FULL = [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
]  # fmt: skip


@pytest.mark.parametrize("error", FULL, ids=["disk", "quota", "safetensors"])
def test_a_full_disk_is_said_and_leaves_what_was_whole(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("paceline.train.capture.SHARD_TOKENS", 100)
    monkeypatch.setattr("paceline.train.split.HELD_OUT_SEQUENCES", 6)
    written: list[str] = []

    def full(tensors: dict[str, Tensor], path: os.PathLike[str]) -> None:
        if len(written) == 2:
            Path(path).write_bytes(b"half of it")
            raise error
        written.append(str(path))
        save(tensors, path)

    save = save_file
    monkeypatch.setattr("paceline.train.shards.save_file", full)
    with pytest.raises(PacelineError, match=r"disk is full.*same command again"):
        captured(lab, tmp_path, (1, 2), lab.responses(16))
    monkeypatch.setattr("paceline.train.shards.save_file", save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.safetensors", "00001.safetensors", "index.json"]
    assert sum(captured(lab, tmp_path, (1, 2), lab.responses(16)).index.sequences) == 16


@pytest.mark.usefixtures("small")
def test_states_of_another_model_or_other_layers_are_refused(lab: Lab, tmp_path: Path) -> None:
    shards = captured(lab, tmp_path, (1, 2), lab.responses(8))
    with pytest.raises(PacelineError, match="another model's"):
        shards.check("another", (1,))
    with pytest.raises(PacelineError, match=r"layers \[3\]"):
        shards.check(lab.models.target.key, (2, 3))


@pytest.mark.usefixtures("small")
def test_a_checkpoint_of_another_kind_is_refused(lab: Lab, tmp_path: Path) -> None:
    with gradients():
        trainer(lab, tmp_path, replace(CONFIG, tokens=200)).run(silent)
        with pytest.raises(PacelineError, match="other choices"):
            trainer(lab, tmp_path, kind="medusa")


def test_a_disk_budget_ends_the_capture(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train.capture.SHARD_TOKENS", 100)
    monkeypatch.setattr("paceline.train.split.HELD_OUT_SEQUENCES", 6)
    target, taps = lab.models.target, (1, 2)
    responses = lab.responses(24)
    shards = Shards(tmp_path, new_index(target, taps))
    a_token = 2 * 16 * 3 + 8
    store(shards, Capture(target, taps), responses, 400 * a_token, lambda tokens: None, lambda: False)
    assert 200 < sum(shards.index.tokens) <= 400
