"""An answer in a terminal, each token in the colour of its origin; underline and bold say the same without colours."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from paceline.explain.record import Token, Totals
from paceline.types import Origin

# Blue and orange stay apart for every common colour blindness, on dark and on light backgrounds.
STYLES: dict[Origin, str] = {
    "accepted": "underline #3b8eea",
    "correction": "bold #000000 on #e69f00",
    "bonus": "bold #ffffff on #1f6fd0",
    "plain": "none",
}
MEANINGS: dict[Origin, str] = {
    "accepted": "drafted, and the target agreed",
    "correction": "target's own; draft refused",
    "bonus": "target's own; whole draft accepted",
    "plain": "target's own; no draft",
}
BAR = 14  # columns
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}


def coloured(tokens: Iterable[Token]) -> Text:
    """The tokens' text. What could steer the terminal is shown as a symbol; a lone line break gets one to colour."""
    text = Text()
    for token in tokens:
        shown = token.text.translate(VISIBLE)
        if shown and not shown.strip() and token.origin in ("correction", "bonus"):
            shown = shown.replace("\n", "↵\n")
        text.append(shown, STYLES[token.origin])
    return text


def print_summary(console: Console, totals: Totals) -> None:
    """The legend with each origin's share, and what it comes to."""
    console.print()
    console.print(_legend(totals))
    console.print()
    console.print(_figures(totals))


def _legend(totals: Totals) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for origin, meaning in MEANINGS.items():
        count = totals.origins.get(origin, 0)
        share = count / totals.tokens if totals.tokens else 0.0
        style = Style.parse(STYLES[origin])
        swatch, bar = (
            Text(f" {origin} ", style),
            Text("█" * round(share * BAR), Style(color=style.bgcolor or style.color)),
        )
        table.add_row(swatch, Text(meaning, "dim"), str(count), f"{share:.0%}", bar)
    return table


def _figures(totals: Totals) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("steps", "tokens", "tokens a forward", "drafted", "accepted", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        str(totals.steps),
        str(totals.tokens),
        f"[bold]{totals.tokens_per_forward:.2f}[/bold]",
        str(totals.drafted),
        f"{totals.acceptance_rate:.0%}" if totals.drafted else "-",
        f"{totals.tokens_per_second:.1f}",
    )
    return table
