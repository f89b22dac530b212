"""Two vocabularies side by side, and a text of the one followed in the other's ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.propose.retokenised import WINDOW, RetokenisedText
from paceline.propose.translation import NOT_SHARED, Translation, common_prefix, encode_behind, whole_text
from paceline.text.pieces import BYTE_OF
from paceline.text.tokenizer import Tokenizer
from paceline.weights.presets import preset_is_cached, preset_path

ALPHABET = list(BYTE_OF)
CODE = ["d e", "de f", "Ġ x", "Ġ Ġ", "ĠĠ ĠĠ", "r e", "re t", "ret urn", "u r", "ur n", "ð Ł", "Ċ Ġ"]
PROSE = ["t u", "r n", "tu rn", "Ġ d", "e f", "Ġd ef", "Ġ x", "x x", "ð Ł", "ðŁ ĺ", "r e", "Ċ Ċ"]
TEXT = "def f(x):\n    return x  # naïve 😀 日本語\n\n\treturn turn xx xxx 12345 def\r\n" * 4


def byte_level(
    merges: Sequence[str], *, special: Sequence[str] = (), added: Sequence[str] = (), backwards: bool = False,
    bos: str | None = None,
) -> Tokenizer:  # fmt: skip
    letters = ALPHABET[::-1] if backwards else ALPHABET
    tokens = [*letters, *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False) for name in added])
    bos_id = None if bos is None else backend.token_to_id(bos)
    return Tokenizer(backend, bos_id=bos_id, adds_bos=bos is not None)


def sentencepiece(*, prefix: bool, special: Sequence[str] = ("<s>",)) -> Tokenizer:
    """Like Llama 2's (`prefix`: a space before every text) or Gemma's; every byte has a token, so "x" has two."""
    merges = [("▁", "x"), ("r", "n"), ("x", "x"), ("▁", "d"), ("e", "f"), ("▁d", "ef")]
    pieces = ["▁", *"abcdefnrtux12345().:\n", *dict.fromkeys(left + right for left, right in merges)]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return Tokenizer(backend, bos_id=backend.token_to_id("<s>"), adds_bos=True)


def tokenizers() -> dict[str, Tokenizer]:
    return {
        "code": byte_level(CODE, special=["<s>", "<only code>"], backwards=True),
        "prose": byte_level(PROSE, special=["<s>"]),
        "llama": sentencepiece(prefix=True),
        "gemma": sentencepiece(prefix=False),
    }


KINDS = ["code", "prose", "llama", "gemma"]
PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]


def one(tokenizer: Tokenizer, text: str) -> int:
    """The single token that `text` is."""
    found = tokenizer.backend.token_to_id(text)
    assert found is not None
    return int(found)


# --- tokens that both know ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_partners_stand_for_the_same_bytes_and_each_has_one(pair: tuple[str, str]) -> None:
    target, draft = (tokenizers()[kind] for kind in pair)
    translation = Translation(target, draft)
    partners = [(t, d) for d, t in enumerate(translation.to_target.tolist()) if t != NOT_SHARED]
    assert len(partners) == translation.shared > 20
    assert len({t for t, _ in partners}) == len(partners)
    for ours, theirs in partners:
        assert target.token_bytes(ours) == draft.token_bytes(theirs) != b""
        assert (ours in target.special_ids) == (theirs in draft.special_ids)
        assert int(translation.to_draft[ours]) == theirs
    assert int((translation.to_draft != NOT_SHARED).sum()) == len(partners)


def test_spellings_of_a_space_differ_and_the_token_is_shared() -> None:
    target, draft = tokenizers()["prose"], tokenizers()["gemma"]
    assert int(Translation(target, draft).to_target[one(draft, "▁def")]) == one(target, "Ġdef")


def test_a_token_that_only_one_knows_has_no_partner() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    translation = Translation(target, draft)
    assert int(translation.to_target[one(draft, "turn")]) == NOT_SHARED
    assert int(translation.to_draft[one(target, "return")]) == NOT_SHARED
    assert int(translation.to_target[one(draft, "re")]) == one(target, "re")


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_of_two_tokens_for_a_byte_the_one_that_text_is_made_of_is_shared(kind: str) -> None:
    """`<0x78>` and `x`."""
    both = tokenizers()[kind]
    forward, back = Translation(both, tokenizers()["prose"]), Translation(tokenizers()["prose"], both)
    letter = one(tokenizers()["prose"], "x")
    assert int(forward.to_target[letter]) == one(both, "x")
    assert int(back.to_draft[letter]) == one(both, "x")


def test_special_tokens_are_shared_by_name_and_only_where_both_are_special() -> None:
    target = byte_level(CODE, special=["<s>", "<end>", "<tool>", "x "])
    draft = byte_level(PROSE, special=["<end>", "<other>"], added=["<tool>", "x "])
    translation = Translation(target, draft)
    assert int(translation.to_target[one(draft, "<end>")]) == one(target, "<end>")
    for name in ("<other>", "<tool>", "x "):
        assert int(translation.to_target[one(draft, name)]) == NOT_SHARED


def test_ids_that_the_models_have_no_rows_for_are_not_shared() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    translation = Translation(target, draft, target_size=256, draft_size=250)
    assert int(translation.to_target.max()) < 256
    assert translation.to_target[250:].eq(NOT_SHARED).all()
    assert translation.shared == 250


def test_share_is_the_part_of_the_drafts_tokens_that_both_have() -> None:
    draft = byte_level(PROSE[:2])
    assert Translation(draft, draft).share == 1
    assert Translation(byte_level(PROSE[:1]), draft).share == 257 / 258


# --- the text in the draft's ids ------------------------------------------------------------------------------------


def read_step_by_step(target: Tokenizer, draft: Tokenizer, ids: Sequence[int], step: int = 1) -> RetokenisedText:
    """Follow `ids`, checking after each step what `follow` said of the ids before it."""
    text = RetokenisedText(Translation(target, draft))
    for end in range(step, len(ids) + step, step):
        before = list(text.ids)
        kept = text.follow(ids[:end])
        assert text.ids[:kept] == before[:kept]
        assert kept == common_prefix(text.ids, before)
    return text


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_text_read_in_steps_has_the_ids_of_the_whole_text(pair: tuple[str, str], step: int) -> None:
    target, draft = (tokenizers()[kind] for kind in pair)
    text = read_step_by_step(target, draft, target.encode(TEXT), step)
    assert text.ids == draft.encode(TEXT)
    assert len(text.ids) > 3 * WINDOW


def test_only_the_end_of_a_long_text_is_tokenised_again() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    ids = target.encode(TEXT * 3)
    text = RetokenisedText(Translation(target, draft))
    text.follow(ids[:-1])
    lengths: list[int] = []
    encode = draft.encode
    draft.encode = lambda text, **options: lengths.append(len(text)) or encode(text, **options)  # type: ignore
    text.follow(ids)
    assert text.ids == encode(TEXT * 3)
    assert max(lengths) < 12 * WINDOW < len(TEXT * 3) / 2


def test_where_no_place_to_begin_is_found_all_of_the_text_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.propose.retokenised.TRIES", 0)
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    assert read_step_by_step(target, draft, target.encode(TEXT), 20).ids == draft.encode(TEXT)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=150), st.sampled_from(PAIRS))
def test_whatever_the_target_writes_the_ids_say_the_same(ids: list[int], pair: tuple[str, str]) -> None:
    """Any ids, also bytes that are no characters."""
    target, draft = (tokenizers()[kind] for kind in pair)
    ids = [token % target.vocab_size for token in ids]
    ids = [token for token in ids if token not in target.special_ids]
    text = read_step_by_step(target, draft, ids)
    said = target.decode(ids)
    if text.inside_a_character:
        said = said.removesuffix("\ufffd")
    assert draft.decode(text.ids) == said


@pytest.mark.parametrize("draft", ["prose", "llama"])
def test_a_character_cut_over_several_tokens_is_held_back_until_it_is_whole(draft: str) -> None:
    target, other = tokenizers()["code"], tokenizers()[draft]
    ids = target.encode("x😀x")
    assert [target.token_bytes(token) for token in ids] == [b"x", b"\xf0\x9f", b"\x98", b"\x80", b"x"]
    text = RetokenisedText(Translation(target, other))
    seen = []
    for end in range(1, len(ids) + 1):
        text.follow(ids[:end])
        seen.append((other.decode(text.ids), text.inside_a_character))
    assert seen == [("x", False), ("x", True), ("x", True), ("x😀", False), ("x😀x", False)]


def test_bytes_that_never_become_a_character_do_not_stay_pending() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    text = RetokenisedText(Translation(target, draft))
    text.follow([one(target, "ðŁ"), one(target, "x")])
    assert (draft.decode(text.ids), text.inside_a_character) == ("\ufffdx", False)


def test_special_tokens_stay_special_where_both_have_them_and_are_spelt_out_elsewhere() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    ids = [
        *target.encode("x\n"),
        one(target, "<s>"),
        *target.encode("x\n"),
        one(target, "<only code>"),
        one(target, "x"),
    ]
    text = read_step_by_step(target, draft, ids)
    assert text.ids == [*draft.encode("x\n"), one(draft, "<s>"), *draft.encode("x\n<only code>x")]


def test_the_name_of_a_special_token_in_plain_text_stays_plain() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    text = read_step_by_step(target, draft, target.encode("x <s> x", special=False))
    assert one(draft, "<s>") not in text.ids
    assert draft.decode(text.ids) == "x <s> x"


def test_each_begins_a_text_in_its_own_way() -> None:
    plain = byte_level(PROSE)
    ours, theirs = byte_level(CODE, special=["<a>"], bos="<a>"), byte_level(PROSE, special=["<b>"], bos="<b>")
    for target, draft in ((ours, theirs), (ours, plain), (plain, theirs)):
        assert read_step_by_step(target, draft, target.encode("def x")).ids == draft.encode("def x")


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_goes_on_gets_no_space_of_its_own(kind: str) -> None:
    tokenizer = tokenizers()[kind]
    for text in ("def x", " def x", "\ndef", "é"):
        assert b"".join(map(tokenizer.token_bytes, encode_behind(tokenizer, text))) == text.encode()


# --- drafted text in the target's tokens ----------------------------------------------------------------------------


def drafted_as(context: str, drafted: Sequence[int], target: Tokenizer, draft: Tokenizer) -> list[str]:
    found = Translation(target, draft).target_ids(target.encode(context), drafted)
    return [target.token_string(token) for token in found]


def test_drafted_text_becomes_tokens_that_only_the_target_has() -> None:
    """The draft spells "return" as re, turn."""
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    drafted = draft.encode("return x", bos=False)
    assert [draft.token_string(token) for token in drafted] == ["re", "turn", "Ġx"]
    assert drafted_as("def\n", drafted, target, draft) == ["return", "Ġx"]
    assert drafted_as("def\n", [*drafted[:1], one(draft, "t")], target, draft) == ["ret"]


def test_text_that_would_change_the_contexts_own_tokens_is_no_draft() -> None:
    """Behind "de" the text "f" makes "def": the target has written "de" and will not take it back."""
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    assert drafted_as("x de", draft.encode("f(x):", bos=False), target, draft) == []
    assert drafted_as("x de", draft.encode("(x):", bos=False), target, draft) == ["(", "x", ")", ":"]


def test_a_context_with_unusual_tokens_can_still_be_drafted_behind() -> None:
    """Sampled text need not be cut as the tokenizer would cut it; only what is near the end matters."""
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    unusual = [one(target, letter) for letter in "def"]
    found = Translation(target, draft).target_ids([*unusual, *target.encode(" x x")], draft.encode(" x(", bos=False))
    assert found == [one(target, "Ġx"), one(target, "(")]


def test_a_special_token_ends_the_draft() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    drafted = [*draft.encode("def", bos=False), one(draft, "<s>"), one(draft, "x")]
    assert drafted_as("x ", drafted, target, draft) == ["def", "<s>"]
    assert drafted_as("x ", drafted[-2:], target, draft) == ["<s>"]
    only_draft = byte_level(PROSE, special=["<mine>"])
    assert drafted_as("x ", [*only_draft.encode("def"), one(only_draft, "<mine>")], target, only_draft) == ["def"]


def test_half_a_character_is_not_drafted() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    drafted = draft.encode("xx😀", bos=False)
    assert [draft.token_bytes(token) for token in drafted] == [b"xx", b"\xf0\x9f\x98", b"\x80"]
    assert drafted_as("(", drafted[:2], target, draft) == ["x", "x"]
    assert drafted_as("(", drafted, target, draft) == ["x", "x", "ðŁ", "ĺ", "Ģ"]
    assert drafted_as("(", [*drafted[:2], one(draft, "<s>")], target, draft) == ["x", "x"]


def test_behind_half_a_character_nothing_is_drafted() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    context = target.encode("x😀")[:-1]
    assert Translation(target, draft).target_ids(context, draft.encode("xx", bos=False)) == []


@pytest.mark.parametrize("pair", PAIRS)
def test_drafted_ids_behind_any_context_go_on_as_the_whole_text_does(pair: tuple[str, str]) -> None:
    target, draft = (tokenizers()[kind] for kind in pair)
    whole = target.encode("def x(x):\n    return 12345 def xx")
    translation = Translation(target, draft)
    found = 0
    for cut in range(2, len(whole)):
        rest = b"".join(map(target.token_bytes, whole[cut:])).decode()
        drafted = translation.target_ids(whole[:cut], encode_behind(draft, rest))
        assert drafted in ([], whole[cut:])
        found += bool(drafted)
    assert found >= 0.8 * (len(whole) - 2)


def test_chances_keep_their_product() -> None:
    target, draft = tokenizers()["code"], tokenizers()["prose"]
    translation = Translation(target, draft)
    drafted = draft.encode("return defxx", bos=False)
    tokens = target.encode("return defxx", bos=False)
    assert [draft.token_string(token) for token in drafted] == ["re", "turn", "Ġdef", "xx"]
    assert [target.token_string(token) for token in tokens] == ["return", "Ġ", "def", "x", "x"]
    assert translation.spread([0.5, 0.4, 0.3, 0.2], drafted, tokens) == [0.2, 0.3, 1.0, 0.2, 1.0]
    assert translation.spread([0.5, 0.4, 0.3, 0.2], drafted, tokens[:2]) == [0.2, 0.3]


def test_whole_text_ends_before_the_first_byte_that_is_none() -> None:
    assert whole_text("é😀".encode()) == "é😀"
    assert whole_text("é😀".encode()[:-1]) == "é"
    assert whole_text(b"a\xffb") == "a"
    assert whole_text(b"\x80") == ""


# --- the presets' own vocabularies ----------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.parametrize("draft", ["smollm2-135m", "gemma3-270m"])
def test_real_vocabularies_share_most_of_the_drafts_or_a_good_part(draft: str) -> None:
    if not (preset_is_cached(draft) and preset_is_cached("qwen2.5-coder-1.5b")):
        pytest.skip("presets are not cached")
    target = Tokenizer.from_gguf(preset_path("qwen2.5-coder-1.5b"))
    other = Tokenizer.from_gguf(preset_path(draft))
    translation = Translation(target, other)
    assert translation.share > (0.75 if draft.startswith("smollm2") else 0.35)
    ids = target.encode(TEXT)
    assert read_step_by_step(target, other, ids).ids == other.encode(TEXT)
    chat = target.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    if draft.startswith("smollm2"):
        assert read_step_by_step(target, other, chat).ids == other.encode(
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
