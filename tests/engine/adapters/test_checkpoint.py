"""peft's directories: what is read, and what is refused by name before a weight is."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.checkpoint import AdapterConfig, AdapterReader, LayerSize, digest_of
from penstock.engine.errors import InvalidRequest
from tests.tiny_adapters import adapted_model, write_adapter, write_encoded_prompt, write_tuned_prompt
from tests.tiny_models import tiny_model

PATHS = [f"model.layers.{layer}.{part}" for layer in range(12) for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model("llama"), tmp_path_factory.mktemp("adapter"), target_modules=["q_proj", "v_proj"])


def reader(max_rank: int = 16) -> AdapterReader:
    sizes = {f"model.layers.{layer}.self_attn.{name}": LayerSize(64, 64) for layer in range(3) for name in ("q_proj", "o_proj")}
    sizes |= {f"model.layers.{layer}.self_attn.{name}": LayerSize(64, 32) for layer in range(3) for name in ("k_proj", "v_proj")}
    unsuitable = {"lm_head": "embeddings and the output layer cannot be changed"}
    return AdapterReader(sizes, unsuitable, torch.float32, max_rank, hidden_size=64)


def with_config(**fields: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")

    return change


def with_weights(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(directory: Path) -> None:
        weights = load_file(directory / "adapter_model.safetensors")
        change(weights)
        save_file(weights, directory / "adapter_model.safetensors")

    return apply


Q_DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSALS: dict[str, tuple[Change, str]] = {
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "it has no adapter_config.json"),
    "no directory": (shutil.rmtree, "there is no directory"),
    "no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "it is not JSON"),
    "no object": (lambda path: (path / "adapter_config.json").write_text("[]"), "not a JSON object"),
    "another kind": (with_config(peft_type="IA3"), "`peft_type` is 'IA3'"),
    "another task": (with_config(task_type="SEQ_CLS"), "`task_type` is 'SEQ_CLS'"),
    "DoRA": (with_config(use_dora=True), "`use_dora`: DoRA is not supported"),
    "bias": (with_config(bias="all"), "`bias` is 'all'"),
    "biases of the update": (with_config(lora_bias=True), "`lora_bias`"),
    "whole modules": (with_config(modules_to_save=["lm_head"]), "`modules_to_save`"),
    "tokens": (with_config(trainable_token_indices=[1]), "`trainable_token_indices`"),
    "parameters": (with_config(target_parameters=["experts.down_proj"]), "`target_parameters`"),
    "replicated layers": (with_config(layer_replication=[[0, 2]]), "`layer_replication`"),
    "initialization": (with_config(init_lora_weights="pissa"), "`init_lora_weights` is 'pissa'"),
    "what is not known": (with_config(new_thing={"a": 1}), "`new_thing`: not supported"),
    "no rank": (with_config(r=0), "`r` in its adapter_config.json is 0"),
    "no number": (with_config(lora_alpha="8"), "`lora_alpha`"),
    "an integer beyond all numbers": (with_config(lora_alpha=10**400), "`lora_alpha`"),
    "a pattern as large as memory": (with_config(target_modules="(?:a{1000}){100000}"), "is too large"),
    "a pattern that nests deeply": (with_config(target_modules="(" * 5000 + ")" * 5000), "cannot be matched"),
    "a pattern that contains itself": (with_config(target_modules="(?R)"), "cannot be matched"),
    "no pattern": (with_config(target_modules="("), "cannot be matched"),
    "no layer": (with_config(target_modules=["x_proj"]), "name no layer of this model"),
    "the head": (with_config(target_modules=["q_proj", "v_proj", "lm_head"]), "'lm_head', and embeddings and the output layer"),
    "a layer too many": (with_config(target_modules=["q_proj"]), "v_proj.lora_A.weight', which is no weight of a target module"),
    "a layer too few": (
        with_config(target_modules=["q_proj", "v_proj", "o_proj"]),
        "lacks 'base_model.model.*o_proj.lora_A",
    ),
    "another rank": (with_config(r=8), r"this model with rank 8 takes \[\(8, 64\), \(64, 8\)\]"),
    "large rank": (with_config(r=32), "has rank 32, and --max-lora-rank is 16"),
    "other shapes": (with_weights(lambda weights: weights.update({Q_DOWN: torch.zeros(4, 65)})), r"have the shapes \[\(4, 65\)"),
    "integers": (
        with_weights(lambda weights: weights.update({Q_DOWN: torch.zeros(4, 64, dtype=torch.int32)})),
        "no floating point",
    ),
    "not a number": (with_weights(lambda weights: weights[Q_DOWN].fill_(float("nan"))), "are not all finite in float32"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "it has no adapter_model.safetensors"),
    "pickled weights": (
        lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
        r"it has no adapter_model.safetensors: adapter_model\.bin cannot be read",
    ),
    "weights that end too early": (lambda path: os.truncate(path / "adapter_model.safetensors", 9000), "cannot be read"),
    "weights that end in the header": (lambda path: os.truncate(path / "adapter_model.safetensors", 100), "its header is broken"),
    "damaged weights": (lambda path: (path / "adapter_model.safetensors").write_bytes(b"\1" * 100), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_no_adapter_of_the_model_is_refused_by_name(case: str, adapter: Path, tmp_path: Path) -> None:
    change, reason = REFUSALS[case]
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert len(reader().read("a", tmp_path).updates) == 6
    change(tmp_path)
    with pytest.raises(InvalidRequest, match=reason):
        reader().read("a", tmp_path)


CHOICES: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj", "up_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.1.mlp.up_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": r".*\.(q|o)_proj"},
    {"target_modules": r".*layers\.1\..*", "exclude_modules": r".*mlp.*"},
    {"target_modules": ["o_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["o_proj"], "layers_to_transform": 1},
    {"target_modules": ["o_proj"], "layers_to_transform": [2], "layers_pattern": "layers"},
    {"target_modules": ["o_proj"], "layers_to_transform": [2], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["o_proj"], "layers_to_transform": [2], "layers_pattern": "blocks"},
)


@pytest.mark.parametrize("fields", CHOICES)
def test_the_layers_that_are_changed_are_those_that_peft_would_change(fields: dict[str, Any]) -> None:
    theirs = {path for path in PATHS if is_target(LoraConfig(**fields), path)}
    ours = AdapterConfig({"r": 8, "lora_alpha": 8, **fields})
    if theirs:
        assert ours.targets(PATHS) == theirs
    else:
        with pytest.raises(InvalidRequest, match="name no layer"):
            ours.targets(PATHS)


def is_target(config: LoraConfig, path: str) -> bool:
    found = check_target_module_exists(config, path)
    return isinstance(found, bool | re.Match) and bool(found)


def test_all_linear_layers_are_all_that_can_be_changed() -> None:
    assert AdapterConfig({"target_modules": "all-linear"}).targets(PATHS) == set(PATHS)


def test_a_header_with_far_more_than_the_weights_is_refused_before_it_is_read(adapter: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(adapter, tmp_path / "copy")
    stray = {f"stray.{number}": torch.zeros(0) for number in range(2000)}
    with_weights(lambda weights: weights.update(stray))(copied)
    with pytest.raises(InvalidRequest, match="its header is too large"):
        reader().read("sql", copied)


def test_all_patterns_of_an_adapter_share_a_bound_on_time() -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}}
    assert AdapterConfig(fields).rank_of(PATHS[0]) == 2
    with pytest.raises(InvalidRequest, match="it takes too long"):
        AdapterConfig(fields, deadline=0.0).rank_of(PATHS[0])


def test_weights_that_are_cut_short_while_they_are_read_are_refused(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = shutil.copytree(adapter, tmp_path / "copy")
    check = AdapterReader._check_shapes

    def cut(self: AdapterReader, *shapes: Any) -> None:
        os.truncate(copied / "adapter_model.safetensors", 4096)  # what was mapped would be gone: a signal that ends the process
        check(self, *shapes)

    monkeypatch.setattr(AdapterReader, "_check_shapes", cut)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        reader().read("sql", copied)


PROMPT_REFUSALS: dict[str, tuple[Change, str]] = {
    "a prefix": (
        with_config(peft_type="PREFIX_TUNING"),
        "'PREFIX_TUNING', and only LORA, PROMPT_TUNING and P_TUNING are supported: it has keys and values for every layer",
    ),
    "no kind": (with_config(peft_type=["P_TUNING"]), r"`peft_type` is \['P_TUNING'\]"),
    "fields of another kind": (with_config(peft_type="P_TUNING"), "`prompt_tuning_init`: not supported"),
    "an encoder's": (with_config(encoder_hidden_size=32), "`encoder_hidden_size`: not supported"),
    "another task": (with_config(task_type="SEQ_2_SEQ_LM"), "`task_type` is 'SEQ_2_SEQ_LM'"),
    "two submodules": (with_config(num_transformer_submodules=2), "`num_transformer_submodules`"),
    "whole modules": (with_config(modules_to_save=["lm_head"]), "`modules_to_save`"),
    "no number": (with_config(num_virtual_tokens=0), "`num_virtual_tokens` in its adapter_config.json is 0"),
    "another number": (with_config(num_virtual_tokens=5), r"holds prompt_embeddings \[9, 64\], and it takes prompt_embeddings \[5, 64\]"),
    "another width": (
        with_weights(lambda weights: weights.update(prompt_embeddings=torch.zeros(9, 32))),
        r"it takes prompt_embeddings \[9, 64\]",
    ),
    "another weight": (with_weights(lambda weights: weights.update(more=torch.zeros(1))), "it takes prompt_embeddings"),
    "integers": (
        with_weights(lambda weights: weights.update(prompt_embeddings=torch.zeros(9, 64, dtype=torch.int32))),
        "no floating point numbers",
    ),
    "not a number": (with_weights(lambda weights: weights["prompt_embeddings"].fill_(float("nan"))), "not all finite in float32"),
}


@pytest.mark.parametrize("case", PROMPT_REFUSALS)
def test_a_tuned_prompt_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    change, reason = PROMPT_REFUSALS[case]
    change(write_tuned_prompt(tiny_model("llama"), tmp_path))
    with pytest.raises(InvalidRequest, match=reason):
        reader().read("tuned", tmp_path)


@pytest.mark.parametrize("encoder", ["MLP", "LSTM"])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_p_tunings_files_hold_what_its_encoder_gives(encoder: str, inference_mode: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"encoder_reparameterization_type": encoder, "inference_mode": inference_mode}
    write_encoded_prompt(tiny_model("llama"), tmp_path, **settings)
    loaded: Any = adapted_model(tiny_model("llama"), tmp_path)
    (vectors_NH,) = loaded.get_prompt(batch_size=1)
    prompt = reader().read("tuned", tmp_path).prompt
    assert prompt is not None
    torch.testing.assert_close(prompt.vectors_NH, vectors_NH, rtol=0, atol=0)


def test_what_becomes_of_the_files_does_not_change_an_adapter_that_was_read(adapter: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(adapter, tmp_path / "copy")
    read = reader().read("sql", copied)
    with (copied / "adapter_model.safetensors").open("r+b") as file:
        zeros = bytes(file.seek(0, os.SEEK_END))
        file.seek(0)
        file.write(zeros)
    assert digest_of(read.updates) == read.digest


def test_adapters_that_compute_the_same_share_a_digest_and_others_do_not(adapter: Path, tmp_path: Path) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    one, same = (reader().read("a", path) for path in (adapter, tmp_path))
    assert one.digest == same.digest
    with_config(lora_alpha=9)(tmp_path)
    assert reader().read("a", tmp_path).digest != one.digest
