"""Threads that the container really has, and the choice of device and precision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import device
from paceline.device import Backend, available_cpus, choose_backend, set_threads
from paceline.errors import PacelineError

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup folder in place of /sys/fs/cgroup, on a machine of eight processors."""
    real = Path
    monkeypatch.setattr(device, "Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else real(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "cpus"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("1000 100000", 1),
        ("max 100000", 8),
        ("9900000 100000", 8),
        ("300000 50000\n", 6),
        ("nonsense", 8),
        ("", 8),
    ],
)
def test_cgroup_v2_quota(content: str, cpus: int, cgroup: Path) -> None:
    (cgroup / "cpu.max").write_text(content)
    assert available_cpus() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("250000", 3), ("-1", 8), ("0", 8), ("1000", 1), ("?", 8)])
def test_cgroup_v1_quota(quota: str, cpus: int, cgroup: Path) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu/cpu.cfs_quota_us").write_text(quota)
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000")
    assert available_cpus() == cpus


def test_no_cgroup(cgroup: Path) -> None:
    assert available_cpus() == 8


def test_affinity_below_the_quota(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cgroup / "cpu.max").write_text("600000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    assert available_cpus() == 2


def test_system_without_affinity(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cpus() == 6


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_restored")
def test_set_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_threads(1) == torch.get_num_threads() == 1
    monkeypatch.setattr(device, "available_cpus", lambda: 2)
    assert set_threads(None) == torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [0, -3])
def test_too_few_threads(threads: int) -> None:
    before = torch.get_num_threads()
    with pytest.raises(PacelineError, match=f"threads must be at least 1, not {threads}"):
        set_threads(threads)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("precision", "dtype", "invariant"),
    [
        ("fp32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("int8", torch.float32, True),
        ("int8-fast", torch.float32, True),
    ],
)
def test_explicit_precision(precision: str, dtype: torch.dtype, invariant: bool) -> None:
    """Asked for, a precision is taken whatever the checkpoint and the processor."""
    for quantized in (True, False):
        backend = choose_backend("cpu", precision, quantized_checkpoint=quantized)
        assert backend == Backend(CPU, precision, dtype)  # type: ignore[arg-type]
        assert backend.row_invariant is backend.int8 is invariant


@pytest.mark.parametrize(
    ("quantized", "int8_dot", "bf16_dot", "expected"),
    [
        (True, True, True, "int8"),
        (True, True, False, "int8"),
        (True, False, True, "bf16"),
        (True, False, False, "fp32"),
        (False, True, True, "bf16"),
        (False, True, False, "fp32"),
        (False, False, False, "fp32"),
    ],
)
def test_auto_precision(
    quantized: bool, int8_dot: bool, bf16_dot: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never rounds a checkpoint harder than it came, and only to what the processor multiplies exactly and fast."""
    monkeypatch.setattr(device, "has_int8_dot", lambda: int8_dot)
    monkeypatch.setattr(device, "has_bf16_dot", lambda: bf16_dot)
    if expected == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        expected = "fp32"
    assert choose_backend("cpu", "auto", quantized_checkpoint=quantized).precision == expected


def test_device_defaults_to_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend(None, "fp32", quantized_checkpoint=False).device == CPU


def test_gpu_is_preferred_and_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = choose_backend(None, "auto", quantized_checkpoint=True)
    assert backend == Backend(torch.device("cuda"), "bf16", torch.bfloat16)


@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
def test_int8_on_a_gpu_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(PacelineError, match=f"precision '{precision}' runs on the CPU only; use bf16 on cuda"):
        choose_backend("cuda", precision, quantized_checkpoint=True)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_absent_gpu_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PacelineError, match=f"device '{name}' was asked for but PyTorch finds no GPU"):
        choose_backend(name, "auto", quantized_checkpoint=False)


@pytest.mark.parametrize("precision", ["int3", "", "FP32"])
def test_unknown_precision_is_named(precision: str) -> None:
    with pytest.raises(
        PacelineError, match=f"unknown precision '{precision}'; one of auto, fp32, bf16, int8, int8-fast"
    ):
        choose_backend("cpu", precision, quantized_checkpoint=False)


@pytest.mark.parametrize("name", ["gpu", "cpu:x"])
def test_unknown_device_is_named(name: str) -> None:
    with pytest.raises(PacelineError, match=f"'{name}'"):
        choose_backend(name, "fp32", quantized_checkpoint=False)
