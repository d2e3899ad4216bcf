"""What waits is bounded by what it is, and every request is scheduled in the end, whatever others ask for."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest
import torch

from penstock.cli.flags import parse_arguments
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import QueueFull
from penstock.engine.multimodal.inputs import PromptImage
from penstock.engine.multimodal.vectors import embeds_at
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.engine import PoolingQueue, WaitingInput
from penstock.engine.pooling.model import PoolingInput, PoolingParams
from penstock.engine.scheduling import admission
from penstock.llm.model import engine_arguments
from penstock.serving.endpoints.answers import AT_ONCE, MAX_OPEN, merge
from penstock.serving.models.startup import min_priority
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve
from tests.fakes import LETTERS, drive, make_core, make_request


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def step(core: EngineCore) -> list[str]:
    """The requests in the next step."""
    scheduled = core.schedule()
    assert scheduled is not None
    batch = core.build(scheduled)
    core.update(scheduled, batch, core.runner.launch(batch).collect())
    core.check_integrity()
    return [sequence.request.request_id for sequence in scheduled.num_tokens]


@pytest.mark.parametrize(("aging_seconds", "num_before"), [(60.0, 6), (0.0, 20)])
def test_a_waiting_request_ages_past_all_priorities(aging_seconds: float, num_before: int) -> None:
    """Every ten seconds another comes that is more urgent, and each takes ten seconds."""
    clock = Clock()
    core = make_core(max_num_seqs=1, aging_seconds=aging_seconds, clock=clock)
    core.add(make_request("patient", max_tokens=1))
    finished: list[str] = []
    for number in range(20):
        core.add(make_request(f"urgent {number}", max_tokens=1, priority=-(2**31)))
        finished += step(core)
        clock.now += 10
    assert finished[:num_before] == [f"urgent {number}" for number in range(num_before)]
    assert finished[num_before:][:1] == ["patient"] * (num_before < 20)


def test_an_aged_request_is_not_preempted_for_a_more_urgent_one() -> None:
    clock = Clock()
    core = make_core(num_blocks=50, max_num_seqs=2, aging_seconds=60, clock=clock)
    core.add(make_request("aged", LETTERS[:1] * 90, max_tokens=100, priority=5))
    clock.now = 60
    while "aged" not in step(core):
        pass
    core.add(make_request("urgent", LETTERS[:2] * 40, max_tokens=100, priority=-5))
    preempted = set()
    while core.has_work:
        step(core)
        preempted |= {sequence.request.request_id for sequence in core.scheduler.waiting}
    assert core.stats().num_preemptions
    assert preempted == {"urgent"}


def test_each_of_the_answers_to_a_request_counts_as_waiting() -> None:
    core = make_core(max_waiting=8)
    core.add(make_request("many", n=8, max_tokens=1))
    with pytest.raises(QueueFull):
        core.add(make_request("one", max_tokens=1))
    drive(core)
    core.add(make_request("one", max_tokens=1))
    core.check_integrity()


def test_tokens_of_waiting_prompts_are_bounded_and_an_idle_engine_takes_any_request() -> None:
    core = make_core(max_waiting=1, max_waiting_tokens=10)
    core.add(make_request("long", LETTERS[:1] * 100, n=8, max_tokens=1))
    with pytest.raises(QueueFull) as refusal:
        core.scheduler.waiting.check_admission()
    assert refusal.value.retry_after > 0
    drive(core)
    core.add(make_request("a", LETTERS[:1] * 9, max_tokens=1))
    core.abort("a")
    core.scheduler.waiting.check_admission()
    core.check_integrity()


def test_bytes_of_waiting_images_and_vectors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_EMBED_BYTES", 1000)
    core = make_core()
    queue = core.scheduler.waiting
    for name in "ab":
        core.add(make_request(name, [1, 1], max_tokens=1))
    first, second = queue
    for sequence in (first, second):
        queue.remove(sequence)
        sequence.request.embeds = (PromptImage([0], b"image", {"pixels": torch.zeros(100)}), embeds_at([1], torch.zeros(1, 150)))
    queue.add(first)
    with pytest.raises(QueueFull, match="1000 bytes of images"):
        queue.add(second)
    queue.check_integrity()
    queue.remove(first)
    queue.add(second)


def test_texts_to_be_pooled_are_bounded_and_age_alike() -> None:
    async def scenario() -> None:
        clock = Clock()
        queue = PoolingQueue(4, 100, max_waiting_tokens=12, aging_seconds=60, clock=clock)

        def add(priority: int) -> WaitingInput:
            tokens = PoolingInput(EncoderInput([priority + 1] * 4), PoolingParams(task="embed"))
            waiting = WaitingInput(tokens, asyncio.get_running_loop().create_future())
            queue.add(waiting, priority)
            return waiting

        patient, cancelled = add(5), add(0)
        clock.now = 60
        urgent = add(-5)
        with pytest.raises(QueueFull):
            add(0)
        cancelled.future.cancel()
        with pytest.raises(QueueFull):
            add(-5)  # not searched again for each that is refused
        clock.now += 1
        another = add(-5)
        assert [queue.take_batch() for _ in range(4)] == [[patient], [urgent], [another], []]
        queue.check_admission()

    asyncio.run(scenario())


def test_a_refused_text_may_come_again_once_those_that_wait_have_been_computed() -> None:
    async def scenario() -> None:
        clock = Clock()
        queue = PoolingQueue(10, 4, clock=clock)

        def add() -> None:
            tokens = PoolingInput(EncoderInput([1] * 10), PoolingParams(task="embed"))
            queue.add(WaitingInput(tokens, asyncio.get_running_loop().create_future()), 0)

        for _ in range(4):
            add()
        with pytest.raises(QueueFull) as caught:
            add()
        assert caught.value.retry_after == 4, "nothing has been measured, and a batch is taken to last a second"
        for _ in range(3):
            queue.take_batch()
            clock.now += 5
            add()
        with pytest.raises(QueueFull) as caught:
            add()
        assert caught.value.retry_after == 20

    asyncio.run(scenario())


def test_the_bound_on_tokens_comes_from_the_cache_where_none_is_given() -> None:
    assert EngineConfig().num_waiting_tokens(1000) == 32_000
    assert EngineConfig(max_waiting_tokens=7).num_waiting_tokens(1000) == 7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_priority_below_the_operators_bound_is_refused(path: str) -> None:
    async def scenario(server: Running) -> None:
        body = CHAT if "chat" in path else {"prompt": "Hi"}
        status, answer = await server.post(path, body | {"priority": -1})
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert "--min-priority" in answer["error"]["message"]
        for priority in (0, 7, None):
            assert (await server.post(path, body | {"priority": priority}))[0] == 200
        assert [request.priority for request in server.engine.requests] == [0, 7, 0]

    serve(scenario, ServerOptions(min_priority=0))


def test_clients_with_keys_of_their_own_have_no_priority_over_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert min_priority(parse_arguments(["--api-key", "one", "two"]).server) == 0
    assert min_priority(parse_arguments(["--api-key", "one", "two", "--min-priority", "-3"]).server) == -3
    assert min_priority(parse_arguments(["--api-key", "one"]).server) is None
    assert min_priority(parse_arguments(["--scheduling-policy", "fcfs"]).server) == 0


def test_a_librarys_callers_are_not_bounded() -> None:
    config = engine_arguments(None, {}).engine
    assert config.priority_aging == 0
    assert config.max_waiting_tokens == config.max_waiting_requests == 2**31


class Full:
    """An engine with room for so many streams. The first `num_ahead` that are opened find it full of others'."""

    def __init__(self, room: int, num_ahead: int = 0) -> None:
        self.room, self.num_ahead = room, num_ahead
        self.num_open = self.most_open = self.most_at_once = 0
        self.num_since_yield = 0

    async def stream(self) -> AsyncGenerator[SequenceDelta, None]:
        if self.num_open >= self.room or self.num_ahead:
            self.num_ahead = max(0, self.num_ahead - 1)
            raise QueueFull("full", 60)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.num_since_yield += 1
        try:
            await asyncio.sleep(0)
            self.most_at_once, self.num_since_yield = max(self.most_at_once, self.num_since_yield), 0
            yield SequenceDelta(0, token_ids=[1])
        finally:
            self.num_open -= 1


def test_one_request_with_more_prompts_than_may_wait_is_served_where_it_is_alone() -> None:
    async def scenario() -> None:
        engine = Full(room=10)
        deltas = [delta.index async for delta in merge([engine.stream] * 100, 1)]
        assert sorted(deltas) == list(range(100))
        assert engine.most_open == 10

    asyncio.run(scenario())


def test_a_request_whose_first_prompt_finds_the_queue_full_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(QueueFull):
            _ = [delta async for delta in merge([Full(room=10, num_ahead=1).stream] * 100, 1)]

    asyncio.run(scenario())


@pytest.mark.parametrize(("n", "at_once"), [(1, AT_ONCE), (16, AT_ONCE // 16), (64, 1)])
def test_sequences_of_many_prompts_are_added_in_slices(n: int, at_once: int) -> None:
    async def scenario() -> None:
        engine = Full(room=1000)
        _ = [delta async for delta in merge([engine.stream] * 200, n)]
        assert engine.most_at_once == at_once
        assert engine.most_open <= max(1, MAX_OPEN // n)

    asyncio.run(scenario())
