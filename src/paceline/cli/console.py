"""What goes to the terminal beside answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.types import RequestStats


def note(text: str, *, quiet: bool) -> None:
    """A line of commentary on stderr, dim on a terminal."""
    if not quiet:
        dim, plain = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}{text}{plain}", file=sys.stderr)


def origins(stats: RequestStats) -> str:
    """Which methods the accepted tokens came from, and how many of them."""
    shares = sorted(stats.accepted_from.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / stats.accepted:.0%}" for name, count in shares)


def summary(stats: RequestStats) -> str:
    """One line on how an answer came about."""
    line = f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"
    line += f", {stats.mean_acceptance_length:.2f} tokens a forward"
    if stats.drafted:
        line += f", {stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens accepted"
    if len(stats.accepted_from) > 1:
        line += f" ({origins(stats)})"
    return line + f", first token after {stats.first_token_seconds:.2f} s"
