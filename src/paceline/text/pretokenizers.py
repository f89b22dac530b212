"""How a byte-level vocabulary cuts text before merging: what `tokenizer.ggml.pre` of a GGUF file names.

A GGUF names the original tokenizer's rules but does not carry them. llama.cpp's list of names is followed
(src/llama-vocab.cpp); where its regexes are adapted to its own engine, the original tokenizer.json's rule is used.
Each regex of a sequence cuts out its matches; what lies between them is cut by the next.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

from paceline.errors import PacelineError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_EACH_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
# Combining marks belong to the letters.
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TURKISH = rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+"
    + "".join(rf"|\s{{{width}}}(?!\S)" for width in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s"
)

# Tekken and GPT-4o cut inside CamelCase: capitals then small letters, or capitals alone.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _cased_words(suffix: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"


_TEKKEN = _cased_words("") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _cased_words(f"{_CONTRACTION}?") + r"|\p{N}{1,3}" + _CASED_TAIL

_CJK_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _CJK_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_CJK_WIDE = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# DeepSeek LLM lists the cased letters of one Unicode version, as ranges.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _class(ranges: str) -> str:
    """A character class from hexadecimal ranges: source text cannot be trusted to keep look-alike letters apart."""
    return "".join("-".join(rf"\x{{{end}}}" for end in span.split("-")) for span in ranges.split())


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_class(_CASED_LETTERS)}]+",
    rf"\s?[!-/:-~{_class('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    _CJK_WIDE,
    _EACH_DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, _EACH_DIGIT)
_BLOOM = rf" ?[^(\s|.,!?{_class('2026 3002 FF0C 3001 964 6D4 60C')})]+"
# llama.cpp's rule for files that name none (Falcon's, roughly): old conversions only.
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)
_DIGITS_GPT2 = (_EACH_DIGIT, _GPT2)


@dataclass(frozen=True)
class PreTokenizerRule:
    """`nfc`: compose characters first. `ignore_merges`: a whole word found in the vocabulary is one token.

    `adds_bos` holds where the file does not say.
    """

    regexes: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    falcon: bool = False

    def build(self) -> PreTokenizer:
        if self.falcon:
            return _falcon()
        return Sequence([*map(_split, self.regexes), ByteLevel(add_prefix_space=False, use_regex=False)])


def _split(regex: str) -> PreTokenizer:
    # the originals use `Digits` for this one, whose Unicode tables are a little newer than those of the regex engine
    return Digits(individual_digits=True) if regex == _EACH_DIGIT else Split(Regex(regex), behavior="isolated")


def _falcon() -> PreTokenizer:
    """Falcon looks for digits *after* the bytes have become letters, some of which count as digits."""
    return Sequence(
        [
            Punctuation("contiguous"),
            ByteLevel(add_prefix_space=False, use_regex=True),
            Digits(individual_digits=False),
            Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_GPT2_RULE = PreTokenizerRule((_GPT2,))
_GPT2_NFC_RULE = PreTokenizerRule((_GPT2,), nfc=True)
_DIGITS_RULE = PreTokenizerRule(_DIGITS_GPT2)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,))
_QWEN2_NFC_RULE = PreTokenizerRule((_QWEN2,), nfc=True)
_GPT4O_RULE = PreTokenizerRule((_GPT4O,))
_BLOOM_RULE = PreTokenizerRule((_BLOOM,))
_BAILING_RULE = PreTokenizerRule((_BAILING,))
_AYA_RULE = PreTokenizerRule(_AYA)
_DEEPSEEK_V3_RULE = PreTokenizerRule(_DEEPSEEK_V3)

RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule(_DEFAULT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3_RULE),
    **dict.fromkeys(("lfm2", "jina-v5-nano"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizerRule((_LLAMA3,))),
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "mellum"), _GPT2_RULE),
    **dict.fromkeys(("a.x-4.0", "exaone4", "modern-bert", "jina-es", "jina-de", "jina-v2-es"), _GPT2_RULE),
    **dict.fromkeys(("jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"), _GPT2_RULE),
    **dict.fromkeys(("mpt", "olmo"), _GPT2_NFC_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_RULE),
    "command-r": PreTokenizerRule(_DIGITS_GPT2, nfc=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"), _QWEN2_NFC_RULE),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), _QWEN2_RULE),
    "qwen35": PreTokenizerRule((_QWEN35,), nfc=True),
    "ufakzeka": PreTokenizerRule((_TURKISH,)),
    "deepseek-llm": PreTokenizerRule(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizerRule(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3_RULE),
    "falcon": PreTokenizerRule((), falcon=True),
    "tekken": PreTokenizerRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_RULE),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA_RULE),
    "granite-embed-multi-97m": PreTokenizerRule((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM_RULE),
    "viking": PreTokenizerRule((_BLOOM, _EACH_DIGIT)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING_RULE),
    "seed-coder": PreTokenizerRule((_SEED_CODER,)),
    "exaone-moe": PreTokenizerRule((_EXAONE_MOE,)),
    "jais-2": PreTokenizerRule((_JAIS2,)),
    "minicpm5": PreTokenizerRule((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
}


def pre_tokenizer_rule(name: str) -> PreTokenizerRule:
    """Raises PacelineError for a name that is not in the table: a wrong cut would silently change every prompt."""
    if name not in RULES:
        raise PacelineError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer Paceline does not know; "
            "use the model's Hugging Face directory (with tokenizer.json) instead of this GGUF"
        )
    return RULES[name]
