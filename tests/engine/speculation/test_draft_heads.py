"""EAGLE-3 and MTP heads change no answer, propose what a plain computation of the head gives, and are refused where they do not fit."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from penstock.engine.build import build_core, load_draft, release
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.model.drafters.configured import check_draft
from penstock.engine.model.drafters.drafter import ModelDraft
from penstock.engine.model.drafters.eagle import EagleModel, eagle_head, layers_read
from penstock.engine.model.drafters.heads import DraftHead
from penstock.engine.model.drafters.mtp import mtp_head
from penstock.engine.model.loader import LoadedModel, load_model
from penstock.engine.model.native import NativeDecoder
from penstock.engine.scheduling.step import Speculation
from tests.engine.model.test_native import needs_kernels
from tests.engine.speculation.test_draft_model import answers
from tests.engines import loaded_model
from tests.fakes import byte_tokenizer, drive, make_request, tokens
from tests.tiny_models import tiny_config, tiny_model

BLOCK_SIZE = 8
KINDS = ["eagle", "eagle of gemma2", "eagle with a vocabulary of its own", "mtp", "mtp of deepseek"]
DRAFT_VOCAB = 120
NEXTN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
    },
}


@dataclass(frozen=True)
class Pair:
    """A model and its head as the engine has them, and both again in plain code."""

    loaded: LoadedModel
    head: DraftHead
    plain: Any
    plain_head: Any

    @property
    def speculation(self) -> str:
        return "draft" if self.head.layers else "mtp"

    @torch.inference_mode()
    def drafts(self, token_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        """What the head says after these tokens, without a cache."""
        ids_1T = torch.tensor([token_ids])
        hidden = self.plain(input_ids=ids_1T[:, :-1], output_hidden_states=True).hidden_states
        features = plain_features(self.plain_head, [hidden[layer] for layer in self.head.layers]) if self.head.layers else hidden[-1]
        said: list[int] = []
        for _ in range(num_tokens):
            inputs = torch.tensor([[*token_ids[1:], *said]])
            positions = torch.arange(1, 1 + inputs.shape[1])[None]
            mask = torch.full((inputs.shape[1], inputs.shape[1]), -torch.inf).triu(1)[None, None]
            embeds = self.plain.get_input_embeddings()(inputs)
            rotary = self.plain_head.rotary_emb(embeds, positions)
            if self.head.layers:
                out = plain_eagle_layer(self.plain_head.midlayer, embeds, features, rotary, mask)
                normed = self.plain_head.norm(out)
                logits = (self.plain_head.lm_head or self.plain.get_output_embeddings())(normed)
                out = normed if self.plain_head.norm_output else out
            else:
                out = self.plain_head.layers[0](embeds, features, rotary, mask, positions, None)
                logits = self.plain.get_output_embeddings()(out)
            best = int(logits[0, -1, : byte_tokenizer().vocab_size].argmax())
            d2t = dict(self.plain_head.named_buffers()).get("d2t")
            said.append(best if d2t is None else best + int(d2t[best]))
            features = torch.cat([features, out[:, -1:]], 1)
        return said


def plain_features(head: Any, states: list[Tensor]) -> Tensor:
    if head.fc_norm is not None:
        states = [norm(state) for norm, state in zip(head.fc_norm, states, strict=True)]
    joined = torch.cat(states, -1)
    features: Tensor = head.fc(joined if head.input_norm is None else head.input_norm(joined))
    return features


def plain_eagle_layer(layer: Any, embeds: Tensor, features: Tensor, rotary: Any, mask: Tensor) -> Tensor:
    """Li et al., arXiv:2503.01840, figure 5."""
    normed = layer.hidden_norm(features)
    inputs = torch.cat([layer.input_layernorm(embeds), normed], -1)
    hidden = (normed if layer.norm_before_residual else features) + layer.self_attn(
        inputs, position_embeddings=rotary, attention_mask=mask
    )[0]
    out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return out


def eagle_config(**settings: Any) -> LlamaConfig:
    config: LlamaConfig = tiny_config("llama")  # type: ignore[assignment]
    config.num_hidden_layers = 1
    config.architectures = ["LlamaForCausalLMEagle3"]
    for name, setting in settings.items():
        setattr(config, name, setting)
    return config


def random_weights(shapes: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(tensor.shape) if tensor.dim() == 1 else 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in shapes.items()
    }
    if "d2t" in weights:  # offsets from the place in the head's vocabulary
        chosen = torch.randperm(byte_tokenizer().vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
        weights["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    return weights


def eagle_modules(config: Any, names: set[str]) -> EagleModel:
    config._attn_implementation = "eager"
    return EagleModel(config, len(layers_read(config, 3)), names)


def eagle_pair(model: str = "llama", **settings: Any) -> Pair:
    names = {"lm_head.weight", *(["d2t"] if settings else [])}
    plain_head = eagle_modules(eagle_config(**settings), names)
    weights = random_weights(plain_head.state_dict())
    plain_head.load_state_dict(weights)
    loaded = loaded_model(tiny_model(model))
    return Pair(loaded, eagle_head(eagle_config(**settings), loaded, weights), tiny_model(model), plain_head.eval())


def nextn_model(name: str, seed: int = 0) -> PreTrainedModel:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    settings = tiny_config("llama").to_dict() | sizes | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1} | NEXTN[name]
    settings = {key: value for key, value in settings.items() if key not in ("model_type", "architectures", "rope_parameters")}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **settings)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)  # type: ignore[no-untyped-call]
        randomize(model)
    model.generation_config.eos_token_id = None
    result: PreTrainedModel = model.eval()
    return result


def randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)


def nextn_module(model: PreTrainedModel) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        module: Any = MtpModel(model, 1)
        randomize(module.layers)
    module.config._attn_implementation = "eager"
    return module.eval()


def mtp_pair(name: str) -> Pair:
    plain, served = nextn_model(name), nextn_model(name)
    plain_head, module = nextn_module(plain), nextn_module(served)
    loaded = loaded_model(served)
    module.tie_with_main_model(served)
    return Pair(loaded, mtp_head(loaded, module), plain, plain_head)


@functools.cache
def pair(kind: str) -> Pair:
    if kind == "eagle":
        return eagle_pair()
    if kind == "eagle of gemma2":  # whose layers are in two groups
        return eagle_pair("gemma2")
    if kind.startswith("eagle"):
        return eagle_pair(draft_vocab_size=DRAFT_VOCAB, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0]})
    return mtp_pair("deepseek_v3" if "deepseek" in kind else "glm4_moe")


@contextmanager
def engine(loaded: LoadedModel, head: DraftHead | None, *, num_blocks: int = 128, **settings: Any) -> Iterator[EngineCore]:
    per_block = block_bytes(loaded.kv_layout, BLOCK_SIZE, loaded.dtype)
    speculation = "none"
    if head is not None:
        per_block += block_bytes(head.cache_layout(), BLOCK_SIZE, loaded.dtype)
        speculation = "draft" if head.layers else "mtp"
    options: dict[str, Any] = {"compile": "off", "speculation": speculation, "max_num_seqs": 8, "block_size": BLOCK_SIZE} | settings
    core = build_core(loaded, byte_tokenizer(), EngineConfig(kv_cache_memory=num_blocks * per_block, **options), draft=head)
    core.scheduler.lengths = None
    if core.scheduler.speculation is not None:
        core.scheduler.speculation.draft_cost = 0.1
    try:
        yield core
        core.check_integrity()
    finally:
        core.close()
        core.runner.shutdown()
        release(core)


@functools.cache
def plain_answers(kind: str) -> list[list[int]]:
    with engine(pair(kind).loaded, None) as core:
        return answers(core)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], list[int]]]:
    """The drafts that reach sequences, each with the tokens before it. Three are made in every step, whatever the accuracy."""
    found: list[tuple[tuple[int, ...], list[int]]] = []
    deliver = ModelDraft.deliver

    def record(draft: ModelDraft) -> None:
        token_ids = draft.sequence.token_ids
        if len(token_ids) == draft.num_known and token_ids[-len(draft.said) :] == draft.said:
            found.append((tuple(token_ids), list(draft.draft)))
        deliver(draft)

    monkeypatch.setattr(ModelDraft, "deliver", record)
    monkeypatch.setattr(Speculation, "num_passes", lambda *_, **__: 3)
    monkeypatch.setattr("penstock.engine.speculation.proposers.SequenceDraft.min_accuracy", 0.0)
    return found


CASES: list[tuple[int, dict[str, Any]]] = [
    (128, {}),
    (18, {}),
    (128, {"enable_prefix_caching": False, "max_num_batched_tokens": 16}),
]


USUAL = (("eagle", CASES[1]),)


@pytest.mark.parametrize(
    ("kind", "num_blocks", "settings"),
    [pytest.param(kind, *case, marks=[] if (kind, case) in USUAL else pytest.mark.thorough) for kind in KINDS for case in CASES],
)
def test_a_random_head_changes_no_answer_and_says_what_it_says_without_a_cache(
    kind: str, num_blocks: int, settings: dict[str, Any], recorded: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    """With chunked prefill, forks, grammars, shared prefixes and preemption; `answers` asks for each twice."""
    both = pair(kind)
    num_groups = 2 if "gemma2" in kind else 1  # with blocks of their own
    with engine(both.loaded, both.head, num_blocks=num_blocks * num_groups, **settings) as core:
        assert answers(core) == plain_answers(kind)
        assert (core.stats().num_preemptions > 0) == (num_blocks == 18)
    assert len(recorded) > 100
    for token_ids, draft in recorded[:: len(recorded) // 30]:
        assert draft == both.drafts(token_ids, len(draft))


def test_blocks_of_an_answer_are_known_to_the_head_although_it_made_no_drafts_there(
    recorded: list[tuple[tuple[int, ...], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("eagle")
    prompt = list(range(3, 24))
    with engine(both.loaded, both.head) as core:
        with monkeypatch.context() as without:
            without.setattr(Speculation, "num_passes", lambda *_, **__: 0)
            core.add(make_request("first", prompt, max_tokens=40, ignore_eos=True))
            prompt += tokens(drive(core)["first"])
        assert recorded == []
        core.add(make_request("next", [*prompt, 5], max_tokens=12, ignore_eos=True))
        drive(core)
        assert core.stats().num_prefix_cache_hits == 56
    assert recorded
    for token_ids, draft in recorded:
        assert draft == both.drafts(token_ids, len(draft))


def test_sequences_that_begin_with_blocks_from_files_get_no_drafts_of_a_head(
    tmp_path: Path, recorded: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    """The states of their tokens are not there; what is computed behind them is of no use to a head either."""
    both = pair("eagle")
    loaded = replace(both.loaded, weights_digest="tiny")
    said = []
    for head in (None, both.head):
        with engine(loaded, head, kv_cache_dir=str(tmp_path)) as core:
            prompt = list(range(3, 40))
            for _ in range(2):
                core.add(make_request("loaded", prompt, max_tokens=20, ignore_eos=True))
                prompt += tokens(drive(core, max_steps=10**6)["loaded"])
            said.append(prompt)
            assert recorded == []
            if head is not None:
                core.add(make_request("other", list(range(60, 90)), max_tokens=20, ignore_eos=True))
                drive(core)
    assert said[0] == said[1]
    assert recorded
    for token_ids, draft in recorded:
        assert draft == both.drafts(token_ids, len(draft))


@needs_kernels
def test_a_head_reads_what_native_code_computes(
    recorded: list[tuple[tuple[int, ...], list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loaded = loaded_model(tiny_model("llama", head_dim=64, hidden_size=64).bfloat16())
    config = eagle_config(head_dim=64)
    head = eagle_head(eagle_config(head_dim=64), loaded, random_weights(eagle_modules(config, set()).state_dict()))
    said = []
    for drafting in (None, head):
        with engine(loaded, drafting) as core:
            core.add(make_request("one", list(range(3, 30)), max_tokens=30, ignore_eos=True))
            said.append(tokens(drive(core)["one"]))
            assert isinstance(loaded.model.forward, NativeDecoder)
    assert said[0] == said[1]
    assert len(recorded) > 20
    assert "one by one" not in caplog.text


def successor(token_id: int) -> int:
    return (token_id + 1) % 200


def model_of_successors(model: Any) -> None:
    """Makes a model say `successor` of the last token, with hidden states that are that token's embedding."""
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        embeddings = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        head.zero_()
        for token_id in range(len(embeddings)):
            head[successor(token_id)] += embeddings[token_id]


def right_eagle_weights() -> tuple[LoadedModel, dict[str, Tensor]]:
    """The hidden state of a token is 1 at its number; the head moves it to the successor's, by its MLP."""
    size = 320
    model: Any = tiny_model("llama", hidden_size=size, intermediate_size=size)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(size))
    model_of_successors(model)
    config = eagle_config(hidden_size=size, intermediate_size=size)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in eagle_modules(config, {"lm_head.weight"}).state_dict().items()}
    weights |= {name: torch.ones(size) for name in weights if "norm" in name}
    weights["fc.weight"][:, :size] = weights["midlayer.mlp.up_proj.weight"][:] = torch.eye(size)
    weights["midlayer.mlp.gate_proj.weight"][:] = torch.eye(size)
    moves = torch.zeros(size, size)
    for token_id in range(size):
        moves[token_id, token_id] -= 1
        moves[successor(token_id), token_id] += 1
    gate = torch.tensor(size**0.5)
    weights["midlayer.mlp.down_proj.weight"] = moves / (nn.functional.silu(gate) * gate)
    weights["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    return loaded_model(model), weights


def right_eagle() -> tuple[LoadedModel, DraftHead]:
    loaded, weights = right_eagle_weights()
    return loaded, eagle_head(eagle_config(hidden_size=320, intermediate_size=320), loaded, weights)


def right_mtp() -> tuple[LoadedModel, DraftHead]:
    model = nextn_model("glm4_moe")
    model_of_successors(model)
    module = nextn_module(model)
    with torch.no_grad():
        module.layers[0].eh_proj.weight.copy_(torch.eye(64, 128))
        for name, parameter in module.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
    loaded = loaded_model(model)
    module.tie_with_main_model(model)
    return loaded, mtp_head(loaded, module)


@pytest.mark.parametrize("make", [right_eagle, right_mtp])
def test_the_tokens_of_a_head_that_is_right_are_all_accepted(make: Any) -> None:
    check_that_all_is_accepted(*make())


def check_that_all_is_accepted(loaded: LoadedModel, head: DraftHead) -> None:
    with engine(loaded, head) as core:
        for number in range(3):
            core.add(make_request(str(number), [*range(3, 30), number], max_tokens=60, n=1 + number, ignore_eos=True))
        said = drive(core)
        stats = core.stats()
    expected = [successor(number) for number in range(60)]
    assert tokens(said["0"]) == expected
    assert tokens(said["2"], 2) == [token_id + 2 for token_id in expected]
    assert 0 < stats.drafts[core.scheduler.speculation.name].num_drafted == stats.num_accepted_tokens  # type: ignore[union-attr]
    assert stats.num_steps < 40


def write_head(directory: Path, config: LlamaConfig, weights: dict[str, Tensor]) -> None:
    config.save_pretrained(directory)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(directory)
    (directory / "tokenizer.json").write_text(byte_tokenizer().serialized())
    (directory / "tokenizer_config.json").write_text("{}")
    return load_model(directory, "float32", "cpu")


def head_of(directory: Path, target: LoadedModel) -> Any:
    config = EngineConfig(speculation="draft", draft_model=str(directory))
    return load_draft(config, byte_tokenizer(), target)


def test_a_head_is_read_from_its_checkpoint(tmp_path: Path, target: LoadedModel) -> None:
    config = eagle_config(draft_vocab_size=DRAFT_VOCAB)
    weights = random_weights(eagle_modules(config, {"d2t"}).state_dict())
    unused = {"t2d": torch.zeros(320, dtype=torch.bool)}
    write_head(tmp_path, config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()} | unused)
    head = head_of(tmp_path, target)
    expected = eagle_head(eagle_config(draft_vocab_size=DRAFT_VOCAB), target, weights)
    states = [torch.randn(2, 64) for _ in range(3)]
    assert torch.equal(head.features(states), expected.features(states))
    assert head.next_ids(states[0], 250) == expected.next_ids(states[0], 250)
    assert head.layers == (2, 1, 0)


def test_layer_numbers_from_1_on_are_those_of_outputs() -> None:
    def layers(ids: Any) -> tuple[int, ...]:
        return layers_read(eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}), 32)

    assert layers(None) == (2, 16, 29)
    assert layers([2, 16, 29]) == (2, 16, 29)
    assert layers([1, 15, 28]) == (2, 16, 29)
    with pytest.raises(ConfigurationError, match="eagle_aux_hidden_state_layer_ids is 'all'"):
        layers("all")


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        ({"hidden_size": 128}, {}, "hidden states of 128, and the model has 64"),
        ({"target_hidden_size": 96}, {}, "hidden states of 96, and the model has 64"),
        ({"vocab_size": 400}, {}, "a vocabulary of 400, and the model has 320"),
        ({"num_hidden_layers": 2}, {}, "2 layers of 'llama'"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "norm_before_fc and fc_norm"),
        ({"norm_before_fc": True}, {}, "lacks input_norm.weight"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}, "EagleLlamaForCausalLM heads are not supported"),
        ({"architectures": ["DeepseekV3ForCausalLMEagle3"]}, {}, "DeepseekV3ForCausalLMEagle3 heads are not supported"),
        ({"speculators_model_type": "peagle"}, {}, "speculators' peagle heads are not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7]}}, {}, r"reads before layers \(0, 7\), and the model has 3"),
        ({}, {"fc.weight": torch.zeros(64, 128)}, r"fc.weight has the shape \(64, 128\), and this model takes \(64, 192\)"),
        ({}, {"fc.bias": torch.zeros(64)}, "not those of EAGLE-3: fc.bias"),
        ({}, {"norm.weight": None}, "lacks norm.weight"),
        ({"draft_vocab_size": DRAFT_VOCAB}, {"d2t": torch.full((DRAFT_VOCAB,), 300)}, "d2t names tokens that are not below 320"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    settings: dict[str, Any], change: dict[str, Tensor | None], reason: str, tmp_path: Path, target: LoadedModel
) -> None:
    weights: dict[str, Any] = random_weights(eagle_modules(eagle_config(), set()).state_dict())
    if "draft_vocab_size" in settings:
        weights |= random_weights(eagle_modules(eagle_config(**settings), {"d2t"}).state_dict())
    weights = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    write_head(tmp_path, eagle_config(**settings), weights)
    with pytest.raises(ConfigurationError, match=reason):
        head_of(tmp_path, target)


def test_a_head_with_another_tokenizer_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    write_head(tmp_path, eagle_config(), random_weights(eagle_modules(eagle_config(), set()).state_dict()))
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().serialized().replace("</think>", "</thought>"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="token 258 is '</thought>', and the model's '</think>'"):
        head_of(tmp_path, target)


def write_nextn(directory: Path, name: str) -> Any:
    """A checkpoint with an MTP layer, by the names that such models are published with; returns the module that it was written from."""
    model = nextn_model(name)
    module = nextn_module(model)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for key, tensor in module.layers.state_dict().items():
        key = key.removeprefix("0.").replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if key.endswith("experts.gate_up_proj"):
            for number, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                weights[f"model.layers.3.mlp.experts.{number}.gate_proj.weight"] = gate.contiguous()
                weights[f"model.layers.3.mlp.experts.{number}.up_proj.weight"] = up.contiguous()
        elif key.endswith("experts.down_proj"):
            for number, part in enumerate(tensor):
                weights[f"model.layers.3.mlp.experts.{number}.down_proj.weight"] = part.contiguous()
        else:
            weights[f"model.layers.3.{key}"] = tensor.contiguous()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return module


@pytest.mark.parametrize("name", NEXTN)
def test_an_mtp_layer_is_read_from_the_models_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The patterns of the weights that a model leaves out name the layers of the published models.
    model_class: Any = type(nextn_model(name))
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    written = write_nextn(tmp_path, name)
    loaded = load_model(tmp_path, "float32", "cpu")
    head: Any = load_draft(EngineConfig(speculation="mtp"), byte_tokenizer(), loaded)
    expected = written.layers.state_dict()
    assert {key: tensor.tolist() for key, tensor in head.module.layers.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in expected.items()
    }
    assert head.reads_last


def test_a_model_without_mtp_layers_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    with pytest.raises(ConfigurationError, match="llama models have no MTP layers"):
        check_draft(EngineConfig(speculation="mtp"), byte_tokenizer(), target.directory)
    nextn_model("glm4_moe").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="MTP layer cannot be loaded"):
        load_draft(EngineConfig(speculation="mtp"), byte_tokenizer(), load_model(tmp_path, "float32", "cpu"))
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == 1
