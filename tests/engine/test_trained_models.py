"""Tiny trained models of every kind give the right text and transformers' own, whatever their requests run beside."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.engine.batch import Batch
from penstock.engine.build import build_core
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.kv_cache.tensors import block_bytes
from penstock.engine.model.loader import LoadedModel
from penstock.engine.runner import StepHandle
from tests.engines import core_over, loaded_model
from tests.fakes import EOS, byte_tokenizer, content, drive, ids, make_request
from tests.trained_models import KINDS, held_out, trained_model

pytestmark = pytest.mark.thorough  # training takes seconds for each model

BLOCK_SIZE = 8
LONGEST = 24  # longer than every answer, so that one without an end shows as well
MAX_MODEL_LEN = 64
NEARLY_GREEDY: dict[str, Any] = {"n": 3, "temperature": 0.3}

SERVED = [name for name in KINDS if name not in ("draft", "both cases")]
every_kind = pytest.mark.parametrize("name", SERVED)
SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"enable_prefix_caching": False},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 14, "max_num_batched_tokens": 30},
    "ahead": {"async_scheduling": True, "max_num_batched_tokens": 30},
}


@dataclass(frozen=True)
class Subject:
    """A trained model in the engine's hands, with prompts of its task and what transformers says of each."""

    loaded: LoadedModel
    prompts: list[str]
    texts: list[str]


def said_by_transformers(model: PreTrainedModel, prompt: str) -> str:
    input_ids = torch.tensor([ids(prompt)])
    generate: Any = model.generate
    with torch.inference_mode():
        output = generate(input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=LONGEST, eos_token_id=EOS)
    return byte_tokenizer().decode(output[0, input_ids.shape[1] :].tolist(), skip_special_tokens=True)


@functools.cache
def subject(name: str) -> Subject:
    examples = held_out(KINDS[name].task)
    model = trained_model(name)
    prompts = [prompt for prompt, _ in examples]
    texts = [said_by_transformers(model, prompt) for prompt in prompts]
    assert texts == [answer for _, answer in examples]
    return Subject(loaded_model(model, MAX_MODEL_LEN), prompts, texts)


@contextmanager
def engine(model: LoadedModel, **settings: Any) -> Iterator[EngineCore]:
    core = core_over(model, **{"block_size": BLOCK_SIZE, "num_blocks": 200} | settings)
    try:
        yield core
        core.check_integrity()
    finally:
        core.runner.shutdown()


def texts_of(core: EngineCore, prompts: list[str], **params: Any) -> list[list[str]]:
    """All sequences of each prompt. They end themselves."""
    for number, prompt in enumerate(prompts):
        core.add(make_request(str(number), prompt, max_tokens=LONGEST, seed=number, **params))
    said = drive(core)
    return [[content(said[str(number)], index) for index in range(params.get("n", 1))] for number in range(len(prompts))]


@every_kind
@pytest.mark.parametrize("settings", [pytest.param(settings, id=name) for name, settings in SETTINGS.items()])
def test_every_answer_is_right_beside_others(name: str, settings: dict[str, Any]) -> None:
    model = subject(name)
    if "num_blocks" in settings and KINDS[name].only_states:
        settings = settings | {"num_blocks": 9}  # their strings are shorter
    with engine(model.loaded, **settings) as core:
        assert texts_of(core, model.prompts) == [[text] for text in model.texts]
        assert texts_of(core, model.prompts, **NEARLY_GREEDY) == [[text] * 3 for text in model.texts]
        stats = core.stats()
    assert (stats.num_preemptions > 0) == ("num_blocks" in settings)


@every_kind
def test_what_is_cached_is_read_as_it_was_computed(name: str) -> None:
    model = subject(name)
    with engine(model.loaded) as core:
        for _ in range(2):
            for prompt, text in zip(model.prompts, model.texts, strict=True):
                assert texts_of(core, [prompt]) == [[text]]
        assert core.stats().num_prefix_cache_hits > 0


def other_blocks(core: EngineCore, batch: Batch) -> None:
    for keys in core.runner.cache.keys:
        keys.copy_(keys.roll(1, 0))


def other_positions(core: EngineCore, batch: Batch) -> None:
    batch.inputs.positions_1T.add_(1)


def other_states(core: EngineCore, batch: Batch) -> None:
    assert core.runner.states is not None
    for state in core.runner.states.memory:
        state.copy_(state.roll(1, 0))


FAULTS: list[tuple[str, Callable[[EngineCore, Batch], None]]] = [
    *((name, other_blocks) for name in SERVED if not KINDS[name].only_states),
    *((name, other_positions) for name in ("llama", "sliding window", "windows and full attention", "latents", "experts")),
    *((name, other_states) for name in ("convolutions", "delta net", "mamba")),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_shows_in_the_text(name: str, fault: Callable[[EngineCore, Batch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first two steps, once."""
    model = subject(name)
    with engine(model.loaded) as core:
        launch, num_steps = core.runner.launch, 0

        def launch_with_fault(batch: Batch) -> StepHandle:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                fault(core, batch)
            return launch(batch)

        monkeypatch.setattr(core.runner, "launch", launch_with_fault)
        said = texts_of(core, model.prompts)
    assert sum(answer == [text] for answer, text in zip(said, model.texts, strict=True)) <= len(said) / 2


def test_other_experts_show_in_the_text() -> None:
    model = trained_model("experts")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "experts" in parameter_name:
                parameter.copy_(parameter.roll(1, 0))
    prompts = subject("experts").prompts
    with engine(loaded_model(model, MAX_MODEL_LEN)) as core:
        said = texts_of(core, prompts)
    assert sum(answer == [text] for answer, text in zip(said, subject("experts").texts, strict=True)) <= len(said) / 2


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_a_smaller_trained_model_drafts_what_the_model_says(num_blocks: int) -> None:
    model = subject("llama")
    draft = loaded_model(trained_model("draft"), MAX_MODEL_LEN)
    per_block = sum(block_bytes(loaded.kv_layout, BLOCK_SIZE, loaded.dtype) for loaded in (model.loaded, draft))
    config = EngineConfig(
        kv_cache_memory=num_blocks * per_block,
        block_size=BLOCK_SIZE,
        compile="off",
        speculation="draft",
        draft_model="draft",
        max_num_seqs=8,
    )
    core = build_core(model.loaded, byte_tokenizer(), config, draft=draft)
    core.scheduler.lengths = None
    assert core.scheduler.speculation is not None
    core.scheduler.speculation.draft_cost = 0.1
    try:
        assert texts_of(core, model.prompts) == [[text] for text in model.texts]
        assert texts_of(core, model.prompts, **NEARLY_GREEDY) == [[text] * 3 for text in model.texts]
        stats = core.stats()
    finally:
        core.close()
        core.runner.shutdown()
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks == 14)
