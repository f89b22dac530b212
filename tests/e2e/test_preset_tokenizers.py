"""Golden ids of the presets' own vocabularies.

They were recorded from independent tokenizers, which agreed with ours on these texts and on 4,600 others (digits, runs
of spaces and newlines, code, CJK, emoji, random code points):
- Qwen2.5: tiktoken 0.14 over the original `qwen.tiktoken` (shipped in `dashscope` 2.0.2) with Qwen's regex and NFC.
  No difference. transformers 5.24's GGUF conversion agrees on NFC text (it leaves the normaliser out).
- SmolLM2: tiktoken's merge engine over the file's merges, text cut by the `regex` package: every digit alone, then
  GPT-2's regex. No difference. (transformers' GGUF conversion does not cut the digits, so it is no oracle here.)
- Gemma 3: Google's `sentencepiece` over a model rebuilt from the file's pieces, scores and types. No difference, save
  where the text itself contains U+2581 beside a space. transformers agrees, save on runs of more than 16 spaces, where
  its merges differ from SentencePiece.
"""

from pathlib import Path

import pytest

from paceline.text.tokenizer import Tokenizer
from paceline.weights.presets import preset_is_cached, preset_path

pytestmark = pytest.mark.real_model

SMOLLM2: dict[str, list[int]] = {
    "1234567890 3.14": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 216, 35, 30, 33, 36],
    "a  b   c    d\n\n\n  e\t\tf ": [81, 216, 278, 256, 265, 333, 287, 1116, 3805, 297, 197, 197, 86, 216],
    "def add(a, b):\n    return a + b  # sum\n": [
        1604,
        803,
        24,
        81,
        28,
        278,
        727,
        472,
        1003,
        253,
        1232,
        278,
        216,
        907,
        2028,
        198,
    ],
    "你好，世界！我想在apple工作": [
        18645,
        250,
        48392,
        138,
        12831,
        7906,
        240,
        178,
        239,
        230,
        8083,
        219,
        19805,
        235,
        177,
        221,
        128,
        32632,
        21949,
        36149,
        115,
        40994,
    ],
    "🚀 😶\u200d🌫️ 👨\u200d👩\u200d👧": [
        10813,
        244,
        218,
        40303,
        131,
        321,
        231,
        10813,
        230,
        121,
        31752,
        15107,
        235,
        118,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
    ],
    "I've café naïve, WE'LL it's": [57, 3543, 37366, 15486, 46494, 28, 26587, 23, 16421, 357, 506],
    "x = [1, 22, 333];\r\n": [104, 446, 933, 33, 28, 216, 34, 34, 28, 216, 35, 35, 35, 26695, 2738],
    "Привет, мир! 안녕하세요": [
        155,
        249,
        46879,
        16464,
        32547,
        28,
        41337,
        7872,
        9175,
        17,
        18601,
        239,
        226,
        182,
        223,
        239,
        33085,
        242,
        183,
        222,
        133,
        183,
        244,
        238,
    ],
    "²½ Ⅷ": [19133, 16738, 216, 173, 223, 117],
}
QWEN2: dict[str, list[int]] = {
    "1234567890 3.14": [16, 17, 18, 19, 20, 21, 22, 23, 24, 15, 220, 18, 13, 16, 19],
    "a  b   c    d\n\n\n  e\t\tf ": [64, 220, 293, 256, 272, 262, 294, 1406, 220, 384, 197, 1166, 220],
    "def add(a, b):\n    return a + b  # sum\n": [
        750,
        912,
        2877,
        11,
        293,
        982,
        262,
        470,
        264,
        488,
        293,
        220,
        671,
        2629,
        198,
    ],
    "你好，世界！我想在apple工作": [108386, 3837, 99489, 6313, 104100, 18493, 22377, 99257],
    "🚀 😶\u200d🌫️ 👨\u200d👩\u200d👧": [
        145836,
        26525,
        114,
        378,
        235,
        149921,
        30543,
        61804,
        101,
        378,
        235,
        145233,
        378,
        235,
        145665,
    ],
    "I've café naïve, WE'LL it's": [40, 3003, 51950, 94880, 586, 11, 19677, 6, 4086, 432, 594],
    "x = [1, 22, 333];\r\n": [87, 284, 508, 16, 11, 220, 17, 17, 11, 220, 18, 18, 18, 5960],
    "Привет, мир! 안녕하세요": [53645, 26991, 8178, 11, 137144, 0, 95170, 144370, 91145],
    "²½ Ⅷ": [29456, 26062, 220, 70467, 100],
}
GEMMA3: dict[str, list[int]] = {
    "1234567890 3.14": [
        236770,
        236778,
        236800,
        236812,
        236810,
        236825,
        236832,
        236828,
        236819,
        236771,
        236743,
        236800,
        236761,
        236770,
        236812,
    ],
    "a  b   c    d\n\n\n  e\t\tf ": [
        236746,
        138,
        236763,
        139,
        236755,
        140,
        236753,
        109,
        138,
        236744,
        255969,
        236760,
        236743,
    ],
    "def add(a, b):\n    return a + b  # sum\n": [
        2063,
        1138,
        236769,
        236746,
        236764,
        518,
        1473,
        107,
        140,
        2060,
        496,
        900,
        518,
        138,
        236865,
        2324,
        107,
    ],
    "你好，世界！我想在apple工作": [144626, 236900, 12811, 237354, 62133, 237075, 17641, 11700],
    "🚀 😶\u200d🌫️ 👨\u200d👩\u200d👧": [
        242015,
        236743,
        247717,
        237243,
        248989,
        238178,
        236743,
        243874,
        237243,
        243767,
        237243,
        244814,
    ],
    "I've café naïve, WE'LL it's": [
        236777,
        236789,
        560,
        33443,
        120362,
        236764,
        19716,
        236789,
        2182,
        625,
        236789,
        236751,
    ],
    "x = [1, 22, 333];\r\n": [
        236781,
        578,
        870,
        236770,
        236764,
        236743,
        236778,
        236778,
        236764,
        236743,
        236800,
        236800,
        236800,
        2312,
        251,
        107,
    ],
    "Привет, мир! 안녕하세요": [116130, 236764, 58562, 236888, 83732],
    "²½ Ⅷ": [238131, 238612, 236743, 251329],
}


def available(name: str) -> Path:
    """The small preset is downloaded; the others are only used where they already are."""
    if name != "smollm2-135m" and not preset_is_cached(name):
        pytest.skip(f"{name} is not in the cache")
    return preset_path(name)


@pytest.mark.parametrize(
    ("name", "golden"), [("smollm2-135m", SMOLLM2), ("qwen2.5-coder-0.5b", QWEN2), ("gemma3-270m", GEMMA3)]
)
def test_ids_equal_the_original_tokenizers(name: str, golden: dict[str, list[int]]) -> None:
    tokenizer = Tokenizer.from_gguf(available(name))
    for text, ids in golden.items():
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "rows", "bos", "ends"),
    [
        ("smollm2-135m", 49152, [], ["<|im_end|>", "<|endoftext|>", "<reponame>"]),
        (
            "qwen2.5-coder-0.5b",
            151665,  # the file pads its 151,936 rows with ids that are no tokens
            [],
            ["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        ("gemma3-270m", 262144, [2], ["<eos>", "<end_of_turn>"]),
    ],
)
def test_rows_bos_and_end_tokens(name: str, rows: int, bos: list[int], ends: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(available(name))
    assert tokenizer.vocab_size == rows
    assert tokenizer.encode("") == bos
    assert [tokenizer.token_string(token) for token in tokenizer.eos_ids] == ends


def test_smollm2_chat_prompt() -> None:
    tokenizer = Tokenizer.from_gguf(available("smollm2-135m"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    prompt = tokenizer.render_chat(messages)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt)[:2] == [1, 9690]
    assert tokenizer.encode(prompt).count(1) == 3


def test_the_cache_gives_the_same_tokenizer(tmp_path: Path) -> None:
    path = available("smollm2-135m")
    built, cached = (Tokenizer.from_gguf(path, cache_dir=tmp_path) for _ in range(2))
    assert built.token_strings() == cached.token_strings()
    for text in SMOLLM2:
        assert built.encode(text) == cached.encode(text)
