"""Shared by all tests: one thread (tiny models gain nothing from more, and busy neighbours cost less), no gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
