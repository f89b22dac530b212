"""An engine's process, as the runner sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.protocol import Answer, Settings

from paceline.errors import PacelineError

ROOT = Path(__file__).parents[2]
SHOWN = 15  # lines of a failed engine's log
PATIENCE = 60  # seconds that an engine has to end by itself, or to fall asleep
MOMENT = 0.2  # seconds; processor time is counted in hundredths


class Worker:
    """Starts `python -m benchmarks.peers.ENGINE` and talks to it. Raises PacelineError with the end of its log."""

    def __init__(self, engine: str, python: str, settings: Settings) -> None:
        self.engine = engine
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [python, "-m", f"benchmarks.peers.{engine}"]
        try:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(settings.threads)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                start_new_session=True,  # so that what it starts can be ended with it
            )  # fmt: skip
        except OSError as error:
            raise PacelineError(f"cannot start '{python}' for {engine}: {error.strerror}; check the path") from None
        try:
            self.versions: dict[str, str] = self._ask(op="start", settings=asdict(settings))
        except PacelineError:
            self.close()
            raise

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        return Answer(**self._ask(op="generate", mode=mode, prompt=list(prompt), max_tokens=max_tokens))

    def step_costs(self, rows: Sequence[int]) -> dict[int, float]:
        """Median seconds of a step by rows; empty where the engine does not let one measure it."""
        return {int(count): seconds for count, seconds in self._ask(op="step_costs", rows=list(rows)).items()}

    def cpu_seconds(self) -> float:
        """Processor time of the process and its children so far."""
        try:
            own = psutil.Process(self.process.pid)
            family = [own, *own.children(recursive=True)]
            return sum(sum(process.cpu_times()[:2]) for process in family)
        except psutil.NoSuchProcess:
            return 0.0

    def settle(self) -> None:
        """Wait until it sleeps: some spin for a second after an answer, which must not fall on the next engine."""
        deadline, spent = time.monotonic() + PATIENCE, self.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(MOMENT)
            before, spent = spent, self.cpu_seconds()
            if spent - before < MOMENT / 10:
                return

    def close(self) -> None:
        """End the process: by request, or by force if it does not listen."""
        try:
            self.process.communicate(json.dumps({"op": "close"}) + "\n", timeout=PATIENCE)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        reply = json.loads(line) if line else {"error": "its process ended"}
        if "error" in reply:
            raise PacelineError(f"{self.engine} failed at '{request['op']}': {reply['error']}\n{self._end_of_log()}")
        return reply["ok"]

    def _end_of_log(self) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().splitlines()[-SHOWN:])
