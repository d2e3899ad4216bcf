import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.pooling.encoder import EncoderInput, FlatForward, PaddedForward
from penstock.engine.pooling.loader import load_pooling_model
from penstock.engine.pooling.model import PoolingModel, PoolingParams, PoolingTask
from tests.tiny_encoders import DECODERS, ENCODERS, MAX_LEN, VOCAB_SIZE, modules, save_encoder, tiny_encoder
from tests.tiny_models import tiny_model

CLASSIFIERS = ("bert", "roberta", "distilbert", "modernbert", "electra", "albert", "mpnet", "deberta-v2", "qwen3", "llama")
PADDED = {"mpnet", "deberta-v2"}  # transformers does not let their attention be replaced
LENGTHS = (5, 40, 1, 5, 17, 40, 2)


def prompts(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]


def load(directory: Path, **settings: Any) -> PoolingModel:
    return load_pooling_model(directory, EngineConfig(device="cpu", **settings))


def compute(model: PoolingModel, inputs: list[list[int]], **params: Any) -> list[Tensor]:
    return model.compute([model.check(EncoderInput(token_ids), PoolingParams(**params)) for token_ids in inputs])


def own_states(model: PreTrainedModel, token_ids: list[int], **options: Any) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([token_ids]), **options).last_hidden_state[0]
    return states


def own_logits(model: PreTrainedModel, token_ids: list[int], **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), **options).logits[0]
    return logits


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_token_vectors_and_their_mean_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = tiny_encoder(name)
    model = load(save_encoder(reference, tmp_path))
    assert isinstance(model.forward, PaddedForward if name in PADDED else FlatForward)
    states = [own_states(reference, token_ids) for token_ids in prompts()]
    assert_equal(compute(model, prompts(), task="token_embed"), states)
    assert_equal(compute(model, prompts(), task="embed"), [state.mean(0) for state in states])


def test_a_decoder_made_to_look_both_ways_does(tmp_path: Path) -> None:
    """As EmbeddingGemma, with windows that both directions count in."""
    model = load(save_encoder(tiny_encoder("gemma3_text", use_bidirectional_attention=True), tmp_path))
    assert isinstance(model.forward, FlatForward)
    reference = AutoModel.from_pretrained(tmp_path).eval()  # its config counts the window otherwise once it is read again
    assert_equal(compute(model, prompts(), task="token_embed"), [own_states(reference, token_ids) for token_ids in prompts()])


def test_a_language_model_is_pooled_without_its_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding, whose files are those of a model that writes."""
    whole = tiny_model("qwen3")
    encoder: Any = whole.base_model
    files = {"modules": modules("Pooling", "Normalize"), "_1_Pooling": {"pooling_mode_lasttoken": True}}
    model = load(save_encoder(whole, tmp_path, **files))
    last = [own_states(encoder, token_ids)[-1] for token_ids in prompts()]
    assert_equal(compute(model, prompts()), [vector / vector.norm() for vector in last])


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
def test_a_masked_language_model_is_pooled_without_its_head(name: str, tmp_path: Path) -> None:
    """Such files lack the pooler that the class without a head has, which nothing here reads."""
    whole = tiny_encoder(name, head="masked")
    model = load(save_encoder(whole, tmp_path))
    encoder: Any = whole.base_model
    assert_equal(compute(model, prompts()), [own_states(encoder, token_ids).mean(0) for token_ids in prompts()])


@pytest.mark.parametrize("name", ["bert", "mpnet", "qwen3"])
def test_a_batch_changes_nothing(name: str, tmp_path: Path) -> None:
    model = load(save_encoder(tiny_encoder(name), tmp_path))
    alone = [compute(model, [token_ids])[0] for token_ids in prompts()]
    assert_equal(compute(model, prompts()), alone)
    assert_equal(compute(model, prompts()[::-1]), alone[::-1])


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "modernbert", "electra", "albert", "mpnet", "deberta-v2", "qwen3", "llama"]
)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_and_scores_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    reference = tiny_encoder(name, head="sequence", num_labels=num_labels)
    model = load(save_encoder(reference, tmp_path))
    logits = [own_logits(reference, token_ids) for token_ids in prompts()]
    assert model.num_labels == num_labels
    assert model.is_cross_encoder == (num_labels == 1)
    probabilities = [logit.sigmoid() if num_labels == 1 else logit.softmax(-1) for logit in logits]
    assert_equal(compute(model, prompts(), task="classify"), probabilities)
    if num_labels == 1:
        assert_equal(compute(model, prompts()), [logit.sigmoid() for logit in logits])


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_classes_of_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = tiny_encoder(name, head="token", num_labels=4)
    model = load(save_encoder(reference, tmp_path))
    assert model.tasks == {"token_classify"}
    assert_equal(compute(model, prompts()), [own_logits(reference, token_ids).softmax(-1) for token_ids in prompts()])


def test_a_head_that_reads_the_mean_gets_it(tmp_path: Path) -> None:
    reference = tiny_encoder("modernbert", head="sequence", num_labels=3, classifier_pooling="mean")
    model = load(save_encoder(reference, tmp_path))
    assert model.classifier is not None
    assert model.classifier.reads == "mean"
    assert_equal(compute(model, prompts()), [own_logits(reference, token_ids).softmax(-1) for token_ids in prompts()])


PROBLEMS: dict[str, Any] = {
    "regression": torch.nn.Identity(),
    "multi_label_classification": torch.sigmoid,
    "single_label_classification": torch.nn.Softmax(-1),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_probabilities_follow_the_problem(problem: str, tmp_path: Path) -> None:
    reference = tiny_encoder("bert", head="sequence", num_labels=3, problem_type=problem)
    model = load(save_encoder(reference, tmp_path))
    assert_equal(compute(model, prompts()), [PROBLEMS[problem](own_logits(reference, token_ids)) for token_ids in prompts()])


@pytest.mark.parametrize("where", ["config.json", "old config.json", "config_sentence_transformers.json"])
def test_scores_go_through_the_activation_that_the_files_name(where: str, tmp_path: Path) -> None:
    path = "torch.nn.modules.linear.Identity"
    by_file: dict[str, dict[str, Any]] = {
        "config.json": {"sentence_transformers": {"activation_fn": path}},
        "old config.json": {"sbert_ce_default_activation_function": path},
        "config_sentence_transformers.json": {},
    }
    settings = by_file[where]
    reference = tiny_encoder("bert", head="sequence", num_labels=1, **settings)
    files = {} if settings else {"config_sentence_transformers": {"model_type": "CrossEncoder", "activation_fn": path}}
    model = load(save_encoder(reference, tmp_path, **files))
    assert_equal(compute(model, prompts()), [own_logits(reference, token_ids) for token_ids in prompts()])


def test_an_activation_from_elsewhere_is_refused(tmp_path: Path) -> None:
    reference = tiny_encoder("bert", head="sequence", num_labels=1, sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(ConfigurationError, match=r"'os\.system' is not one of torch\.nn's"):
        load(save_encoder(reference, tmp_path))


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_both_texts_of_a_pair_are_told_apart(name: str, tmp_path: Path) -> None:
    reference = tiny_encoder(name, head="sequence", num_labels=1)
    model = load(save_encoder(reference, tmp_path))
    pairs = [(token_ids, [int(2 * place >= len(token_ids)) for place in range(len(token_ids))]) for token_ids in prompts()]
    found = model.compute([model.check(EncoderInput(token_ids, types), PoolingParams()) for token_ids, types in pairs])
    options = [{"token_type_ids": torch.tensor([types])} if name == "bert" else {} for _, types in pairs]
    assert_equal(found, [own_logits(reference, ids, **option).sigmoid() for (ids, _), option in zip(pairs, options, strict=True)])


MODES = {
    "cls": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
    "max": lambda states: states.amax(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / sum(range(1, len(states) + 1)),
}
OLD_KEYS = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_pooled_as_the_files_say(mode: str, tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    files = {"modules": modules("Pooling"), "_1_Pooling": {"embedding_dimension": 32, "pooling_mode": mode}}
    model = load(save_encoder(reference, tmp_path, **files))
    assert_equal(compute(model, prompts()), [MODES[mode](own_states(reference, token_ids)) for token_ids in prompts()])


@pytest.mark.parametrize("mode", OLD_KEYS)
def test_older_files_name_each_kind_of_pooling(mode: str, tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    config = {"word_embedding_dimension": 32} | {f"pooling_mode_{key}": name == mode for name, key in OLD_KEYS.items()}
    model = load(save_encoder(reference, tmp_path, modules=modules("Pooling"), _1_Pooling=config))
    assert model.files.pooling_modes == (mode,)


def test_several_kinds_of_pooling_are_joined(tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    files = {"modules": modules("Pooling", "Normalize"), "_1_Pooling": {"pooling_mode": ["cls", "max"]}}
    model = load(save_encoder(reference, tmp_path, **files))
    assert model.dimensions == 64
    joined = [torch.cat([states[0], states.amax(0)]) for states in (own_states(reference, token_ids) for token_ids in prompts())]
    assert_equal(compute(model, prompts()), [vector / vector.norm() for vector in joined])
    assert_equal(compute(model, prompts(), normalize=False), joined)


def test_tokens_of_an_instruction_are_left_out_where_the_files_say_so(tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    files = {"modules": modules("Pooling"), "_1_Pooling": {"pooling_mode": "weightedmean", "include_prompt": False}}
    model = load(save_encoder(reference, tmp_path, **files))
    token_ids = prompts()[1]
    weights = torch.arange(4.0, len(token_ids) + 1)[:, None]
    expected = (own_states(reference, token_ids)[3:] * weights).sum(0) / weights.sum()
    assert_equal(compute(model, [token_ids], num_instruction_tokens=3), [expected])


def save_dense(directory: Path) -> Tensor:
    """Weights of 12 outputs, [12, 32]; the biases are 1."""
    weight = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    directory.mkdir(parents=True)
    save_file({"linear.weight": weight, "linear.bias": torch.ones(12)}, directory / "model.safetensors")
    return weight


def test_a_dense_stage_and_what_comes_after_it(tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    weight = save_dense(tmp_path / "_2_Dense")
    dense = {"in_features": 32, "out_features": 12, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    files = {"modules": modules("Pooling", "Dense", "Normalize"), "_1_Pooling": {"pooling_mode": "cls"}, "_2_Dense": dense}
    model = load(save_encoder(reference, tmp_path, **files))
    assert model.dimensions == 12
    vectors = [torch.tanh(weight @ own_states(reference, token_ids)[0] + 1) for token_ids in prompts()]
    assert_equal(compute(model, prompts()), [vector / vector.norm() for vector in vectors])


def test_a_stage_that_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a WeightedLayerPooling stage"):
        load(save_encoder(tiny_encoder("bert"), tmp_path, modules=modules("WeightedLayerPooling", "Pooling")))


def test_the_length_is_what_the_files_say_and_the_operator_can_change_it(tmp_path: Path) -> None:
    save_encoder(tiny_encoder("roberta"), tmp_path, modules=modules("Pooling"))
    assert load(tmp_path).max_model_len == MAX_LEN
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert load(tmp_path).max_model_len == 32
    assert load(tmp_path, max_model_len=64).max_model_len == 64
    with pytest.raises(ConfigurationError, match=f"not between 1 and this model's {MAX_LEN} tokens"):
        load(tmp_path, max_model_len=MAX_LEN + 1)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    reference = tiny_encoder("bert")
    model = load(save_encoder(reference, tmp_path), dtype="bfloat16")
    for ours, token_ids in zip(compute(model, prompts()), prompts(), strict=True):
        own = own_states(reference, token_ids).mean(0)
        assert torch.cosine_similarity(ours, own, dim=0) > 0.99


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("t5", "T5Model", "it is an encoder-decoder"),
        ("clip", "CLIPModel", r"it is a multimodal model \(its config holds text_config, vision_config\)"),
        ("esm", "EsmModel", r"it is a model of several parts \(its config holds esmfold_config\)"),
    ],
)
def test_what_is_no_encoder_is_refused_by_name(model_type: str, architecture: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    with pytest.raises(ConfigurationError, match=f"{architecture} cannot be served: {reason}"):
        load(tmp_path)


REFUSALS: list[tuple[list[int], PoolingTask | None, dict[str, Any], str]] = [
    ([], None, {}, "is empty"),
    ([5] * (MAX_LEN + 1), None, {}, f"has {MAX_LEN + 1} tokens"),
    ([VOCAB_SIZE], None, {}, "not below"),
    ([5], "classify", {}, "does not classify; it can embed, token_embed"),
    ([5], "embed", {"dimensions": 8}, "not trained to be cut short; --matryoshka"),
    ([5], "embed", {"dimensions": 33}, "between 1 and 32"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return load(save_encoder(tiny_encoder("bert"), tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(("token_ids", "task", "params", "message"), REFUSALS)
def test_what_the_model_cannot_do_is_refused(
    token_ids: list[int], task: PoolingTask | None, params: dict[str, Any], message: str, plain: PoolingModel
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plain.check(EncoderInput(token_ids), PoolingParams(task=task, **params))


@pytest.mark.parametrize("where", ["config.json", "config_sentence_transformers.json", "the operator's word"])
def test_a_matryoshka_model_cuts_embeddings_and_brings_them_to_length_1_again(where: str, tmp_path: Path) -> None:
    reference = tiny_encoder("bert", is_matryoshka=where == "config.json")
    files: dict[str, Any] = {"modules": modules("Pooling", "Normalize"), "_1_Pooling": {"pooling_mode": "mean"}}
    if where == "config_sentence_transformers.json":
        files["config_sentence_transformers"] = {"truncate_dim": 16}
    model = load(save_encoder(reference, tmp_path, **files), matryoshka=where == "the operator's word")
    assert model.dimensions == (16 if "config_sentence_transformers" in files else 32)
    cut = [own_states(reference, token_ids).mean(0)[:8] for token_ids in prompts()]
    assert_equal(compute(model, prompts(), dimensions=8), [vector / vector.norm() for vector in cut])


def test_one_batch_serves_several_tasks(plain: PoolingModel) -> None:
    tasks: list[PoolingTask] = ["embed", "token_embed", "embed"]
    inputs = [plain.check(EncoderInput(ids), PoolingParams(task=task)) for ids, task in zip(prompts(), tasks, strict=False)]
    together = plain.compute(inputs)
    assert_equal(together, [plain.compute([each])[0] for each in inputs])
    assert [answer.dim() for answer in together] == [1, 2, 1]


def test_texts_of_one_batch_are_finished_each_as_it_was_asked(plain: PoolingModel) -> None:
    params = [PoolingParams(normalize=True), PoolingParams(normalize=False), PoolingParams(normalize=True)]
    inputs = [plain.check(EncoderInput(ids), own) for ids, own in zip(prompts(), params, strict=False)]
    together = plain.compute(inputs)
    assert_equal(together, [plain.compute([each])[0] for each in inputs])
    assert [bool(torch.isclose(answer.norm(), torch.tensor(1.0))) for answer in together] == [True, False, True]


def test_answers_are_tensors_of_the_callers_own(plain: PoolingModel) -> None:
    first, second = compute(plain, prompts()[:2], task="token_embed")
    before = second.clone()
    first.zero_()
    assert torch.equal(second, before)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert not first.is_inference()
