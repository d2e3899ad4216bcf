"""Graphs without a GPU: a tape stands in for what the device records, everything else is what runs there."""

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.attention import interface
from penstock.engine.attention.interface import AttentionMetadata, flatten
from penstock.engine.batch import Batch, StepInputs, slots_of
from penstock.engine.core import EngineCore
from penstock.engine.kv_cache.tensors import KVCache, kv_layout
from penstock.engine.model.cuda_graphs import CudaRecorder, GraphShape, StepGraphs, graph_sizes, load, mixed_sizes, padding
from penstock.engine.model.forward import compute_logits
from penstock.engine.model.loader import LoadedModel
from penstock.engine.runner import ModelRunner
from penstock.engine.scheduling.step import SHORT_CHUNK
from tests.engines import core_over, loaded_model, run
from tests.gpu.tape import TapeRecorder
from tests.tiny_models import FORMS, tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 8
TABLE_WIDTH = 8
MAX_LEN = BLOCK_SIZE * TABLE_WIDTH
NUM_BLOCKS = 40
NUM_TABLES = 8
MAX_TOKENS = 40
TABLES_PN = torch.zeros(NUM_TABLES, TABLE_WIDTH, dtype=torch.int32)


@dataclass(frozen=True)
class Part:
    """A sequence of a batch: `num_new` of its `context_len` tokens are computed, and draft tokens after them."""

    context_len: int
    num_new: int = 1
    num_drafts: int = 0


def make_batch(parts: Sequence[int | Part], num_rows_kept: int | None = None, seed: int = 0) -> Batch:
    """Sequences on blocks of their own, decodes first; a number stands for a decode. Tokens and blocks differ from seed to seed."""
    chance = random.Random(seed)
    free_blocks = chance.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    free_rows = chance.sample(range(NUM_TABLES), NUM_TABLES)
    slots: list[int] = []
    positions: list[int] = []
    starts = [0]
    context_lens: list[int] = []
    rows: list[int] = []
    entries: list[tuple[int, int, int]] = []
    for part in (Part(one) if isinstance(one, int) else one for one in parts):
        row, stop = free_rows.pop(), part.context_len + part.num_drafts
        table = [free_blocks.pop() for _ in range(0, stop, BLOCK_SIZE)]
        entries += [(row, place, block) for place, block in enumerate(table)]
        slots += slots_of(table, part.context_len - part.num_new, stop, BLOCK_SIZE)
        positions += range(part.context_len - part.num_new, stop)
        starts += range(starts[-1] + part.num_new, len(slots) + 1)
        context_lens += range(part.context_len, stop + 1)
        rows += [row] * (1 + part.num_drafts)
    num_padding = max(0, ModelRunner.min_tokens - len(slots))
    kept = sorted(chance.sample(range(len(slots)), num_rows_kept or len(slots)))
    num_decodes = sum(stop - start == 1 for start, stop in pairwise(starts))
    attention = flatten(slots + [-1] * num_padding, starts, context_lens, rows, num_decodes=num_decodes)
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
        if name in ("qwen3_moe", "deepseek_v3"):
            self.model.set_experts_implementation("batched_mm")  # on a CPU the others wait for the device
        self.cache = KVCache(kv_layout(self.model.config, has_latents=False), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
        self.cache.block_tables_PN = TABLES_PN
        generator = torch.Generator().manual_seed(1)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_(generator=generator)
        self.cache.attach(self.model)
        self.recorder = recorder or TapeRecorder()
        self.graphs = StepGraphs(
            functools.partial(compute_logits, self.model),
            self.recorder,
            max_num_rows=max_num_rows,
            max_num_tokens=MAX_TOKENS,
            block_tables_PN=TABLES_PN,
            block_size=BLOCK_SIZE,
        )

    def capture(self) -> "Setup":
        while self.graphs.capture_next():
            pass
        return self

    def kv(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (*self.cache.keys, *self.cache.values)]

    def restore(self, tensors: list[Tensor]) -> None:
        for tensor, was in zip((*self.cache.keys, *self.cache.values), tensors, strict=True):
            tensor.copy_(was)

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


@given(max_num_tokens=st.integers(1, 10**5))
def test_steps_with_prompts_are_padded_by_few_tokens(max_num_tokens: int) -> None:
    sizes = mixed_sizes(max_num_tokens)
    assert sizes[-1:] == ([min(max_num_tokens, 2048)] if max_num_tokens > SHORT_CHUNK else [])
    for smaller, larger in pairwise(sizes):
        assert smaller < larger <= smaller + max(64, smaller // 8)


def test_sizes_by_default_are_few() -> None:
    assert graph_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert len(mixed_sizes(2048)) == 26


@given(data=st.data(), max_num_rows=st.integers(32, 300), max_num_tokens=st.integers(300, 2500))
def test_a_step_within_the_bounds_finds_a_graph(data: st.DataObject, max_num_rows: int, max_num_tokens: int) -> None:
    num_decodes = data.draw(st.integers(0, max_num_rows - 16))
    room = min(max_num_tokens, 2048) - num_decodes
    num_prompts = data.draw(st.integers(1, min(16, room // (SHORT_CHUNK + 1))))
    num_tokens = num_decodes + data.draw(st.integers(num_prompts * (SHORT_CHUNK + 1), room))
    wanted = GraphShape(num_tokens, num_decodes, num_prompts, num_decodes + num_prompts)
    sizes = mixed_sizes(max_num_tokens)
    chosen = next(size for size in sizes if GraphShape.of_mixed(size, max_num_rows).has_room_for(wanted))
    assert chosen == min(size for size in sizes if size >= num_tokens), "no larger one than its tokens need"


# What was in a graph's tensors before, of a larger batch, must not show in the next one. The third number is of the graph in its order.
STEPS: list[tuple[Sequence[int | Part], int, int]] = [
    ((30,), 1, 3),
    ((1, 41, 17), 3, 1),
    ((9, 60), 2, 2),
    ((Part(20, num_drafts=3),), 4, 1),
    ((Part(30, num_drafts=2), 41, 5, Part(20, 20), Part(33, 9)), 6, 4),
    ((12, Part(44, 25)), 2, 5),
    ((9, Part(40, num_drafts=2), Part(11, 11), Part(60, 10)), 4, 5),
    ((Part(40, 40),), 1, 4),
    ((Part(64, 13),), 1, 6),
    ((1, Part(9, 9)), 2, 6),
]


@pytest.mark.parametrize("name", FORMS)
def test_every_architecture_computes_the_same_in_a_graph(name: str) -> None:
    setup = Setup(name, max_num_rows=6).capture()
    assert list(map(str, setup.graphs.shapes)) == [
        *(f"{size} decodes" for size in (6, 4, 2, 1)),
        *(f"{size} tokens" for size in (40, 32, 16)),
    ]
    expected = [0] * len(setup.graphs.shapes)
    for seed, (parts, num_kept, number) in enumerate(STEPS):
        batch = make_batch(parts, num_kept, seed=seed)
        before = setup.kv()
        logits = setup.replayed(batch)
        assert logits is not None
        in_graph = setup.kv()
        setup.restore(before)
        torch.testing.assert_close(logits, setup.eager(batch), atol=5e-5, rtol=0)
        torch.testing.assert_close(in_graph, setup.kv(), atol=5e-5, rtol=0)
        expected[number] += 1
        assert setup.recorder.num_replays == expected
    assert setup.graphs.num_steps == {("decode", True): 4, ("mixed", True): 6}


@pytest.mark.parametrize(
    "parts",
    [
        (5, 6, 7, 8, 9),
        (5, Part(20, num_drafts=3)),
        (Part(41, 41),),
        (5, 6, 7, 8, 9, Part(20, 20)),
        (*[Part(9, 9)] * 4, Part(4, 4)),
    ],
    ids=["decodes", "drafts", "tokens", "decodes beside a prompt", "prompts"],
)
def test_what_no_graph_has_room_for_is_not_replayed(llama: Setup, parts: Sequence[int | Part], caplog: pytest.LogCaptureFixture) -> None:
    before = list(llama.recorder.num_replays)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert llama.replayed(make_batch(parts, 1)) is None
    assert llama.recorder.num_replays == before
    assert caplog.text.count("runs without a CUDA graph") <= 1


def test_a_step_that_scores_more_rows_than_a_graph_has_is_not_replayed(llama: Setup) -> None:
    parts = (5, Part(20, 20))
    assert llama.replayed(make_batch(parts, 5)) is None
    assert llama.replayed(make_batch(parts, 4)) is not None


@pytest.mark.parametrize("num_rows_kept", [1, 2, 3])
@pytest.mark.parametrize("last", [14, Part(14, 12)])
def test_only_the_kept_rows_come_back(llama: Setup, num_rows_kept: int, last: int | Part) -> None:
    batch = make_batch((9, 30, last), num_rows_kept)
    logits = llama.replayed(batch)
    assert logits is not None
    torch.testing.assert_close(logits, llama.eager(batch), atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("before", "after", "seed"),
    [
        ((9, 30, 14, 50), (12, 33, 7), 1),
        ((9, 30, Part(60, 20), Part(12, 9)), (12, Part(60, 20)), 3),
        ((Part(32, 32),), (Part(17, 17),), 5),
    ],
    ids=["decodes", "mixed", "prompts"],
)
def test_padding_touches_no_slot_and_a_row_only_its_own(
    llama: Setup, before: Sequence[int | Part], after: Sequence[int | Part], seed: int
) -> None:
    full, small = make_batch(before, 1, seed=seed), make_batch(after, 1, seed=seed + 1)
    assert llama.replayed(full) is not None  # leaves its slots and tables in the graph's tensors
    tensors = llama.kv()
    assert llama.replayed(small) is not None
    slots = small.inputs.attention.slot_mapping_T
    for tensor, was in zip(llama.kv(), tensors, strict=True):
        is_changed = (tensor != was).flatten(2).any(-1).flatten()
        assert sorted(is_changed.nonzero()[:, 0].tolist()) == sorted(slots.tolist())


def test_loading_copies_in_all_that_differs_between_batches() -> None:
    own = padding(GraphShape(num_tokens=32, num_decodes=5, num_prompts=3, num_kept=6), TABLES_PN, max_context_len=MAX_LEN)
    batches: list[tuple[Sequence[int | Part], list[int]]] = [
        ((9, 30, Part(12, num_drafts=1), Part(50, 12), Part(9, 9)), [0, 1, 2, 3, 4, 4, 16, 25, 25]),
        ((Part(40, 11),), [0, 0, 0, 0, 0, 0, 11, 11, 11]),
        ((12, 33, Part(14, 14)), [0, 1, 2, 2, 2, 2, 16, 16, 16]),
        ((12, 33, 9, 10, 11, *[Part(9, 9)] * 3), [0, 1, 2, 3, 4, 5, 14, 23, 32]),
    ]
    for seed, (parts, starts) in enumerate(batches):
        inputs = make_batch(parts, 3, seed=seed).inputs
        load(own, inputs)
        given, num_tokens = inputs.attention, inputs.input_ids_1T.numel()
        metadata = AttentionMetadata.unpack(own.attention.packed, TABLES_PN)  # the fields are views of it
        assert own.input_ids_1T[0].tolist() == inputs.input_ids_1T[0].tolist() + [0] * (32 - num_tokens)
        assert own.positions_1T[0].tolist() == inputs.positions_1T[0].tolist() + [0] * (32 - num_tokens)
        assert own.kept_T.tolist() == inputs.kept_T.tolist() + [0] * 3
        assert metadata.slot_mapping_T.tolist() == given.slot_mapping_T.tolist() + [-1] * (32 - num_tokens)
        assert metadata.query_start_loc.tolist() == starts
        for mine, theirs in [(metadata.context_lens_B, given.context_lens_B), (metadata.table_rows_B, given.table_rows_B)]:
            decodes, prompts = theirs[: given.num_decodes].tolist(), theirs[given.num_decodes :].tolist()
            assert mine.tolist() == decodes + [0] * (5 - len(decodes)) + prompts + [0] * (3 - len(prompts))
        assert (metadata.num_decodes, metadata.max_query_len, metadata.max_context_len) == (5, 32, MAX_LEN)


def test_a_capture_that_fails_leaves_the_graphs_before_it_and_the_other_kind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(recorder=TapeRecorder(fail_at=1))
    with caplog.at_level(logging.WARNING):
        setup.capture()
    assert list(map(str, setup.graphs.shapes)) == ["4 decodes", "40 tokens", "32 tokens", "16 tokens"]
    assert "Steps of 2 decodes and fewer run without CUDA graphs: RuntimeError: CUDA error" in caplog.text
    assert setup.replayed(make_batch((5, 6))) is None
    assert setup.replayed(make_batch((5, 6, 7))) is not None
    setup = Setup(recorder=TapeRecorder(fail_at=4))
    with caplog.at_level(logging.WARNING):
        setup.capture()
    assert "Steps with prompts of 32 tokens and fewer run without CUDA graphs: RuntimeError: CUDA error" in caplog.text
    assert setup.replayed(make_batch((5, Part(20, 20)), 1)) is None
    assert setup.replayed(make_batch((5, Part(36, 36)), 1)) is not None


def test_a_graph_that_another_rank_could_not_capture_is_dropped_on_this_one() -> None:
    setup = Setup()
    others = iter([True, False, *[True] * 10])
    setup.graphs._agree = lambda is_captured: next(others) and is_captured
    setup.capture()
    assert list(map(str, setup.graphs.shapes)) == ["4 decodes", "40 tokens", "32 tokens", "16 tokens"]
    setup = Setup(recorder=TapeRecorder(fail_at=1))
    said: list[bool] = []
    setup.graphs._agree = lambda is_captured: said.append(is_captured) or is_captured  # type: ignore[func-returns-value]
    setup.capture()
    assert said == [True, False, True, True, True], "the other ranks wait for the word of one that fails"


def test_a_model_that_waits_for_the_device_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def forward(input_ids_1T: Tensor, positions_1T: Tensor, metadata: AttentionMetadata, kept_K: Tensor) -> Tensor:
        scale = 2.0 if positions_1T.max() > MAX_LEN else 1.0
        return input_ids_1T[0, kept_K, None].float() * scale

    graphs = StepGraphs(
        forward, TapeRecorder(), max_num_rows=4, max_num_tokens=MAX_TOKENS, block_tables_PN=TABLES_PN, block_size=BLOCK_SIZE
    )
    with caplog.at_level(logging.WARNING):
        while graphs.capture_next():
            pass
    assert graphs.shapes == []
    assert "Steps of 4 decodes and fewer run without CUDA graphs: RuntimeError: operation not permitted" in caplog.text
    assert "Steps with prompts of 40 tokens and fewer run without CUDA graphs: RuntimeError: operation not permitted" in caplog.text
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
    forward = functools.partial(compute_logits, loaded.model)
    cache = core.runner.cache
    sizes: dict[str, Any] = {"max_num_rows": 4, "max_num_tokens": 24, "block_size": BLOCK_SIZE, "num_groups": len(cache.groups)}
    graphs = StepGraphs(forward, recorder, block_tables_PN=cache.block_tables_PN, **sizes)
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
    assert len(recorder.captured) == 5
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
