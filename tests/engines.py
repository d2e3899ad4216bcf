"""Whole engines over small models: everything as it is built for a user, but for the compiler."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.adapters.checkpoint import WholeModel
from penstock.engine.build import build_core, core_over_blocks, fuse
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta, TokenLogprobs
from penstock.engine.kv_cache.tensors import LayerKV, block_bytes, kv_layout
from penstock.engine.model.loader import LoadedModel, in_memory
from penstock.engine.multimodal import mrope
from penstock.engine.multimodal.inputs import ProcessedPrompt
from penstock.engine.multimodal.vision import take_apart
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.weights.experts import pack_experts
from penstock.engine.weights.linear import pack_linears
from tests.fakes import RowFunction, byte_tokenizer, drive, make_request, tokens

_layouts: dict[str, list[LayerKV]] = {}


def loaded_model(model: PreTrainedModel, max_model_len: int = 128) -> LoadedModel:
    """What `load` makes of a model directory, of a model that is in memory. The model itself is changed."""
    key = model.config.to_json_string(use_diff=False)
    if key not in _layouts:
        _layouts[key] = kv_layout(model.config)  # takes 0.1 s
    loaded = in_memory(model, max_model_len, _layouts[key])
    fuse(loaded)
    if loaded.device.type == "cpu":
        pack_linears(model)
        pack_experts(model)
    return loaded


def loaded_multimodal(whole: PreTrainedModel, max_model_len: int = 128) -> LoadedModel:
    """What `load` makes of a multimodal model's directory, of one that is in memory. The model itself is changed."""
    mrope.register(whole.config)
    names = WholeModel.of(whole)
    model, vision = take_apart(whole)
    return replace(loaded_model(model, max_model_len), vision=vision, whole=names)


def core_over(
    loaded: LoadedModel,
    tokenizer: Tokenizer | None = None,
    *,
    num_blocks: int | None = None,
    num_slots: int | None = None,
    block_size: int = 16,
    **settings: Any,
) -> EngineCore:
    """An engine whose cache has `num_blocks` blocks, by default enough for eight sequences of the full length.

    Where layers are recurrent, there are `num_slots` for states, by default enough for two snapshots of each sequence that runs.

    It takes the model from the engine that had it before.
    """
    if num_blocks is None:
        num_blocks = 8 * -(-loaded.max_model_len // block_size)
    if loaded.recurrent_layers:
        settings = {"max_num_seqs": 8} | settings
        config = EngineConfig(block_size=block_size, compile="off", speculation="none", **settings)
        slots = 3 * config.num_seqs("cpu") if num_slots is None else num_slots
        core = core_over_blocks(loaded, tokenizer or byte_tokenizer(), config, num_blocks, num_slots=slots)
    else:
        memory = num_blocks * block_bytes(loaded.kv_layout, block_size, loaded.dtype)
        config = EngineConfig(kv_cache_memory=memory, block_size=block_size, compile="off", **settings)
        core = build_core(loaded, tokenizer or byte_tokenizer(), config)
    core.scheduler.lengths = None  # admits whatever fits: many tests are about the preemptions that follow
    return core


@dataclass(slots=True)
class Recorder:
    """A logits processor that keeps what it sees, one row per sampled token, and changes nothing while no tokens are `forced`."""

    forced: Sequence[int] = ()
    rows: list[Tensor] = field(default_factory=list)

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        self.rows.append(logits.clone())
        if self.forced:
            logits = torch.full_like(logits, -torch.inf)
            logits[self.forced[len(self.rows) - 1]] = 0.0
        return logits


@dataclass(slots=True)
class Run:
    """One sequence as the engine ran it. Logits [num output tokens, V]."""

    token_ids: list[int]
    logits_TV: Tensor
    deltas: list[SequenceDelta]

    @property
    def num_cached_tokens(self) -> int:
        prompt = self.deltas[0].prompt
        assert prompt is not None
        return prompt.num_cached_tokens

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        prompt = self.deltas[0].prompt
        assert prompt is not None
        assert prompt.logprobs is not None
        return prompt.logprobs


def run(
    core: EngineCore, prompts: Sequence[list[int] | ProcessedPrompt], *, stagger: int = 0, forced: Sequence[int] = (), **params: Any
) -> list[Run]:
    """Runs the prompts at once, each `stagger` steps after the one before, and gives their sequences in order: n for each prompt.

    With `forced`, these tokens are what every sequence says, whatever the model would.
    """
    recorders: list[list[Recorder]] = []
    early: dict[str, list[SequenceDelta]] = {}
    for index, given in enumerate(prompts):
        processed = given if isinstance(given, ProcessedPrompt) else ProcessedPrompt(given, ())
        prompt = processed.token_ids
        recorders.append([])
        core.add(
            make_request(
                str(index),
                prompt,
                make_answer=functools.partial(_plain_answer, core.tokenizer, prompt),
                logits_processors=[_recording(recorders[-1], forced)],
                ignore_eos=True,
                embeds=processed.embeds,
                **params,
            )
        )
        for _ in range(stagger):
            for request_id, deltas in core.step().items():
                early.setdefault(request_id, []).extend(deltas)
    late = drive(core)
    runs = []
    for index, made in enumerate(recorders):
        deltas = [*early.get(str(index), []), *late.get(str(index), [])]
        for number, recorder in enumerate(made):
            own = [delta for delta in deltas if delta.index == number]
            runs.append(Run(tokens(own, number), torch.stack(recorder.rows), own))
    return runs


def _plain_answer(tokenizer: Tokenizer, prompt: list[int]) -> Answer:
    return Answer(Detokenizer(tokenizer, prompt), None, None, (), False, True)


def _recording(recorders: list[Recorder], forced: Sequence[int]) -> Callable[[], RowFunction]:
    def make() -> RowFunction:
        recorders.append(Recorder(forced))
        return recorders[-1]

    return make
