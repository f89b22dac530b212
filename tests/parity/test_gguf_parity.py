"""GGUF files written as llama.cpp's converter writes them, against transformers with the dequantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import K_QUANTS, MODELS, QUANTIZABLE, WIDE, Array, random_blocks, with_type, write
from tiny import SIZES, assert_parity, from_source, prompt, tiny_model
from transformers import LlamaConfig, Qwen2Config

from paceline.errors import PacelineError
from paceline.weights.gguf import GGUFSource


def assert_gguf_parity(path: Path, model: Any) -> None:
    assert_parity(from_source(GGUFSource(path)), model, prompt(60))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_families_against_transformers(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(MODELS[name])
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type(kind)), model)


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quant_types_against_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny_model(MODELS["llama"])
    path = write(tmp_path / "tiny.gguf", model, with_type(kind))
    assert GGUFSource(path).quantized is (kind not in ("F32", "F16", "BF16"))
    assert_gguf_parity(path, model)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_against_transformers(kind: str, tmp_path: Path) -> None:
    """The reference weights come from gguf's own dequantisation."""
    model = tiny_model(LlamaConfig(**WIDE, tie_word_embeddings=False))
    blocks, embedding = random_blocks(kind), with_type("Q8_0")
    path = write(
        tmp_path / "tiny.gguf", model, lambda w: (embedding if w.shape[0] == WIDE["vocab_size"] else blocks)(w)
    )
    assert model.model.layers[0].self_attn.q_proj.weight.std() > 1e-3
    assert_gguf_parity(path, model)


def _rope_freqs(head_dim: int, rope: Mapping[str, float]) -> Array:
    """The divisor of each frequency, as convert_hf_to_gguf computes it from a llama3 scaling."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    old, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_freqs(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
    rope["original_max_position_embeddings"] = 32
    model = tiny_model(LlamaConfig(**SIZES, head_dim=32, rope_parameters=rope))
    extra = {"rope_freqs.weight": _rope_freqs(32, rope)}  # type: ignore[arg-type]
    assert len(set(extra["rope_freqs.weight"].tolist())) > 3
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type("F32"), extra=extra), model)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "yarn", "original_max_position_embeddings": 32}])  # fmt: skip  # noqa: E501
def test_rope_scaling_in_metadata(scaling: dict[str, Any], tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES, rope_parameters=scaling | {"rope_theta": 500.0, "factor": 4.0})
    model = tiny_model(config)
    assert_gguf_parity(write(tmp_path / "tiny.gguf", model, with_type("F32")), model)


def _refused(path: Path) -> str:
    """The one line a user sees; it names the file."""
    with pytest.raises(PacelineError) as caught:
        from_source(GGUFSource(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kept", [3, 40, 300, 0.5, 0.999])
def test_truncated_file(kept: float, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model(MODELS["llama"]), with_type("Q8_0"))
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert "fetch the file again" in _refused(path)


@pytest.mark.parametrize("content", [b"", b"not a model\n" * 100, b"GGUF", bytes(4096)])
def test_not_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert "not GGUF" in _refused(path)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in _refused(tmp_path / "absent.gguf")


def _write_metadata_only(path: Path, architecture: str | None, **integers: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture or "llama")
    if architecture is None:
        writer.kv_data[0].clear()
    for key, value in integers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["mamba", "qwen2moe", "gemma2", "clip"])
def test_unsupported_architecture(architecture: str, tmp_path: Path) -> None:
    message = _refused(_write_metadata_only(tmp_path / "x.gguf", architecture))
    assert f"unsupported architecture '{architecture}'" in message
    assert "qwen3" in message


def test_no_architecture(tmp_path: Path) -> None:
    assert "general.architecture" in _refused(_write_metadata_only(tmp_path / "x.gguf", None))


def test_head_counts_that_vary_by_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny_model(MODELS["llama"]), with_type("F32"), head_counts=[2, 2, 1])
    assert "'llama.attention.head_count_kv' of [2, 2, 1]" in _refused(path)


def test_head_counts_listed_by_layer(tmp_path: Path) -> None:
    model = tiny_model(MODELS["llama"])
    assert_gguf_parity(write(tmp_path / "x.gguf", model, with_type("F32"), head_counts=[2, 2, 2]), model)


def test_missing_metadata(tmp_path: Path) -> None:
    assert "'llama.attention.head_count'" in _refused(_write_metadata_only(tmp_path / "x.gguf", "llama"))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.2.ffn_down.weight"])
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model(MODELS["llama"]), with_type("F32"), drop=name)
    assert f"'{name}' is missing" in _refused(path)
