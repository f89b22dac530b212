"""Which tokens end a generation, beyond the one the model file declares.

Files often declare one end token where the chat format uses another, so markers are also recognised by their text.
The list is llama.cpp's.
"""

from collections.abc import Iterable, Mapping

# Nothing but an end marker is spelt like this: enough that the file lists it as an added token.
CERTAIN_MARKERS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<turn|>",
    "<|tool_response>",
    # After these, code models go on with another file or repository, or with padding.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<reponame>",
    "<|file_sep|>",
)
# Also ordinary text (Gemma has the HTML tag </s>): only where the file calls the token special.
SPECIAL_MARKERS = ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[")

# With one of these sets present, the first marker is a separator inside an answer.
_SEPARATORS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)


def end_ids(declared: Iterable[int | None], added: Mapping[str, int], special: frozenset[int]) -> tuple[int, ...]:
    """Declared ids first (in order, `None` left out), then the markers found among the `added` tokens."""
    by_text = {text: added[text] for text in CERTAIN_MARKERS if text in added}
    by_text |= {text: added[text] for text in SPECIAL_MARKERS if added.get(text) in special}
    for separator, companions in _SEPARATORS:
        if companions <= by_text.keys():
            by_text.pop(separator, None)
    ids = [id_ for id_ in declared if id_ is not None] + list(by_text.values())
    return tuple(dict.fromkeys(ids))
