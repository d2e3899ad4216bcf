"""Compiles constraints off the event loop, each once, and keeps them."""

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.engine.errors import EngineUnavailable, QueueFull, UnsupportedGrammar
from penstock.engine.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, Vocabulary
from penstock.engine.grammars.grammar_choice import (
    MAX_REFUSAL,
    NOTHING_GIVEN_UP,
    Abandoned,
    Compiled,
    GrammarChoice,
    Refusal,
    VocabularySource,
    exact,
    is_lenient,
)
from penstock.engine.grammars.grammar_limits import check_limits, check_size, is_small
from penstock.engine.grammars.grammar_queue import GrammarQueue, Job
from penstock.engine.grammars.grammar_stats import GrammarStats
from penstock.engine.heap import heap_bytes

MAX_BYTES = 2**29
MAX_GROWTH = 2**30  # of the heap since the first grammar: what grammars add while they are used is not counted
MAX_REFUSALS = 1024
TIME_LIMIT = 10.0
BUSY_SHARE = 0.5  # of a processor: a compilation that got less of it in all its time says nothing of the constraint
RETRY_SECONDS = 5

Outcome = Compiled | Refusal


@dataclass(slots=True, eq=False)
class _Flight:
    """One compilation and how many requests wait for it. It `is_abandoned` once all of their clients have gone."""

    job: Job = field(init=False)
    num_waiters: int = 0
    is_abandoned: bool = False


class GrammarCompiler:
    """Every request's way to its grammar: compiled at most once at a time, kept while memory allows; refusals are kept too.

    `factories` are the backends by name, in the order in which they were registered. Each is made when it is first needed,
    or by `warm_up`.
    `max_bytes` bounds the grammars kept, least recently used ones going first; one in use lives on with its sequences. Where the heap has
    grown by more than `MAX_GROWTH` all the same, by what grammars add while they are used, older ones go too.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[Vocabulary], GrammarBackend]],
        tokenizer: VocabularySource,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        max_bytes: int = MAX_BYTES,
        time_limit: float = TIME_LIMIT,
        heap_bytes: Callable[[], int] = heap_bytes,
    ) -> None:
        self._choice = GrammarChoice(factories, tokenizer, vocab_size, stop_token_ids)
        self._queue = GrammarQueue()
        self._max_bytes = max_bytes
        self._time_limit = time_limit
        self._grammars: OrderedDict[str, Compiled] = OrderedDict()
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()
        self._given_up: OrderedDict[str, dict[str, Refusal]] = OrderedDict()  # by backend
        self._flights: dict[str, _Flight] = {}
        self._heap_bytes = heap_bytes
        self._first_heap_bytes: int | None = None
        self.num_bytes = 0
        self._num_queries = 0
        self._num_hits = 0

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar:
        """The grammar of `spec`, by the named backend or by the first that takes it; exactly, or else as leniently as the spec allows.

        `client` is whom to hold to account for the work. Raises `UnsupportedGrammar` where the constraint is too large, where no backend
        takes it or where the time limit passes, `QueueFull` where too many others, or of this client's, wait to be compiled, and
        `EngineUnavailable` where the time limit passes because the machine is busy.
        """
        assert backend_name is None or backend_name in self._choice.factories
        key = _key(spec, backend_name) if is_small(spec) else await asyncio.to_thread(_key, spec, backend_name)
        outcome = self._kept(key)
        self._num_queries += 1
        self._num_hits += outcome is not None
        if outcome is None:
            outcome = await self._compiled(key, spec, backend_name, client)
        if isinstance(outcome, Refusal):
            raise outcome.error(spec.param)
        return outcome.grammar

    def give_up(self, grammar: CompiledGrammar, reason: str) -> None:
        """Remembers that the grammar's backend raised `UnsupportedGrammar` while it generated.

        The constraint is compiled by another backend the next time; where none can, it is refused at once.
        """
        key = next((key for key, kept in self._grammars.items() if kept.grammar is grammar), None)
        if key is None:  # reported before, or not kept
            return
        kept = self._grammars.pop(key)
        self.num_bytes -= kept.grammar.num_bytes
        self._given_up.setdefault(key, {})[kept.backend] = Refusal(reason[:MAX_REFUSAL], "")
        self._given_up.move_to_end(key)
        if len(self._given_up) > MAX_REFUSALS:
            self._given_up.popitem(last=False)

    def warm_up(self) -> None:
        """What the first constraint would wait for, and the loop with it, done beforehand. Blocks for up to a second."""
        self._choice.warm_up()

    def _kept(self, key: str) -> Outcome | None:
        if key in self._grammars:
            self._grammars.move_to_end(key)
            return self._grammars[key]
        return self._refusals.get(key)

    async def _compiled(self, key: str, spec: GrammarSpec, backend_name: str | None, client: str | None) -> Outcome:
        flight = self._flights.get(key) or self._begin(key, spec, backend_name, client)
        flight.num_waiters += 1
        flight.is_abandoned = False
        try:
            return await self._within_limit(flight.job)
        except TimeoutError:
            raise self._overdue(flight.job, spec) from None
        except asyncio.CancelledError:
            flight.is_abandoned = flight.num_waiters == 1
            raise
        except Abandoned:  # it saw that before this request came
            return await self._compiled(key, spec, backend_name, client)
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters and self._queue.withdraw(flight.job):
                del self._flights[key]

    def _begin(self, key: str, spec: GrammarSpec, backend_name: str | None, client: str | None) -> _Flight:
        flight = _Flight()
        given_up = dict(self._given_up.get(key, NOTHING_GIVEN_UP))
        work = functools.partial(_outcome, self._choice, spec, backend_name, given_up, lambda: not flight.is_abandoned)
        flight.job = self._queue.submit(work, client)
        flight.job.done.add_done_callback(functools.partial(self._land, key, flight))
        self._flights[key] = flight
        return flight

    def _overdue(self, job: Job, spec: GrammarSpec) -> Exception:
        """What a request is told whose constraint is not compiled in time. Its job goes on, and the result is kept for the next."""
        if not job.is_started:
            return QueueFull("too many constraints are being compiled")
        seconds = job.cpu_seconds
        if seconds is not None and seconds < BUSY_SHARE * self._time_limit:
            return EngineUnavailable("the machine is too busy to compile the constraint: try again later", RETRY_SECONDS)
        return UnsupportedGrammar(f"compiling the constraint took longer than {self._time_limit:g} s", spec.param)

    async def _within_limit(self, job: Job) -> Outcome:
        """Raises `TimeoutError`. What a backend starts for the first that needs it does not count."""
        until = job.clock.seconds + self._time_limit
        while (left := until - job.clock.seconds) > 0:
            # Not cancelled: a client that gives up does not take the grammar from others who wait for it.
            await asyncio.wait([job.done], timeout=left + 0.001)
            if job.done.done():
                outcome: Outcome = job.done.result()
                return outcome
        raise TimeoutError

    def _land(self, key: str, flight: _Flight, done: "asyncio.Future[Outcome]") -> None:
        if done.cancelled():
            return
        del self._flights[key]
        if done.exception() is not None:
            return
        outcome = done.result()
        if not isinstance(outcome, Refusal):
            self._keep(key, outcome, is_wanted=flight.num_waiters > 0)
            return
        self._refusals[key] = outcome
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _keep(self, key: str, compiled: Compiled, *, is_wanted: bool) -> None:
        """What no request waits for any more is the first to be dropped: it does not take the place of others."""
        num_bytes = compiled.grammar.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._grammars[key] = compiled
        self._grammars.move_to_end(key, last=is_wanted)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        if self._first_heap_bytes is None:
            self._first_heap_bytes = self._heap_bytes()
        # Half at a time: measuring takes some microseconds for each arena, and what a grammar has grown by is not known.
        while len(self._grammars) > 1 and self._heap_bytes() - self._first_heap_bytes > MAX_GROWTH:
            for _ in range(len(self._grammars) // 2):
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.num_bytes -= self._grammars.popitem(last=False)[1].grammar.num_bytes

    def stats(self) -> GrammarStats:
        num_attempts, seconds = self._choice.counts.read()
        return GrammarStats(
            num_attempts=num_attempts,
            seconds=seconds,
            num_cache_queries=self._num_queries,
            num_cache_hits=self._num_hits,
            num_cache_entries=len(self._grammars),
            num_cache_bytes=self.num_bytes,
            num_running=self._queue.num_running,
            num_waiting=self._queue.num_waiting,
        )

    def check_integrity(self) -> None:
        """Asserts that what is kept adds up and that nothing is left waiting. For tests, between requests."""
        assert self.num_bytes == sum(kept.grammar.num_bytes for kept in self._grammars.values()) <= self._max_bytes
        assert not self._flights
        assert len(self._refusals) <= MAX_REFUSALS
        assert len(self._given_up) <= MAX_REFUSALS
        self._queue.check_integrity()

    def close(self) -> None:
        """Compiles nothing more; returns at once."""
        self._queue.close()


def _outcome(
    choice: GrammarChoice, spec: GrammarSpec, backend_name: str | None, given_up: Mapping[str, Refusal], is_wanted: Callable[[], bool]
) -> Outcome:
    """Runs in a thread. Every backend is asked to be exact before any may be lenient, and for the closed reading before the constraint
    as written.

    Of several refusals the last counts, which is about the constraint as the client wrote it. Raises `Abandoned`.
    """
    readings = [spec] if spec.as_written is None else [spec, spec.as_written]
    attempts = [exact(reading) for reading in readings] + [reading for reading in readings if is_lenient(reading)]
    outcome: Outcome | None = None
    for attempt in attempts:
        try:
            check_limits(attempt)
        except UnsupportedGrammar as error:
            outcome = Refusal.of(error, attempt.param)
            continue
        outcome = choice.compile(attempt, backend_name, given_up, is_wanted)
        if isinstance(outcome, Compiled):
            break
    assert outcome is not None
    return outcome


def _key(spec: GrammarSpec, backend_name: str | None) -> str:
    """A digest: a cache of refused schemas should not keep megabytes of them. Members' order is part of the text.

    Raises `UnsupportedGrammar` for what is too large to be looked at.

    The field itself counts only where it is in what comes out: in the warnings of a lenient grammar.
    """
    check_size(spec)
    whole = spec if spec.is_lenient else replace(spec, param="")
    return hashlib.sha256(repr((whole, backend_name)).encode("utf-8", "surrogatepass")).hexdigest()
