"""What `paceline explain` tells of a request: texts that join to the answer, and trees spelt along their branches."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from paceline.engine.output import Output
from paceline.explain.record import Record, Recorder
from paceline.sampling.params import SamplingParams
from paceline.text.pieces import BYTE_OF
from paceline.text.tokenizer import Tokenizer
from paceline.types import Origin, Sequence, TracedStep

EMOJI = "🤖"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and one special token."""
    backend = Backend(models.BPE(vocab={char: id_ for id_, char in enumerate(BYTE_OF)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
ID = {TOKENIZER.token_bytes(id_): id_ for id_ in range(len(BYTE_OF))}
END = TOKENIZER.vocab_size - 1
PROMPT = [ID[b"?"]]


def ids(text: str) -> list[int]:
    return [ID[bytes([byte])] for byte in text.encode()]


def traced(
    emitted: Seq[int], origins: Seq[Origin], tokens: Seq[int] = (), parents: tuple[int, ...] = (),
    path: tuple[int, ...] = (), confidence: list[float] | None = None,
) -> TracedStep:  # fmt: skip
    return TracedStep("suffix", list(tokens), parents, confidence, path, list(emitted), list(origins), 0.001, 0.01)


def recorded(steps: Seq[TracedStep], stop: tuple[str, ...] = ()) -> Record:
    """The steps as a finished request would have them."""
    params = SamplingParams(stop=stop)
    output = Output.of(TOKENIZER, params, (END,))
    emitted = [token for step in steps for token in step.emitted]
    sequence = Sequence(0, PROMPT + emitted, len(PROMPT), params, 0, 100, output)
    for generated, token in enumerate(emitted, 1):
        sequence.finish_reason = output.push(token, generated, len(emitted))
    recorder = Recorder(TOKENIZER)
    for step in steps:
        recorder.push(step)
    recorder.finish()
    record = recorder.record(sequence, "?", {})
    assert record.text == output.text == "".join(token.text for token in recorder.read(len(output.text)))
    return record


def texts(record: Record) -> list[str]:
    return [token.text for token in record.tokens]


def test_a_character_across_tokens_and_steps_belongs_to_its_last_token() -> None:
    robot = ids(EMOJI)
    origins: list[Origin] = ["accepted", "accepted", "accepted", "bonus"]
    record = recorded([traced(robot[:1], ["plain"]), traced([*robot[1:], *ids("a")], origins)])
    assert texts(record) == ["", "", "", EMOJI, "a"]
    assert [token.label for token in record.tokens] == ["F0", "9F", "A4", EMOJI, "a"]
    assert [token.step for token in record.tokens] == [0, 1, 1, 1, 1]


def test_a_character_that_never_became_whole_is_a_replacement_of_the_last_token() -> None:
    assert texts(recorded([traced(ids("a") + ids(EMOJI)[:3], ["plain"] * 4)])) == ["a", "", "", "\ufffd"]


def test_a_special_token_has_a_label_but_no_text() -> None:
    record = recorded([traced([*ids("a"), END], ["plain"] * 2)])
    assert texts(record) == ["a", ""]
    assert record.tokens[1].label == "<|end|>"


def test_a_stop_string_is_no_part_of_the_answer() -> None:
    record = recorded([traced(ids("on"), ["plain"] * 2), traced(ids("e.\n"), ["plain"] * 3)], stop=("e.\n",))
    assert texts(record) == ["o", "n", "", "", ""]


def test_text_is_read_once_and_only_as_far_as_it_is_final() -> None:
    recorder = Recorder(TOKENIZER)
    recorder.push(traced(ids("ab"), ["plain", "plain"]))
    assert [token.text for token in recorder.read(1)] == ["a"]
    recorder.push(traced(ids("é") + ids(EMOJI)[:1], ["plain"] * 3))
    assert "".join(token.text for token in recorder.read(3)) == "bé"
    assert recorder.read(3) == []
    recorder.finish()
    assert [(token.text, token.step) for token in recorder.read(9)][-1] == ("\ufffd", 1)


def test_nodes_are_spelt_after_their_own_ancestors() -> None:
    """The last token began a character that two branches end in different ways; a third leaves it broken."""
    robot, ghost = ids(EMOJI), ids("👻")
    assert robot[:2] == ghost[:2]
    draft = [*robot[2:], *ghost[2:], *ids("x")]
    step = traced(ids("x"), ["correction"], draft, (-1, 0, -1, 2, -1))
    record = recorded([traced(robot[:2], ["plain", "plain"]), step])
    assert [node.label for node in record.steps[1].nodes] == ["A4", EMOJI, "91", "👻", "\ufffdx"]
    assert texts(record) == ["", "", "\ufffdx"]


def test_totals_and_places_follow_from_the_steps() -> None:
    corrected: list[Origin] = ["accepted", "accepted", "correction"]
    record = recorded([
        traced(ids("a"), ["plain"]),
        traced(ids("bcd"), corrected, ids("bcxy"), (-1, 0, 1, 2), (0, 1), [0.9, 0.8, 0.7, 0.6]),
        traced(ids("ef"), ["accepted", "bonus"], ids("ex"), (-1, -1), (0,)),
    ])  # fmt: skip
    totals = record.as_json()["totals"]
    assert (totals["steps"], totals["tokens"], totals["drafted"], totals["accepted"]) == (3, 6, 6, 3)
    assert (totals["tokens_per_forward"], totals["acceptance_rate"]) == (2.0, 0.5)
    assert totals["origins"] == {"plain": 1, "accepted": 3, "correction": 1, "bonus": 1}
    assert [(step.first, step.count) for step in record.steps] == [(0, 1), (1, 3), (4, 2)]
    assert [node.confidence for node in record.steps[1].nodes] == [0.9, 0.8, 0.7, 0.6]
    assert [node.confidence for node in record.steps[2].nodes] == [None, None]
