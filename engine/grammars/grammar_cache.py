"""Compiles constraints off the event loop, each once, and keeps them."""

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.engine.errors import QueueFull, UnsupportedGrammar
from penstock.engine.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, Vocabulary
from penstock.engine.grammars.grammar_choice import GrammarChoice, Refusal, VocabularySource, exact, is_lenient
from penstock.engine.grammars.grammar_limits import check_limits, check_size, is_small
from penstock.engine.grammars.grammar_queue import GrammarQueue, Job
from penstock.engine.grammars.grammar_stats import GrammarStats
from penstock.engine.heap import heap_bytes

MAX_BYTES = 2**29
MAX_GROWTH = 2**30  # of the heap since the first grammar: what grammars add while they are used is not counted
MAX_REFUSALS = 1024
TIME_LIMIT = 10.0

Outcome = CompiledGrammar | Refusal


@dataclass(slots=True, eq=False)
class _Flight:
    """One compilation and how many requests wait for it."""

    job: Job
    num_waiters: int = 0


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
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._heap_bytes = heap_bytes
        self._first_heap_bytes: int | None = None
        self.num_bytes = 0
        self._num_queries = 0
        self._num_hits = 0

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar:
        """The grammar of `spec`, by the named backend or by the first that takes it; exactly, or else as leniently as the spec allows.

        `client` is whom to hold to account for the work. Raises `UnsupportedGrammar` where the constraint is too large, where no backend
        takes it or where the time limit passes, and `QueueFull` where too many others, or of this client's, wait to be compiled.
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
        return outcome

    def warm_up(self) -> None:
        """What the first constraint would wait for, and the loop with it, done beforehand. Blocks for up to a second."""
        self._choice.warm_up()

    def _kept(self, key: str) -> Outcome | None:
        if key in self._grammars:
            self._grammars.move_to_end(key)
            return self._grammars[key]
        return self._refusals.get(key)

    async def _compiled(self, key: str, spec: GrammarSpec, backend_name: str | None, client: str | None) -> Outcome:
        flight = self._flights.get(key)
        if flight is None:
            job = self._queue.submit(functools.partial(_outcome, self._choice, spec, backend_name), client)
            flight = self._flights[key] = _Flight(job)
            job.done.add_done_callback(functools.partial(self._land, key))
        flight.num_waiters += 1
        try:
            outcome = await self._within_limit(flight.job)
        except TimeoutError:
            if not flight.job.is_started:
                raise QueueFull("too many constraints are being compiled") from None
            raise UnsupportedGrammar(f"compiling the constraint took longer than {self._time_limit:g} s", spec.param) from None
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters and self._queue.withdraw(flight.job):
                del self._flights[key]
        return outcome

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

    def _land(self, key: str, done: "asyncio.Future[Outcome]") -> None:
        if done.cancelled():
            return
        del self._flights[key]
        if done.exception() is not None:
            return
        outcome = done.result()
        if not isinstance(outcome, Refusal):
            self._keep(key, outcome)
            return
        self._refusals[key] = outcome
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _keep(self, key: str, grammar: CompiledGrammar) -> None:
        if grammar.num_bytes > self._max_bytes:
            return
        self._grammars[key] = grammar
        self.num_bytes += grammar.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        if self._first_heap_bytes is None:
            self._first_heap_bytes = self._heap_bytes()
        # Half at a time: measuring takes some microseconds for each arena, and what a grammar has grown by is not known.
        while len(self._grammars) > 1 and self._heap_bytes() - self._first_heap_bytes > MAX_GROWTH:
            for _ in range(len(self._grammars) // 2):
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.num_bytes -= self._grammars.popitem(last=False)[1].num_bytes

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
        assert self.num_bytes == sum(grammar.num_bytes for grammar in self._grammars.values()) <= self._max_bytes
        assert not self._flights
        assert len(self._refusals) <= MAX_REFUSALS
        self._queue.check_integrity()

    def close(self) -> None:
        """Compiles nothing more; returns at once."""
        self._queue.close()


def _outcome(choice: GrammarChoice, spec: GrammarSpec, backend_name: str | None) -> Outcome:
    """Runs in a thread. Every backend is asked to be exact before any may be lenient, and for the closed reading before the constraint
    as written.

    Of several refusals the last counts, which is about the constraint as the client wrote it.
    """
    readings = [spec] if spec.as_written is None else [spec, spec.as_written]
    attempts = [exact(reading) for reading in readings] + [reading for reading in readings if is_lenient(reading)]
    outcome: Outcome | None = None
    for attempt in attempts:
        outcome = _attempted(choice, attempt, backend_name)
        if not isinstance(outcome, Refusal):
            break
    assert outcome is not None
    return outcome


def _attempted(choice: GrammarChoice, spec: GrammarSpec, backend_name: str | None) -> Outcome:
    try:
        check_limits(spec)
    except UnsupportedGrammar as error:
        return Refusal.of(error, spec.param)
    return choice.compile(spec, backend_name)


def _key(spec: GrammarSpec, backend_name: str | None) -> str:
    """A digest: a cache of refused schemas should not keep megabytes of them. Members' order is part of the text.

    Raises `UnsupportedGrammar` for what is too large to be looked at.

    The field itself counts only where it is in what comes out: in the warnings of a lenient grammar.
    """
    check_size(spec)
    whole = spec if spec.is_lenient else replace(spec, param="")
    return hashlib.sha256(repr((whole, backend_name)).encode("utf-8", "surrogatepass")).hexdigest()
