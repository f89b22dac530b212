"""Converted weights on disk: the second start reads them back, and nothing that goes wrong there is fatal."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from native_lab import NATIVE, needs_kernels
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import device
from paceline.device import Backend
from paceline.model.config import ModelConfig, RopeConfig
from paceline.native.packed import Format, Packed
from paceline.weights import load, store
from paceline.weights.cache_dir import converted_dir
from paceline.weights.fingerprint import fingerprint, remove_converted
from paceline.weights.resolve import Checkpoint
from paceline.weights.store import Converted, load_converted, save_converted

VOCAB, HIDDEN = 50, 64
ONEDNN = Backend(torch.device("cpu"), "int8", torch.float32)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_folder(folder: Path, seed: int = 0, heads: int = 4) -> Path:
    random = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random)}
    tensors["model.norm.weight"] = torch.randn(HIDDEN, generator=random)
    for index in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{index}."
        tensors |= {f"{at}{name}.weight": torch.randn(HIDDEN, HIDDEN, generator=random) for name in MATRICES}
        tensors |= {f"{at}{name}.weight": torch.randn(HIDDEN, generator=random) for name in NORMS}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0, heads: int = 4) -> Path:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    for index in range(CONFIG["num_hidden_layers"]):
        for name in MATRICES.values():
            values = random.standard_normal((HIDDEN, HIDDEN), dtype=np.float32)
            writer.add_tensor(f"blk.{index}.{name}.weight", quantize(values, kind), raw_dtype=kind)
        for name in NORMS.values():
            writer.add_tensor(f"blk.{index}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("token_embd.weight", quantize(np.ones((VOCAB, HIDDEN), dtype=np.float32), kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Loads:
    """Every set of tensors that `load_model` handed to the decoder, latest last."""

    def __init__(self) -> None:
        self.tensors: list[Mapping[str, Tensor | Packed]] = []
        self.configs: list[ModelConfig] = []
        self.backends: list[Backend] = []

    def __call__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor | Packed], backend: Backend, head_ids: Any
    ) -> None:
        self.configs.append(config)
        self.tensors.append({name: held(tensor) for name, tensor in tensors.items()})
        self.backends.append(backend)

    def first_equals_last(self) -> bool:
        first, last = self.tensors[0], self.tensors[-1]
        return set(first) == set(last) and all(same(first[name], last[name]) for name in first)

    def formats(self) -> set[Format]:
        """Of all packed matrices of the last load; empty where PyTorch computes."""
        return {each.format for each in self.tensors[-1].values() if isinstance(each, Packed)}


def held(each: Tensor | Packed) -> Tensor | Packed:
    """A copy: what was loaded may lie in a mapped file that a test is about to damage."""
    return replace(each, data=each.data.clone()) if isinstance(each, Packed) else each.clone()


def same(a: Tensor | Packed, b: Tensor | Packed) -> bool:
    if isinstance(a, Packed) and isinstance(b, Packed):
        return (a.format, a.rows, a.columns) == (b.format, b.rows, b.columns) and torch.equal(a.data, b.data)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    recorded = Loads()
    monkeypatch.setattr(load, "assemble", recorded)
    monkeypatch.setattr(load, "load_tokenizer", lambda checkpoint: None)
    return recorded


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture(params=["onednn", pytest.param("native", marks=needs_kernels)])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether few bits go to the native kernels or to PyTorch."""
    monkeypatch.setattr(device, "has_kernels", lambda: request.param == "native")
    monkeypatch.setattr(device, "has_int8_dot", lambda: True)
    monkeypatch.setattr(device, "has_bf16_dot", lambda: False)
    return bool(request.param == "native")


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_kernels", lambda: False)
    monkeypatch.setattr(device, "has_int8_dot", lambda: True)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_kernels", lambda: True)


def stored_files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def forbid_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: Checkpoint) -> None:
        raise AssertionError("the checkpoint was opened")

    monkeypatch.setattr(load, "open_source", refuse)


# ---- the second load ----


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_second_load_reads_only_the_store(
    precision: str, native: bool, folder: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.load_model(str(folder), precision=precision)
    forbid_source(monkeypatch)
    load.load_model(str(folder), precision=precision)
    assert len(loads.tensors[0]) > 10
    assert loads.first_equals_last()
    assert loads.configs[0] == loads.configs[1]
    assert [backend.native for backend in loads.backends] == [native] * 2


@needs_kernels
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("precision", ["auto", "stored"])
def test_a_quantised_checkpoint_is_kept_as_stored(
    precision: str, tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q5_1)
    load.load_model(str(path), precision=precision)
    assert loads.formats() == {Format.Q5_1}
    forbid_source(monkeypatch)
    assert load.load_model(str(path), precision=precision).backend == replace(NATIVE, precision="stored")
    assert loads.first_equals_last()


@needs_kernels
@pytest.mark.usefixtures("_kernels")
def test_int8_for_a_quantised_checkpoint_is_not_what_is_stored(tmp_path: Path, loads: Loads) -> None:
    """Asked for in 8 bits, the weights are rounded to 8 bits; both conversions live side by side."""
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    for precision, formats in (("stored", {Format.Q4_0}), ("int8", {Format.Q8_0}), ("stored", {Format.Q4_0})):
        load.load_model(str(path), precision=precision)
        assert loads.formats() == formats
    assert loads.first_equals_last()


@needs_kernels
@pytest.mark.usefixtures("_kernels")
def test_packed_weights_from_the_store_lie_on_a_cache_line(folder: Path, loads: Loads) -> None:
    load.load_model(str(folder), precision="int8")
    found = load_converted(fingerprint(checkpoint_of(folder)), NATIVE)
    assert found is not None
    matrices = [each.data for each in found.tensors.values() if isinstance(each, Packed)]
    assert len(matrices) == 1 + 2 * len(MATRICES)
    assert all(data.data_ptr() % 64 == 0 for data in matrices)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("heads", [4, 8])  # 8 heads of 8: the kernels want multiples of 16
def test_second_load_reads_only_the_store_whatever_the_kernels_can_run(
    heads: int, tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model", heads=heads)
    load.load_model(str(folder), device="cpu", precision="int8")
    forbid_source(monkeypatch)
    load.load_model(str(folder), device="cpu", precision="int8")
    assert loads.first_equals_last()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("heads", [4, 8])
def test_second_load_of_a_quantised_checkpoint_reads_only_the_store_whatever_the_kernels_can_run(
    heads: int, tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", heads=heads)
    load.load_model(str(path), device="cpu")
    forbid_source(monkeypatch)
    load.load_model(str(path), device="cpu")
    assert loads.first_equals_last()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_needs_no_conversion_is_not_stored(precision: str, folder: Path, cache: Path, loads: Loads) -> None:
    load.load_model(str(folder), precision=precision)
    assert stored_files(cache) == []


def test_quantised_checkpoint_in_bf16_is_stored(tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantising is what takes the time."""
    path = write_gguf(tmp_path / "model.gguf")
    load.load_model(str(path), precision="bf16")
    forbid_source(monkeypatch)
    load.load_model(str(path), precision="bf16")
    assert loads.first_equals_last()
    head = loads.tensors[0]["head.weight"]
    assert isinstance(head, Tensor)
    assert head.dtype == torch.bfloat16


@pytest.mark.usefixtures("_no_kernels")
def test_stored_int8_does_not_answer_for_another_precision(folder: Path, loads: Loads) -> None:
    load.load_model(str(folder), precision="int8")
    load.load_model(str(folder), precision="fp32")
    assert "head.scale" in loads.tensors[0]
    assert "head.scale" not in loads.tensors[1]


@needs_kernels
def test_what_the_kernels_read_does_not_answer_for_pytorch(
    folder: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same precision of the same checkpoint, in two layouts."""
    monkeypatch.setattr(device, "has_int8_dot", lambda: True)
    for there in (True, False, True):
        monkeypatch.setattr(device, "has_kernels", lambda there=there: there)
        load.load_model(str(folder), precision="int8")
        assert (loads.formats() == {Format.Q8_0}) is there
        assert ("head.scale" in loads.tensors[-1]) is not there


@pytest.mark.usefixtures("native")
def test_keys_differ_by_precision(folder: Path, loads: Loads) -> None:
    """Prefix hashes are salted with the key: caches of two precisions must not meet."""
    keys = {load.load_model(str(folder), precision=p).key for p in ("fp32", "bf16", "int8", "int4")}
    assert len(keys) == 4


@needs_kernels
def test_keys_differ_by_who_computes(folder: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_int8_dot", lambda: True)
    keys = []
    for there in (True, False):
        monkeypatch.setattr(device, "has_kernels", lambda there=there: there)
        keys.append(load.load_model(str(folder), precision="int8").key)
    assert keys[0] != keys[1]


def test_config_survives_the_store(folder: Path) -> None:
    config = ModelConfig(
        family="gemma3_text", vocab_size=3, hidden_size=2, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=2,
        intermediate_size=2, max_positions=9, rope=RopeConfig(theta=1 / 3, frequency_divisors=(1.0, 0.1)),
        local_rope=RopeConfig(theta=7.7), attention_scale=1 / 7, sliding_window=5, sliding_layers=(True, False),
        eos_ids=(1, 106), bos_id=2,
    )  # fmt: skip
    save_converted("key", ONEDNN, Converted(config, True, {"x": torch.ones(1)}))
    found = load_converted("key", ONEDNN)
    assert found is not None
    assert found.config == config
    assert found.quantized is True


# ---- changed checkpoints ----


def checkpoint_of(path: Path) -> Checkpoint:
    return Checkpoint(str(path), path, "directory" if path.is_dir() else "gguf")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", ["time", "size"])
def test_fingerprint_of_a_directory(name: str, change: str, folder: Path) -> None:
    before = fingerprint(checkpoint_of(folder))
    assert fingerprint(checkpoint_of(folder)) == before
    alter(folder / name, change)
    assert fingerprint(checkpoint_of(folder)) != before


@pytest.mark.parametrize("change", ["time", "size"])
def test_fingerprint_of_a_gguf(change: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    before = fingerprint(checkpoint_of(path))
    assert fingerprint(checkpoint_of(path)) == before
    alter(path, change)
    assert fingerprint(checkpoint_of(path)) != before


def alter(file: Path, change: str) -> None:
    stat = file.stat()
    if change == "size":
        file.write_bytes(file.read_bytes() + b" ")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def test_fingerprints_of_two_folders_differ(tmp_path: Path) -> None:
    first, second = write_folder(tmp_path / "a"), write_folder(tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        os.utime(first / name, ns=(1, 1))
        os.utime(second / name, ns=(1, 1))
    assert fingerprint(checkpoint_of(first)) != fingerprint(checkpoint_of(second))


def test_new_shard_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(checkpoint_of(folder))
    save_file({"x": torch.ones(1)}, folder / "model-2.safetensors")
    assert fingerprint(checkpoint_of(folder)) != before


@pytest.mark.usefixtures("native")
def test_new_weights_are_loaded_anew(folder: Path, loads: Loads) -> None:
    load.load_model(str(folder), precision="int8")
    write_folder(folder, seed=1)
    load.load_model(str(folder), precision="int8")
    assert not loads.first_equals_last()


# ---- a store that is damaged or cannot be written ----


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 5000)


def _without_metadata(path: Path) -> None:
    save_file(load_file(path), path)


def _without_config(path: Path) -> None:
    save_file(load_file(path), path, metadata={"quantized": "True"})


def _with_another_config(path: Path) -> None:
    save_file(load_file(path), path, metadata={"quantized": "True", "config": '{"family": "llama"}'})


def _with_another_shape(path: Path) -> None:
    """Read as it says, a matrix would reach past its end."""
    with safe_open(str(path), framework="pt") as handle:
        metadata = handle.metadata()
    shapes = {
        name: [form, rows + 16, columns] for name, (form, rows, columns) in json.loads(metadata["packed"]).items()
    }
    save_file(load_file(path), path, metadata=metadata | {"packed": json.dumps(shapes)})


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _cut_header,
        _empty,
        _garbage,
        _without_metadata,
        _without_config,
        _with_another_config,
        _with_another_shape,
    ],
)
def test_damaged_file_is_rebuilt(
    damage: Any, native: bool, folder: Path, cache: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.load_model(str(folder), precision="int8")
    (file,) = stored_files(cache)
    damage(file)
    load.load_model(str(folder), precision="int8")
    assert loads.first_equals_last()
    forbid_source(monkeypatch)
    load.load_model(str(folder), precision="int8")
    assert loads.first_equals_last()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_full_disk_does_not_fail_the_load(
    error: Exception, folder: Path, cache: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(store, "save_file", fail)
    load.load_model(str(folder), precision="int8")
    assert len(loads.tensors) == 1
    assert stored_files(cache) == []


@pytest.mark.usefixtures("native")
def test_cache_that_is_a_file_does_not_fail_the_load(folder: Path, cache: Path, loads: Loads) -> None:
    cache.write_text("in the way")
    load.load_model(str(folder), precision="int8")
    assert len(loads.tensors) == 1


def test_cache_that_cannot_be_looked_at_does_not_fail_the_load(
    folder: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("exists", "mkdir", "unlink"):
        monkeypatch.setattr(Path, name, deny)
    assert load_converted("key", ONEDNN) is None
    converted = Converted(ModelConfig("llama", 1, 1, 1, 1, 1, 1, 1, 1), False, {})
    save_converted("key", ONEDNN, converted)


# ---- precision auto ----


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize(("int8_dot", "expected"), [(True, "int8"), (False, "fp32")])
@pytest.mark.parametrize("again", [False, True])
def test_auto_for_a_quantised_checkpoint(
    again: bool, int8_dot: bool, expected: str, tmp_path: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 where the processor multiplies bytes exactly; also when the weights come from the store."""
    monkeypatch.setattr(device, "has_int8_dot", lambda: int8_dot)
    monkeypatch.setattr(device, "has_bf16_dot", lambda: False)
    path = write_gguf(tmp_path / "model.gguf")
    if again:
        load.load_model(str(path))
    assert load.load_model(str(path), device="cpu").backend.precision == expected
    assert ("head.scale" in loads.tensors[-1]) is (expected == "int8")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16])
def test_auto_for_a_gguf_that_is_not_quantised(
    kind: gguf.GGMLQuantizationType, native: bool, tmp_path: Path, loads: Loads
) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind)
    assert load.load_model(str(path), device="cpu").backend.precision == "fp32"
    load.load_model(str(path), device="cpu", precision="int8")
    assert load.load_model(str(path), device="cpu").backend.precision == "fp32"
    assert loads.tensors[-1].keys() == loads.tensors[0].keys()


@pytest.mark.usefixtures("native")
def test_auto_for_a_directory_ignores_a_stored_int8(folder: Path, loads: Loads) -> None:
    load.load_model(str(folder), device="cpu", precision="int8")
    assert load.load_model(str(folder), device="cpu").backend.precision == "fp32"
    assert loads.tensors[0].keys() != loads.tensors[-1].keys()


def test_removing_takes_what_was_converted_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    mine, other = (checkpoint_of(write_gguf(tmp_path / name)) for name in ("mine.gguf", "other.gguf"))
    folder = converted_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for checkpoint in (mine, other):
        (folder / f"{fingerprint(checkpoint)}-int8.safetensors").write_bytes(b"12345")
    assert remove_converted(mine) == 5
    assert [file.name for file in folder.glob("*-int8.safetensors")] == [f"{fingerprint(other)}-int8.safetensors"]
