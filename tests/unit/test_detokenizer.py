import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.text import tokenizer as paceline_tokenizer
from paceline.text.detokenizer import Detokenizer
from paceline.text.pieces import BYTE_OF

EMOJI = "🤖"


def byte_level() -> paceline_tokenizer.Tokenizer:
    vocab = {char: id_ for id_, char in enumerate(BYTE_OF)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return paceline_tokenizer.Tokenizer(backend)


def sentencepiece(*, prefix: bool = True) -> paceline_tokenizer.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocab = {text: id_ for id_, text in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return paceline_tokenizer.Tokenizer(backend)


def metaspace() -> paceline_tokenizer.Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.backend.decoder = decoders.Metaspace()
    return paceline_tokenizer.Tokenizer(tokenizer.backend)


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_a_character_across_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{EMOJI}b")
    assert streamed(Detokenizer(tokenizer), ids) == ["a", "", "", "", EMOJI, "b", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode(EMOJI)[:3]:
        assert detokenizer.push(token) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_an_invalid_byte_in_the_middle_does_not_hold_later_text() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.encode("a")[0], tokenizer.encode(EMOJI)[0], *tokenizer.encode("bc")]
    assert streamed(Detokenizer(tokenizer), ids) == ["a", "", "\ufffdb", "c", ""]


def test_a_good_character_shown_before_a_bad_byte_stays() -> None:
    """Where `tokenizers`' byte fallback would turn the whole run into replacement characters."""
    tokenizer = sentencepiece()
    ids = [*tokenizer.encode(EMOJI)[1:], tokenizer.token_strings().index("<0xFF>")]
    assert "".join(streamed(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == f"{EMOJI}\ufffd"


def test_a_literal_replacement_character_is_text_like_any_other() -> None:
    tokenizer = byte_level()
    assert "".join(map(Detokenizer(tokenizer).push, tokenizer.encode("a\ufffd"))) == "a\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|end|>b")
    assert streamed(Detokenizer(tokenizer), ids) == ["a", "", "b", ""]
    assert "".join(streamed(Detokenizer(tokenizer, skip_special=False), ids)) == "a<|end|>b"


@pytest.mark.parametrize("build", [sentencepiece, metaspace])
def test_the_leading_space_is_dropped_once(build: object) -> None:
    tokenizer = build()  # type: ignore[operator]
    ids = tokenizer.encode("<s> a a")
    assert [tokenizer.token_string(token) for token in ids] == ["<s>", "▁", "▁a", "▁a"]
    assert "".join(streamed(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    assert tokenizer.decode(ids) == " a a"


def test_the_leading_space_is_kept_where_text_continues() -> None:
    tokenizer = sentencepiece()
    detokenizer = Detokenizer(tokenizer, continues=True)
    assert streamed(detokenizer, tokenizer.encode("a")) == [" a", ""]


def test_without_a_prefix_the_leading_space_is_text() -> None:
    tokenizer = sentencepiece(prefix=False)
    assert streamed(Detokenizer(tokenizer), tokenizer.encode(" a")) == [" a", ""]


def test_a_finished_detokenizer_starts_afresh() -> None:
    tokenizer = sentencepiece()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a")
    assert streamed(detokenizer, ids) == streamed(detokenizer, ids) == ["a", ""]


@pytest.mark.parametrize("build", [byte_level, sentencepiece, metaspace])
def test_the_stream_equals_decoding_all_at_once_for_any_ids(build: object) -> None:
    tokenizer = build()  # type: ignore[operator]
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        raw = b"".join(tokenizer.token_bytes(token) for token in ids if token not in tokenizer.special_ids)
        whole = raw.decode("utf-8", "replace")
        expected = whole.removeprefix(" ") if tokenizer.strips_leading_space else whole
        assert "".join(streamed(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == expected
