"""`native/include/paceline.h` for ctypes: its structs and the signatures of its functions, and nothing else."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from paceline.errors import PacelineError
from paceline.native.library import library, why_missing


class Matrix(ctypes.Structure):
    _fields_ = (
        ("format", c_int32), ("rows", c_int32), ("columns", c_int32), ("unused", c_int32), ("packed", c_void_p),
    )  # fmt: skip


class Linear(ctypes.Structure):
    _fields_ = (
        ("parts", c_int32), ("rows", c_int32), ("columns", c_int32), ("unused", c_int32), ("part", Matrix * 3),
        ("bias", c_void_p),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Linear), ("output", Linear), ("gate_up", Linear), ("down", Linear),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("embed_norm", c_void_p),
        ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("post_attention_norm", c_void_p), ("post_mlp_norm", c_void_p),
        ("hidden", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("intermediate", c_int32), ("activation", c_int32), ("window", c_int32), ("eps", c_float), ("scale", c_float),
    )  # fmt: skip


class Place(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("cos", c_void_p), ("sin", c_void_p))


class Batch(ctypes.Structure):
    _fields_ = (
        ("rows", c_int32), ("unused", c_int32), ("slot", c_void_p), ("position", c_void_p), ("table", c_void_p),
        ("prefix", c_void_p), ("tail", c_void_p), ("tail_length", c_void_p), ("beside", c_void_p), ("work", c_void_p),
    )  # fmt: skip


class Head(ctypes.Structure):
    _fields_ = (
        ("layer", Layer), ("fc", Linear), ("output", Linear), ("embedding", Matrix), ("residual_norm", c_void_p),
        ("output_norm", c_void_p), ("ids", c_void_p), ("feeds_normed", c_int32), ("unused", c_int32),
    )  # fmt: skip


class Draft(ctypes.Structure):
    _fields_ = (
        ("taps", c_void_p), ("tokens", c_void_p), ("depth", c_int32), ("stop_below", c_float), ("temperature", c_float),
        ("unused", c_int32), ("keys", c_void_p), ("worth", c_void_p),
    )  # fmt: skip


class Lookup(ctypes.Structure):
    _fields_ = (
        ("tokens", c_void_p), ("slots", c_int32), ("capacity", c_int32), ("oldest", c_int32), ("recent", c_int32),
        ("tail", c_void_p), ("count", c_int32), ("most", c_int32), ("factor", c_double), ("floor", c_double),
    )  # fmt: skip


class Chains(ctypes.Structure):
    _fields_ = (
        ("length", c_int32), ("key", c_int32), ("buckets", c_int32), ("mask", c_int32),
        ("bucket", c_void_p), ("keys", c_void_p), ("beside", c_void_p), ("older", c_void_p),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "pl_backends": (c_char_p, []),
    "pl_backend": (c_char_p, []),
    "pl_use_backend": (c_int32, [c_char_p]),
    "pl_set_threads": (c_int32, [c_int32]),
    "pl_packed_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "pl_pack": (None, [c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "pl_quantize": (c_int32, [c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "pl_take_rows": (None, [c_int32, c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
    "pl_dequantize_rows": (None, [c_int32, c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
    "pl_linear_work": (c_int64, [c_int32, c_int32]),
    "pl_linear_forward": (None, [POINTER(Linear), c_void_p, c_int32, c_void_p, c_void_p]),
    "pl_rms_norm": (None, [c_void_p, c_int32, c_int32, c_void_p, c_float, c_void_p]),
    "pl_layer_work": (c_int64, [POINTER(Layer), c_int32]),
    "pl_attention": (
        None, [POINTER(Layer), POINTER(Batch), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "pl_mlp": (None, [POINTER(Layer), POINTER(Batch), c_void_p]),
    "pl_layers": (None, [c_void_p, c_void_p, c_int32, POINTER(Batch), c_void_p, c_void_p]),
    "pl_chain_work": (c_int64, [POINTER(Head), c_int32]),
    "pl_chain": (
        c_int32,
        [
            POINTER(Head), POINTER(Batch), POINTER(Draft), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        ],
    ),
    "pl_row_best": (None, [c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "pl_temper": (None, [c_void_p, c_int32, c_int32, c_float, c_void_p]),
    "pl_draw": (None, [c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "pl_suffix_lookup": (
        c_int32, [POINTER(Lookup), POINTER(Chains), c_int32, c_void_p, c_void_p, POINTER(c_int32)],
    ),
    "pl_longest_match": (c_int32, [c_void_p, c_int32, c_int32, c_int32, POINTER(c_int32)]),
}  # fmt: skip


@cache
def kernels() -> CDLL:
    """The library with its functions declared. Raises PacelineError where there is none."""
    loaded = library()
    if loaded is None:
        raise PacelineError(f"the native kernels are missing: {why_missing()}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def backends() -> list[str]:
    """Instruction sets that the library has kernels for and this processor runs, best first."""
    names: bytes = kernels().pl_backends()
    return names.decode().split(",")


def backend() -> str:
    """The instruction set in use."""
    name: bytes = kernels().pl_backend()
    return name.decode()
