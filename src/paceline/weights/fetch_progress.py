"""Progress of a fetch: it watches the folder, so that the code that fetches need not know of it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_shown(name: str, total: int, fetched: Callable[[], int]) -> Iterator[None]:
    from rich.console import Console  # slow to import, and only wanted for a fetch

    console = Console(stderr=True)
    stop = threading.Event()
    show = _show_bar if console.is_terminal else _show_lines
    thread = threading.Thread(target=show, args=(name, total, fetched, console, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _show_bar(name: str, total: int, fetched: Callable[[], int], console: "Console", stop: threading.Event) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, completed=fetched())
        while not stop.wait(0.2):
            bar.update(task, completed=fetched())
        bar.update(task, completed=fetched())


def _show_lines(name: str, total: int, fetched: Callable[[], int], console: "Console", stop: threading.Event) -> None:
    told = -1
    while not stop.wait(0.2):
        tenths = 10 * fetched() // total
        if tenths > told:
            told = tenths
            console.print(f"{name}: {megabytes(fetched())} of {megabytes(total)}")


def file_sizes(folder: Path) -> Iterator[int]:
    """The sizes of all files below ``folder``, which may come and go meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(parent, name)).st_size


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
