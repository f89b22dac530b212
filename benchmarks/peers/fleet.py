"""The engines' processes: all at once, or one at a time where memory does not allow that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from benchmarks.peers.engines import Engine
from benchmarks.peers.protocol import Answer
from benchmarks.peers.worker import Worker

from paceline.bench.noise import CpuClock, other_cores


class Fleet:
    """Starts an engine when it is first asked for, and lets each of its modes answer `warm_up` once, not counted.

    in_turn: ends the others before. `idle_cores`: by engine, the most of a core that it used while another ran.
    `stranger_cores`: mean over all runs, the cores that processes outside the comparison kept busy.
    """

    def __init__(self, engines: Sequence[Engine], warm_up: Sequence[int], max_tokens: int, in_turn: bool) -> None:
        self.by_label = {label: engine for engine in engines for label in engine.labels}
        self.warm_up, self.max_tokens, self.in_turn = list(warm_up), max_tokens, in_turn
        self.workers: dict[Engine, Worker] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.idle_cores: dict[str, float] = {}
        self._strange_seconds, self._wall_seconds = 0.0, 0.0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_all()

    def worker(self, label: str) -> Worker:
        engine = self.by_label[label]
        if engine not in self.workers:
            if self.in_turn:
                self._close_all()
            self.workers[engine] = self._started(engine)
        return self.workers[engine]

    def start_all(self) -> None:
        """Before anything is timed, unless they take turns."""
        for label in () if self.in_turn else self.by_label:
            self.worker(label)

    def timed(self, label: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One answer, while the processor time of everybody else is watched."""
        worker = self.worker(label)
        clock, spent = CpuClock.read(), self._cpu_seconds()
        answer = worker.generate(label.partition(":")[2], prompt, max_tokens)
        end, spent_after = CpuClock.read(), self._cpu_seconds()
        worker.settle()
        used = {engine: spent_after[engine] - spent[engine] for engine in spent}
        wall = max(end.wall - clock.wall, 1e-9)
        for engine, seconds in used.items():
            if self.workers[engine] is not worker:
                self.idle_cores[engine.name] = max(self.idle_cores.get(engine.name, 0.0), seconds / wall)
        self._strange_seconds += max(0.0, other_cores(clock, end) * wall - sum(used.values()))
        self._wall_seconds += wall
        return answer

    @property
    def stranger_cores(self) -> float:
        return self._strange_seconds / self._wall_seconds if self._wall_seconds else 0.0

    def _started(self, engine: Engine) -> Worker:
        worker = Worker(engine.name, engine.python, engine.settings)
        self.versions[engine.name] = worker.versions
        for mode in engine.settings.modes:
            worker.generate(mode, self.warm_up, self.max_tokens)
        worker.settle()
        return worker

    def _cpu_seconds(self) -> Mapping[Engine, float]:
        return {engine: worker.cpu_seconds() for engine, worker in self.workers.items()}

    def _close_all(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
