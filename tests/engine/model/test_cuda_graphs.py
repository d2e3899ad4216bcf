"""Graphs without a GPU: a tape stands in for what the device records, everything else is what runs there."""

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.attention import interface
from penstock.engine.attention.metadata import AttentionMetadata, flatten
from penstock.engine.batch import Batch, StepInputs, slots_of
from penstock.engine.core import EngineCore
from penstock.engine.kv_cache.cache import KVCache, kv_layout
from penstock.engine.model.cuda_graphs import CudaRecorder, DecodeGraphs, graph_sizes, load, padding
from penstock.engine.model.layers import compute_logits
from penstock.engine.model.loader import LoadedModel
from penstock.engine.runner import ModelRunner
from tests.engines import core_over, loaded_model, run
from tests.tape import TapeRecorder
from tests.tiny_models import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 8
TABLE_WIDTH = 8
MAX_LEN = BLOCK_SIZE * TABLE_WIDTH
NUM_BLOCKS = 40
NUM_TABLES = 8
TABLES_PN = torch.zeros(NUM_TABLES, TABLE_WIDTH, dtype=torch.int32)


def make_batch(context_lens: Sequence[int], num_rows_kept: int | None = None, query_lens: Sequence[int] = (), seed: int = 0) -> Batch:
    """Sequences of one new token each, or of `query_lens`, on blocks of their own; tokens and blocks differ from seed to seed."""
    chance = random.Random(seed)
    free_blocks = chance.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free_blocks.pop() for _ in range(0, length, BLOCK_SIZE)] for length in context_lens]
    query_lens = query_lens or [1] * len(context_lens)
    slots: list[int] = []
    positions: list[int] = []
    for table, context_len, query_len in zip(tables, context_lens, query_lens, strict=True):
        slots += slots_of(table, context_len - query_len, context_len, BLOCK_SIZE)
        positions += range(context_len - query_len, context_len)
    num_padding = max(0, ModelRunner.min_tokens - len(slots))
    starts = [sum(query_lens[:index]) for index in range(len(query_lens) + 1)]
    num_decodes = sum(length == 1 for length in query_lens)
    kept = sorted(chance.sample(range(len(slots)), num_rows_kept or len(slots)))
    rows = chance.sample(range(NUM_TABLES), len(tables))
    attention = flatten(slots + [-1] * num_padding, starts, list(context_lens), rows, num_decodes=num_decodes)
    entries = [(row, place, block) for row, table in zip(rows, tables, strict=True) for place, block in enumerate(table)]
    padding = [0] * num_padding
    return Batch(
        inputs=StepInputs.pack(
            attention,
            chance.choices(range(3, 259), k=len(slots)) + padding,
            positions + padding,
            kept,
            [number for numbers in zip(*entries, strict=True) for number in numbers],
            TABLES_PN,
        ),
        logits_rows=[],
        sampler_rows=[],
        prompts=[],
        masks=None,
        copies=[],
    )


class Setup:
    """A tiny model over a cache with something in it, and graphs of it."""

    def __init__(self, name: str = "llama", max_num_rows: int = 4, recorder: TapeRecorder | None = None, **settings: Any) -> None:
        interface.register()
        self.model = tiny_model(name, interface.IMPLEMENTATION, **settings).requires_grad_(False)
        if name == "qwen3_moe":
            self.model.set_experts_implementation("batched_mm")  # on a CPU the others wait for the device
        self.cache = KVCache(kv_layout(self.model.config), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
        self.cache.block_tables_PN = TABLES_PN
        generator = torch.Generator().manual_seed(1)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_(generator=generator)
        self.cache.attach(self.model)
        self.recorder = recorder or TapeRecorder()
        forward = functools.partial(compute_logits, self.model, kept=None)
        self.graphs = DecodeGraphs(forward, self.recorder, max_num_rows=max_num_rows, block_tables_PN=TABLES_PN, block_size=BLOCK_SIZE)

    def capture(self) -> "Setup":
        while self.graphs.capture_next():
            pass
        return self

    @torch.inference_mode()
    def replayed(self, batch: Batch) -> Tensor | None:
        self.cache.write_tables(batch.inputs.table_updates_3U)
        logits = self.graphs.run(batch)
        return None if logits is None else logits.clone()

    @torch.inference_mode()
    def eager(self, batch: Batch) -> Tensor:
        inputs = batch.inputs
        self.cache.write_tables(inputs.table_updates_3U)
        return compute_logits(self.model, inputs.input_ids_1T, inputs.positions_1T, inputs.attention, inputs.kept_T)


@pytest.fixture(scope="module")
def llama() -> Setup:
    return Setup().capture()


@given(max_num_rows=st.integers(1, 2000))
def test_sizes_reach_the_greatest_batch_and_never_more_than_double_a_small_one(max_num_rows: int) -> None:
    sizes = graph_sizes(max_num_rows)
    assert sizes[0] == 1
    assert sizes[-1] == max_num_rows
    for smaller, larger in pairwise(sizes):
        assert smaller < larger <= (2 if smaller < 64 else 1.5) * smaller


def test_sizes_by_default_are_few() -> None:
    assert graph_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_the_same_in_a_graph(name: str) -> None:
    setup = Setup(name, max_num_rows=3).capture()
    assert setup.graphs.sizes == [1, 2, 3]
    for seed, context_lens in enumerate([(30,), (1, 41, 17), (9, 60)]):
        batch = make_batch(context_lens, seed=seed)
        logits = setup.replayed(batch)
        assert logits is not None
        torch.testing.assert_close(logits, setup.eager(batch), atol=5e-5, rtol=0)
    assert setup.recorder.num_replays == [1, 1, 1]


def test_each_batch_is_replayed_at_the_next_size(llama: Setup) -> None:
    assert llama.graphs.sizes == [1, 2, 4]
    for num_rows, number in [(1, 2), (2, 1), (3, 0), (4, 0)]:  # the largest was captured first
        before = list(llama.recorder.num_replays)
        assert llama.replayed(make_batch([5] * num_rows)) is not None
        before[number] += 1
        assert llama.recorder.num_replays == before


@pytest.mark.parametrize(
    ("context_lens", "query_lens"), [((5, 6, 7, 8, 9), ()), ((5, 20), (1, 3)), ((20,), (20,)), ((5, 20, 30), (1, 3, 30))]
)
def test_what_is_no_batch_of_decodes_or_too_large_is_not_replayed(
    llama: Setup, context_lens: tuple[int, ...], query_lens: Sequence[int]
) -> None:
    before = list(llama.recorder.num_replays)
    assert llama.replayed(make_batch(context_lens, query_lens=query_lens)) is None
    assert llama.recorder.num_replays == before


@pytest.mark.parametrize("num_rows_kept", [1, 2, 3])
def test_only_the_kept_rows_come_back(llama: Setup, num_rows_kept: int) -> None:
    batch = make_batch((9, 30, 14), num_rows_kept)
    logits = llama.replayed(batch)
    assert logits is not None
    torch.testing.assert_close(logits, llama.eager(batch), atol=5e-5, rtol=0)


def test_padding_touches_no_slot_and_a_row_only_its_own(llama: Setup) -> None:
    full, small = make_batch((9, 30, 14, 50), seed=1), make_batch((12, 33, 7), seed=2)
    assert llama.replayed(full) is not None  # leaves its slots and tables in the graph's tensors
    before = [tensor.clone() for tensor in (*llama.cache.keys, *llama.cache.values)]
    assert llama.replayed(small) is not None
    slots = small.inputs.attention.slot_mapping_T
    for tensor, was in zip((*llama.cache.keys, *llama.cache.values), before, strict=True):
        is_changed = (tensor != was).flatten(2).any(-1).flatten()
        assert sorted(is_changed.nonzero()[:, 0].tolist()) == sorted(slots.tolist())


def test_loading_copies_in_all_that_differs_between_batches() -> None:
    own = padding(5, TABLES_PN, max_context_len=MAX_LEN)
    for seed, context_lens in enumerate([(9, 30, 14, 50, 1), (3,), (12, 33, 7)]):
        inputs = make_batch(context_lens, seed=seed).inputs
        num_rows = inputs.attention.num_sequences
        num_padding = 5 - num_rows
        load(own, inputs)
        assert own.input_ids_1T[0].tolist() == inputs.input_ids_1T[0, :num_rows].tolist() + [0] * num_padding
        assert own.positions_1T[0].tolist() == inputs.positions_1T[0, :num_rows].tolist() + [0] * num_padding
        metadata = AttentionMetadata.unpack(own.attention.packed, TABLES_PN)  # the fields are views of it
        assert metadata.slot_mapping_T.tolist() == inputs.attention.slot_mapping_T[:num_rows].tolist() + [-1] * num_padding
        assert metadata.context_lens_B.tolist() == [*context_lens, *[0] * num_padding]
        assert metadata.table_rows_B.tolist() == inputs.attention.table_rows_B.tolist() + [0] * num_padding
        assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5]
        assert (metadata.num_decodes, metadata.max_query_len, metadata.max_context_len) == (5, 1, MAX_LEN)


def test_a_capture_that_fails_leaves_the_sizes_before_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(recorder=TapeRecorder(fail_at=1))
    with caplog.at_level(logging.WARNING):
        setup.capture()
    assert setup.graphs.sizes == [4]
    assert "Decode steps of 2 rows and fewer run without CUDA graphs: RuntimeError: CUDA error" in caplog.text
    assert setup.replayed(make_batch((5, 6))) is None
    assert setup.replayed(make_batch((5, 6, 7))) is not None


def test_a_model_that_waits_for_the_device_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def forward(input_ids_1T: Tensor, positions_1T: Tensor, metadata: AttentionMetadata) -> Tensor:
        scale = 2.0 if positions_1T.max() > MAX_LEN else 1.0
        return input_ids_1T[0, :, None].float() * scale

    graphs = DecodeGraphs(forward, TapeRecorder(), max_num_rows=4, block_tables_PN=TABLES_PN, block_size=BLOCK_SIZE)
    with caplog.at_level(logging.WARNING):
        assert not graphs.capture_next()
    assert graphs.sizes == []
    assert "Decode steps of 4 rows and fewer run without CUDA graphs: RuntimeError: operation not permitted" in caplog.text
    assert graphs.run(make_batch((5, 6))) is None


class FakeCuda:
    """The calls that a recorder makes of `torch.cuda`, and the stream that is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
        self.calls: list[str] = []
        self.current = "default"
        self.fails = fails
        side = SimpleNamespace(
            wait_stream=lambda stream: self.calls.append(f"wait for {stream}"), synchronize=lambda: self.calls.append("synchronize")
        )
        graph = SimpleNamespace(replay=lambda: self.calls.append("replay"))
        replaced: dict[str, Any] = {
            "Stream": lambda device: side,
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda: self.current,
            "CUDAGraph": lambda: graph,
            "stream": self._stream,
            "graph": self._graph,
        }
        for name, stand_in in replaced.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, "side"
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ((0, 1), "thread_local")
        self.calls.append("begin")
        yield
        self.current = "side"  # where the capture has failed, torch does not come back from here
        if self.fails:
            raise RuntimeError("capture failed")
        self.calls.append("end")


@pytest.mark.parametrize("fails", [False, True])
def test_a_recorder_warms_up_before_it_captures_and_comes_back_to_its_stream(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    cuda = FakeCuda(monkeypatch, fails)
    recorder = CudaRecorder(torch.device("cuda"))
    with pytest.raises(RuntimeError) if fails else nullcontext():
        replay = recorder.capture(lambda: cuda.calls.append(f"work on {cuda.current}"))
    assert cuda.current == "default"
    expected = ["wait for default", "work on side", "synchronize", "begin", "work on side"]
    if not fails:
        replay()
        expected += ["end", "replay"]
    assert cuda.calls == expected


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    return loaded_model(tiny_model("gemma2"), max_model_len=MAX_LEN)


def graphed_core(loaded: LoadedModel, recorder: TapeRecorder) -> EngineCore:
    core = core_over(loaded, block_size=BLOCK_SIZE, max_num_seqs=4)
    core.runner.shutdown()
    forward = functools.partial(compute_logits, loaded.model, kept=None)
    cache = core.runner.cache
    sizes = {"block_size": BLOCK_SIZE, "num_groups": len(cache.groups)}
    graphs = DecodeGraphs(forward, recorder, max_num_rows=4, block_tables_PN=cache.block_tables_PN, **sizes)
    core.runner = ModelRunner(loaded, core.runner.cache, vocab_size=core.vocab_size, graphs=graphs, num_threads=1)
    return core


def test_the_engine_says_the_same_with_graphs_and_may_begin_before_they_are_there(gemma: LoadedModel) -> None:
    prompts = [random.Random(seed).choices(range(3, 259), k=length) for seed, length in enumerate((1, 7, 20))]
    expected = run(core_over(gemma, block_size=BLOCK_SIZE, max_num_seqs=4), prompts, stagger=2, max_tokens=8, temperature=0)
    recorder = TapeRecorder()
    core = graphed_core(gemma, recorder)
    assert [one.token_ids for one in run(core, prompts, max_tokens=8, temperature=0)] == [one.token_ids for one in expected]
    assert recorder.captured == []
    core.runner.optimize()
    assert len(recorder.captured) == 3
    got = run(core, prompts, stagger=2, max_tokens=8, temperature=0, prompt_logprobs=2)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert sum(recorder.num_replays) > 8
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.logits_TV, theirs.logits_TV, atol=5e-5, rtol=0)


def test_a_runner_that_is_shut_down_captures_nothing(gemma: LoadedModel) -> None:
    recorder = TapeRecorder()
    core = graphed_core(gemma, recorder)
    core.runner.shutdown()
    core.runner.optimize()
    assert recorder.captured == []
