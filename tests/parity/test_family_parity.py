"""Every family against the original library: a whole prompt in one forward."""

from __future__ import annotations

import pytest
from tiny import FAMILIES, assert_parity, family, prompt, use_attention


@pytest.mark.parametrize("attention", ["rows", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_against_transformers(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_attention(monkeypatch, attention)
    model, decoder = family(name)
    assert_parity(decoder, model, prompt(70))


def test_inner_width_of_gpt2() -> None:
    """Twice stated: by the config, and by the weights that the parity above runs."""
    assert family("gpt2-n-inner")[1].config.intermediate_size == 80
    assert family("gpt2")[1].config.intermediate_size == 4 * 64
