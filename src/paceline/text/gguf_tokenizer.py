"""A tokenizer from the metadata of a GGUF file.

Two kinds of vocabulary: byte-level BPE with a list of merges (`gpt2`), and SentencePiece BPE (`llama`), whose merges
follow from the scores. Token types as in llama.cpp: normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from paceline.errors import PacelineError
from paceline.text.end_tokens import CERTAIN_MARKERS, end_ids
from paceline.text.gguf_metadata import read_metadata
from paceline.text.parts import TokenizerParts
from paceline.text.pretokenizers import pre_tokenizer_rule

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_SCORES, _MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
_ARRAYS = frozenset({_TOKENS, _TYPES, _SCORES, _MERGES})
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")
_CACHE_FORMAT = 2  # part of the cached file's name: raise it when the built tokenizer changes


def read_gguf(path: Path, *, cache_dir: Path | None = None) -> TokenizerParts:
    """Raises PacelineError if the file is not a GGUF, has no vocabulary, or names an unknown kind of tokenizer."""
    path = Path(path)
    cached = None if cache_dir is None else _cache_path(path, cache_dir)
    backend = None if cached is None else _load_cached(cached)
    if backend is not None:
        return _parts(read_metadata(path), backend)
    metadata = read_metadata(path, _ARRAYS)
    backend = _build(metadata, path)
    if cached is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk costs time, not the answer
            _save(backend, cached)
    return _parts(metadata, backend)


def _parts(metadata: dict[str, Any], backend: Backend) -> TokenizerParts:
    added = backend.get_added_tokens_decoder()
    special = frozenset(id_ for id_, token in added.items() if token.special)
    by_text = {token.content: id_ for id_, token in added.items()}
    declared = (_id(metadata, "eos"), _id(metadata, "eot"), _id(metadata, "eom"))
    return TokenizerParts(
        backend=backend,
        bos_id=_id(metadata, "bos"),
        adds_bos=_adds_bos(metadata),
        eos_ids=end_ids(declared, by_text, special),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _id(metadata: dict[str, Any], role: str) -> int | None:
    default = {"bos": 1, "eos": 2, "unknown": 0}.get(role) if _kind(metadata) == "llama" else None
    value = metadata.get(f"tokenizer.ggml.{role}_token_id", default)
    return None if value is None else int(value)


def _kind(metadata: dict[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.model"))


def _pre(metadata: dict[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _adds_bos(metadata: dict[str, Any]) -> bool:
    kind = _kind(metadata)
    by_default = pre_tokenizer_rule(_pre(metadata)).adds_bos if kind == "gpt2" else True
    # llama.cpp overrides Gemma 4 files that say false
    return kind == "gemma4" or bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _build(metadata: dict[str, Any], path: Path) -> Backend:
    kind = _kind(metadata)
    build = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}.get(kind)
    if build is None or _TOKENS not in metadata:
        raise PacelineError(
            f"{path} has tokenizer.ggml.model {kind!r}, of which Paceline reads 'gpt2', 'llama' and 'gemma4'; "
            "use the model's Hugging Face directory instead"
        )
    metadata = _without_padding(metadata)
    tokens = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(metadata[_TOKENS])]
    vocab = {text: id_ for id_, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(text for id_, text in enumerate(tokens) if vocab[text] != id_)
        raise PacelineError(f"{path} lists the token {twice!r} twice; convert the model again")
    try:
        backend = build(metadata, vocab, tokens)
    except PacelineError:
        raise
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise PacelineError(f"{path} has a vocabulary that does not fit ({error}); convert the model again") from error
    _add_tokens(backend, metadata, tokens)
    return backend


def _without_padding(metadata: dict[str, Any]) -> dict[str, Any]:
    """The converter names the rows past the tokenizer's own [PADn], unused: they are no tokens."""
    tokens, types = metadata[_TOKENS], metadata.get(_TYPES)
    count = len(tokens)
    while types is not None and count and types[count - 1] == _UNUSED and _PADDING.fullmatch(tokens[count - 1]):
        count -= 1
    if count == len(tokens):
        return metadata
    cut = {key: metadata[key][:count] for key in (_TOKENS, _TYPES, _SCORES) if key in metadata}
    return metadata | cut


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], tokens: Sequence[str]) -> Backend:
    rule = pre_tokenizer_rule(_pre(metadata))
    if _MERGES not in metadata:
        raise PacelineError(f"the GGUF file has no {_MERGES}; convert the model again")
    backend = Backend(BPE(vocab=vocab, merges=_pairs(metadata[_MERGES]), ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], vocab: dict[str, int], tokens: Sequence[str]) -> Backend:
    unknown = _id(metadata, "unknown")
    merges = _pairs(metadata[_MERGES]) if _MERGES in metadata else _merges_from_scores(metadata, vocab, tokens)
    backend = Backend(
        BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", _kind(metadata) == "llama"))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """ "left right"; the left part may itself begin with a space."""
    cuts = (merge.index(" ", 1) for merge in merges)
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges_from_scores(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: Sequence[str]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the highest score: every way to cut each token, best token first.

    Control, byte and user-defined tokens never come out of a merge (the last are found in the text beforehand).
    """
    scores, types = metadata[_SCORES], metadata.get(_TYPES) or [_NORMAL] * len(tokens)
    normal = {text: id_ for text, id_ in vocab.items() if types[id_] == _NORMAL}
    merges: list[tuple[str, str]] = []
    for text in sorted(normal, key=lambda text: -scores[normal[text]]):
        cuts = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in normal and text[at:] in normal]
        if len(cuts) > 1:
            cuts.sort(key=lambda cut: (normal[cut[0]], normal[cut[1]]))
        merges += cuts
    return merges


def _add_tokens(backend: Backend, metadata: dict[str, Any], tokens: Sequence[str]) -> None:
    """Control and unknown tokens are special; user-defined ones are found in any text."""
    types = metadata.get(_TYPES) or [_NORMAL] * len(tokens)
    # Some converters leave end markers as normal tokens; llama.cpp corrects these too.
    markers = set(CERTAIN_MARKERS)
    eats_space = _takes_following_space(metadata)
    special = [
        AddedToken(text, normalized=False, special=True, rstrip=eats_space and text not in _PHI3_PLAIN)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _UNKNOWN) or text in markers
    ]
    plain = [
        AddedToken(text, normalized=False, special=False, rstrip=eats_space)
        for text, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED and text not in markers
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def _takes_following_space(metadata: dict[str, Any]) -> bool:
    """Phi-3's markers swallow the white space after them; a GGUF says so only by the model's name."""
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _cache_path(path: Path, cache_dir: Path) -> Path:
    try:
        stat = path.stat()
    except OSError as error:
        raise PacelineError(f"cannot read {path}: {error.strerror}; check the path") from error
    return cache_dir / f"{path.name}-{stat.st_size}-{stat.st_mtime_ns}-{_CACHE_FORMAT}.tokenizer.json"


def _load_cached(cached: Path) -> Backend | None:
    if not cached.is_file():
        return None
    try:
        return Backend.from_file(str(cached))
    except Exception:  # damaged, or written by a newer `tokenizers`: build it again
        return None


def _save(backend: Backend, cached: Path) -> None:
    """Written beside its place and moved there, so that another process never reads half a file."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cached.parent, suffix=".tmp")
    os.close(handle)
    try:
        backend.save(name, pretty=False)
        os.replace(name, cached)
    finally:
        Path(name).unlink(missing_ok=True)
