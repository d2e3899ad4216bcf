"""EAGLE-3 heads in the format of the library speculators: what their settings make of them, and which are refused."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.drafters.eagle import architecture_of_head, load_eagle, read_head_config
from penstock.engine.model.drafters.heads import DraftHead
from penstock.engine.model.loader import LoadedModel
from tests.engine.speculation import test_draft_heads
from tests.engine.speculation.test_draft_heads import (
    DRAFT_VOCAB,
    Pair,
    check_that_all_is_accepted,
    eagle_modules,
    engine,
    random_weights,
    right_eagle_weights,
)
from tests.engine.speculation.test_draft_model import answers
from tests.engines import loaded_model
from tests.fakes import drive, make_request, tokens
from tests.tiny_models import tiny_config, tiny_model

recorded = test_draft_heads.recorded
# Settings of the head, and of its layer.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "norm_before_residual": ({"norm_before_residual": True, "draft_vocab_size": DRAFT_VOCAB}, {"attention_bias": True}),
    "norm_before_fc": ({"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2]}, {}),
    "qwen3": ({"norm_before_residual": True, "fc_norm": True, "norm_output": True}, {"model_type": "qwen3"}),
}


def layer_config(**settings: Any) -> PretrainedConfig:
    own = tiny_config("llama").to_dict() | {"num_hidden_layers": 1} | settings
    names = ("model_type", "architectures", "rope_parameters")
    return AutoConfig.for_model(own["model_type"], **{key: value for key, value in own.items() if key not in names})


def write_head(directory: Path, layer: PretrainedConfig, weights: dict[str, Tensor], **settings: Any) -> None:
    """As the library writes it."""
    content = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": layer.vocab_size,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer.to_diff_dict(),
        "transformers_version": "4.57.1",
    }
    (directory / "config.json").write_text(json.dumps(content | settings))
    named = {name.replace("midlayer.", "layers.0."): tensor.contiguous() for name, tensor in weights.items()}
    if "d2t" in weights:
        named["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool)
        named["t2d"][weights["d2t"] + torch.arange(len(weights["d2t"]))] = True
    save_file(named, directory / "model.safetensors")


def load_head(directory: Path, loaded: LoadedModel) -> DraftHead:
    architecture = architecture_of_head(directory)
    assert architecture is not None
    return load_eagle(directory, architecture, loaded)


@functools.cache
def pair(kind: str) -> Pair:
    settings, of_layer = KINDS[kind]
    config = layer_config(**of_layer)
    for name, value in settings.items():
        setattr(config, name, value)
    config.speculators_model_type = "eagle3"
    plain_head = eagle_modules(config, {"lm_head.weight"})
    weights = random_weights(plain_head.state_dict())
    scales = {name for name in weights if "norm" in name}
    weights |= {name: torch.linspace(0.5, 2.0, weights[name].numel()) for name in scales}
    plain_head.load_state_dict(weights)
    loaded = loaded_model(tiny_model("llama"))
    # The library writes the model's embeddings beside the head's weights.
    embeddings: Any = tiny_model("llama").get_input_embeddings()
    written = weights | {"embed_tokens.weight": embeddings.weight.detach()}
    with TemporaryDirectory() as directory:
        write_head(Path(directory), layer_config(**of_layer), written, **settings)
        return Pair(loaded, load_head(Path(directory), loaded), tiny_model("llama"), plain_head.eval())


@functools.cache
def short_answers() -> list[list[int]]:
    with engine(pair("plain").loaded, None) as core:
        return ask(core)


def ask(core: Any) -> list[list[int]]:
    core.add(make_request("greedy", list(range(3, 30)), max_tokens=20, ignore_eos=True))
    core.add(make_request("sampled", list(range(60, 80)), max_tokens=20, temperature=1.0, seed=5, ignore_eos=True))
    said = drive(core)
    return [tokens(said[name]) for name in ("greedy", "sampled")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_head_changes_no_answer_and_says_what_it_says_without_a_cache(
    kind: str, recorded: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    both = pair(kind)
    with engine(both.loaded, both.head) as core:
        assert ask(core) == short_answers()
    assert len(recorded) > 20
    for token_ids, draft in recorded[::5]:
        assert draft == both.drafts(token_ids, len(draft))


@pytest.mark.thorough
@pytest.mark.parametrize(("num_blocks", "settings"), test_draft_heads.CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_head_changes_no_answer_in_every_batch(
    kind: str, num_blocks: int, settings: dict[str, Any], recorded: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    both = pair(kind)
    with engine(both.loaded, None) as core:
        expected = answers(core)
    with engine(both.loaded, both.head, num_blocks=num_blocks, **settings) as core:
        assert answers(core) == expected
    for token_ids, draft in recorded[:: len(recorded) // 30]:
        assert draft == both.drafts(token_ids, len(draft))


def test_the_tokens_of_a_head_that_is_right_are_all_accepted(tmp_path: Path) -> None:
    loaded, weights = right_eagle_weights()
    weights["midlayer.mlp.down_proj.weight"] *= 320**0.5  # the length of a normalized feature
    write_head(tmp_path, layer_config(hidden_size=320, intermediate_size=320), weights, norm_before_residual=True)
    check_that_all_is_accepted(loaded, load_head(tmp_path, loaded))


@pytest.mark.parametrize(
    ("settings", "of_layer", "reason"),
    [
        ({"speculators_model_type": "peagle"}, {}, "speculators' peagle heads are not supported"),
        ({"speculators_model_type": "eagle"}, {}, "speculators' eagle heads are not supported"),
        ({"norm_before_mlp": True}, {}, "settings of the head that are not supported: norm_before_mlp"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "not supported: quantization_config"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "norm_before_fc and fc_norm"),
        ({"transformer_layer_config": None}, {}, "no transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 0}}, {}, "`num_hidden_layers` is 0"),
        ({"transformer_layer_config": {"model_type": "none"}}, {}, "cannot be read as a 'none' config"),
        ({"target_hidden_size": 96}, {}, "hidden states of 96, and the model has 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, {}, r"reads before layers \(1, 3\), and the model has 3"),
        ({}, {"num_hidden_layers": 2}, "2 layers of 'llama': it takes one of 'llama' or 'qwen3'"),
        ({}, {"model_type": "gemma"}, "1 layers of 'gemma'"),
        ({}, {"vocab_size": 400}, "a vocabulary of 400, and the model has 320"),
        ({}, {"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "heads with sliding_attention are not supported"),
    ],
)
def test_a_head_that_is_not_for_this_engine_or_model_is_refused(
    settings: dict[str, Any], of_layer: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_head(tmp_path, layer_config(**of_layer), {"norm.weight": torch.ones(64), "d2t": torch.zeros(8, dtype=torch.int64)}, **settings)
    architecture = architecture_of_head(tmp_path)
    assert architecture is not None
    with pytest.raises(ConfigurationError, match=reason):
        read_head_config(tmp_path, architecture, tiny_config("llama"))
