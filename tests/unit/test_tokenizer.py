"""Tokenizers from small synthetic files; the real vocabularies are in e2e/test_preset_tokenizers.py."""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.errors import PacelineError
from paceline.text.gguf_tokenizer import _without_padding
from paceline.text.pieces import BYTE_OF
from paceline.text.pretokenizers import RULES
from paceline.text.tokenizer import Tokenizer

ALPHABET = list(BYTE_OF)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ", "Ì ģ", "Ã ©", "Ċ Ċ"]
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>"]
USER_DEFINED = ["<tool>", "    é", "üü"]
NORMAL, CONTROL_TYPE, USER_TYPE, UNUSED_TYPE = 1, 3, 4, 5

WriteGguf = Callable[..., Path]


def byte_level_vocabulary(*words: str) -> tuple[list[str], list[int]]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*ALPHABET, *merged, *words, *CONTROL, *USER_DEFINED, "[PAD]"]
    types = [NORMAL] * (len(tokens) - 7) + [CONTROL_TYPE] * 3 + [USER_TYPE] * 3 + [UNUSED_TYPE]
    return tokens, types


@pytest.fixture
def byte_level(tmp_path: Path) -> WriteGguf:
    """Writes a byte-level GGUF and returns its path."""

    def write(
        pre: str | None = "gpt-2",
        words: Sequence[str] = (),
        add_bos: bool | None = None,
        eos: str = "<|im_end|>",
        name: str = "tiny",
        template: str | None = None,
        retyped: dict[str, int] | None = None,
        model: str = "gpt2",
    ) -> Path:
        tokens, types = byte_level_vocabulary(*words)
        for text, kind in (retyped or {}).items():
            types[tokens.index(text)] = kind
        path = tmp_path / f"{pre}-{add_bos}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(name)
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index(eos))
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if template is not None:
            writer.add_chat_template(template)
        finish(writer)
        return path

    return write


@pytest.fixture
def sentencepiece(tmp_path: Path) -> WriteGguf:
    """Writes a SentencePiece GGUF; scores fall with the id, as SentencePiece's do."""

    def write(prefix: bool | None = None, words: Sequence[str] = ()) -> Path:
        pieces = ["▁a", "ab", "▁ab", "▁b", "bc", *words, "▁", "a", "b", "c"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", *pieces]
        types = [2, 3, 3, *[6] * 256, 4, *[1] * len(pieces)]
        path = tmp_path / f"spm-{prefix}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * 260 + [-float(rank) for rank in range(len(pieces))])
        if prefix is not None:
            writer.add_add_space_prefix(prefix)
        finish(writer)
        return path

    return write


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_string(token) for token in tokenizer.encode(text)]


# --- byte-level BPE -------------------------------------------------------------------------------------------------


def test_byte_level_merges_follow_the_file(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert texts(tokenizer, "hello hello") == ["hello", "Ġhello"]
    assert texts(tokenizer, "hel") == ["he", "l"]


@pytest.mark.parametrize("text", ["hello  12345\n\n\tworld", "naïve 你好 🤖", "\x00\x7f\u200d", "", " ", "    "])
def test_decoding_gives_the_text_back(byte_level: WriteGguf, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_pre_tokenizer_named_in_the_file_is_honoured(byte_level: WriteGguf) -> None:
    def digits(pre: str) -> list[str]:
        return texts(Tokenizer.from_gguf(byte_level(pre, add_bos=False)), "1231")

    assert digits("smollm") == ["1", "2", "3", "1"]
    assert digits("qwen2") == ["1", "2", "3", "1"]
    assert digits("gpt-2") == ["123", "1"]
    assert digits("llama-bpe") == ["123", "1"]


def test_a_file_without_pre_gets_the_default_rule(byte_level: WriteGguf) -> None:
    assert texts(Tokenizer.from_gguf(byte_level(None)), "hello+12312") == ["hello", "+", "123", "12"]


def test_an_unknown_pre_tokenizer_is_refused_by_name(byte_level: WriteGguf) -> None:
    with pytest.raises(PacelineError, match=r"'martian'.*tokenizer\.json"):
        Tokenizer.from_gguf(byte_level("martian"))


def test_an_unknown_kind_of_vocabulary_is_refused_by_name(byte_level: WriteGguf) -> None:
    with pytest.raises(PacelineError, match="'rwkv'"):
        Tokenizer.from_gguf(byte_level(model="rwkv"))


def test_llama3_takes_a_whole_word_from_the_vocabulary_without_merges(byte_level: WriteGguf) -> None:
    words = ["zqz"]  # no merge leads there
    assert texts(Tokenizer.from_gguf(byte_level("llama-bpe", words, add_bos=False)), "zqz") == ["zqz"]
    assert texts(Tokenizer.from_gguf(byte_level("qwen2", words, add_bos=False)), "zqz") == ["z", "q", "z"]


def test_qwen2_composes_characters_first(byte_level: WriteGguf) -> None:
    decomposed = unicodedata.normalize("NFD", "é")
    assert len(decomposed) == 2
    assert texts(Tokenizer.from_gguf(byte_level("qwen2")), decomposed) == ["Ã©"]
    assert texts(Tokenizer.from_gguf(byte_level("gpt-2")), decomposed) == ["e", "Ìģ"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # worked out by hand from the original tokenizer.json rules
        ("gpt-2", "I'VE x  y 12", ["I", "'", "VE", " x", " ", " y", " 12"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("qwen2", "I'VE (a)\n\n  b1234", ["I", "'VE", " (", "a", ")\n\n", " ", " b", "1", "2", "3", "4"]),
        ("llama-bpe", "b1234 =\n x", ["b", "123", "4", " =\n", " x"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "CamelCase's 1234", ["Camel", "Case's", " ", "123", "4"]),
        ("deepseek-llm", "ab 12\nc.d", ["ab", " ", "1", "2", "\n", "c", ".", "d"]),
        ("deepseek-coder", "ab.c 中文1", ["ab", ".", "c", " ", "中文", "1"]),
        ("deepseek-v3", "x中文か1234", ["x", "中文か", "123", "4"]),
        ("falcon", "a=b 1234", ["a", "=", "b", " ", "123", "4"]),
        ("bloom", "hi (x), yo", ["hi", " (", "x", "),", " yo"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("bailingmoe", "a\n\nb'S", ["a", "\n\n", "b", "'S"]),
        ("seed-coder", "x;\ny", ["x", ";", "\n", "y"]),
        ("qwen35", "e\u0323\u0308x", ["e\u0323\u0308x"]),
        ("chatglm-bpe", "12345", ["123", "45"]),
    ],
)
def test_text_is_cut_as_the_original_tokenizer_cuts_it(pre: str, text: str, pieces: list[str]) -> None:
    cut = [piece for piece, _ in RULES[pre].build().pre_tokenize_str(text)]
    assert [bytes(BYTE_OF[char] for char in piece).decode() for piece in cut] == pieces


@pytest.mark.parametrize("pre", sorted(RULES))
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    text = "I'VE  1234 done\r\n\n\tif (x!=y) { 你好か } naïve 🤖 Ⅷ² ก\u0e31"
    cut = [piece for piece, _ in RULES[pre].build().pre_tokenize_str(text)]
    assert bytes(BYTE_OF[char] for piece in cut for char in piece).decode() == text


# --- special tokens, BOS, end of generation -------------------------------------------------------------------------


def test_control_tokens_are_parsed_or_spelt_out(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    marker = tokenizer.token_strings().index("<|im_end|>")
    assert tokenizer.encode("hello<|im_end|>")[-1] == marker
    spelt = tokenizer.encode("hello<|im_end|>", special=False)
    assert marker not in spelt
    assert tokenizer.decode(spelt) == "hello<|im_end|>"
    assert tokenizer.encode("hello<|im_end|>")[-1] == marker  # the switch is set back


def test_user_defined_tokens_match_in_any_text_and_are_not_special(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    tool = tokenizer.token_strings().index("<tool>")
    assert tool in tokenizer.encode("a<tool>b")
    assert tool in tokenizer.encode("a<tool>b", special=False)
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool>b"
    assert tool not in tokenizer.special_ids


def test_an_added_token_decodes_to_its_own_text_not_to_bytes(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    token = tokenizer.token_strings().index("    é")
    assert tokenizer.encode("hello    é") == [*tokenizer.encode("hello"), token]
    assert tokenizer.decode([token]) == "    é"
    # in a merged token, "ü" is the stand-in for byte 0xFC
    assert tokenizer.decode(tokenizer.encode("üü")) == "üü"


def test_special_tokens_are_left_out_of_the_text_on_request(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_bos_is_added_once_and_never_doubled(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(add_bos=True))
    assert tokenizer.bos_id is not None
    plain = tokenizer.encode("hello", bos=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("<s>hello") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("") == [tokenizer.bos_id]


def test_bos_is_not_added_where_the_file_says_no(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level("llama-bpe", add_bos=False))
    assert tokenizer.encode("hello") == tokenizer.encode("hello", bos=False)


def test_bos_where_the_file_is_silent_follows_the_family(byte_level: WriteGguf) -> None:
    assert Tokenizer.from_gguf(byte_level("llama-bpe")).adds_bos
    assert not Tokenizer.from_gguf(byte_level("qwen2")).adds_bos


def test_a_rendered_chat_that_begins_with_bos_gets_no_second_one(byte_level: WriteGguf) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = Tokenizer.from_gguf(byte_level(add_bos=True, template=template))
    prompt = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert prompt == "<s>hello<|im_end|>"
    assert tokenizer.encode(prompt).count(tokenizer.bos_id or -1) == 1


def test_end_tokens_are_the_declared_one_then_known_markers(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(eos="<s>", words=["<|endoftext|>"]))
    assert [tokenizer.token_string(token) for token in tokenizer.eos_ids] == ["<s>", "<|im_end|>", "<|endoftext|>"]
    # the converter left <|endoftext|> a normal token
    assert tokenizer.eos_ids[2] in tokenizer.special_ids


def test_an_html_tag_does_not_end_a_generation(byte_level: WriteGguf) -> None:
    user_defined = Tokenizer.from_gguf(byte_level(words=["</s>"], retyped={"</s>": USER_TYPE}))
    assert [user_defined.token_string(token) for token in user_defined.eos_ids] == ["<|im_end|>"]
    control = Tokenizer.from_gguf(byte_level(words=["</s>"], retyped={"</s>": CONTROL_TYPE}))
    assert "</s>" in [control.token_string(token) for token in control.eos_ids]


def test_a_separator_inside_answers_does_not_end_them(byte_level: WriteGguf) -> None:
    words = ["<|end|>", "<|return|>", "<|call|>"]
    ends = Tokenizer.from_gguf(byte_level(words=words)).eos_ids
    tokens, _ = byte_level_vocabulary(*words)
    assert [tokens[token] for token in ends] == ["<|im_end|>", "<|return|>", "<|call|>"]


def test_phi3_markers_swallow_the_white_space_after_them(byte_level: WriteGguf) -> None:
    plain = Tokenizer.from_gguf(byte_level(add_bos=False)).encode("<|im_end|>\n hello", bos=False)
    phi = Tokenizer.from_gguf(byte_level(name="Phi-3 mini")).encode("<|im_end|>\n hello", bos=False)
    assert len(plain) > 2
    assert phi == [plain[0], *Tokenizer.from_gguf(byte_level()).encode("hello")]


def test_vocabulary_counts_and_spells_every_id(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    tokens, _ = byte_level_vocabulary()
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_strings() == tokens
    assert tokenizer.token_string(tokens.index("Ġhello")) == "Ġhello"


def test_rows_that_only_pad_the_output_are_no_tokens(byte_level: WriteGguf) -> None:
    """The converter calls them [PADn], unused; one that is not at the end keeps its id."""
    padding = {"[PAD271]": UNUSED_TYPE}
    inside = Tokenizer.from_gguf(byte_level(words=("[PAD271]",), retyped=padding))
    assert "[PAD271]" in inside.token_strings()
    tokens, types = byte_level_vocabulary()
    metadata = {
        "tokenizer.ggml.tokens": [*tokens, "[PAD900]", "[PAD901]"],
        "tokenizer.ggml.token_type": [*types, UNUSED_TYPE, UNUSED_TYPE],
    }
    assert _without_padding(metadata)["tokenizer.ggml.tokens"] == tokens
    assert _without_padding(metadata)["tokenizer.ggml.token_type"] == types


def test_rows_that_pad_the_embedding_decode_to_nothing(byte_level: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.decode([*tokenizer.encode("hello"), tokenizer.vocab_size + 7]) == "hello"


# --- SentencePiece --------------------------------------------------------------------------------------------------


def test_sentencepiece_merges_the_best_score_first(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(prefix=False))
    # ab (score -1) beats bc (-4)
    assert texts(tokenizer, "abc") == ["<s>", "ab", "c"]
    assert texts(tokenizer, "bcab") == ["<s>", "bc", "ab"]


def test_sentencepiece_prefix_space_is_added_and_dropped_again(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())  # llama.cpp's default: yes
    assert texts(tokenizer, "ab") == ["<s>", "▁ab"]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_sentencepiece_prefix_space_is_left_out_where_the_file_says_so(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(prefix=False))
    assert texts(tokenizer, "ab") == ["<s>", "ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_sentencepiece_falls_back_to_bytes(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(prefix=False))
    assert texts(tokenizer, "é") == ["<s>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aé🤖\n")) == "aé🤖\n"


def test_sentencepiece_user_defined_run_of_spaces_comes_before_merges(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(prefix=False))
    assert texts(tokenizer, "a   b") == ["<s>", "a", "  ", "▁b"]
    assert tokenizer.decode(tokenizer.encode("a   b")) == "a   b"


def test_sentencepiece_does_not_merge_into_a_byte_or_control_token(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(prefix=False, words=[*"<0x41>", "<0", "<0x", "1>", "<0x4"]))
    assert "<0x41>" not in texts(tokenizer, "<0x41>")
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def test_sentencepiece_defaults_are_llamas(sentencepiece: WriteGguf) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)


# --- the cache and damaged files ------------------------------------------------------------------------------------


def test_the_cached_tokenizer_is_the_same_and_is_used(byte_level: WriteGguf, tmp_path: Path) -> None:
    path, cache = byte_level("qwen2", template="{{ bos_token }}"), tmp_path / "cache"
    built = Tokenizer.from_gguf(path, cache_dir=cache)
    (file,) = cache.iterdir()
    again = Tokenizer.from_gguf(path, cache_dir=cache)
    text = "hello <tool>e\u0301 12<|im_end|>"
    assert again.encode(text) == built.encode(text)
    assert (again.eos_ids, again.special_ids, again.chat_template) == (
        built.eos_ids,
        built.special_ids,
        built.chat_template,
    )
    # a doctored cache shows that it is read at all
    file.write_text(file.read_text().replace("NFC", "NFKC"))
    assert Tokenizer.from_gguf(path, cache_dir=cache).encode("½") != built.encode("½")


def test_a_damaged_cache_is_built_again(byte_level: WriteGguf, tmp_path: Path) -> None:
    path, cache = byte_level(), tmp_path / "cache"
    built = Tokenizer.from_gguf(path, cache_dir=cache)
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:100])
    assert Tokenizer.from_gguf(path, cache_dir=cache).encode("hello") == built.encode("hello")
    assert json.loads(file.read_text())
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_does_not_matter(byte_level: WriteGguf, tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    assert Tokenizer.from_gguf(byte_level(), cache_dir=blocked).encode("hello")


def test_a_file_that_is_not_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 not a model at all")
    with pytest.raises(PacelineError, match=r"model\.gguf is not a GGUF"):
        Tokenizer.from_gguf(path)
    with pytest.raises(PacelineError, match="missing"):
        Tokenizer.from_gguf(tmp_path / "missing.gguf", cache_dir=tmp_path)


def test_a_gguf_cut_short_is_named(byte_level: WriteGguf) -> None:
    path = byte_level()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(PacelineError, match="download the file again"):
        Tokenizer.from_gguf(path)


# --- Hugging Face directories ---------------------------------------------------------------------------------------


def llama_like_backend() -> Backend:
    """Byte-level, with <s> put first by the post-processor, as Llama 3's tokenizer.json does."""
    tokens, _ = byte_level_vocabulary()
    vocab = {text: id_ for id_, text in enumerate(text for text in tokens if text not in CONTROL)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def test_a_directory_gives_special_ids_and_template(tmp_path: Path) -> None:
    backend = llama_like_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [backend.token_to_id("<|im_start|>")]})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.token_string(tokenizer.bos_id or -1) == "<s>"
    assert [tokenizer.token_string(token) for token in tokenizer.eos_ids] == ["<|im_end|>", "<|im_start|>"]
    prompt = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert prompt == "<s>hello<|im_end|>"
    assert texts(tokenizer, prompt) == ["<s>", "hello", "<|im_end|>"]
    assert texts(tokenizer, "hello") == ["<s>", "hello"]


def test_a_declared_bos_that_the_post_processor_leaves_out_is_not_added(tmp_path: Path) -> None:
    backend = llama_like_backend()
    backend.post_processor = processors.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.bos_id is not None
    assert texts(tokenizer, "hello") == ["hello"]


def test_a_template_file_beats_the_one_in_the_config(tmp_path: Path) -> None:
    llama_like_backend().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "config"}]})
    assert Tokenizer.from_directory(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).chat_template == "file"


def test_special_tokens_map_serves_where_the_config_is_silent(tmp_path: Path) -> None:
    llama_like_backend().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<|im_start|>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.adds_bos
    assert tokenizer.token_string(tokenizer.eos_ids[0]) == "<|im_start|>"


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    tokens, _ = byte_level_vocabulary()
    write_json(tmp_path / "vocab.json", {text: id_ for id_, text in enumerate([*tokens, "<|endoftext|>"])})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert texts(tokenizer, "hello hello") == ["hello", "Ġhello"]
    assert [tokenizer.token_string(token) for token in tokenizer.eos_ids] == ["<|endoftext|>"]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"no tokenizer in .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(PacelineError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_decoder_that_is_not_text_bytes_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(PacelineError, match="WordPiece"):
        Tokenizer(backend)


def test_decoding_agrees_with_the_backend_on_valid_text() -> None:
    backend = llama_like_backend()
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("<s>hello  12 naïve 🤖<|im_end|>")
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)
