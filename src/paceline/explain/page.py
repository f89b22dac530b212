"""One HTML file that steps through an answer's draft trees: no network, no other files."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from string import Template

from paceline.errors import PacelineError
from paceline.explain.record import Record


def render(record: Record) -> str:
    """The page. Values are substituted once, so nothing in a record is taken for a placeholder."""
    parts = {"style": _part("page.css"), "tree": _part("page.tree.js"), "script": _part("page.js")}
    return Template(_part("page.html")).substitute(parts, record=embed(record.as_json()))


def embed(value: object) -> str:
    """JSON that is safe inside a script element: it has no `<`, so no token can end the element or open a comment."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write(record: Record, path: Path) -> None:
    """Raises PacelineError if the file cannot be written."""
    try:
        path.write_text(render(record), encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"cannot write '{path}': {error.strerror}") from None


def _part(name: str) -> str:
    return files("paceline.explain").joinpath(name).read_text(encoding="utf-8")
