"""The page of `paceline explain --trace`: whole in one file, and safe whatever the tokens say."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.explain.page import render, write
from paceline.explain.record import Node, Record, Step, Token, Totals

HOSTILE = [
    "</script><script>document.title='hit'</script>", "<!--<script>", "]]>", "$record", "${tokens}", "$$", "\u2028",
    '"\\', "&lt;", "\x00", "\x1b[31m", "é😀", "\n",
]  # fmt: skip


class Page(HTMLParser):
    """The elements' names, and the text of each script, as a browser would cut them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script":
            self.scripts[-1] += data


def record_of(labels: list[str]) -> Record:
    """One step that drafted and accepted all `labels`."""
    nodes = [Node(label, i - 1, 0.5) for i, label in enumerate(labels)]
    tokens = [Token(i, label, label, "accepted", 0) for i, label in enumerate(labels)]
    step = Step("ngram", nodes, list(range(len(nodes))), 0, len(tokens), 0.001, 0.02)
    totals = Totals(1, len(tokens), len(nodes), len(nodes), 0.001, 0.02, 50.0, {"accepted": len(tokens)})
    text = "".join(labels)
    return Record({"model": text}, text, text, text, text, "stop", totals, tokens, [step])


def test_the_record_comes_back_whatever_the_tokens_say() -> None:
    record = record_of(HOSTILE)
    data = Page(render(record)).scripts[0]
    assert json.loads(data) == record.as_json()
    assert "<" not in data


def test_no_token_adds_an_element() -> None:
    assert Page(render(record_of(HOSTILE))).names == Page(render(record_of(["a"]))).names
    code = "".join(files("paceline.explain").joinpath(name).read_text("utf-8") for name in ("page.js", "page.tree.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", code)


def test_the_page_needs_no_other_file() -> None:
    page = render(record_of(["a"]))
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"\bsrc=|@import|url\(", page)
    assert "default-src 'none'" in page
    assert "$" not in re.sub(r"\$\{", "", page)  # no placeholder is left


def test_a_place_that_refuses_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"cannot write .*absent"):
        write(record_of(["a"]), tmp_path / "absent" / "page.html")


LAYOUT = """
const record = { root: "?" }, tokens = Array(65).fill({ label: "own", origin: "correction" });
function widthOf(node) { return 20 + node.label.length; }
const out = input.map(({ step, room }) => {
  const { all, line } = treeOf(step);
  arrange(line);
  const size = locate(all, room);
  return { size, line: line.map((node) => node.row), boxes: all.map((node) => [node.x, node.y, node.width, HEIGHT]) };
});
console.log(JSON.stringify(out));
"""


def random_step(rng: random.Random, kind: str) -> dict[str, Any]:
    """A tree of up to 64 nodes with a random accepted path, as the page's JSON has it."""
    size = rng.randint(1, 64)
    lowest, highest = {"chain": (1, 1), "tree": (1, 64), "star": (64, 64)}[kind]
    parents = [max(-1, i - rng.randint(lowest, highest)) for i in range(size)]
    path: list[int] = []
    while rng.random() < 0.9 and (below := [i for i, p in enumerate(parents) if p == (path or [-1])[-1]]):
        path.append(rng.choice(below))
    nodes = [{"label": "x" * rng.randint(1, 18), "parent": p, "confidence": None} for p in parents]
    return {"method": "m", "nodes": nodes, "path": path, "first": 0, "count": len(path) + 1}


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script runs in node")
@pytest.mark.parametrize("kind", ["chain", "tree", "star"])
def test_no_node_of_a_drawn_tree_covers_another(kind: str) -> None:
    rng = random.Random(0)
    steps = [random_step(rng, kind) for _ in range(40)]
    cases = [{"step": step, "room": rng.choice([300, 900])} for step in steps]
    script = files("paceline.explain").joinpath("page.tree.js").read_text("utf-8")
    code = f'"use strict";\nconst input = {json.dumps(cases)};\n{script}\n{LAYOUT}'
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for step, drawn in zip(steps, json.loads(done.stdout), strict=True):
        assert len(drawn["boxes"]) == len(step["nodes"]) + 2  # the root and the target's own token
        assert set(drawn["line"]) == {0}
        width, height = drawn["size"]
        for i, (x, y, w, h) in enumerate(drawn["boxes"]):
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
            assert not any(
                x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h for x2, y2, w2, h2 in drawn["boxes"][:i]
            )
