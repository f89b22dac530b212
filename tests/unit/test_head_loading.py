"""What lies on disk and how a head is found, read, and refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.device import Backend
from paceline.errors import PacelineError
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.load import FORMATS, Head, load_head
from paceline.heads.mtp import MtpHead
from paceline.model.config import ModelConfig
from paceline.model.linear import DenseLinear

GOLDEN = Path(__file__).parents[1] / "parity/golden"
FP32 = Backend(torch.device("cpu"), "fp32", torch.float32)
TARGET = ModelConfig("llama", 200, 32, 12, 4, 2, 8, 48, max_positions=512)
Weights = dict[str, Tensor]
Config = dict[str, Any]


def golden(name: str = "eagle3") -> tuple[Config, Weights]:
    return json.loads((GOLDEN / name / "config.json").read_text()), load_file(GOLDEN / name / "model.safetensors")


def write(folder: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def authors(config: Config) -> Config:
    """The same head's config.json as the EAGLE authors write it: the layer's settings at the top."""
    flags = {key: config[key] for key in ("draft_vocab_size", "norm_before_residual") if key in config}
    layer: Config = config["transformer_layer_config"]
    return layer | flags


def load(folder: Path | str, target: ModelConfig = TARGET, backend: Backend = FP32) -> Head:
    return load_head(str(folder), target, backend)


def eagle3(folder: Path | str, target: ModelConfig = TARGET, backend: Backend = FP32) -> Eagle3Head:
    head = load(folder, target, backend)
    assert isinstance(head, Eagle3Head)
    return head


def logits(head: EagleHead) -> Tensor:
    """Something that depends on fc, norm and output head."""
    taps = torch.arange(len(head.taps) * 32).float().view(len(head.taps), 1, 32).sin()
    return head.logits(head.fuse(list(taps)))


def refused(folder: Path | str, target: ModelConfig = TARGET) -> str:
    with pytest.raises(PacelineError) as caught:
        load(folder, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Layouts of the same head


def prefixed(weights: Weights) -> Weights:
    return {name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": w for name, w in weights.items()}


def midlayer(weights: Weights) -> Weights:
    return {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}


@pytest.mark.parametrize("spell", [midlayer, prefixed, dict])
def test_one_head_in_every_spelling(spell: Callable[[Weights], Weights], tmp_path: Path) -> None:
    config, weights = golden()
    reference = eagle3(GOLDEN / "eagle3")
    head = eagle3(write(tmp_path, authors(config), spell(weights)))
    assert torch.equal(logits(head), logits(reference))
    assert head.target_ids is not None
    assert reference.target_ids is not None
    assert torch.equal(head.target_ids, reference.target_ids)


def test_midlayer_is_one_layer_whatever_the_config_says(tmp_path: Path) -> None:
    config, weights = golden()
    head = eagle3(write(tmp_path, authors(config) | {"num_hidden_layers": 32}, midlayer(weights)))
    assert head.config.num_layers == 1


def test_shards_with_an_index(tmp_path: Path) -> None:
    config, weights = golden()
    write(tmp_path, config, weights)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, str(tmp_path / file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(logits(eagle3(tmp_path)), logits(eagle3(GOLDEN / "eagle3")))
    (tmp_path / "part-1.safetensors").unlink()
    assert "part-1.safetensors is named by the index but does not exist" in refused(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "head.pt"])
def test_pytorch_files(file: str, tmp_path: Path) -> None:
    config, weights = golden()
    (tmp_path / "config.json").write_text(json.dumps(authors(config)))
    torch.save(midlayer(weights), tmp_path / file)
    assert torch.equal(logits(eagle3(tmp_path)), logits(eagle3(GOLDEN / "eagle3")))


def test_safetensors_win_over_pytorch_files(tmp_path: Path) -> None:
    config, weights = golden()
    write(tmp_path, config, weights)
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(eagle3(tmp_path)), logits(eagle3(GOLDEN / "eagle3")))


def test_eagle1_of_speculators_and_of_hass(tmp_path: Path) -> None:
    """speculators 0.2 named the modules anew; its `layernorms` are HASS's."""
    weights = eagle1_weights()
    norms = {"embed_layernorm": 1.5, "hidden_layernorm": 0.5, "lm_head_layernorm": 2.0}
    hass = weights | {f"{name}.weight": torch.full((32,), value) for name, value in norms.items()}
    renamed = {
        "fc.": "fusion_fc.",
        "layers.0.": "transformer.",
        "embed_layernorm.": "embedding_layernorm.",
        "hidden_layernorm.": "transformer.input_layernorm.",
        "lm_head_layernorm.": "pre_lm_head_layernorm.",
    }
    theirs = {}
    for name, weight in hass.items():
        old, new = next((pair for pair in renamed.items() if name.startswith(pair[0])), ("", ""))
        theirs[new + name.removeprefix(old)] = weight
    config = {"speculators_model_type": "eagle", "layernorms": True, "fusion_bias": False}
    layer = authors(golden()[0])
    output = DenseLinear(torch.randn(200, 32))
    rows = torch.randn(3, 32)
    found = []
    for name, folder in (
        ("hass", write(tmp_path / "hass", layer, hass)),
        ("speculators", write(tmp_path / "speculators", config | {"transformer_layer_config": layer}, theirs)),
        ("plain", write(tmp_path / "plain", layer, weights)),
    ):
        head = load(folder)
        assert isinstance(head, EagleHead), name
        assert head.version == "eagle"
        found.append(head.logits(rows, output))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    del theirs["embedding_layernorm.weight"]
    write(tmp_path / "speculators", config | {"transformer_layer_config": layer}, theirs)
    assert "lacks embed_norm.weight" in refused(tmp_path / "speculators")


def eagle1_weights() -> Weights:
    """Layer of the golden head, cut to EAGLE-1's width."""
    _, weights = golden()
    kept = {name: w for name, w in weights.items() if name.startswith("layers.0.") and "layernorm" not in name}
    kept = {name: w[:, :32].contiguous() if "_proj" in name and w.shape[1] == 64 else w for name, w in kept.items()}
    del kept["layers.0.hidden_norm.weight"]
    kept["layers.0.post_attention_layernorm.weight"] = torch.ones(32)
    return kept | {"fc.weight": torch.randn(32, 64)}


def test_eagle1_uses_the_targets_output_head_even_beside_a_copy(tmp_path: Path) -> None:
    weights = eagle1_weights() | {"lm_head.weight": torch.zeros(200, 32)}
    head = load(write(tmp_path, authors(golden()[0]), weights))
    assert isinstance(head, EagleHead)
    assert head.output is None
    assert head.target_ids is None


def test_mtp_of_speculators() -> None:
    head = load(GOLDEN / "mtp-qwen3")
    assert isinstance(head, MtpHead)
    assert not head.hidden_first
    assert head.config.num_layers == len(head.depths) == 1
    assert head.config.qk_norm


# What a loaded head is made of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_backends_dtype(dtype: torch.dtype) -> None:
    head = eagle3(GOLDEN / "eagle3", backend=Backend(torch.device("cpu"), "fp32", dtype))
    assert head.dtype == dtype
    assert head.fc.weight.dtype == dtype  # type: ignore[attr-defined]
    assert head.embed(torch.tensor([1]), torch.empty(0).__getitem__).dtype == dtype
    assert head.fuse([torch.randn(1, 32)] * 3).dtype == dtype
    assert logits(head).dtype == torch.float32


def test_bf16_scores_are_near_those_of_fp32() -> None:
    exact = logits(eagle3(GOLDEN / "eagle3"))
    rounded = logits(eagle3(GOLDEN / "eagle3", backend=Backend(torch.device("cpu"), "bf16", torch.bfloat16)))
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


def test_positions_reach_as_far_as_the_targets() -> None:
    assert eagle3(GOLDEN / "eagle3").config.max_positions == 512


def test_a_head_without_an_embedding_uses_the_targets(tmp_path: Path) -> None:
    config, weights = golden()
    own = weights.pop("embed_tokens.weight").float()
    head = eagle3(write(tmp_path, config, weights))
    assert head.embedding is None
    tokens, other = torch.tensor([3, 7]), torch.randn(200, 32)
    assert torch.equal(head.embed(tokens, other.__getitem__), other[tokens])
    assert torch.equal(eagle3(GOLDEN / "eagle3").embed(tokens, other.__getitem__), own[tokens])


def test_a_head_narrower_than_its_target_brings_its_embedding(tmp_path: Path) -> None:
    config, weights = golden()
    weights["fc.weight"] = torch.randn(32, 3 * 48)
    target = replace(TARGET, hidden_size=48)
    head = eagle3(write(tmp_path, config | {"target_hidden_size": 48}, weights), target)
    assert head.fuse([torch.randn(2, 48)] * 3).shape == (2, 32)
    del weights["embed_tokens.weight"]
    assert "lacks embed_tokens.weight" in refused(write(tmp_path, config | {"target_hidden_size": 48}, weights), target)


def test_what_training_leaves_of_the_target_is_passed_by(tmp_path: Path) -> None:
    config, weights = golden()
    left = {"verifier_norm.weight": torch.ones(32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert torch.equal(logits(eagle3(write(tmp_path, config, weights | left))), logits(eagle3(GOLDEN / "eagle3")))


# Which layers are read


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({}, (2, 6, 9)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 6, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, (1, 5, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [9, 2, 12]}, (2, 9, 12)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (2, 6, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 8]}}, (1, 6, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}}, (2, 6, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [8, 10, 12]}}, (8, 10, 12)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 6, 9)),
        (
            {
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
                "eagle_aux_hidden_state_layer_ids": [3, 4, 5],
            },
            (3, 4, 5),
        ),
    ],
)
def test_layer_ids_of_each_convention(settings: Config, taps: tuple[int, ...], tmp_path: Path) -> None:
    """At the top: inputs of layers (vLLM, speculators). In eagle_config: outputs (SGLang), unless they start past 1."""
    config, weights = golden()
    config.pop("eagle_aux_hidden_state_layer_ids")
    head = load(write(tmp_path, config | settings, weights))
    assert isinstance(head, Eagle3Head)
    assert head.taps == taps


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_a_target_too_shallow_for_the_default_layers_is_refused(layers: int, tmp_path: Path) -> None:
    config, weights = golden()
    config.pop("eagle_aux_hidden_state_layer_ids")
    message = refused(write(tmp_path, config, weights), replace(TARGET, num_layers=layers))
    assert f"reads the inputs of layers 2, {layers // 2}, {layers - 3}, this model has {layers} layers" in message


# Heads of another model


@pytest.mark.parametrize("name", ["eagle3", "mtp-qwen3"])
def test_another_hidden_size_is_refused(name: str) -> None:
    message = refused(GOLDEN / name, replace(TARGET, hidden_size=48))
    assert message == (
        f"head '{GOLDEN / name}' was made for another model: it reads hidden states of size 32, this model's are 48; "
        "give a head of this model"
    )


@pytest.mark.parametrize("name", ["eagle3", "mtp-qwen3"])
def test_another_vocabulary_is_refused(name: str) -> None:
    message = refused(GOLDEN / name, replace(TARGET, vocab_size=256))
    assert "its vocabulary has 200 tokens, this model's 256" in message


def test_another_number_of_layers_is_refused() -> None:
    message = refused(GOLDEN / "eagle3", replace(TARGET, num_layers=8))
    assert "it reads the inputs of layers 2, 6, 9, this model has 8 layers" in message


def test_the_model_that_the_head_names_is_told(tmp_path: Path) -> None:
    config, weights = golden()
    config["speculators_config"]["verifier"]["name_or_path"] = "org/other"
    assert "was made for org/other: " in refused(write(tmp_path, config, weights), replace(TARGET, vocab_size=256))


def test_a_width_that_no_config_names_is_refused_by_shape(tmp_path: Path) -> None:
    config, weights = golden()
    weights["fc.weight"] = torch.zeros(32, 4 * 32)
    message = refused(write(tmp_path, config, weights))
    assert "does not fit its config.json and this model: fc.weight is [32, 128] instead of [32, 96]" in message


def test_draft_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    config, weights = golden()
    weights["d2t"] = weights["d2t"] + torch.arange(100)  # ids where offsets belong
    message = refused(write(tmp_path, config, weights))
    assert "outside this model's vocabulary of 200; d2t must hold offsets" in message


# Files that are not as they should be


def test_missing_tensors_are_named_few_at_most(tmp_path: Path) -> None:
    config, weights = golden()
    del weights["norm.weight"]
    assert "lacks norm.weight; is the download complete?" in refused(write(tmp_path, config, weights))
    weights = {name: w for name, w in weights.items() if "mlp" not in name and "self_attn" not in name}
    message = refused(write(tmp_path, config, weights))
    assert "lacks layers.0.self_attn.q_proj.weight, layers.0.self_attn.k_proj.weight, " in message
    assert "and 5 more; is the download complete?" in message


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path) -> None:
    config, weights = golden()
    del weights["d2t"]
    assert "lacks d2t" in refused(write(tmp_path, config, weights))


def test_biases_that_the_config_promises_are_missed(tmp_path: Path) -> None:
    config, weights = golden()
    config["transformer_layer_config"]["attention_bias"] = True
    assert "lacks layers.0.self_attn.q_proj.bias" in refused(write(tmp_path, config, weights))


@pytest.mark.parametrize("extra", ["mask_hidden", "layers.1.mlp.up_proj.weight", "input_norm.weight"])
def test_unexpected_tensors_are_named(extra: str, tmp_path: Path) -> None:
    config, weights = golden()
    message = refused(write(tmp_path, config, weights | {extra: torch.zeros(2)}))
    assert f"has tensors that its config.json does not account for: {extra}" in message


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_an_unknown_kind_of_speculator_is_told_with_those_known(kind: str, tmp_path: Path) -> None:
    config, weights = golden()
    message = refused(write(tmp_path, config | {"speculators_model_type": kind}, weights))
    assert f"found speculators_model_type '{kind}'; known formats: " in message
    assert all(name in message for name in FORMATS)


def test_an_unknown_format_is_told_by_its_tensors(tmp_path: Path) -> None:
    weights = {f"blocks.{i}.weight": torch.zeros(1) for i in range(5)}
    message = refused(write(tmp_path, {"model_type": "llama"}, weights))
    assert "unknown head format" in message
    assert "found tensors blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more; known formats: " in message


def test_another_kind_of_layer_is_refused(tmp_path: Path) -> None:
    config, weights = golden()
    config["transformer_layer_config"]["model_type"] = "gemma3"
    assert "has layers of kind 'gemma3'; supported: llama" in refused(write(tmp_path, config, weights))


def test_a_mistral_head_has_a_window_only_if_its_config_says_so(tmp_path: Path) -> None:
    config, weights = golden()
    layer = config["transformer_layer_config"] | {"model_type": "mistral"}
    config["transformer_layer_config"] = layer
    assert eagle3(write(tmp_path, config, weights)).config.window(0) is None
    layer["sliding_window"] = 64
    assert eagle3(write(tmp_path, config, weights)).config.window(0) == 64


def test_a_config_that_lacks_a_setting_is_refused(tmp_path: Path) -> None:
    config, weights = golden()
    del config["transformer_layer_config"]["intermediate_size"]
    assert "lacks 'intermediate_size'" in refused(write(tmp_path, config, weights))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    config = authors(golden()[0]) | {"num_hidden_layers": 12, "num_nextn_predict_layers": 1}
    names = ("enorm.weight", "eh_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    weights = {f"model.layers.12.{name}": torch.zeros(1) for name in names}
    assert "has multi-head latent attention (kv_a_proj_with_mqa): not supported" in refused(
        write(tmp_path, config, weights)
    )


def test_gated_attention_is_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, authors(golden()[0]), {"mtp.fc.weight": torch.zeros(1)}))
    assert "is of the Qwen3-Next kind (mtp.fc.weight), which is not supported" in message


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert f"no weights in {tmp_path}: a head needs a .safetensors, .bin or .pt file" in refused(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    assert f"{tmp_path / 'config.json'} does not exist" in refused(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_named(file: str, tmp_path: Path) -> None:
    config, weights = golden()
    write(tmp_path, config, weights)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    whole = (tmp_path / file).read_bytes()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    assert f"cannot read {tmp_path / file}: " in refused(tmp_path)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.proof,)


def test_code_in_a_pytorch_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    proof = tmp_path / "proof"
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"fc.weight": Trap(proof)}, file, protocol=2)
    assert f"cannot read {tmp_path / 'pytorch_model.bin'}: " in refused(tmp_path)
    assert not proof.exists()


def test_a_training_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"state_dict": {"fc.weight": torch.zeros(1)}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    assert "does not hold tensors by name; save the head's state_dict alone" in refused(tmp_path)


# Names


@pytest.mark.parametrize("name", ["/absent/head", "./absent", "../absent", "~/absent"])
def test_a_missing_directory_is_named(name: str) -> None:
    assert refused(name) == f"cannot read head '{name}': no such directory"


@pytest.mark.parametrize("name", ["absent", "a/b/c"])
def test_what_is_neither_directory_nor_hub_id_is_named(name: str) -> None:
    assert refused(name) == f"unknown head '{name}': give a directory or a hub id (org/name)"


def test_a_file_is_not_a_head(tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    file.touch()
    assert "is a file; give the directory of the head" in refused(file)


def test_a_hub_id_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        assert repo == "org/head"
        assert allow_patterns == ["*.json", "*.safetensors"]
        return str(GOLDEN / "eagle3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert torch.equal(logits(eagle3("org/head")), logits(eagle3(GOLDEN / "eagle3")))


def test_a_hub_id_without_safetensors_is_fetched_as_pytorch_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, weights = golden()
    (tmp_path / "config.json").write_text(json.dumps(config))

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        if "*.bin" in allow_patterns:
            torch.save(weights, tmp_path / "pytorch_model.bin")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert torch.equal(logits(eagle3("org/head")), logits(eagle3(GOLDEN / "eagle3")))


def test_a_hub_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refused("org/head") == "cannot fetch 'org/head' from the hub: no route; check the name and the network"
