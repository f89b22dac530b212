"""Shared by all tests: one thread (tiny models gain nothing from more, and busy neighbours cost less), no gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_no_gradients() -> Iterator[None]:
    torch.set_num_threads(1)  # each time: a command run in this process sets its own
    with torch.inference_mode():
        yield
