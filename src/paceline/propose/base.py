"""What a drafting method has to be. It can slow a request down; it can never change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PacelineError
from paceline.types import Committed, Draft, View


@dataclass(frozen=True)
class Needs:
    """What a proposer reads from the target.

    taps: layers whose input hidden states `observe` gets (`num_layers`: the last one's output, -1: that output after
    the final norm). runs_target_layers: it computes with the target's own layers over `view.cache`, in scratch rows.
    """

    taps: tuple[int, ...] = ()
    runs_target_layers: bool = False


@dataclass(frozen=True)
class Budget:
    """What is of use for one sequence in this step: branches of at most `depth` tokens, `nodes` tokens in all.

    0 for one that does not draft now (a proposer with a cache of its own may catch up on its prompt meanwhile).
    """

    depth: int
    nodes: int


NOTHING = Budget(0, 0)


class Proposer(Protocol):
    """One small file per method; inherit, and write `propose` and what else the method wants to know.

    Called in this order: open, (propose, observe)*, close. `open` may give back a part of a prefix hit: it returns how
    many of the first `view.committed` positions it can use, and the target computes the rest again so that `observe`
    brings it (a head whose cache lacks the last block). `propose` gets every sequence of the step at once and returns
    one draft each, within its budget. `observe` gets every row that became final, and only records; positions of a
    prefix hit are never observed.
    """

    name: str
    needs: Needs = Needs()

    def open(self, view: View) -> int:
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]: ...

    def observe(self, view: View, committed: Committed) -> None:
        return None

    def close(self, view: View) -> None:
        return None


def check_draft(name: str, draft: Draft, budget: Budget) -> None:
    """A proposer may come from anywhere; what it must not do is said before anything is computed.

    Raises PacelineError.
    """
    if draft.depth > budget.depth:
        raise PacelineError(
            f"proposer '{name}' drafted {draft.depth} tokens deep where at most {budget.depth} were asked for "
            "(the context has no more room, or the draft length is set); a draft must stay within its budget"
        )
    if draft.size > budget.nodes:
        raise PacelineError(f"proposer '{name}' drafted {draft.size} nodes where at most {budget.nodes} were asked for")
    if any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise PacelineError(f"proposer '{name}' gave a tree in which a parent does not stand before its children")
    if draft.size and draft.draw != "point" and draft.q is None:
        raise PacelineError(f"proposer '{name}' drew its tokens ({draft.draw}) but gave no q to judge them by")
