"""Where and in what numbers a model runs: device, dtype, threads. Decided here and nowhere else."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.errors import PacelineError

Precision = Literal["auto", "stored", "fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class Backend:
    """A resolved choice. `native`: the C++ kernels compute, else PyTorch does."""

    device: torch.device
    precision: Precision  # never "auto"
    dtype: torch.dtype  # of activations
    native: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float16 if self.native else self.dtype

    @property
    def int8(self) -> bool:
        """int8 weights through oneDNN."""
        return self.precision == "int8" and not self.native

    @property
    def int4(self) -> bool:
        """4-bit weights in groups of 32 and bf16 activations through PyTorch: the quickest single row it has."""
        return self.precision == "int4" and not self.native

    @property
    def row_invariant(self) -> bool:
        """Whether a row's bits do not depend on the rows computed with it."""
        return self.native or self.int8

    @property
    def key(self) -> str:
        """What names the numbers that this backend computes."""
        return f"{self.precision}-native" if self.native else self.precision


def choose_backend(
    device: str | None, precision: str, *, quantized_checkpoint: bool, native: bool = True, may_round: bool = False
) -> Backend:
    """`auto` never rounds a checkpoint harder than it came, unless it `may_round`, as a draft's may.

    native: whether the C++ kernels have what the model is made of. Raises PacelineError.
    """
    if precision not in get_args(Precision):
        raise PacelineError(f"unknown precision '{precision}'; one of {', '.join(get_args(Precision))}")
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise PacelineError(f"unknown device '{device}'; use cpu, cuda or cuda:N") from None
    if target.type not in ("cpu", "cuda"):
        raise PacelineError(f"unknown device '{device}'; use cpu, cuda or cuda:N")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise PacelineError(f"device '{device}' was asked for but PyTorch finds no GPU; use --device cpu")
    if target.index is not None and target.type == "cuda" and target.index >= torch.cuda.device_count():
        raise PacelineError(f"device '{device}' was asked for but PyTorch finds {torch.cuda.device_count()} GPU(s)")
    native = native and target.type == "cpu" and has_kernels()
    if precision == "auto":
        precision = _best_precision(target, quantized_checkpoint, native, may_round)
    if precision in ("stored", "int8", "int4") and target.type != "cpu":
        raise PacelineError(f"precision '{precision}' runs on the CPU only; use bf16 on {target}")
    if precision == "stored" and not (native and quantized_checkpoint):
        raise PacelineError("precision 'stored' needs a GGUF file and the native kernels (paceline doctor); use auto")
    native = native and precision in ("stored", "int8", "int4")
    if precision == "int8" and not native and not has_int8_dot():
        raise PacelineError(f"precision '{precision}' needs a processor with VNNI; use fp32 or bf16")
    dtype = torch.bfloat16 if precision == "bf16" or (precision == "int4" and not native) else torch.float32
    return Backend(target, precision, dtype, native)  # type: ignore[arg-type]


def _best_precision(device: torch.device, quantized_checkpoint: bool, native: bool, may_round: bool) -> str:
    if device.type != "cpu":
        return "bf16"
    if native and quantized_checkpoint:
        return "stored"
    if native and may_round:
        return "int8"
    if may_round and has_int8_dot():
        return "int4"
    if quantized_checkpoint and has_int8_dot():
        return "int8"
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() and has_bf16_dot() else "fp32"


def has_int8_dot() -> bool:
    """VNNI: without it oneDNN's u8 x s8 products may saturate between multiply and add."""
    return bool(torch.cpu._is_vnni_supported())


def has_bf16_dot() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def has_kernels() -> bool:
    """Whether the C++ kernels are there and made for this processor; portable ones are slower than PyTorch's."""
    from paceline.native.interface import backend
    from paceline.native.library import library

    return library() is not None and backend() != "portable"


def native_enabled() -> bool:
    """Whether the CPU kernels may be used: ``PACELINE_NATIVE=0`` keeps everything in PyTorch."""
    return os.environ.get("PACELINE_NATIVE", "1") != "0"


def set_threads(threads: int | None) -> int:
    """Give PyTorch and the kernels `threads` threads, or as many as this container has; returns the number."""
    count = available_cpus() if threads is None else threads
    if count < 1:
        raise PacelineError(f"threads must be at least 1, not {threads}")
    torch.set_num_threads(count)
    if has_kernels():
        from paceline.native.interface import kernels

        kernels().pl_set_threads(count)
    return count


def bound_product_cache() -> None:
    """Before a process that trains computes anything.

    oneDNN keeps code and memory for the shapes of its latest 1,024 products. In training almost every product has a
    shape of its own, which comes to gigabytes; a few are as quick.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


def hold_products_to_rows() -> None:
    """Before a process computes anything: MKL's products on Intel's processors choose their order of summation by the
    number of rows, unless this tells them not to. Without the kernels a row's bits would depend on its company."""
    try:
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    if intel:
        order = "AVX512" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "AVX2"
        os.environ.setdefault("MKL_CBWR", f"{order},STRICT")


hold_products_to_rows()


def leave_threads_to_kernels() -> None:
    """Where the kernels do the work, PyTorch's small operations run in the caller: two pools would fight."""
    torch.set_num_threads(1)


def available_cpus() -> int:
    """Processors allowed by the affinity mask and by the cgroup's CPU quota (v2 and v1), at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


def _cgroup_quota(root: Path) -> float | None:
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return limit_us / int((root / "cpu/cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def send(values: Tensor, device: torch.device) -> Tensor:
    """Move a small host tensor to the device without waiting for it; one that is there already is returned."""
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)
