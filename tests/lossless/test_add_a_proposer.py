"""The page about adding a method: its code runs as it stands, keeps the guarantee, and is found by its entry point."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from lab import engine, exact_law, model, output, p_value, run, sample_outputs

from paceline.methods import known_methods
from paceline.propose.base import Proposer
from paceline.propose.none import NoProposer
from paceline.sampling.params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "add_a_proposer.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]


@pytest.fixture
def bigram() -> Proposer:
    module = ModuleType("bigram_of_the_page")
    exec(CODE, module.__dict__)
    proposer: Proposer = module.BigramProposer()
    return proposer


def test_the_page_keeps_its_word_of_under_forty_lines() -> None:
    assert len(CODE.splitlines()) < 40


def test_it_drafts_and_gives_the_tokens_of_plain_decoding(bigram: Proposer) -> None:
    target, params = model(0), SamplingParams(max_tokens=40)
    (request,) = run(engine(target, bigram, k=4), [[1, 2, 3, 1, 2]], [params])
    (plain,) = run(engine(target, NoProposer()), [[1, 2, 3, 1, 2]], [params])
    assert output(request) == output(plain)
    assert request.stats.accepted > 0


def test_it_is_exact_under_rejection(bigram: Proposer) -> None:
    target, params = model(0), SamplingParams(temperature=1.1, max_tokens=3, verify="rejection")
    assert p_value(sample_outputs(engine(target, bigram, k=3), params, 1500), exact_law(target, params, 3)) > 1e-4


def test_an_installed_package_registers_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.build import Options
    from paceline.methods import build_proposer

    (tmp_path / "bigram_package.py").write_text(CODE)
    info = tmp_path / "bigram_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[paceline.proposers]\nbigram = bigram_package:build\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "bigram" in known_methods()
    assert Options("smollm2-135m", method="bigram").chosen_method == "bigram"
    assert build_proposer("bigram", None).name == "bigram"  # type: ignore[arg-type]
