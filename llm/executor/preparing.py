"""From an executor's request to the engine's: fields that cannot be honoured are refused by name."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from math import isfinite
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from penstock.engine.adapters.checkpoint import AdapterReader
from penstock.engine.adapters.registry import Adapter
from penstock.engine.contracts.logits_processor import ChosenProcessor, LogitsProcessor, LogitsRow, choose, chosen_processors, per_row
from penstock.engine.core import EngineCore
from penstock.engine.errors import InvalidRequest
from penstock.engine.kv_cache.transfer import TransferRefused
from penstock.engine.multimodal.inputs import ProcessedPrompt
from penstock.engine.multimodal.vectors import check_vectors, embeds_at
from penstock.engine.request import AnswerFactory
from penstock.engine.request import Request as EngineRequest
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.speculation.proposers import Prediction
from penstock.llm.executor.requests import (
    DEFAULT_PRIORITY,
    ContextPhaseParams,
    LoraConfig,
    PromptTuningConfig,
    Request,
    RequestType,
    SamplingConfig,
    check_type,
    row_processor,
)
from penstock.llm.executor.responses import FoldSettings
from penstock.serving.context import JobQueue, LocalContext, ServerContext, queue_for

OF_REQUESTS = {
    "position_ids": "positions are counted from the first token",
    "multimodal_input": "what its hashes are for is found by the vectors themselves: use `multimodal_embedding`",
    "mrope_config": "positions are counted from the first token, and those of images from their sizes",
    "lookahead_config": "the engine drafts for itself: see `speculation` of the Executor",
    "eagle_config": "a draft model is chosen for all requests: see `draft_model` of the Executor",
    "encoder_input_token_ids": "there are no encoders",
    "encoder_input_features": "there are no encoders",
    "encoder_output_length": "there are no encoders",
    "cross_attention_mask": "there are no encoders",
    "skip_cross_attn_blocks": "there are no encoders",
    "language_adapter_uid": "adapters cannot be loaded",
}
OF_DRAFTS = {
    "logits": "a draft token is accepted where the sampled one equals it",
    "acceptance_threshold": "a draft token is accepted where the sampled one equals it",
    "fast_logits": "a draft token is accepted where the sampled one equals it",
}
OF_SAMPLING = {
    "top_p_min": "`top_p` does not decay",
    "top_p_reset_ids": "`top_p` does not decay",
    "top_p_decay": "`top_p` does not decay",
    "beam_search_diversity_rate": "beams are scored by what the model says alone",
    "beam_width_array": "the beam width stays the same from step to step",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p_decay": (1,),
    "beam_search_diversity_rate": (0,),
    "top_k": (0, 1),
    "top_p": (0, 1),
    "min_p": (0,),
}


def check_supported(request: Request) -> None:
    """Raises `InvalidRequest` that names the first field which cannot be honoured. A value that asks for nothing is as good as none.

    Raises `TypeError` for one of the wrong type: configs may have been changed since they were made.
    """
    request.output_config.check()
    request.sampling_config.check()
    check_type(request.prompt_tuning_config, "prompt_tuning_config", PromptTuningConfig, "a PromptTuningConfig")
    check_type(request.multimodal_embedding, "multimodal_embedding", Tensor, "a tensor")
    _check_phase(request)
    if request.output_config.return_encoder_output:
        raise InvalidRequest("`return_encoder_output` is not supported: there are no encoders", "output_config.return_encoder_output")
    _refuse(request, OF_REQUESTS, "")
    if request.external_draft_tokens_config is not None:
        _refuse(request.external_draft_tokens_config, OF_DRAFTS, "external_draft_tokens_config.")
    config = request.sampling_config
    _refuse(config, OF_SAMPLING, "sampling_config.")
    if config.beam_width > 1:
        _refuse(config, dict.fromkeys(("top_k", "top_p", "min_p"), "beams are not drawn"), "sampling_config.")
    if config.beam_width < 1:
        raise InvalidRequest(f"`beam_width` must be at least 1, got {config.beam_width}", "sampling_config.beam_width")
    if not 0 <= request.priority <= 1:
        raise InvalidRequest(f"`priority` must be from 0 to 1, got {request.priority}", "priority")
    if request.end_id is not None and request.end_id < -1:
        raise InvalidRequest(f"`end_id` must be a token id, or -1 for none, got {request.end_id}", "end_id")
    seconds = request.allotted_seconds
    if seconds is not None and not (isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"`allotted_time` must be 0 or more seconds, got {seconds}", "allotted_time")


def _refuse(holder: object, reasons: dict[str, str], path: str) -> None:
    for name, reason in reasons.items():
        value = getattr(holder, name)
        is_neutral = value is None or value is False or (isinstance(value, int | float) and value in NEUTRAL.get(name, ()))
        if not is_neutral:
            raise InvalidRequest(f"`{name}` is not supported: {reason}", f"{path}{name}")


PRIORITY_LEVELS = 2**20
NO_END = -1
MAX_SEQUENCES = 128


def fold_settings(context: LocalContext, request: Request, arrival_time: float, num_steps: Callable[[], int]) -> FoldSettings:
    """What responses are made by. Raises `InvalidRequest` for what is not supported, with the name of the field."""
    check_supported(request)
    scheduler, count = context.engine.core.scheduler, num_sequences(request)
    limit = min(MAX_SEQUENCES, scheduler.max_num_seqs)  # they all run at once
    if count > limit:
        name = "num_return_sequences" if request.sampling_config.beam_width <= 1 else "beam_width"
        raise InvalidRequest(f"`{name}` must be at most {limit}, got {count}", name)
    return FoldSettings(
        num_sequences=count,
        stop_token_ids=_stop_token_ids(context, request),
        stop_sequences=_sequences(request.stop_words, "stop_words", context.vocab_size),
        arrival_time=arrival_time,
        block_size=scheduler.block_size,
        num_steps=num_steps,
    )


def prompt_of(context: LocalContext, request: Request) -> ProcessedPrompt:
    """The prompt with the vectors that its ids beyond the vocabulary stand for. Raises `InvalidRequest`."""
    tuning, embedding = request.prompt_tuning_config, request.multimodal_embedding
    if tuning is None and embedding is None:
        return ProcessedPrompt(list(request.input_token_ids))
    if tuning is not None and embedding is not None:
        raise InvalidRequest("`prompt_tuning_config` and `multimodal_embedding` are for the same ids", "multimodal_embedding")
    vision = context.engine.core.runner.loaded.vision
    if embedding is not None and vision is not None and vision.beyond_vectors:
        reason = f"this model's images have {vision.beyond_vectors}, of which their vectors say nothing: give the images to `LLM`"
        raise InvalidRequest(f"`multimodal_embedding` is not supported: {reason}", "multimodal_embedding")
    runner, name = context.engine.core.runner, "multimodal_embedding" if tuning is None else "prompt_tuning_config.embedding_table"
    table = embedding if tuning is None else tuning.embedding_table
    check_vectors(table, runner.embedder.hidden_size, name)
    assert table is not None
    rows = {place: token_id - runner.loaded.vocab_size for place, token_id in enumerate(request.input_token_ids)}
    rows = {place: row for place, row in rows.items() if row >= 0}
    if tuning is None:
        rows = dict(zip(rows, range(len(rows)), strict=True))
        if len(rows) != len(table):
            raise InvalidRequest(f"`{name}` has {len(table)} vectors for {len(rows)} ids of the prompt", name)
    if rows and max(rows.values()) >= len(table):
        raise InvalidRequest(f"the prompt asks for vector {max(rows.values())}, and `{name}` has {len(table)}", "input_token_ids")
    ids = [0 if place in rows else token_id for place, token_id in enumerate(request.input_token_ids)]
    runs = [[place for _, place in run] for _, run in groupby(enumerate(rows), lambda entry: entry[1] - entry[0])]
    vectors = table.detach().cpu()
    # Each run of them by itself: prompts that begin with the same one share its blocks.
    return ProcessedPrompt(ids, tuple(embeds_at(run, vectors[[rows[place] for place in run]]) for run in runs))


def _check_phase(request: Request) -> None:
    """Raises `InvalidRequest` for a phase that does not fit the rest of the request."""
    check_type(request.context_phase_params, "context_phase_params", ContextPhaseParams, "a ContextPhaseParams")
    params = request.context_phase_params
    if (params is None) is (request.type is RequestType.GENERATION_ONLY):
        raise InvalidRequest("`context_phase_params` go with the type GENERATION_ONLY, and with no other", "context_phase_params")
    if request.type is not RequestType.CONTEXT_AND_GENERATION and request.sampling_config.beam_width > 1:
        raise InvalidRequest(f"`type` {request.type.name} is not supported with beams: their blocks are not handed over", "type")
    if params is None:
        return
    if params.draft_tokens:
        name = "context_phase_params.draft_tokens"
        raise InvalidRequest(f"`{name}` is not supported: the executor that generates drafts for itself", name)
    if params.opaque_state is None:
        raise InvalidRequest("`context_phase_params.opaque_state` is missing", "context_phase_params.opaque_state")
    if len(params.first_gen_tokens) != num_sequences(request):
        name = "context_phase_params.first_gen_tokens"
        raise InvalidRequest(f"`{name}` has {len(params.first_gen_tokens)} tokens for {num_sequences(request)} sequences", name)


def received_prompt(core: EngineCore, request: EngineRequest, params: ContextPhaseParams) -> EngineRequest:
    """The request with the blocks of its prompt that another process has computed. Raises `InvalidRequest`."""
    if not 0 <= min(params.first_gen_tokens) <= max(params.first_gen_tokens) < core.vocab_size:
        name = "context_phase_params.first_gen_tokens"
        raise InvalidRequest(f"`{name}` must be from 0 to {core.vocab_size - 1}", name)
    try:
        received = core.receive(request, params.opaque_state or b"")
    except TransferRefused as refusal:
        raise InvalidRequest(f"`context_phase_params`: {refusal}", "context_phase_params") from None
    return replace(request, received=received, first_token_ids=tuple(params.first_gen_tokens))


async def prepare(context: LocalContext, request: Request, request_id: int, arrival_time: float, turns: asyncio.Semaphore) -> EngineRequest:
    """Raises `InvalidRequest` for what cannot be served, with the name of the field.

    Requests take `turns` at having their grammars compiled: the compiler refuses those that it cannot come to in time, and a batch may
    bring any number.
    """
    params = sampling_params(request)
    params.check_token_ids(context.vocab_size)
    core, phase = context.engine.core, request.context_phase_params
    if request.type is not RequestType.CONTEXT_AND_GENERATION and core.transfer is None:
        raise InvalidRequest(
            "`type` needs an executor with `cache_transceiver_config`, or `kv_transfer_dir`, through which prompts are handed over", "type"
        )
    grammar = None
    if request.guided_decoding_params is not None:
        guide = request.guided_decoding_params
        async with turns:
            queue = queue_for(len(guide.guide or ""))
            spec = await context.workers.run(queue, lambda: guide.spec(context.options.additional_properties))
            grammar = await context.grammar_compiler.compile(spec)
    adapter = None if request.lora_config is None else await task_adapter(context, request.lora_config)
    tables = (None if request.prompt_tuning_config is None else request.prompt_tuning_config.embedding_table, request.multimodal_embedding)
    size = sum(table.numel() for table in tables if table is not None)
    prompt = await context.workers.run(queue_for(size), lambda: prompt_of(context, request))
    prepared = EngineRequest(
        request_id=str(request_id),
        prompt_token_ids=prompt.token_ids,
        embeds=prompt.embeds,
        params=params,
        make_answer=AnswerFactory(context.tokenizer, prompt.text_ids, params),
        grammar=grammar,
        logits_processors=processors(context, request),
        priority=round((DEFAULT_PRIORITY - request.priority) * PRIORITY_LEVELS),
        cache_salt=request.cache_salt,
        adapter=adapter,
        client_id=request.client_id,
        outputs=request.output_config.wanted,
        with_context_outputs=request.output_config.wants_context,
        deadline=None if request.allotted_seconds is None else arrival_time + request.allotted_seconds,
        beam=beam_params(request),
        bad_sequences=_sequences(request.bad_words, "bad_words", context.vocab_size),
        stop_sequences=_sequences(request.stop_words, "stop_words", context.vocab_size),
        retention=None if request.kv_cache_retention_config is None else request.kv_cache_retention_config.retention,
        prediction=external_draft(context, request),
        is_exported=request.type is RequestType.CONTEXT_ONLY,
    )
    if phase is None:
        return prepared
    async with turns:
        return await context.workers.run(JobQueue.LONG, lambda: received_prompt(core, prepared, phase))


# TensorRT-LLM's ids of modules, by the names that models have for them.
LORA_MODULES = {0: "qkv_proj", 1: "q_proj", 2: "k_proj", 3: "v_proj", 4: "o_proj", 5: "gate_proj", 6: "down_proj", 7: "up_proj"}


async def task_adapter(context: LocalContext, config: LoraConfig) -> Adapter:
    """The adapter of a task, which is kept for later requests. Raises `InvalidRequest` for one that is not known, or does not fit."""
    name, registry, adapted = f"task {config.task_id}", context.adapters, context.engine.core.runner.adapted
    if adapted is None:
        raise InvalidRequest("`lora_config` needs an executor with `enable_lora=True`", "lora_config")
    if config.weights is not None and config.config is not None:
        weights, rows, reader = config.weights, config.config, adapted.reader
        adapter = await context.workers.run(queue_for(weights.numel()), lambda: reader.adapter_of(name, unpacked(reader, weights, rows)))
        if registry.get(name) is None and len(registry) >= registry.max_adapters:
            registry.drop_oldest()
        registry.add(adapter, replaces=True)
    found = registry.get(name)
    if found is None:
        raise InvalidRequest(f"`lora_config` names task {config.task_id}, which is not known (any more): bring its weights", "lora_config")
    registry.touch(name)
    return found


def unpacked(reader: AdapterReader, weights: Tensor, rows: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of each layer, by its path. Raises `InvalidRequest`."""

    def refuse(reason: str) -> NoReturn:
        raise InvalidRequest(f"`lora_config`: {reason}", "lora_config")

    weights, rows = (tensor.squeeze(0) if tensor.dim() == 3 else tensor for tensor in (weights, rows))
    if weights.dim() != 2 or rows.dim() != 2 or len(weights) != len(rows) or rows.shape[1] not in (3, 4) or rows.is_floating_point():
        refuse("`weights` are [modules, numbers] and `config` is [modules, 3]")
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for own, (module, layer, rank, *is_dora) in zip(weights, rows.tolist(), strict=True):
        end = rf"(.*\.)?{int(layer)}\.([^.]+\.)*{LORA_MODULES.get(int(module))}"
        path = next((path for path in reader.sizes if re.fullmatch(end, path)), None)
        if path is None or path in found:
            refuse(f"module {module} of layer {layer} is {'not in this model' if path is None else 'there twice'}")
        size = reader.sizes[path]
        num_down, num_up = rank * size.inputs, rank * size.outputs
        if any(is_dora) or rank < 1 or num_down + num_up > len(own):
            refuse("DoRA is not supported" if any(is_dora) else f"module {module} of layer {layer} lacks weights of rank {rank}")
        found[path] = own[:num_down].view(rank, size.inputs), own[num_down : num_down + num_up].view(size.outputs, rank)
    return found


def external_draft(context: ServerContext, request: Request) -> Prediction | None:
    """The draft tokens of the caller's own. Raises `InvalidRequest` where no draft token is ever checked, or for what is no token."""
    name, config = "external_draft_tokens_config", request.external_draft_tokens_config
    if config is None:
        return None
    if cast(LocalContext, context).engine.core.scheduler.speculation is None:
        raise InvalidRequest(f"`{name}` is not supported: there is no speculative decoding with `speculation='none'`", name)
    if request.sampling_config.beam_width > 1:
        raise InvalidRequest(f"`{name}` is not supported: beams have no draft tokens", name)
    if not 0 <= min(config.tokens) <= max(config.tokens) < context.vocab_size:
        raise InvalidRequest(f"`tokens` must be from 0 to {context.vocab_size - 1}", f"{name}.tokens")
    return Prediction(config.tokens)


def num_sequences(request: Request) -> int:
    """How many the engine ends: sequences, or beams that are returned. Raises `InvalidRequest` for a number that cannot be."""
    config = request.sampling_config
    given = {request.num_return_sequences, config.num_return_sequences} - {None}
    if len(given) > 1:
        raise InvalidRequest("`num_return_sequences` differs from the one in the sampling config", "num_return_sequences")
    is_search = config.beam_width > 1
    number = given.pop() if given else config.beam_width if is_search else 1
    assert number is not None
    if number < 1 or (is_search and number > config.beam_width):
        rule = f"from 1 to beam_width ({config.beam_width})" if is_search else "at least 1"
        raise InvalidRequest(f"`num_return_sequences` must be {rule}, got {number}", "num_return_sequences")
    return number


def sampling_params(request: Request) -> SamplingParams:
    config = request.sampling_config
    if request.max_tokens < 1:
        raise InvalidRequest(f"`max_tokens` must be a positive integer, got {request.max_tokens}", "max_tokens")
    max_tokens, min_tokens = request.max_tokens, config.min_tokens
    if request.type is RequestType.CONTEXT_ONLY:
        max_tokens, min_tokens = 1, min_tokens and min(min_tokens, 1)
    return SamplingParams(
        n=num_sequences(request),
        **_choice(config),
        **_given(
            seed=config.seed,
            min_tokens=min_tokens,
            repetition_penalty=config.repetition_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
        ),
        max_tokens=max_tokens,
        ignore_eos=request.end_id is not None,
        stop=tuple(word for word in request.stop_words or () if isinstance(word, str)),
        stop_token_ids=() if request.end_id in (None, NO_END) else (request.end_id,),
        bad_words=tuple(word for word in request.bad_words or () if isinstance(word, str)),
        logprobs=0 if request.output_config.return_log_probs and config.beam_width == 1 else None,
    )


def beam_params(request: Request) -> BeamSearchParams | None:
    """None where nothing is searched for. There as here an answer's score is divided by its length to the power of the penalty."""
    config = request.sampling_config
    if config.beam_width == 1:
        return None
    early_stopping = {None: True, 1: True, 0: False}.get(config.early_stopping, "never")
    penalty = 0.0 if config.length_penalty is None else config.length_penalty
    return BeamSearchParams(config.beam_width, length_penalty=penalty, early_stopping=early_stopping)  # type: ignore[arg-type]


def processors(context: ServerContext, request: Request) -> list[ChosenProcessor]:
    """What the request names or brings, what its n-grams need, and its bias."""
    choices: list[tuple[str, Mapping[str, Any]]] = [(choice.name, choice.arguments) for choice in request.processors]
    size = request.sampling_config.no_repeat_ngram_size
    if size is not None and size <= request.max_tokens:  # more tokens than that do not come even once
        choices.append(("no_repeat_ngram", {"size": size}))
    made = chosen_processors(context.plugins.logits_processors, choices)
    if request.logits_post_processor is not None:
        try:
            made.append(choose(row_processor(request.logits_post_processor, "logits_post_processor"), {}))
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"`logits_post_processor`: {error}", "logits_post_processor") from error
    if request.embedding_bias is not None:
        made.append(choose(_adding(_checked_bias(request.embedding_bias, context.vocab_size)), {}))
    return made


def _choice(config: SamplingConfig) -> dict[str, Any]:
    """How one of the tokens is chosen, in the engine's terms."""
    if config.beam_width > 1:
        return {"temperature": config.temperature or 0.0}
    if not config.is_drawn:
        return {"temperature": 0.0}
    return _given(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _sequences(words: Any, name: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The words that are token ids."""
    sequences = tuple(word for word in words or () if not isinstance(word, str))
    for place, word in enumerate(words or ()):
        if not word:
            raise InvalidRequest(f"`{name}[{place}]` is empty", f"{name}[{place}]")
    for sequence in sequences:
        for token_id in (min(sequence), max(sequence)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"`{name}` holds token id {token_id}, outside the vocabulary of {vocab_size} tokens", name)
    return sequences


def _stop_token_ids(context: ServerContext, request: Request) -> frozenset[int]:
    """The ids that end its sequences, of which a grammar's end is always one of the model's own."""
    if request.end_id is not None and request.end_id >= context.vocab_size:
        raise InvalidRequest(f"`end_id` is {request.end_id}, and the vocabulary has {context.vocab_size} tokens", "end_id")
    own = context.stop_token_ids if request.end_id is None or request.guided_decoding_params is not None else frozenset[int]()
    return own if request.end_id in (None, NO_END) else own | {request.end_id}


def _checked_bias(bias: Tensor, vocab_size: int) -> Tensor:
    if not isinstance(bias, torch.Tensor) or bias.shape != (vocab_size,) or not bias.is_floating_point():
        shape = f"one of shape {tuple(bias.shape)} and {bias.dtype}" if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise InvalidRequest(f"`embedding_bias` must be a tensor of {vocab_size} floats, got {shape}", "embedding_bias")
    if bool(bias.isnan().any()) or bool(bias.isposinf().any()):
        raise InvalidRequest("`embedding_bias` holds what is not a number, or plus infinity", "embedding_bias")
    return bias.detach().float()


def _adding(bias_V: Tensor) -> LogitsProcessor:
    def process(row: LogitsRow, logits: Tensor) -> Tensor:
        return logits + bias_V.to(logits.device)

    return per_row(process)
