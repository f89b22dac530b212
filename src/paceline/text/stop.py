"""Stop strings in a stream of text."""

from collections.abc import Sequence

from paceline.errors import PacelineError


class StopScanner:
    """Releases text up to the first stop string.

    "First" is the one that is complete first (the longest, if several end there): what a reader of the stream would
    stop at. So the text released does not depend on how it was cut into pieces, that is, on how many tokens a
    speculative step brought.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise PacelineError("a stop string is empty (''); leave it out of the list")
        self._stops = tuple(stops)
        self._held = ""
        self._found = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be released, whether a stop string was found). After a hit everything is swallowed."""
        if self._found:
            return "", True
        buffer = self._held + text
        start = self._first_hit(buffer)
        if start is not None:
            self._found, self._held = True, ""
            return buffer[:start], True
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """The text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, buffer: str) -> int | None:
        hits = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        return min(hits)[1] if hits else None

    def _possible_start(self, buffer: str) -> int:
        """Where the longest suffix that could still grow into a stop string begins."""
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, len(buffer) - longest + 1), len(buffer)):
            if any(stop.startswith(buffer[start:]) for stop in self._stops):
                return start
        return len(buffer)
