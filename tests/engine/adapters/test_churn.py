"""Whatever is loaded, replaced, unloaded and dropped meanwhile, every answer is that of the adapter which its request began with."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.adapters.registry import Adapter, AdapterRegistry
from penstock.engine.core import EngineCore
from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder
from tests.engine.model.test_native import needs_kernels
from tests.engines import core_over, loaded_model
from tests.fakes import drive, make_request, tokens
from tests.tiny_adapters import write_adapter, write_encoded_prompt, write_tuned_prompt
from tests.tiny_models import tiny_model

NUM_NEW_TOKENS = 12
PROMPTS = [list(range(start, start + length)) for start, length in ((7, 1), (40, 9), (60, 26))]
NAMES = ("a", "b", "c", "d")
NUM_DIRECTORIES = 5
MAX_ADAPTERS = 3
SHAPE: dict[str, Any] = {"head_dim": 64, "hidden_size": 64, "intermediate_size": 80}


@dataclass(frozen=True)
class Subject:
    """A model, directories of adapters, and what it says alone with each, None for none: as much as rounding cannot change."""

    make_core: Callable[..., EngineCore]
    directories: list[Path]
    answers: dict[tuple[int | None, int], list[int]]


def alone(core: EngineCore, adapter: Adapter | None, prompt: list[int], margin: float) -> list[int]:
    """Up to the first token that is chosen by less than this margin."""
    core.add(make_request("alone", prompt, adapter=adapter, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=2))
    (deltas,) = drive(core).values()
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    gaps = [entry.top[0][1] - entry.top[1][1] for entry in entries]
    return [token_id for token_id, _ in itertools.takewhile(lambda pair: pair[1] > margin, zip(tokens(deltas), gaps, strict=True))]


def subject_of(loaded: LoadedModel, directory: Path, margin: float) -> Subject:
    directories = [write_adapter(tiny_model("llama", **SHAPE), directory / str(seed), seed=seed, r=2 + 3 * seed) for seed in range(3)]
    directories.append(write_tuned_prompt(tiny_model("llama", **SHAPE), directory / "tuned"))
    directories.append(write_encoded_prompt(tiny_model("llama", **SHAPE), directory / "encoded"))
    core = core_over(loaded, enable_lora=True, enable_prefix_caching=False, speculation="none")
    assert core.runner.adapted is not None
    adapters = {None: None} | {number: core.runner.adapted.reader.read("alone", path) for number, path in enumerate(directories)}
    answers = {
        (number, place): alone(core, adapter, prompt, margin)
        for number, adapter in adapters.items()
        for place, prompt in enumerate(PROMPTS)
    }
    core.runner.shutdown()
    assert len(directories) == NUM_DIRECTORIES
    answers = {key: answer for key, answer in answers.items() if answer}
    assert len({tuple(answer[:3]) for answer in answers.values()}) > 12, "the adapters change too little"
    return Subject(partial(core_over, loaded), directories, answers)


NAME, WHICH, PLACE, NUM_TOKENS = (
    st.sampled_from(NAMES),
    st.integers(0, NUM_DIRECTORIES - 1),
    st.integers(0, 2),
    st.integers(1, NUM_NEW_TOKENS),
)
REQUESTS = st.lists(st.tuples(st.sampled_from((*NAMES, None)), PLACE, NUM_TOKENS), min_size=2, max_size=6)
OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), REQUESTS),
    st.tuples(st.just("ask"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("load"), NAME, WHICH, st.just(True)),
    st.tuples(st.just("load"), NAME, WHICH, st.booleans()),
    st.tuples(st.just("load_two_at_once"), NAME, WHICH, WHICH),
    st.tuples(st.just("unload"), NAME),
    st.tuples(st.just("drop_oldest")),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)
OPERATIONS_OF_AN_EXAMPLE = st.lists(OPERATIONS, min_size=30, max_size=60)


class Churn:
    """Adapters come and go under a few names, each from one path whose files change, while requests of them run."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        # Few slots and blocks: adapters change places, and requests are preempted.
        limits: dict[str, Any] = {"max_loras": 2, "num_blocks": 18, "max_num_batched_tokens": 20, "max_num_seqs": 6}
        self.core = subject.make_core(block_size=8, enable_lora=True, **limits)
        assert self.core.runner.adapted is not None
        self.registry = AdapterRegistry(MAX_ADAPTERS, read=self.core.runner.adapted.reader.read)
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.known: dict[str, int] = {}  # which adapter has the name; least recently touched first
        self.expected: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.numbers = itertools.count()

    def run(self, operations: list[Any]) -> None:
        try:
            for which, name in enumerate(NAMES[:MAX_ADAPTERS]):
                self.load(name, which, replaces=False)
            for operation, *arguments in operations:
                getattr(self, operation)(*arguments)
                self.core.check_integrity()
                assert [adapter.name for adapter in self.registry] == list(self.known)
            self.step(500)
            assert self.said == self.expected
        finally:
            self.core.runner.shutdown()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.root)

    def load(self, name: str, which: int, replaces: bool) -> None:
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.subject.directories[which], directory)
        loading = self.registry.load(name, directory, replaces=replaces)
        if (name in self.known and not replaces) or (name not in self.known and len(self.known) == MAX_ADAPTERS):
            with pytest.raises(InvalidRequest, match=r"unload it first, or set|3 adapters are loaded"):
                self.loop.run_until_complete(loading)
        else:
            self.loop.run_until_complete(loading)
            self.known[name] = which

    def load_two_at_once(self, name: str, first: int, second: int) -> None:
        async def both() -> None:
            paths = [self.subject.directories[which] for which in (first, second)]
            await asyncio.gather(*(self.registry.load(name, path, replaces=True) for path in paths))

        if name in self.known or len(self.known) < MAX_ADAPTERS:
            self.loop.run_until_complete(both())
            self.known[name] = second

    def unload(self, name: str) -> None:
        if self.known.pop(name, None) is None:
            with pytest.raises(NoSuchModel):
                self.registry.remove(name)
        else:
            assert self.registry.remove(name).name == name

    def drop_oldest(self) -> None:
        if self.known:
            oldest = next(iter(self.known))
            assert self.registry.drop_oldest() == oldest
            del self.known[oldest]

    def ask(self, requests: list[tuple[str | None, int, int]]) -> None:
        for name, place, max_tokens in requests:
            if name is not None and name not in self.known:
                with pytest.raises(NoSuchModel):
                    self.registry.named(name)
                continue
            adapter = None if name is None else self.registry.named(name)
            if name is not None:
                self.registry.touch(name)
                self.known[name] = self.known.pop(name)
            answer = self.subject.answers.get((None if name is None else self.known[name], place), [])[:max_tokens]
            if answer:
                request_id = str(next(self.numbers))
                self.expected[request_id], self.said[request_id] = answer, []
                params: dict[str, Any] = {"max_tokens": len(answer), "ignore_eos": True, "priority": int(max_tokens % 4 == 0)}
                self.core.add(make_request(request_id, PROMPTS[place], adapter=adapter, **params))

    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.core.has_work:
                break
            for request_id, deltas in self.core.step().items():
                if request_id in self.expected:  # else it was aborted
                    said = self.said[request_id]
                    said += tokens(deltas)
                    assert said == self.expected[request_id][: len(said)]

    def abort(self, number: int) -> None:
        running = [request_id for request_id, answer in self.expected.items() if self.said[request_id] != answer]
        if running:
            request_id = running[number % len(running)]
            self.core.abort(request_id)
            del self.expected[request_id], self.said[request_id]


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(loaded_model(tiny_model("llama", **SHAPE), max_model_len=64), tmp_path_factory.mktemp("adapters"), margin=1e-3)


@pytest.fixture(scope="module")
def in_native_code(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    loaded = loaded_model(tiny_model("llama", **SHAPE).bfloat16(), max_model_len=64)
    subject = subject_of(loaded, tmp_path_factory.mktemp("adapters"), margin=0.03)
    assert isinstance(loaded.model.forward, NativeDecoder)
    return subject


@settings(max_examples=8)
@given(operations=OPERATIONS_OF_AN_EXAMPLE)
def test_every_answer_is_that_of_the_adapter_which_its_request_began_with(on_torch: Subject, operations: list[Any]) -> None:
    Churn(on_torch).run(operations)


@needs_kernels
@settings(max_examples=8)
@given(operations=OPERATIONS_OF_AN_EXAMPLE)
def test_native_code_computes_each_row_with_the_adapter_of_its_request(in_native_code: Subject, operations: list[Any]) -> None:
    Churn(in_native_code).run(operations)


@pytest.mark.thorough
@settings(max_examples=60)
@given(operations=OPERATIONS_OF_AN_EXAMPLE)
def test_no_history_of_many_gives_a_request_the_adapter_of_another(on_torch: Subject, operations: list[Any]) -> None:
    Churn(on_torch).run(operations)


@pytest.mark.thorough
@needs_kernels
@settings(max_examples=60)
@given(operations=OPERATIONS_OF_AN_EXAMPLE)
def test_no_history_of_many_gives_native_code_the_adapter_of_another(in_native_code: Subject, operations: list[Any]) -> None:
    Churn(in_native_code).run(operations)
