"""What a drafting method has to be. It can slow a request down; it can never change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch

from paceline.cache.tree import is_chain, is_tree
from paceline.errors import PacelineError
from paceline.types import Committed, Draft, Draw, View


@dataclass(frozen=True)
class Needs:
    """What a proposer reads from the target.

    taps: layers whose input hidden states `observe` gets (`num_layers`: the last one's output, -1: that output after
    the final norm). runs_target_layers: it computes with the target's own layers over `view.cache`, in scratch rows.
    trees: its drafts may have more nodes than they are deep, for which room has to be found.
    """

    taps: tuple[int, ...] = ()
    runs_target_layers: bool = False
    trees: bool = False


@dataclass(frozen=True)
class Budget:
    """What is of use for one sequence in this step: branches of at most `depth` tokens, `nodes` tokens in all.

    0 for one that does not draft now (a proposer with a cache of its own may catch up on its prompt meanwhile).
    """

    depth: int
    nodes: int


NOTHING = Budget(0, 0)
DRAWS = get_args(Draw)


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

    @property
    def settled(self) -> bool:
        """False while it still learns how to draft, at a cost that does not stay: it is not judged by the clock yet."""
        return True

    def open(self, view: View) -> int:
        return view.committed

    def propose(self, views: Sequence[View], budgets: Sequence[Budget]) -> list[Draft]: ...

    def observe(self, view: View, committed: Committed) -> None:
        return None

    def behind(self, view: View) -> int:
        """Tokens that it would have to read before it can draft, having been left out for a while."""
        return 0

    def close(self, view: View) -> None:
        return None


def check_draft(name: str, draft: Draft, budget: Budget, vocab_size: int) -> None:
    """A proposer may come from anywhere; what it must not do is said before anything is computed.

    Raises PacelineError.
    """
    tokens, parents, size = draft.tokens, draft.parents, draft.size
    misfit: str | None = None
    if tokens.dim() != 1 or tokens.dtype is not torch.int64:
        misfit = f"tokens must be int64 of one dimension, not {tokens.dtype} of {tokens.dim()}"
    elif len(parents) != size or not (is_chain(parents) or is_tree(parents)):
        misfit = "every node needs one parent, -1 or a node before it"
    elif draft.depth > budget.depth:
        misfit = (
            f"it is {draft.depth} tokens deep where at most {budget.depth} were asked for "
            "(the context has no more room, or the draft length is set)"
        )
    elif size > budget.nodes:
        misfit = f"it has {size} nodes where at most {budget.nodes} were asked for"
    elif draft.draw not in DRAWS:
        misfit = f"draw must be one of {', '.join(DRAWS)}, not '{draft.draw}'"
    elif size and draft.draw != "point" and not _judgeable(draft):
        misfit = f"tokens that were drawn ({draft.draw}) need q, a row for every node with children"
    elif draft.confidence is not None and len(draft.confidence) != size:
        misfit = f"there are {len(draft.confidence)} confidences for {size} nodes"
    elif tokens.device.type == "cpu" and not all(0 <= token < vocab_size for token in tokens.tolist()):
        misfit = f"token ids must lie in 0..{vocab_size - 1}"
    if misfit is not None:
        raise PacelineError(f"proposer '{name}' gave a draft that cannot be verified: {misfit}")


def _judgeable(draft: Draft) -> bool:
    return draft.q is not None and draft.q.dim() == 2 and draft.q.shape[0] > max(draft.parents) + 1
