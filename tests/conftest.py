"""Shared by all tests: one thread (tiny models gain nothing from more, and busy neighbours cost less), no gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.native.interface import kernels
from paceline.native.library import library


@pytest.fixture(autouse=True)
def _one_thread_no_gradients() -> Iterator[None]:
    torch.set_num_threads(1)  # each time: a command run in this process sets its own
    if library() is not None:
        kernels().pl_set_threads(1)
    with torch.inference_mode():
        yield
