import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import (
    answer_tokens,
    check_servable,
    max_model_len,
    read_answer_tokens,
    read_config,
    recommended_sampling,
    sampling_defaults,
)
from penstock.engine.model.loader import load_model
from tests.fakes import EOS, TOKENIZER
from tests.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURES, tiny_config, tiny_model


@pytest.mark.parametrize("generation_config", [None, {"eos_token_id": [7, 9]}, {"eos_token_id": 7}, {}], ids=str)
def test_without_the_weights_the_tokens_are_those_of_the_loaded_model(tmp_path: Path, generation_config: dict[str, object] | None) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    loaded = load_model(tmp_path, "float32", "cpu", attn_implementation="eager")
    (tmp_path / "model.safetensors").unlink()
    assert read_answer_tokens(tmp_path, TOKENIZER) == answer_tokens(loaded.vocab_size, loaded.eos_token_ids, TOKENIZER)


def test_ends_are_those_that_model_or_tokenizer_know() -> None:
    tokens = answer_tokens(TOKENIZER.vocab_size + 10, frozenset({3}), TOKENIZER)
    assert (tokens.vocab_size, tokens.stop_token_ids) == (TOKENIZER.vocab_size, frozenset({3, EOS}))
    assert answer_tokens(100, frozenset(), TOKENIZER).vocab_size == 100


def llama(positions: int, **rope: Any) -> PretrainedConfig:
    return AutoConfig.for_model("llama", max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_tells_its_context_length(name: str) -> None:
    assert max_model_len(tiny_config(name)) == 512


def test_less_than_the_limit_is_honoured_and_more_is_refused() -> None:
    config = llama(1000, rope_type="default")
    assert max_model_len(config, 10) == 10
    assert max_model_len(config, 1000) == 1000
    with pytest.raises(ConfigurationError, match=r"1001 is more than this model's 1000"):
        max_model_len(config, 1001)


@pytest.mark.parametrize("asked", [0, -1])
def test_less_than_one_token_is_refused(asked: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        max_model_len(llama(1000, rope_type="default"), asked)


def test_yarn_is_counted_once_whichever_length_the_config_holds() -> None:
    before = llama(1000, rope_type="yarn", factor=4.0, original_max_position_embeddings=1000)
    after = llama(4000, rope_type="yarn", factor=4.0, original_max_position_embeddings=1000)
    assert max_model_len(before) == max_model_len(after) == 4000


def test_linear_scaling_stretches_the_context() -> None:
    assert max_model_len(llama(1000, rope_type="linear", factor=2.0)) == 2000


def test_llama3_scaling_is_already_in_the_config() -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 500}
    assert max_model_len(llama(4000, rope_type="llama3", **rope)) == 4000


def test_scaling_that_depends_on_the_batch_stops_where_it_would_begin() -> None:
    assert max_model_len(llama(1000, rope_type="dynamic", factor=4.0)) == 1000
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 400}
    assert max_model_len(llama(1600, rope_type="longrope", factor=4.0, **factors)) == 400


def test_a_model_without_a_limit_takes_what_the_operator_gives() -> None:
    config = PretrainedConfig()
    assert max_model_len(config, 77) == 77
    with pytest.raises(ConfigurationError, match="pass --max-model-len"):
        max_model_len(config)


def recommended(**values: Any) -> dict[str, Any]:
    return recommended_sampling(GenerationConfig(**values))  # type: ignore[no-untyped-call]


def test_a_models_recommended_sampling_becomes_the_default() -> None:
    config = recommended(temperature=0.6, top_p=0.95, max_new_tokens=50, do_sample=True)
    assert sampling_defaults(config) == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 50}
    assert sampling_defaults(recommended()) == {}


def test_the_models_defaults_can_be_left_out_or_overridden() -> None:
    config = recommended(temperature=0.6, max_new_tokens=50)
    assert sampling_defaults(config, "vllm") == {}
    assert sampling_defaults(config, override={"temperature": 0.1}) == {"temperature": 0.1, "max_tokens": 50}
    assert sampling_defaults(config, override={"max_new_tokens": None}) == {"temperature": 0.6}
    assert sampling_defaults(config, "vllm", {"top_k": 5}) == {"top_k": 5}


def test_another_file_is_read_by_its_path_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    (tmp_path / "mine.json").write_text(json.dumps({"temperature": 0.4}))
    assert sampling_defaults(recommended(top_k=3), str(tmp_path)) == {"temperature": 0.3}
    assert sampling_defaults(recommended(), str(tmp_path / "mine.json")) == {"temperature": 0.4}


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("nowhere", {}, "--generation-config nowhere: neither auto, nor vllm, nor a directory"),
        ("auto", {"temprature": 1, "stop": "x"}, "--override-generation-config: stop, temprature: the names are temperature, "),
        ("auto", {"temperature": 3}, "--override-generation-config: `temperature` must be a number from 0 to 2, got 3"),
        ("auto", {"top_k": "many"}, "--override-generation-config: `top_k` must be .*, got 'many'"),
    ],
)
def test_what_cannot_be_used_is_said(source: str, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling_defaults(recommended(), source, override)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="--generation-config"):
        sampling_defaults(recommended(), str(tmp_path))


def test_a_model_that_recommends_what_is_out_of_range_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigurationError, match="--generation-config vllm"):
        sampling_defaults(recommended(repetition_penalty=1000.0))


def config_of(model_type: str, architecture: str, **settings: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, architectures=[architecture], **settings)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT_ARCHITECTURES])
def test_every_architecture_that_is_tried_is_servable(name: str) -> None:
    config = tiny_config(name)
    assert len(check_servable(config)) == config.num_hidden_layers


REFUSED = [
    ("bert", "BertModel", "encoder"),
    ("bert", "BertForMaskedLM", "encoder"),
    ("roberta", "RobertaForSequenceClassification", "classifier"),
    ("llama", "LlamaForSequenceClassification", "classifier"),
    ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
    ("whisper", "WhisperForConditionalGeneration", "it turns speech into text"),
    ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "it takes audio"),
    ("voxtral", "VoxtralForConditionalGeneration", "it turns speech into text"),
    ("musicgen", "MusicgenForConditionalGeneration", "it generates audio"),
    ("jamba", "JambaForCausalLM", "recurrent state, of which the served kinds are .*mamba2"),
    ("minimax", "MiniMaxForCausalLM", "linear_attention; beside attention, only the recurrent layers of .*lfm2"),
    ("bloom", "BloomForCausalLM", "_supports_attention_backend"),
    ("gptj", "GPTJForCausalLM", "_supports_attention_backend"),
    ("paligemma", "PaliGemmaForConditionalGeneration", "multimodal"),
    ("emu3", "Emu3ForConditionalGeneration", "multimodal"),
    ("fuyu", "FuyuForCausalLM", "multimodal"),
    ("detr", "DetrForObjectDetection", "encoder"),
    ("mpt", "MptForCausalLM", "_supports_attention_backend"),
    ("blt", "BltForCausalLM", "_supports_attention_backend"),
    ("dbrx", "DbrxForCausalLM", "the layers of DbrxForCausalLM could not be traced: "),
    ("dots1", "Dots1ForCausalLM", r"the layers of Dots1ForCausalLM could not be traced: empty\(\)"),  # this config names no experts
    ("longcat_flash", "LongcatFlashForCausalLM", r"the layers of LongcatFlashForCausalLM could not be traced: .*nonzero"),
    ("mistral4", "Mistral4ForCausalLM", "AutoModelForCausalLM of transformers .* has no class for it"),
    ("llama", "XverseForCausalLM", "llama models are of the class LlamaForCausalLM"),
    ("llama4_text", "Llama4ForCausalLM", "chunked_attention"),
]


@pytest.mark.parametrize(("model_type", "architecture", "reason"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(model_type: str, architecture: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{architecture} cannot be served: .*{reason}"):
        check_servable(config_of(model_type, architecture))


def test_a_model_that_cannot_be_traced_is_named_where_its_config_names_no_class() -> None:
    with pytest.raises(ConfigurationError, match=r"the layers of JetMoeForCausalLM could not be traced: .*meta"):
        check_servable(AutoConfig.for_model("jetmoe"))


def test_a_dots1_model_with_experts_is_servable() -> None:
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    config = config_of("dots1", "Dots1ForCausalLM", n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, **sizes)
    assert len(check_servable(config)) == 2


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "quux", "architectures": ["QuuxForCausalLM"]}))
    with pytest.raises(ConfigurationError, match=r"'quux' model \(QuuxForCausalLM\)"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_config_with_a_value_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ConfigurationError, match="hidden_size"):
        read_config(tmp_path)


def write_model_with_its_own_code(directory: Path) -> None:
    """A model that is Llama under another name, as code beside its config."""
    content = tiny_config("llama").to_dict() | {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )


def test_code_beside_a_model_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    write_model_with_its_own_code(model)
    with pytest.raises(ConfigurationError, match=r"'own_llama'.*--trust-remote-code"):
        read_config(model)
    config = read_config(model, trust_remote_code=True)
    assert type(config).__name__ == "OwnConfig"
    assert len(check_servable(config, trust_remote_code=True)) == 3


def test_the_context_of_a_multimodal_model_is_its_language_models() -> None:
    assert max_model_len(AutoConfig.for_model("llava", text_config={"model_type": "llama", "max_position_embeddings": 77})) == 77
