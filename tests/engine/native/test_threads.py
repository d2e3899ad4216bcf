"""What a model's thread, and the thread that loads it, are given: threads, CPUs and nodes of memory."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.native import runtime as module
from penstock.engine.native.runtime import by_rows, loading_threads, native_library, num_model_threads, prepare_loops
from penstock.engine.system.cpus import Placement
from penstock.engine.weights.linear import panels
from penstock.engine.weights.packed import pack, quantized
from tests.engines import core_over, loaded_model, run
from tests.tiny_models import tiny_model

T = TypeVar("T")
NODES = (1, 3)


def in_thread(call: Callable[[], T]) -> T:
    """In a new one, whose affinity and number of threads end with it."""
    with ThreadPoolExecutor(1) as caller:
        return caller.submit(call).result()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What of the memory is placed where, while a model's threads run on `NODES`."""
    seen: list[Any] = []

    @contextmanager
    def memory_on(nodes: Sequence[int]) -> Iterator[None]:
        seen.append(nodes)
        yield
        seen.append("end")

    where = Placement(tuple(os.sched_getaffinity(0)), NODES)
    monkeypatch.setattr(module, "placement", lambda *_: where)
    monkeypatch.setattr("penstock.engine.build.placement", lambda *_: where)
    monkeypatch.setattr(module, "memory_on", memory_on)
    monkeypatch.setattr("penstock.engine.build.place_memory", lambda *arguments: seen.append(arguments))
    return seen


def test_a_model_is_loaded_into_memory_of_its_threads_nodes_with_one_openmp_thread(places: list[Any]) -> None:
    def load() -> tuple[list[Any], int]:
        torch.set_num_threads(3)
        with loading_threads(EngineConfig(num_threads=3)):
            assert places == [NODES]
        return places, torch.get_num_threads()

    assert in_thread(load) == ([NODES, "end"], 1)


def test_rows_are_computed_by_all_of_the_models_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 32)
    matrix, meeting = torch.arange(28.0).view(7, 4), threading.Barrier(3)

    def doubled(rows: torch.Tensor) -> tuple[torch.Tensor]:
        if rows[0, 0] > 0:  # the first rows are computed before
            meeting.wait(timeout=60)
            assert torch.get_num_threads() == 1
        return (2 * rows,)

    def load() -> torch.Tensor:
        with loading_threads(EngineConfig(num_threads=3)):
            return by_rows(doubled, [matrix])[0]

    assert torch.equal(in_thread(load), 2 * matrix)


def test_outside_of_loading_rows_are_computed_by_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1)
    (idents,) = by_rows(lambda rows: (torch.full_like(rows, threading.get_ident()),), [torch.zeros(4, 2, dtype=torch.int64)])
    assert set(idents.flatten().tolist()) == {threading.get_ident()}


@pytest.mark.parametrize("num_rows", [1, 15, 64, 77])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packed_some_rows_at_a_time_a_weight_is_the_same(num_rows: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI = torch.randn(num_rows, 64).bfloat16()

    def packed() -> list[torch.Tensor]:
        rounded = quantized(weight_OI, bits)
        return [*(part for part in rounded.parts if part is not None), pack(rounded).blocks, panels(weight_OI)]

    whole = packed()
    monkeypatch.setattr(module, "PART_BYTES", 128)
    with loading_threads(EngineConfig(num_threads=2)):
        in_parts = packed()
    assert all(torch.equal(*both) for both in zip(in_parts, whole, strict=True))


def test_keys_and_values_are_placed_before_they_are_written(places: list[Any]) -> None:
    core = core_over(loaded_model(tiny_model("llama")), num_threads=2)
    caches = [*core.runner.cache.keys, *core.runner.cache.values]
    assert places == [(cache.data_ptr(), cache.nbytes, NODES) for cache in caches]
    core.runner.shutdown()


def test_the_operators_number_of_threads_comes_before_that_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_num_threads", lambda: 9)
    assert num_model_threads(EngineConfig(num_threads=4)) == 4
    assert num_model_threads(EngineConfig()) == 9


def test_a_models_thread_is_prepared_as_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[Any, ...]] = []
    monkeypatch.setattr("penstock.engine.native.runtime.prepare_loops", lambda *arguments: prepared.append(arguments))
    core = core_over(loaded_model(tiny_model("llama")), num_threads=3, pin_threads="off")
    run(core, [[1, 2]], max_tokens=1)
    core.runner.shutdown()
    assert prepared == [(3, "off")]


@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
def test_native_loops_have_as_many_threads_as_torchs() -> None:
    library = native_library()
    assert library is not None

    def numbers() -> list[tuple[int, int]]:
        found = []
        for num_threads in (3, 1, 2):
            prepare_loops(num_threads, "off")
            found.append((torch.get_num_threads(), library.penstock_num_threads()))
            torch.set_num_threads(num_threads + 1)
            found.append((torch.get_num_threads(), library.penstock_num_threads()))
        return found

    assert in_thread(numbers) == [(count, count) for count in (3, 4, 1, 2, 2, 3)]


class FakeLibrary:
    """Of kernels, in an OpenMP library of its own or in torch's."""

    def __init__(self) -> None:
        self.num_threads = 1
        self.placed: list[tuple[list[int], bool]] = []

    def penstock_set_num_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def penstock_num_threads(self) -> int:
        return self.num_threads

    def penstock_place_threads(self, cpus: Any, num_cpus: int, is_pinned: bool) -> None:
        self.placed.append((list(cpus)[:num_cpus], is_pinned))


def test_kernels_with_another_openmp_library_get_the_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(module, "native_library", lambda: library)
    in_thread(lambda: prepare_loops(2, "off"))
    assert library.num_threads == 2
    assert library.placed == []


@pytest.mark.parametrize("is_pinned", [True, False])
def test_threads_are_kept_to_their_cpus(is_pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    library, kept = FakeLibrary(), (4, 5)
    affinity: dict[int, Collection[int]] = {0: {4, 5, 6}}
    monkeypatch.setattr(module, "native_library", lambda: library)
    monkeypatch.setattr(module, "placement", lambda *_: Placement(kept, (0,), is_pinned))
    monkeypatch.setattr(os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", affinity.__setitem__)
    caplog.set_level("INFO", logger=module.__name__)
    in_thread(lambda: prepare_loops(2, "auto"))
    assert affinity == {0: kept}
    assert library.placed == [([4, 5], is_pinned)]
    assert caplog.messages == [f"The model's 2 threads run {'pinned to' if is_pinned else 'on'} the CPUs 4, 5"]
