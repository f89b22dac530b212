"""Shared by all tests: one thread pool, tiny models."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _no_gradients():  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        yield
