"""Threads that the container really has, and the choice of device and precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline import device
from paceline.device import Backend, available_cpus, choose_backend, set_threads
from paceline.errors import PacelineError
from paceline.native import interface, library

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


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what this machine has, whatever it has."""

    def has(*, kernels: bool, int8_dot: bool = True, bf16_dot: bool = False) -> None:
        monkeypatch.setattr(device, "has_kernels", lambda: kernels)
        monkeypatch.setattr(device, "has_int8_dot", lambda: int8_dot)
        monkeypatch.setattr(device, "has_bf16_dot", lambda: bf16_dot)

    return has


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(
    ("precision", "kernels", "dtype", "native"),
    [
        ("fp32", True, torch.float32, False),
        ("fp32", False, torch.float32, False),
        ("bf16", True, torch.bfloat16, False),
        ("bf16", False, torch.bfloat16, False),
        ("int8", True, torch.float32, True),
        ("int8", False, torch.float32, False),
        ("int4", True, torch.float32, True),
        ("int4", False, torch.bfloat16, False),
    ],
)
def test_explicit_precision(
    precision: str, kernels: bool, dtype: torch.dtype, native: bool, quantized: bool, processor: Callable[..., None]
) -> None:
    """Asked for, a precision is taken whatever the checkpoint; the kernels compute it where they can."""
    processor(kernels=kernels)
    backend = choose_backend("cpu", precision, quantized_checkpoint=quantized)
    assert backend == Backend(CPU, precision, dtype, native)  # type: ignore[arg-type]


def test_weights_as_stored_are_for_the_kernels(processor: Callable[..., None]) -> None:
    processor(kernels=True)
    backend = choose_backend("cpu", "stored", quantized_checkpoint=True)
    assert backend == Backend(CPU, "stored", torch.float32, native=True)


@pytest.mark.parametrize(
    ("kernels", "quantized", "native"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_weights_as_stored_are_refused_without_kernels_or_stored_weights(
    kernels: bool, quantized: bool, native: bool, processor: Callable[..., None]
) -> None:
    processor(kernels=kernels)
    with pytest.raises(PacelineError, match="precision 'stored' needs a GGUF file and the native kernels"):
        choose_backend("cpu", "stored", quantized_checkpoint=quantized, native=native)


@pytest.mark.parametrize(("precision", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
def test_a_model_that_the_kernels_cannot_run_stays_in_pytorch(
    precision: str, dtype: torch.dtype, processor: Callable[..., None]
) -> None:
    processor(kernels=True)
    backend = choose_backend("cpu", precision, quantized_checkpoint=False, native=False)
    assert backend == Backend(CPU, precision, dtype)  # type: ignore[arg-type]


def test_int8_without_vnni_needs_the_kernels(processor: Callable[..., None]) -> None:
    processor(kernels=True, int8_dot=False)
    assert choose_backend("cpu", "int8", quantized_checkpoint=False).native
    processor(kernels=False, int8_dot=False)
    with pytest.raises(PacelineError, match="precision 'int8' needs a processor with VNNI"):
        choose_backend("cpu", "int8", quantized_checkpoint=False)


@pytest.mark.parametrize(
    ("quantized", "kernels", "int8_dot", "bf16_dot", "expected"),
    [
        (True, True, False, True, "stored"),
        (True, True, True, False, "stored"),
        (True, False, True, True, "int8"),
        (True, False, True, False, "int8"),
        (True, False, False, True, "bf16"),
        (True, False, False, False, "fp32"),
        (False, True, True, True, "bf16"),
        (False, True, True, False, "fp32"),
        (False, False, True, True, "bf16"),
        (False, False, False, False, "fp32"),
    ],
)
def test_auto_precision(
    quantized: bool, kernels: bool, int8_dot: bool, bf16_dot: bool, expected: str, processor: Callable[..., None]
) -> None:
    """Never rounds a checkpoint harder than it came, and only to what the processor multiplies exactly and fast."""
    processor(kernels=kernels, int8_dot=int8_dot, bf16_dot=bf16_dot)
    if expected == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        expected = "fp32"
    backend = choose_backend("cpu", "auto", quantized_checkpoint=quantized)
    assert (backend.precision, backend.native) == (expected, expected == "stored")


@pytest.mark.parametrize(
    ("quantized", "kernels", "int8_dot", "expected"),
    [
        (True, True, True, "stored"),
        (False, True, False, "int8"),
        (True, False, True, "int4"),
        (False, False, True, "int4"),
        (False, False, False, "fp32"),
    ],
)
def test_auto_precision_of_a_draft(
    quantized: bool, kernels: bool, int8_dot: bool, expected: str, processor: Callable[..., None]
) -> None:
    """Its rounding costs acceptance, never exactness."""
    processor(kernels=kernels, int8_dot=int8_dot)
    backend = choose_backend("cpu", "auto", quantized_checkpoint=quantized, may_round=True)
    assert (backend.precision, backend.native) == (expected, kernels)


@pytest.mark.parametrize(
    ("backend", "invariant", "onednn", "cache"),
    [
        (Backend(CPU, "stored", torch.float32, native=True), True, False, torch.float16),
        (Backend(CPU, "int8", torch.float32, native=True), True, False, torch.float16),
        (Backend(CPU, "int4", torch.float32, native=True), True, False, torch.float16),
        (Backend(CPU, "int8", torch.float32), True, True, torch.float32),
        (Backend(CPU, "int4", torch.bfloat16), False, False, torch.bfloat16),
        (Backend(CPU, "bf16", torch.bfloat16), False, False, torch.bfloat16),
        (Backend(CPU, "fp32", torch.float32), False, False, torch.float32),
    ],
)
def test_what_a_backend_promises_and_keeps(backend: Backend, invariant: bool, onednn: bool, cache: torch.dtype) -> None:
    assert (backend.row_invariant, backend.int8, backend.cache_dtype) == (invariant, onednn, cache)


def test_backends_that_compute_other_numbers_have_other_keys() -> None:
    choices = [Backend(CPU, p, torch.float32, native) for p in ("int8", "int4") for native in (False, True)]
    assert len({backend.key for backend in choices}) == 4


@pytest.mark.parametrize(
    ("built", "name", "expected"), [(True, "avx2", True), (True, "portable", False), (False, "", False)]
)
def test_portable_kernels_count_as_none(
    built: bool, name: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are slower than PyTorch's."""
    monkeypatch.setattr(library, "library", lambda: object() if built else None)
    monkeypatch.setattr(interface, "backend", lambda: name)
    assert device.has_kernels() is expected


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert library.library() is None
    assert not device.has_kernels()
    assert library.why_missing() == "turned off by PACELINE_NATIVE=0"


def test_device_defaults_to_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend(None, "fp32", quantized_checkpoint=False).device == CPU


def test_gpu_is_preferred_and_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = choose_backend(None, "auto", quantized_checkpoint=True)
    assert backend == Backend(torch.device("cuda"), "bf16", torch.bfloat16)


@pytest.mark.parametrize("precision", ["stored", "int8", "int4"])
def test_few_bits_on_a_gpu_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(PacelineError, match=f"precision '{precision}' runs on the CPU only; use bf16 on cuda"):
        choose_backend("cuda", precision, quantized_checkpoint=True)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_absent_gpu_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PacelineError, match=f"device '{name}' was asked for but PyTorch finds no GPU"):
        choose_backend(name, "auto", quantized_checkpoint=False)


@pytest.mark.parametrize("precision", ["int3", "", "FP32", "int8-fast"])
def test_unknown_precision_is_named(precision: str) -> None:
    with pytest.raises(
        PacelineError, match=f"unknown precision '{precision}'; one of auto, stored, fp32, bf16, int8, int4"
    ):
        choose_backend("cpu", precision, quantized_checkpoint=False)


@pytest.mark.parametrize("name", ["gpu", "cpu:x"])
def test_unknown_device_is_named(name: str) -> None:
    with pytest.raises(PacelineError, match=f"'{name}'"):
        choose_backend(name, "fp32", quantized_checkpoint=False)
