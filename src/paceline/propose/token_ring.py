"""The last tokens of any number of growing texts in one flat array: the newest take the place of the oldest."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

BREAK, NO_MORE = -1, -1  # behind the last token of a piece: BREAK, then where the text goes on (-2 - slot) or NO_MORE
BREAK_BYTES = b"\xff\xff\xff\xff"  # never across two ids, whose highest bit is 0


@dataclass
class _Stream:
    """A text that still grows: its last tokens, and the position of the very last (-1: none yet)."""

    tail: array[int] = field(default_factory=lambda: array("i"))
    last: int = -1


class TokenRing:
    """Positions count up; position p lies in slot p % capacity of `tokens`, and those below `oldest` are gone.

    A stream lies in pieces, none of which wraps around. One begins where another stream wrote in between, or at the end
    of the ring, with the last `lead` tokens once more, so that the tokens before any position can be read backwards;
    it ends with two slots that say where the stream goes on. A slice that holds no break is the stream's own text.
    """

    def __init__(self, capacity: int, lead: int) -> None:
        self.capacity, self.lead = capacity, lead
        self.tokens = array("i", [BREAK]) * lead  # never used, so that slices may begin `lead` slots before any token
        self.next = lead - 2  # position of the next token; as if a piece had just ended there
        self._open: dict[Hashable, _Stream] = {}  # least recently written first

    @property
    def oldest(self) -> int:
        """The oldest position that the end of the newest piece leaves in place."""
        return max(0, self.next + 2 - self.capacity)

    def extend(self, stream: Hashable, new: array[int]) -> tuple[list[int], bytes]:
        """Append; returns the new tokens' positions and, as 32-bit ids, up to `lead` tokens before them and them."""
        line = self._open.pop(stream, None) or _Stream()
        self._open[stream] = line
        text, done = line.tail + new, len(line.tail)
        line.tail = text[-self.lead :]
        positions: list[int] = []
        while done < len(text):
            wanted = len(text) - done + 2
            if line.last != self.next - 1 or self._room(wanted) < 3:
                self._begin_piece(line, text[max(0, done - self.lead) : done])
            slot, count = self.next % self.capacity, self._room(wanted) - 2
            self.tokens[slot : slot + count] = text[done : done + count]
            positions += range(self.next, self.next + count)
            self.next += count
            line.last = self.next - 1
            self._end_piece()
            done += count
        return positions, text.tobytes()

    def end(self, stream: Hashable) -> None:
        """The stream grows no more; its text stays."""
        self._open.pop(stream, None)

    def after(self, slot: int, count: int) -> bytes:
        """Up to `count` tokens of the stream from `slot` on, wherever its pieces lie, as 32-bit ids."""
        following = b""
        while True:
            missing = count - len(following) // 4
            piece, end, _ = self.tokens[slot : slot + missing].tobytes().partition(BREAK_BYTES)
            following += piece
            onward = self.tokens[slot + len(piece) // 4 + 1] if end else NO_MORE
            if onward == NO_MORE:
                return following
            slot = -2 - onward

    def renumber(self) -> int:
        """Count from low positions again; returns what was taken from each, a multiple of the capacity."""
        shift = (self.next // self.capacity - 1) * self.capacity
        self.next -= shift
        for line in self._open.values():
            line.last = max(-1, line.last - shift)
        return shift

    def _begin_piece(self, line: _Stream, before: array[int]) -> None:
        """Leave the end of the piece before, repeat what came before, and link the stream's last piece to here."""
        self.next += 2
        needed, slot = len(before) + 3, self.next % self.capacity
        if slot == 0 or self._room(needed) < needed:
            self.next += -slot % self.capacity + self.lead
        slot = self.next % self.capacity
        self.tokens[slot : slot + len(before)] = before
        self.next += len(before)
        if line.last >= self.oldest:
            self.tokens[line.last % self.capacity + 2] = -2 - self.next % self.capacity
        self._forget_stale()

    def _end_piece(self) -> None:
        slot = self.next % self.capacity
        self.tokens[slot], self.tokens[slot + 1] = BREAK, NO_MORE

    def _forget_stale(self) -> None:
        """Drop the stream written least recently if none of it is left: those that nobody ends stay bounded too."""
        name, line = next(iter(self._open.items()))
        if len(self._open) > 1 and -1 < line.last < self.oldest:
            del self._open[name]

    def _room(self, wanted: int) -> int:
        """How many of `wanted` slots there are up to the end of the ring, which first grows to its capacity."""
        slot = self.next % self.capacity
        if slot + wanted > len(self.tokens) < self.capacity:
            slots = min(self.capacity, max(slot + wanted, len(self.tokens) * 9 // 8 + 64))
            self.tokens.frombytes(bytes(4 * (slots - len(self.tokens))))
        return min(wanted, len(self.tokens) - slot)
