"""Where figures come from: the command, the versions, the machine, the moment."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

import paceline
from paceline.bench.noise import noise_warning
from paceline.bench.run import ENOUGH_REPEATS, Outcome
from paceline.device import available_cpus


def provenance(outcome: Outcome, command: str) -> dict[str, Any]:
    config = outcome.config
    return origin(command) | {
        "transformers": _transformers_version() if config.peers else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": config.options.threads or available_cpus(),  # PyTorch's own number is 1 beside the kernels
        "target": config.options.model,
        "precision": outcome.precision,
        "draft": config.options.draft,
        "head": config.options.head_name,
        "draft_precisions": outcome.draft_precisions,
        "methods": list(config.methods),
        "k": config.options.k,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "repeats": config.repeats,
        "other_processes_cores": round(outcome.other_cores, 4),
        "warnings": warnings(outcome),
    }


def origin(command: str) -> dict[str, Any]:
    """What is to be known of any figures."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "paceline": paceline.__version__,
        "commit": git_commit(Path(paceline.__file__)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_model(),
        "peak_memory_bytes": peak_memory(),
    }


def warnings(outcome: Outcome) -> list[str]:
    """Why these figures should not be quoted, if so."""
    found = []
    if outcome.config.repeats < ENOUGH_REPEATS:
        found.append(f"{outcome.config.repeats} repeats are too few for figures to keep; use {ENOUGH_REPEATS} or more")
    noise = noise_warning(outcome.other_cores)
    return found if noise is None else [*found, noise]


def git_commit(file: Path) -> str | None:
    """The commit of the checkout that `file` is tracked in, `-dirty` if its folder has changes; None without one."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None  # installed inside some other project's checkout
    commit, changes = _git(file.parent, "rev-parse", "HEAD"), _git(file.parent, "status", "--porcelain", "--", ".")
    return commit and (f"{commit}-dirty" if changes else commit)


def processor_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def peak_memory() -> int:
    """Most bytes that this process has held in main memory."""
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info()._asdict()["peak_wset"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)
