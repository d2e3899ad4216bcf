"""Pooling models: from texts to embeddings, vectors of their tokens, class probabilities or relevance scores."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.parallel.group import ALONE, Group, Order
from penstock.engine.pooling.encoder import EncoderBatch, EncoderInput, Forward, batch_message, batch_of, build_encoder_batch
from penstock.engine.pooling.files import PoolingMode, SentenceFiles, StageFiles

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`task` None is the model's own first one. `dimensions` cuts embeddings to their first so many numbers, `normalize` to length 1.

    `normalize` None is as the model's files say. `num_instruction_tokens` are the tokens at the start that are an instruction rather than
    the text; models whose files say `include_prompt: false` leave them out of the pooled vector.

    Raises `InvalidRequest` with `param` set to the field's name. What a model makes of them is for `PoolingModel.check`.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    num_instruction_tokens: int = 0

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise InvalidRequest(f"`{name}` must be {rule}, got {getattr(self, name)!r:.100}", name)

        require(self.task is None or self.task in get_args(PoolingTask), "task", f"one of {', '.join(get_args(PoolingTask))}")
        is_integer = isinstance(self.dimensions, Integral) and not isinstance(self.dimensions, bool)
        require(self.dimensions is None or is_integer, "dimensions", "an integer")
        require(isinstance(self.normalize, bool | None), "normalize", "True or False")


class _GivenStates(nn.Module):
    """Takes the encoder's place in a classifier, and returns token vectors that have been computed already."""

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(encoder, "pooler", None)
        self.pooler_activation: nn.Module | None = getattr(encoder, "pooler_activation", None)  # Albert's own is outside of its pooler
        self.states_BLD = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states_BLD, pooler_output=self._pooled())

    def _pooled(self) -> Tensor | None:
        if self.pooler is None:
            return None
        pooled: Tensor
        if self.pooler_activation is not None:
            pooled = self.pooler_activation(self.pooler(self.states_BLD[:, 0]))
        else:
            pooled = self.pooler(self.states_BLD)
        return pooled


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier without its encoder."""

    classifier: PreTrainedModel
    given: _GivenStates

    @classmethod
    def detach(cls, classifier: PreTrainedModel) -> "tuple[PreTrainedModel, Head]":
        """Takes a classifier apart into its encoder and its head. The classifier itself is changed."""
        encoder: Any = classifier.base_model
        given = _GivenStates(encoder)
        setattr(classifier, classifier.base_model_prefix, given)
        return encoder, cls(classifier, given)

    def __call__(self, states_BLD: Tensor) -> Tensor:
        """Logits, float32: of B texts where the class has one output for each, [B, labels], else of every token, [B, L, labels]."""
        if states_BLD.shape[0] > 1 and self.classifier.config.get_text_config().pad_token_id is None:
            return torch.cat([self(states_BLD[row : row + 1]) for row in range(len(states_BLD))])  # some classes refuse more then
        self.given.states_BLD = states_BLD
        shape, device = states_BLD.shape[:2], states_BLD.device
        options: dict[str, Any] = {}
        if "attention_mask" in inspect.signature(self.classifier.forward).parameters:
            options["attention_mask"] = torch.ones(shape, dtype=torch.long, device=device)
        try:
            output = self.classifier(input_ids=torch.ones(shape, dtype=torch.long, device=device), **options)
        finally:
            self.given.states_BLD = torch.empty(0)
        logits: Tensor = output.logits
        return logits.float()


Stage = Callable[[Tensor], Tensor]


def pool_rows(states_NLD: Tensor, modes: Sequence[PoolingMode], num_left_out: int = 0) -> Tensor:
    """One vector, float32, for each of N texts of equal length, [N, modes * D]. Their first `num_left_out` tokens do not count."""
    length = states_NLD.shape[1]
    first = num_left_out if num_left_out < length else 0
    states_NLD = states_NLD[:, first:]
    return torch.cat([_pool(states_NLD, mode, first) for mode in modes], dim=-1)


def _pool(states_NLD: Tensor, mode: PoolingMode, first: int) -> Tensor:
    """`first` is the place of the first token in its text."""
    count = states_NLD.shape[1]
    match mode:
        case "cls":
            return states_NLD[:, 0].float()
        case "lasttoken":
            return states_NLD[:, -1].float()
        case "max":
            return states_NLD.amax(1).float()
        case "mean":
            return states_NLD.mean(1, dtype=torch.float32)
        case "mean_sqrt_len_tokens":
            return states_NLD.sum(1, dtype=torch.float32) / math.sqrt(count)
        case "weightedmean":
            weights_L = torch.arange(first + 1, first + count + 1, dtype=torch.float32, device=states_NLD.device)
            return (states_NLD * (weights_L / weights_L.sum())[:, None]).sum(1)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation."""

    weight_OI: Tensor
    bias_O: Tensor | None
    activation: Stage
    has_residual: bool

    def __call__(self, vectors_BI: Tensor) -> Tensor:
        out = self.activation(nn.functional.linear(vectors_BI, self.weight_OI, self.bias_O))
        return out + vectors_BI if self.has_residual else out


def normalize(vectors_BD: Tensor) -> Tensor:
    return nn.functional.normalize(vectors_BD, dim=-1)


def load_stage(files: StageFiles, device: torch.device) -> Stage:
    """The stage that its files describe, in float32. Raises `ConfigurationError` where they cannot be read."""
    match files.kind:
        case "Normalize":
            return normalize
        case "LayerNorm":
            weights = _load_weights(files, device)
            weight, bias = weights["norm.weight"], weights["norm.bias"]
            return functools.partial(nn.functional.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias)
        case _:
            weights, config = _load_weights(files, device), files.config
            inputs, outputs = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
            if inputs != "sentence_embedding" or outputs not in (None, "sentence_embedding"):
                raise ConfigurationError(f"{files.directory}: a Dense stage over {inputs} is not supported, only over sentence_embedding")
            activation = make_activation(str(config.get("activation_function", "torch.nn.modules.activation.Tanh")))
            return Dense(weights["linear.weight"], weights.get("linear.bias"), activation, bool(config.get("use_residual", False)))


def make_activation(path: str) -> Stage:
    """A class of `torch.nn` by its import path. Raises `ConfigurationError` for anything else: a model's files run no code here."""
    name = path.rpartition(".")[2]
    found = getattr(nn, name, None)
    if not path.startswith("torch.nn.") or not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigurationError(f"the activation {path!r} is not one of torch.nn's")
    activation: Stage = found()
    return activation


def _load_weights(files: StageFiles, device: torch.device) -> dict[str, Tensor]:
    path = files.directory / "model.safetensors"
    if not path.is_file():
        raise ConfigurationError(f"{files.directory} lacks model.safetensors; weights in other formats are not read")
    try:
        return {name: weight.to(device, torch.float32) for name, weight in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text, or pair of texts, and what is asked of it. `params` have been checked and name a task."""

    tokens: EncoderInput
    params: PoolingParams


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head of a classifier, and the tokens that it reads: None for all. `activation` turns logits into what is answered."""

    head: Head
    reads: PoolingMode | None
    activation: Stage
    score_activation: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """A model ready to run, in eval mode and without gradients, and what a caller needs to know of it.

    `tasks` holds `default_task` and what else may be asked. `dimensions` is the width of an embedding, None of a classifier, which has
    `num_labels` and their names instead. `max_model_len` counts tokens, special ones included. All ranks of the `group` compute the vectors
    of the tokens, and rank 0 makes answers of them.
    """

    directory: Path
    encoder: PreTrainedModel
    forward: Forward
    files: SentenceFiles
    stages: tuple[Stage, ...]
    normalizes: bool
    classifier: Classifier | None
    tasks: frozenset[PoolingTask]
    default_task: PoolingTask
    max_model_len: int
    vocab_size: int
    num_token_types: int
    dimensions: int | None
    is_matryoshka: bool
    id2label: dict[int, str]
    device: torch.device
    dtype: torch.dtype
    group: Group = ALONE

    @property
    def num_labels(self) -> int | None:
        return None if self.classifier is None else len(self.id2label)

    @property
    def modules(self) -> list[nn.Module]:
        """All that has weights of the model's main file."""
        return [self.encoder] if self.classifier is None else [self.encoder, self.classifier.head.classifier]

    @property
    def is_cross_encoder(self) -> bool:
        return "score" in self.tasks

    def compute(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        """The answers, float32 on the CPU, in the order of the inputs. They do not depend on what else is in the batch."""
        with torch.inference_mode():
            answers = self._compute(inputs)
        # Each of its own: neither keeps the whole batch in memory, nor is a tensor that only inference may change.
        return [answer.clone() for answer in answers]

    def _compute(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        batch = build_encoder_batch([text.tokens for text in inputs], self.device)
        if self.group.size > 1:
            self.group.send(Order.POOL, batch_message(batch))
        with self.group.together():
            states_TD = self.forward(batch)
        answers: list[Tensor] = [torch.empty(0)] * len(inputs)
        for tasks, answer in self._answering():
            places = [place for place, index in enumerate(batch.order) if inputs[index].params.task in tasks]
            if places:
                params = [inputs[batch.order[place]].params for place in places]
                for place, value in zip(places, answer(states_TD, batch, places, params), strict=True):
                    answers[batch.order[place]] = value
        return answers

    def follow(self, message: Tensor) -> None:
        """On another rank than 0, whose `compute` sends the message: its part of the batch. Only rank 0 makes answers of it."""
        with torch.inference_mode(), self.group.together():
            self.forward(batch_of(message, self.device))

    def _answering(self) -> "Sequence[tuple[tuple[PoolingTask, ...], Answering]]":
        return (
            (("embed",), self._embed),
            (("token_embed",), self._embed_tokens),
            (("classify", "score"), self._classify),
            (("token_classify",), self._classify_tokens),
        )

    def _embed(self, states_TD: Tensor, batch: EncoderBatch, places: list[int], params: list[PoolingParams]) -> list[Tensor]:
        num_left_out = [0 if self.files.include_prompt else each.num_instruction_tokens for each in params]
        vectors_BD = pooled(states_TD, batch, places, self.files.pooling_modes, num_left_out)
        for stage in self.stages:
            vectors_BD = stage(vectors_BD)
        if len({(each.dimensions, each.normalize) for each in params}) == 1:
            return list(self._finished(vectors_BD, params[0]).cpu())
        return [self._finished(vector_D, each).cpu() for vector_D, each in zip(vectors_BD, params, strict=True)]

    def _embed_tokens(self, states_TD: Tensor, batch: EncoderBatch, places: list[int], params: list[PoolingParams]) -> list[Tensor]:
        parts = torch.split(states_TD, batch.lengths)
        return [self._finished(parts[place].float(), each).cpu() for place, each in zip(places, params, strict=True)]

    def _finished(self, vectors_XD: Tensor, params: PoolingParams) -> Tensor:
        """Truncates vectors to the dimensions asked for, then normalizes them."""
        width = params.dimensions or self.files.truncate_dim
        if width is not None:
            vectors_XD = vectors_XD[..., :width]
        is_normalized = self.normalizes if params.normalize is None else params.normalize
        return normalize(vectors_XD) if is_normalized else vectors_XD

    def _classify(self, states_TD: Tensor, batch: EncoderBatch, places: list[int], params: list[PoolingParams]) -> list[Tensor]:
        assert self.classifier is not None
        assert self.classifier.reads is not None
        vectors_BD = pooled(states_TD, batch, places, (self.classifier.reads,), [0] * len(places))
        logits_BL = self.classifier.head(vectors_BD[:, None].to(self.dtype))
        probabilities, scores = self.classifier.activation(logits_BL).cpu(), self.classifier.score_activation(logits_BL).cpu()
        return [(scores if each.task == "score" else probabilities)[row] for row, each in enumerate(params)]

    def _classify_tokens(self, states_TD: Tensor, batch: EncoderBatch, places: list[int], params: list[PoolingParams]) -> list[Tensor]:
        assert self.classifier is not None
        parts = torch.split(self.classifier.activation(self.classifier.head(states_TD[None])[0]), batch.lengths)
        return [parts[place].cpu() for place in places]

    def check(self, tokens: EncoderInput, params: PoolingParams) -> PoolingInput:
        """The input with its task filled in. Raises `InvalidRequest` for what this model cannot do with it."""
        task = params.task or self.default_task
        if task not in self.tasks:
            raise InvalidRequest(f"this model does not {task}; it can {', '.join(sorted(self.tasks))}", "task")
        num_tokens = len(tokens.token_ids)
        if not 1 <= num_tokens <= self.max_model_len:
            size = f"has {num_tokens} tokens, and this model takes at most {self.max_model_len}" if num_tokens else "is empty"
            raise InvalidRequest(f"the input {size}", "input")
        if not 0 <= min(tokens.token_ids) <= max(tokens.token_ids) < self.vocab_size:
            raise InvalidRequest(f"the input holds a token id that is not below {self.vocab_size}", "input")
        if tokens.token_type_ids is not None:
            self._check_types(tokens)
        if params.dimensions is not None:
            self._check_dimensions(task, params.dimensions)
        return PoolingInput(tokens, dataclasses.replace(params, task=task))

    def _check_types(self, tokens: EncoderInput) -> None:
        types = tokens.token_type_ids or []
        if len(types) != len(tokens.token_ids) or not set(types) <= set(range(max(2, self.num_token_types))):
            raise InvalidRequest("there must be one token type id, 0 or 1, for each token", "token_type_ids")

    def _check_dimensions(self, task: PoolingTask, dimensions: int) -> None:
        if self.dimensions is None or task not in ("embed", "token_embed"):
            raise InvalidRequest("dimensions go with embeddings only", "dimensions")
        if not 1 <= dimensions <= self.dimensions:
            raise InvalidRequest(f"dimensions must be between 1 and {self.dimensions}, got {dimensions}", "dimensions")
        if dimensions != self.dimensions and not self.is_matryoshka:
            raise InvalidRequest(
                f"by its files this model's embeddings, of {self.dimensions} dimensions, were not trained to be cut short;"
                " --matryoshka says that they were",
                "dimensions",
            )


Answering = Callable[[Tensor, EncoderBatch, list[int], list[PoolingParams]], list[Tensor]]


def pooled(states_TD: Tensor, batch: EncoderBatch, places: list[int], modes: Sequence[PoolingMode], num_left_out: list[int]) -> Tensor:
    """One vector for each text at `places` of the batch, [len(places), D]."""
    if len(places) == len(batch.order) and not any(num_left_out):
        return torch.cat([pool_rows(group.rows(states_TD), modes) for group in batch.groups])
    parts = torch.split(states_TD, batch.lengths)
    return torch.cat([pool_rows(parts[place][None], modes, count) for place, count in zip(places, num_left_out, strict=True)])
