"""Whatever is scheduled ahead, aborted, preempted, drafted or loaded: each block that can be found holds what its hash says."""

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.kv_cache import persistence
from penstock.engine.kv_cache.blocks import HASH_BYTES, PrefixKey, chain_hashes, group_of_key, max_blocks_held
from penstock.engine.request import BACKGROUND
from penstock.engine.runner import StepHandle
from penstock.engine.scheduling.step import Step
from tests.fakes import LETTERS, letter_like_before, make_core, make_request, runner_of, tokens

MAX_MODEL_LEN = 44
Contents = tuple[list[int], list[int]]  # token ids and positions, which are what a fake runner has for keys and values


class LateThread:
    """In place of the model's: computes a step when its results are waited for, and nothing before."""

    def __init__(self, core: EngineCore) -> None:
        runner = runner_of(core)
        runner.thread.shutdown()
        runner.thread = self  # type: ignore[assignment]
        assert core.scheduler.persistence is not None
        core.scheduler.persistence.loader._submit = self.submit
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._tasks.append((future, lambda: function(*arguments)))
        return future

    def run(self, until: "Future[Any] | None" = None) -> None:
        while self._tasks and not (until is not None and until.done()):
            future, task = self._tasks.popleft()
            future.set_result(task())


class Worker:
    """In place of a thread that reads or writes files: `run` does what was submitted."""

    all: ClassVar[list["Worker"]] = []

    def __init__(self, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self.all.append(self)

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)

    def close(self, seconds: float = 0.0) -> None:
        self.run()

    def run(self) -> None:
        while self._tasks:
            self._tasks.popleft()()


@pytest.fixture(autouse=True, scope="module")
def workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistence, "_Worker", Worker)
        patch.setattr(persistence, "LOAD_BYTES", 200)
        yield


@dataclass
class Blocks:
    """What the blocks of some token sequences hold, by their hashes."""

    block_size: int
    known: dict[bytes, Contents] = field(default_factory=dict)

    def add(self, token_ids: list[int], salt: str = "") -> None:
        hashes: list[bytes] = []
        chain_hashes(token_ids, self.block_size, hashes, PrefixKey(salt))
        for place, block_hash in enumerate(hashes):
            positions = range(place * self.block_size, (place + 1) * self.block_size)
            self.known[block_hash] = ([token_ids[position] for position in positions], list(positions))

    def check_memory(self, core: EngineCore, step_in_flight: Step | None = None) -> None:
        """Of the blocks that can be found, but for those that a step in flight is to fill."""
        pool, cache = core.scheduler.pool, core.runner.cache
        for block in set(range(pool.num_blocks)) - set(step_in_flight.promised if step_in_flight else ()):
            key = pool.hash_of(block)
            if key is not None:
                keys, values = (own[group_of_key(key)][block].flatten().tolist() for own in (cache.keys, cache.values))
                assert (keys, values) == self.known[key[:HASH_BYTES]], "a block in memory holds something else"

    def check_files(self, core: EngineCore) -> int:
        """Of all there are; returns how many."""
        assert core.scheduler.persistence is not None
        files, num_files = core.scheduler.persistence.files, 0
        assert files is not None
        for path in files.root.glob("*/*/*.kv"):
            key = bytes.fromhex(path.stem)
            held = torch.frombuffer(files.format.decode(key, bytearray(path.read_bytes())), dtype=torch.int64).tolist()
            assert (held[: self.block_size], held[self.block_size :]) == self.known[key[:HASH_BYTES]], "a file holds something else"
            num_files += 1
        return num_files


def launch(core: EngineCore, step: Step | None) -> tuple[Step, Batch, StepHandle] | None:
    if step is None:
        return None
    batch = core.build(step)
    return step, batch, core.runner.launch(batch)


def test_a_block_that_a_step_ahead_has_taken_is_not_written_before_that_step_is_computed(tmp_path: Path) -> None:
    core = make_core(kv_cache_dir=tmp_path, is_async=True, num_blocks=4, max_model_len=16)
    thread, (writer, finder, _) = LateThread(core), Worker.all[-3:]
    first, second = LETTERS[:8], LETTERS[::-1][:15]
    core.add(make_request("first", first))
    finder.run()
    in_flight = launch(core, core.schedule())
    assert in_flight is not None
    step, batch, _ = in_flight
    core.abort("first")
    core.add(make_request("second", second, max_tokens=1))
    finder.run()
    follower = launch(core, core.schedule_ahead(step, batch))
    assert follower is not None
    assert set(step.promised) & set(follower[0].promised), "the second request has got a block of the first"
    blocks = Blocks(4)
    blocks.add(second)
    for each in (in_flight, follower):
        thread.run(each[2].future)
        core.update(*each[:2], each[2].collect())
        writer.run()
    blocks.check_memory(core)
    assert blocks.check_files(core) == 3
    core.close()


@dataclass
class Arrival:
    """A request of `core`, and when it comes and goes, in half-steps."""

    begin: int
    leaves_after: int | None
    prompt: list[int]
    options: dict[str, Any]
    deltas: list[SequenceDelta] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        token_ids = list(self.prompt)
        for _ in range(self.options["max_tokens"]):
            token_ids.append(letter_like_before(token_ids))
        return token_ids[len(self.prompt) :]


ARRIVALS = st.builds(
    Arrival,
    st.integers(0, 30),
    st.one_of(st.none(), st.none(), st.integers(0, 12)),
    st.builds(
        lambda head, length, tail: (head * 40)[:length] + tail,
        st.sampled_from([LETTERS[:1], LETTERS[:3]]),
        st.integers(1, 22),
        st.lists(st.sampled_from(LETTERS[:2]), max_size=2),
    ),
    st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([1, 5, 12, 16]),
            "n": st.sampled_from([1, 1, 2]),
            "priority": st.sampled_from([0, 1, BACKGROUND]),
            "cache_salt": st.sampled_from(["", "", "salt"]),
        }
    ),
)


@given(
    plan=st.lists(ARRIVALS, min_size=3, max_size=12),
    rng=st.randoms(use_true_random=False),
    block_size=st.sampled_from([1, 2, 4]),
    num_spare_blocks=st.sampled_from([0, 0, 2, 6]),
    max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=st.sampled_from([4, 9, 16, 200]),
    windows=st.sampled_from([(None,), (None,), (None, 5), (None, 9, 3)]),
    is_async=st.booleans(),
    rows_for_weights=st.sampled_from([None, 20.0]),
    max_bytes=st.sampled_from([3000, 2**20]),
)
@settings(max_examples=12, deadline=None)
def test_each_block_that_can_be_found_holds_what_its_hash_says(
    plan: list[Arrival],
    rng: Random,
    block_size: int,
    num_spare_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    windows: Sequence[int | None],
    is_async: bool,
    rows_for_weights: float | None,
    max_bytes: int,
) -> None:
    blocks = Blocks(block_size)
    for arrival in plan:
        arrival.deltas.clear()
        blocks.add(arrival.prompt + arrival.answer, arrival.options["cache_salt"])
    with tempfile.TemporaryDirectory() as directory:
        core = make_core(
            letter_like_before,
            block_size=block_size,
            num_blocks=max_blocks_held(windows, MAX_MODEL_LEN, max(max_num_seqs, max_num_batched_tokens), block_size) + num_spare_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            rows_for_weights=rows_for_weights,
            is_async=is_async,
            windows=tuple(windows),
            kv_cache_dir=Path(directory),
            kv_cache_dir_size=max_bytes,
        )
        run_all(core, plan, blocks, rng)
        core.close()
        blocks.check_files(core)
    for arrival in plan:
        for index in range(arrival.options["n"]):
            said = tokens(arrival.deltas, index)
            assert said == (arrival.answer if arrival.leaves_after is None else arrival.answer[: len(said)])


def run_all(core: EngineCore, plan: list[Arrival], blocks: Blocks, rng: Random) -> None:
    """Runs the requests as the engine does. Steps are computed as late as can be, files read and written at any time."""
    thread, workers = LateThread(core), Worker.all[-3:]

    def interrupt(half_step: int) -> None:
        for number, arrival in enumerate(plan):
            if arrival.begin == half_step:
                core.add(make_request(str(number), arrival.prompt, ignore_eos=True, **arrival.options))
            if arrival.leaves_after is not None and arrival.begin + arrival.leaves_after == half_step:
                core.abort(str(number))
        core.check_integrity()
        for worker in workers:
            if rng.random() < 0.7:
                worker.run()

    flight: tuple[Step, Batch, StepHandle] | None = None
    for half_step in range(0, 4000, 2):
        interrupt(half_step)
        flight = flight or launch(core, core.schedule())
        if flight is None:
            if half_step > 50 and not core.has_work:
                return
            for worker in workers:
                worker.run()
            thread.run()
            interrupt(half_step + 1)
            continue
        step, batch, handle = flight
        flight = launch(core, core.schedule_ahead(step, batch))
        interrupt(half_step + 1)
        thread.run(handle.future)
        for request_id, deltas in core.update(step, batch, handle.collect()).items():
            plan[int(request_id)].deltas += deltas
        blocks.check_memory(core, None if flight is None else flight[0])
    raise AssertionError("it never ends")
