"""Replicas on a simulated clock: the scheduler, the block pool and the routers are the server's own; only the model's steps are a formula.

A conversation's next turn has the earlier ones as its beginning, so that what a replica has in its cache decides what it has to compute.
Steps in which a scheduler could decide nothing new are not scheduled one by one: see `SimulatedReplica`.
"""

import heapq
import json
import statistics
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.simulation_traffic import BLOCK_SIZE, Shape, Traffic, Turn
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager
from penstock.engine.request import Request
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.scheduling.admission import WaitingQueue
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import Step
from penstock.engine.sequence import Sequence
from penstock.engine.text.answer import Answer
from penstock.integrations.routing import CAPACITY, Router, RoutingName, build_router

MAX_SAME = 40  # steps that follow each other unscheduled: of more, most would be undone when a request comes
PROFILE = Path(__file__).parent / "results" / "profile_step.json"


class StepTime(Protocol):
    """How long a step takes, in seconds, and what a replica has room for."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    def seconds(self, num_tokens: int, num_rows: int, num_context_tokens: int) -> float:
        """Of a step that computes so many tokens of so many sequences, whose contexts add up to so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU by its data sheet: a step takes as long as its products, or as reading weights and KV cache, at a share of the peaks.

    Llama 3.1 8B in 16 bits: 8.03e9 parameters, 32 layers of 4,096, and 8 KV heads of 128, so 128 KiB for each token of the cache.
    """

    flops: float
    bytes_per_second: float
    memory_bytes: float
    flops_share: float = 0.5  # of the peak, in prefill
    bandwidth_share: float = 0.7
    host_seconds: float = 0.002  # of each step, for the host and launches
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192

    PARAMETERS = 8.03e9
    KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token
    ATTENTION_FLOPS = 4 * 32 * 4096  # of a token and a token of its context

    @property
    def num_blocks(self) -> int:
        room = self.memory_bytes * 0.9 - 2 * self.PARAMETERS - 4e9  # activations, graphs
        return int(room / self.KV_BYTES / BLOCK_SIZE)

    def seconds(self, num_tokens: int, num_rows: int, num_context_tokens: int) -> float:
        mean_context = num_context_tokens / num_rows
        flops = num_tokens * (2 * self.PARAMETERS + self.ATTENTION_FLOPS * mean_context)
        num_bytes = 2 * self.PARAMETERS + self.KV_BYTES * num_context_tokens
        return self.host_seconds + max(flops / (self.flops * self.flops_share), num_bytes / (self.bytes_per_second * self.bandwidth_share))


@dataclass(frozen=True, slots=True)
class Measured:
    """One core of the CPU that `profile_step.json` was measured on, with SmolLM2-135M: between its points, by straight lines."""

    decode_seconds: tuple[tuple[int, float], ...]  # by rows
    prompt_seconds: float  # of a token
    num_blocks: int = 96
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    @classmethod
    def read(cls, path: Path = PROFILE, num_prompt_tokens: int = 1024) -> "Measured":
        profile = json.loads(path.read_text(encoding="utf-8"))
        points = tuple((rows, profile[f"decode-{rows}"]["step"]["median_us"] / 1e6) for rows in (1, 8, 32))
        return cls(points, profile["prefill"]["step"]["median_us"] / 1e6 / num_prompt_tokens)

    def seconds(self, num_tokens: int, num_rows: int, num_context_tokens: int) -> float:
        (low, low_seconds), (high, high_seconds) = next(
            (pair for pair in zip(self.decode_seconds, self.decode_seconds[1:], strict=False) if num_rows <= pair[1][0]),
            self.decode_seconds[-2:],
        )
        decode = low_seconds + (num_rows - low) * (high_seconds - low_seconds) / (high - low)
        return decode + (num_tokens - num_rows) * self.prompt_seconds


# Dense 16-bit throughput, bandwidth and memory, of NVIDIA's data sheets: H100 SXM and A100 SXM 80 GB.
STEP_TIMES: dict[str, StepTime] = {
    "h100-8b": Roofline(989e12, 3.35e12, 80e9),
    "a100-8b": Roofline(312e12, 2.039e12, 80e9),
}


class SimulatedReplica:
    """A replica's scheduler and pool. `begin` schedules a step; `finish` is called when the clock has come to the end of the last one.

    Where every running sequence decodes and none waits, the next steps are the same as this one, until one of them ends, fills a block or
    needs another, or a request arrives. The scheduler is not asked for those: `begin` has them follow at once, and `interrupt` undoes
    those that begin after a request has come. That changes nothing, which a test shows; with `is_merging` off each is scheduled.
    """

    def __init__(self, number: int, step_time: StepTime, clock: "Clock", *, is_merging: bool = True) -> None:
        self.number = number
        self._time = step_time
        self._clock = clock
        self._is_merging = is_merging
        self.scheduler = Scheduler(
            KVCacheManager(BlockPool(step_time.num_blocks), BLOCK_SIZE),
            max_num_seqs=step_time.max_num_seqs,
            max_num_batched_tokens=step_time.max_num_batched_tokens,
            waiting=WaitingQueue(max_sequences=10**9, clock=lambda: clock.now),
        )
        self.step: Step | None = None
        self.ends: list[float] = []  # of that step and those that follow as it is
        self._began = 0.0
        self._num_first = 0  # tokens that the step computes
        self.event = 0  # the number of that which is to come at the last of them
        self.turns: dict[Sequence, Turn] = {}
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0

    def add(self, turn: Turn, arrival: int) -> None:
        conversation = turn.conversation
        turn.prompt_tokens, turn.replica = len(conversation.tokens), self.number
        request = Request(
            request_id="",
            prompt_token_ids=cast("list[int]", range(turn.prompt_tokens)),  # of which the scheduler asks the length
            params=PARAMS,
            make_answer=NO_ANSWER,
            block_hashes=conversation.hashes,
        )
        sequence = Sequence(
            request=request,
            index=0,
            arrival=arrival,
            token_ids=cast("list[int]", conversation.tokens),
            block_hashes=conversation.hashes,
            max_tokens=turn.num_output_tokens,
            answer=cast(Answer, None),
            sampling=cast(Any, None),
        )
        self.turns[sequence] = turn
        self.scheduler.add(sequence)

    def begin(self) -> float | None:
        """Schedules the next step and those that follow as it is; when the last ends, or None where there is nothing to compute."""
        step = self.scheduler.schedule()
        if not step:
            return None
        num_rows, num_tokens, context = len(step.num_tokens), 0, 0
        may_repeat = self._is_merging and num_rows == len(self.scheduler.running) and not self.scheduler.waiting
        for sequence, number in step.num_tokens.items():
            num_tokens += number
            context += sequence.num_computed_tokens + number
            may_repeat = may_repeat and sequence.num_computed_tokens + 1 == len(sequence.token_ids)
        step.count_computed()
        self.step, self._began, self._num_first = step, self._clock.now, num_tokens
        end = self._clock.now + self._time.seconds(num_tokens, num_rows, context)
        self.ends = [end]
        if may_repeat:
            for _ in range(1, min(MAX_SAME, *map(self._num_same, step.num_tokens))):
                context += num_rows
                end += self._time.seconds(num_rows, num_rows, context)
                self.ends.append(end)
        return end

    def _num_same(self, sequence: Sequence) -> int:
        """The steps, this one included, until the sequence ends, has filled a block or needs one. Each computes the last of its tokens."""
        num_known, num_blocks = len(sequence.token_ids), len(sequence.token_ids) // BLOCK_SIZE
        to_boundary = (num_blocks + 1) * BLOCK_SIZE - num_known if num_known % BLOCK_SIZE else 1
        return min(to_boundary, sequence.max_tokens - sequence.num_output_tokens)

    def interrupt(self) -> float | None:
        """A request has come now: the last step is that which is under way. When it ends, or None where it is the last one anyway."""
        num_begun = bisect_left(self.ends, self._clock.now) + 1
        if num_begun >= len(self.ends):
            return None
        del self.ends[num_begun:]
        return self.ends[-1]

    def finish(self) -> list[Turn]:
        """The turns that end with the last step: each sequence whose known tokens are all computed has said one in each."""
        assert self.step is not None
        num_same = len(self.ends)
        ended = []
        for sequence in self.step.num_tokens:
            token_ids = sequence.token_ids
            sequence.num_computed_tokens += num_same - 1
            if sequence.num_computed_tokens < len(token_ids):
                continue
            turn = self.turns[sequence]
            if len(token_ids) == turn.prompt_tokens:
                turn.first_token = self.ends[0]
                turn.cached_tokens = sequence.num_cached_tokens
            turn.conversation.extend(num_same)  # whose tokens are the sequence's
            if len(token_ids) - turn.prompt_tokens >= turn.num_output_tokens:
                self.scheduler.finish(sequence)
                del self.turns[sequence]
                turn.end = self.ends[-1]
                ended.append(turn)
        self.busy_seconds += self.ends[-1] - self._began
        self.num_steps += num_same
        self.num_tokens += self._num_first + (num_same - 1) * len(self.step.num_tokens)
        self.step = None
        return ended


SHAPE = Shape()
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def NO_ANSWER() -> Answer:
    raise AssertionError("nothing reads the tokens")


@dataclass(slots=True)
class Clock:
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Drain:
    """Replaces one replica after the other from `start` on: each ends its requests, and is back, empty, `restart_seconds` later."""

    start: float
    restart_seconds: float = 60.0


@dataclass(slots=True)
class Outcome:
    turns: list[Turn]
    seconds: float
    busy: float
    num_steps: int
    num_tokens: int
    num_preemptions: int
    drain_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Returns:
    """The event that a replica is back from its restart."""

    number: int


@dataclass(frozen=True, slots=True)
class DrainsNext:
    """The event that the next replica is to be replaced."""


class Simulation:
    """So many requests a second and replica, chosen by a router. Everything is determined by the seed."""

    def __init__(
        self,
        step_time: StepTime,
        num_replicas: int,
        routing: RoutingName,
        requests_per_second: float,
        *,
        shape: Shape = SHAPE,
        seed: int = 0,
        drain: Drain | None = None,
        router_capacity: int = CAPACITY,
        is_merging: bool = True,
    ) -> None:
        self._step_time = step_time
        self._drain = drain
        self._is_merging = is_merging
        self._clock = Clock()
        self._traffic = Traffic(shape, requests_per_second * num_replicas / shape.mean_turns, seed)
        self._router: Router[int] = build_router(routing, seed, capacity=router_capacity)
        self.replicas = [self._new(number) for number in range(num_replicas)]
        self._replaced: list[SimulatedReplica] = []
        self._loads = dict.fromkeys(range(num_replicas), 0)
        self._events: list[tuple[float, int, Turn | SimulatedReplica | Returns | DrainsNext]] = []
        self._num_events = self._num_arrived = 0
        self._to_drain = list(range(num_replicas))
        self._draining: tuple[SimulatedReplica, float] | None = None
        self._drain_seconds: list[float] = []
        self._done: list[Turn] = []
        self._firsts = self._traffic.first_turns()

    def run(self, num_requests: int) -> Outcome:
        """Until so many requests have ended."""
        clock = self._clock
        self._push_first()
        if self._drain is not None:
            self._push(self._drain.start, DrainsNext())
        while len(self._done) < num_requests:
            clock.now, number_of_event, event = heapq.heappop(self._events)
            match event:
                case SimulatedReplica():
                    if event.event == number_of_event:  # else its steps were interrupted
                        self._end_step(event)
                case Turn():
                    self._arrive(event)
                case Returns(number):
                    self.replicas[number] = self._new(number)
                    self._loads[number] = 0
                    self._push(clock.now, DrainsNext())
                case DrainsNext():
                    self._drain_next()
        replicas = [*self.replicas, *self._replaced]
        return Outcome(
            self._done,
            clock.now,
            sum(replica.busy_seconds for replica in replicas) / (clock.now * len(self.replicas)),
            sum(replica.num_steps for replica in replicas),
            sum(replica.num_tokens for replica in replicas),
            sum(replica.scheduler.num_preemptions for replica in replicas),
            self._drain_seconds,
        )

    def _push(self, when: float, event: "Turn | SimulatedReplica | Returns | DrainsNext") -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, event))

    def _new(self, number: int) -> SimulatedReplica:
        return SimulatedReplica(number, self._step_time, self._clock, is_merging=self._is_merging)

    def _push_end(self, replica: SimulatedReplica, when: float) -> None:
        self._push(when, replica)
        replica.event = self._num_events

    def _push_first(self) -> None:
        turn = next(self._firsts)
        self._push(turn.arrival, turn)

    def _arrive(self, turn: Turn) -> None:
        if turn.is_first:
            self._push_first()
        self._num_arrived += 1
        prefixes = [int.from_bytes(value[:8], "little") for value in turn.conversation.extend(turn.num_new_tokens)]
        chosen = self._router.choose(prefixes, self._loads)
        self._router.routed(prefixes, chosen)
        self._loads[chosen] += 1
        replica = self.replicas[chosen]
        replica.add(turn, self._num_arrived)
        if replica.step is None:
            self._begin_step(replica)
        elif (end := replica.interrupt()) is not None:
            self._push_end(replica, end)

    def _begin_step(self, replica: SimulatedReplica) -> None:
        end = replica.begin()
        if end is not None:
            self._push_end(replica, end)

    def _end_step(self, replica: SimulatedReplica) -> None:
        now = self._clock.now
        for turn in replica.finish():
            self._done.append(turn)
            if replica.number in self._loads:
                self._loads[replica.number] -= 1
            following = self._traffic.next_turn(turn, now)
            if following is not None:
                self._push(following.arrival, following)
        self._begin_step(replica)
        if self._draining is not None and replica is self._draining[0] and not replica.turns:
            self._restart()

    def _drain_next(self) -> None:
        if not self._to_drain:
            return
        number = self._to_drain.pop(0)
        del self._loads[number]
        self._router.forget(number)
        self._draining = self.replicas[number], self._clock.now
        if not self.replicas[number].turns:
            self._restart()

    def _restart(self) -> None:
        """The replica that is drained has ended its last request."""
        assert self._draining is not None
        assert self._drain is not None
        replica, since = self._draining
        self._draining = None
        self._drain_seconds.append(self._clock.now - since)
        self._replaced.append(replica)
        self._push(self._clock.now + self._drain.restart_seconds, Returns(replica.number))


@dataclass(frozen=True, slots=True)
class Summary:
    """`goodput` counts the requests of a second and replica that met both bounds; `hit_rate` is the cached share of prompt tokens."""

    num_requests: int
    goodput: float
    met: float
    hit_rate: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    busy: float
    mean_prompt: float
    mean_output: float
    num_steps: int
    num_preemptions: int

    @classmethod
    def of(cls, outcome: Outcome, num_replicas: int, *, ttft_bound: float, tpot_bound: float, skip: float = 0.2) -> "Summary":
        """Without the requests that ended in the first `skip` of the time, when caches were empty."""
        turns = [turn for turn in outcome.turns if turn.arrival >= skip * outcome.seconds]
        ttft = [turn.first_token - turn.arrival for turn in turns]
        tpot = [(turn.end - turn.first_token) / max(1, turn.num_output_tokens - 1) for turn in turns]
        met = sum(first <= ttft_bound and per <= tpot_bound for first, per in zip(ttft, tpot, strict=True))
        prompts = sum(turn.prompt_tokens for turn in turns)
        return cls(
            len(turns),
            met / (outcome.seconds * (1 - skip)) / num_replicas,
            met / len(turns),
            sum(turn.cached_tokens for turn in turns) / prompts,
            statistics.median(ttft),
            quantile(ttft, 0.99),
            statistics.median(tpot),
            quantile(tpot, 0.99),
            outcome.busy,
            prompts / len(turns),
            sum(turn.num_output_tokens for turn in turns) / len(turns),
            outcome.num_steps,
            outcome.num_preemptions,
        )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
