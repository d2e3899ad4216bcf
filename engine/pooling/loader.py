"""A model directory turned into a `PoolingModel` on its device, with an engine around it."""

import functools
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from penstock.engine.config import Dtype, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import check_kind, max_model_len, read_config, refusal
from penstock.engine.model.loader import DTYPES, load_pretrained, resolve_device, settle_memory
from penstock.engine.multimodal.vision import is_multimodal
from penstock.engine.native.runtime import choose_kernels, loading_threads, num_model_threads
from penstock.engine.parallel.group import ALONE, Group
from penstock.engine.parallel.sharding import Sharding, check_alike, sharding_of
from penstock.engine.pooling.encoder import (
    EncoderInput,
    FlatForward,
    Forward,
    PaddedForward,
    build_encoder_batch,
    choose_forward,
    is_close,
    probe_inputs,
)
from penstock.engine.pooling.engine import PoolingEngine, PoolingQueue
from penstock.engine.pooling.files import PoolingMode, SentenceFiles, is_sequence_classifier, is_token_classifier, read_sentence_files
from penstock.engine.pooling.model import (
    Classifier,
    Head,
    PoolingModel,
    PoolingParams,
    PoolingTask,
    Stage,
    load_stage,
    make_activation,
    normalize,
    pooled,
)
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.weights.checkpoints import weight_files
from penstock.engine.weights.linear import pack_linears

logger = logging.getLogger(__name__)

_HEAD_READS: tuple[PoolingMode, ...] = ("cls", "lasttoken", "mean")


def load_pooling_model(directory: Path, config: EngineConfig, group: Group = ALONE) -> PoolingModel:
    """Loads an embedding model, a classifier or a cross-encoder, or this rank's part of it. All ranks of a group have to call it.

    Raises `ConfigurationError` naming what cannot be served.
    """
    files = read_sentence_files(directory)
    model_config = read_config(directory, config.trust_remote_code)
    _check_config(model_config)
    if config.quantization not in ("auto", "none"):
        raise ConfigurationError(f"--quantization {config.quantization} is for models that generate; this one takes auto or none")
    device = resolve_device(config.device)
    dtype = resolve_pooling_dtype(config.dtype, device, model_config.dtype)
    check_alike(group, weight_files(directory), (directory / "config.json").read_bytes(), dtype, config.max_model_len)
    model, sharding = _load(directory, model_config, dtype, device, config.trust_remote_code, group)
    torch.nn.Module.to(model, device)
    model = model.train(False).requires_grad_(False)
    if device.type == "cpu" and sharding.num_parts > 1:
        pack_linears(model.base_model)
    sharding.install(model)
    is_classifier = is_sequence_classifier(model_config.architectures) or is_token_classifier(model_config.architectures)
    encoder, forward, classifier = _take_apart(model, model_config, files) if is_classifier else (model, choose_forward(model), None)
    stages, normalizes = _stages(files, device)
    tasks = _tasks(model_config, classifier)
    return PoolingModel(
        directory=directory,
        encoder=encoder,
        forward=forward,
        files=files,
        stages=stages,
        normalizes=normalizes,
        classifier=classifier,
        tasks=frozenset(tasks),
        default_task=tasks[0],
        max_model_len=_max_len(model_config, files, forward, config.max_model_len),
        vocab_size=int(model_config.get_text_config().vocab_size),
        num_token_types=int(getattr(model_config, "type_vocab_size", 0) or 0),
        dimensions=None if classifier is not None else _dimensions(forward, encoder, files, stages),
        is_matryoshka=config.matryoshka or files.truncate_dim is not None or _is_matryoshka(model_config),
        id2label={} if classifier is None else {int(number): str(label) for number, label in (model_config.id2label or {}).items()},
        device=device,
        dtype=dtype,
        group=group,
    )


def resolve_pooling_dtype(dtype: Dtype, device: torch.device, stored: object) -> torch.dtype:
    """`auto` is the stored type on a GPU and float32 on a CPU: an embedding is compared by digits that bfloat16 does not have."""
    if dtype != "auto":
        return DTYPES[dtype]
    return stored if device.type == "cuda" and isinstance(stored, torch.dtype) else torch.float32


def _check_config(config: PretrainedConfig) -> None:
    check_kind(config)
    if config.sub_configs:
        parts, kind = ", ".join(sorted(config.sub_configs)), "a multimodal model" if is_multimodal(config) else "a model of several parts"
        raise refusal(config, f"it is {kind} (its config holds {parts}), and only text is served")
    if getattr(config, "quantization_config", None) is not None:
        raise refusal(config, "its weights are quantized (quantization_config), which embedding models' cannot be")


def _load(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, group: Group
) -> tuple[PreTrainedModel, Sharding]:
    factory: Any = AutoModel
    if is_sequence_classifier(config.architectures):
        factory = AutoModelForSequenceClassification
    elif is_token_classifier(config.architectures):
        factory = AutoModelForTokenClassification
    sharding = sharding_of(config, group, trust_remote_code=trust_remote_code, factory=factory)
    model = load_pretrained(
        factory,
        directory,
        config,
        dtype,
        device,
        trust_remote_code=trust_remote_code,
        is_needed=lambda name: factory is not AutoModel or not name.startswith("pooler."),  # which is not used without a head over it
        **sharding.options(is_tied=False),
    )
    sharding.localize(model)
    return model, sharding


def _take_apart(model: PreTrainedModel, config: PretrainedConfig, files: SentenceFiles) -> tuple[PreTrainedModel, Forward, Classifier]:
    """Encoder and head of a classifier, and which tokens the head reads. Raises `ConfigurationError` where it reads others."""
    inputs = probe_inputs(model)
    own = [_own_logits(model, text.token_ids) for text in inputs]
    encoder, head = Head.detach(model)
    forward = choose_forward(encoder)
    activation, score_activation = _activations(config, files)
    if own[0].dim() == 2:
        return encoder, forward, Classifier(head, None, activation, score_activation)
    with torch.inference_mode():
        batch = build_encoder_batch(inputs, model.device)
        states_TD = forward(batch)
        for reads in _HEAD_READS:
            logits_BL = head(pooled(states_TD, batch, list(range(len(inputs))), (reads,), [0] * len(inputs))[:, None].to(model.dtype))
            if all(is_close(logits_BL[place].to(model.dtype), own[index]) for place, index in enumerate(batch.order)):
                return encoder, forward, Classifier(head, reads, activation, score_activation)
    raise ConfigurationError(f"{type(model).__name__} cannot be served: its head reads neither one token of a text nor their mean")


def _own_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=torch.tensor([token_ids], device=model.device)).logits[0]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ConfigurationError(f"{type(model).__name__} cannot be served: it takes no plain text ({error})") from error
    return logits


def _activations(config: PretrainedConfig, files: SentenceFiles) -> tuple[Stage, Stage]:
    """Of class probabilities, by the problem that the config names, and of a cross-encoder's scores."""
    softmax: Stage = functools.partial(torch.softmax, dim=-1)
    is_token_level = is_token_classifier(config.architectures)
    match config.problem_type:
        case "regression":
            activation: Stage = torch.nn.Identity()
        case "multi_label_classification":
            activation = torch.sigmoid
        case "single_label_classification":
            activation = softmax
        case _:
            activation = torch.sigmoid if config.num_labels == 1 and not is_token_level else softmax
    own = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    path = files.activation or own or getattr(config, "sbert_ce_default_activation_function", None)
    if path is None:
        return activation, torch.sigmoid
    named = make_activation(str(path))
    return (named if config.num_labels == 1 else activation), named


def _tasks(config: PretrainedConfig, classifier: Classifier | None) -> list[PoolingTask]:
    """The model's tasks, the default one first."""
    if classifier is None:
        return ["embed", "token_embed"]
    if classifier.reads is None:
        return ["token_classify"]
    return ["score", "classify"] if config.num_labels == 1 else ["classify"]


def _stages(files: SentenceFiles, device: torch.device) -> tuple[tuple[Stage, ...], bool]:
    """The stages after the pooling, and whether normalization comes last, which each request may turn off."""
    stages = [load_stage(stage, device) for stage in files.stages]
    normalizes = bool(stages) and stages[-1] is normalize
    return tuple(stages[:-1] if normalizes else stages), normalizes


def _dimensions(forward: Forward, encoder: PreTrainedModel, files: SentenceFiles, stages: tuple[Stage, ...]) -> int:
    """The width of an embedding, found by computing some."""
    with torch.inference_mode():
        batch = build_encoder_batch(probe_inputs(encoder), encoder.device)
        count = len(batch.order)
        vectors_BD = pooled(forward(batch), batch, list(range(count)), files.pooling_modes, [0] * count)
        for stage in stages:
            vectors_BD = stage(vectors_BD)
    return min(vectors_BD.shape[1], files.truncate_dim or vectors_BD.shape[1])


def _is_matryoshka(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "is_matryoshka", False) or getattr(config, "matryoshka_dimensions", None))


def _max_len(config: PretrainedConfig, files: SentenceFiles, forward: Forward, asked: int | None) -> int:
    """The length that was configured, up to the model's positions, else sentence-transformers' or the model's own."""
    match forward:
        case FlatForward(position_offset=offset):
            num_unused = offset
        case PaddedForward(model=model):
            num_unused = FlatForward.of(model).position_offset
        case _:
            num_unused = 0
    limit = max_model_len(config.get_text_config(), None) - num_unused
    if asked is not None and not 1 <= asked <= limit:
        raise ConfigurationError(f"--max-model-len {asked} is not between 1 and this model's {limit} tokens")
    return asked or min(limit, files.max_seq_length or limit)


MAX_NUM_BATCHED_TOKENS_CPU = 1024  # larger matrices are no faster, and a batch is what a short text waits behind
MAX_NUM_BATCHED_TOKENS_CUDA = 16384


def try_largest_batch(model: PoolingModel, num_tokens: int) -> None:
    """Runs a batch of so many tokens for each task, so that no request waits for libraries to be set up, or is the first not to fit.

    Raises `ConfigurationError` where a batch does not fit in the GPU's memory.
    """
    started = time.monotonic()
    longest = min(num_tokens, model.max_model_len)
    text = EncoderInput([0] * longest)
    try:
        for task in sorted(model.tasks):
            model.compute([model.check(text, PoolingParams(task=task))] * (num_tokens // longest))
            logger.info("A batch of %d tokens has run (%s), after %.0f s", num_tokens, task, time.monotonic() - started)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"batches of {num_tokens} tokens do not fit in the GPU's memory beside the weights: lower --max-num-batched-tokens"
        ) from error


def load_ready(directory: Path, config: EngineConfig, group: Group = ALONE) -> PoolingModel:
    """As `load_pooling_model`, with layers in the form in which they are quick."""
    choose_kernels(config.native_kernels)
    with loading_threads(config):
        model = load_pooling_model(directory, config, group)
        if model.device.type == "cpu":
            pack_linears(model.encoder)
            for module in model.modules:
                settle_memory(module)
    return model


def build_pooling_engine(directory: Path, tokenizer: Tokenizer, config: EngineConfig, group: Group = ALONE) -> PoolingEngine:
    """Loads the model and puts an engine around it. Raises `ConfigurationError` for what cannot be served."""
    model = load_ready(directory, config, group)
    default = MAX_NUM_BATCHED_TOKENS_CUDA if model.device.type == "cuda" else MAX_NUM_BATCHED_TOKENS_CPU
    num_tokens = config.max_num_batched_tokens or default
    if model.device.type == "cuda":
        try_largest_batch(model, num_tokens)
    queue = PoolingQueue(
        num_tokens,
        config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        aging_seconds=config.priority_aging,
    )
    return PoolingEngine(model, tokenizer, queue, num_threads=num_model_threads(config), pin_threads=config.pin_threads)
