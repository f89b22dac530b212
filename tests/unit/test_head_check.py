"""The one look at whether a head fits its target: fitting heads pass in silence, others are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lab import CONFIG, DEVICE, letters, model, on
from lab_heads import eagle1_head, eagle3_head, mtp_head, successor_model, taps
from lab_medusa import KnowingHead, random_head
from torch import Tensor

from paceline.heads.check import TEXT, USELESS, agreement, warn_if_useless
from paceline.heads.eagle import Eagle1Head
from paceline.heads.load import Head
from paceline.model.decoder import NORMED
from paceline.weights.load import LoadedModel

LARGE = replace(CONFIG, vocab_size=400)
HIDDEN = CONFIG.hidden_size


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """Its tokenizer knows the letters of the text, and many ids that no guess should hit by chance."""
    return model(0, config=LARGE, sharpness=-1.0)


def untrained(kind: str, target: LoadedModel) -> Head:
    if kind == "eagle-1":
        return eagle1_head(target)
    if kind == "eagle-3":
        return eagle3_head(target, ids=range(0, 400, 2))
    return random_head(target) if kind == "medusa" else mtp_head(target, 2)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "mtp", "medusa"])
def test_an_untrained_head_is_named_in_a_warning(
    kind: str, target: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    head = untrained(kind, target)
    assert agreement(head, target) < USELESS
    warn_if_useless("org/some-head", head, target)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warning: head 'org/some-head' guesses ")
    assert "% of random-0's tokens" in err
    assert err.count("\n") == 1


def silenced(head: Head) -> None:
    """Layers that add nothing."""
    for layer in head.block.layers:  # type: ignore[union-attr]
        layer.output = layer.down = lambda x: x.new_zeros(x.shape[0], HIDDEN)


def knowing(kind: str, target: LoadedModel) -> Head:
    """Of a target whose next token follows from the last one alone: passes the last one's embedding on."""
    norm = target.decoder.final_norm
    if kind == "eagle-1":
        eagle = eagle1_head(target)
        silenced(eagle)
        eagle.fc = lambda x: norm(x[:, :HIDDEN])
        return eagle
    mtp = mtp_head(target, 2)
    silenced(mtp)
    mtp.depths[0].embed_norm, mtp.depths[0].project = (lambda x: x), (lambda x: x[:, HIDDEN:])
    return mtp


def spelled(target: LoadedModel) -> LoadedModel:
    """With a tokenizer that knows all letters of the text."""
    return replace(target, tokenizer=letters(target.config.vocab_size))


@pytest.mark.parametrize("kind", ["eagle-1", "mtp"])
def test_a_head_that_knows_the_target_passes_in_silence(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = spelled(successor_model())
    head = knowing(kind, target)
    assert agreement(head, target) == 1.0
    warn_if_useless("fits", head, target)
    assert capsys.readouterr() == ("", "")


def test_a_head_that_is_one_token_behind_does_not_pass() -> None:
    """It repeats what the target said in the same row, which is the token that it was just given."""
    target = spelled(successor_model())
    head = knowing("eagle-1", target)
    assert isinstance(head, Eagle1Head)
    head.fc = lambda x: x[:, HIDDEN:]
    assert agreement(head, target) < 0.3


def test_a_reduced_vocabulary_is_read_in_the_targets_ids(target: LoadedModel) -> None:
    """Whatever the text, target and head say one and the same token: 250, the hundredth that this head knows."""
    says = replace(target, decoder=replace(target.decoder, head=lambda x: one_hot(len(x), 250, 400)))
    head = eagle3_head(says, ids=range(150, 350))
    head.output = lambda x: one_hot(len(x), 100, 200)
    assert agreement(head, says) == 1.0
    head.output = lambda x: one_hot(len(x), 99, 200)
    assert agreement(head, says) == 0.0


def one_hot(rows: int, token: int, width: int) -> Tensor:
    logits = torch.zeros(rows, width, device=DEVICE)
    logits[:, token] = 9.0
    return logits


def test_medusa_is_held_against_the_token_after_the_next(target: LoadedModel) -> None:
    """Its first head guesses from the row before what the target says behind the token that came."""
    text = target.tokenizer.encode(TEXT)
    (states,) = taps(target, text, [NORMED])
    chosen = target.decoder.head(states).argmax(dim=1).tolist()

    def head(*, behind: int) -> KnowingHead:
        """Scores `said[place + 2]` in the row of `text[place]`."""
        said = [0] * (1 + behind) + chosen
        return KnowingHead(
            blocks=[[]], outputs=[], dtype=torch.float32, text=said, states=states, vocabulary=400
        )  # fmt: skip

    assert len(on(text)) > 100
    assert agreement(head(behind=0), target) > 0.95
    assert agreement(head(behind=1), target) < 0.5
