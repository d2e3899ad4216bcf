"""Compiles constraints off the event loop, each once, by the first backend that accepts it; caches and counts them."""

import asyncio
import functools
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from penstock.engine.constraints.limits import check_limits, check_size, is_small
from penstock.engine.constraints.queue import GrammarQueue, Job
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.structure import Either, Repeat, Sequence, Structure, Value
from penstock.engine.errors import ConfigurationError, ConstraintTooLarge, EngineUnavailable, QueueFull, UnsupportedGrammar, UnsupportedKind
from penstock.engine.system.process import CompileClock, Histogram, heap_bytes, release_heap

MAX_BYTES = 2**29
MAX_GROWTH = 2**30  # of the heap since the first grammar: what grammars add while they are used is not counted
MEASURE_SECONDS = 0.1  # between two measurements of the heap: each takes some microseconds for each arena, and grammars grow by being used
RELEASE_BYTES = 2**26  # of evicted grammars: the C library keeps their memory, in pieces that the next ones do not fit into
MAX_REFUSALS = 1024
TIME_LIMIT = 10.0
BUSY_SHARE = 0.5  # of a processor: a compilation that got less of it in all its time says nothing of the constraint
RETRY_SECONDS = 5
MAX_REFUSAL = 1000  # characters of a message, and as many of a path
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class CompileOutcome(StrEnum):
    """How a backend's attempt at a constraint ended."""

    COMPILED = "compiled"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """`num_attempts` and `seconds` are by backend, and have counted since the start as have queries and hits. The others are of now."""

    num_attempts: Mapping[tuple[str, CompileOutcome], int]
    seconds: Mapping[str, Histogram]
    num_cache_queries: int
    num_cache_hits: int
    num_cache_entries: int
    num_cache_bytes: int
    num_running: int
    num_waiting: int


class CompileCounts:
    """Counted in the threads that compile, read in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_attempts: Counter[tuple[str, CompileOutcome]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def add(self, backend: str, outcome: CompileOutcome, seconds: float) -> None:
        with self._lock:
            self._num_attempts[backend, outcome] += 1
            self._seconds.setdefault(backend, Histogram(BOUNDS)).observe(seconds)

    def read(self) -> tuple[dict[tuple[str, CompileOutcome], int], dict[str, Histogram]]:
        """Copies, which go on as they are."""
        with self._lock:
            return dict(self._num_attempts), {name: times.copy() for name, times in self._seconds.items()}


# A number, a pattern and a format: each makes engines build tables of their own.
_WARM_UP_SCHEMA = """{"type": "object", "properties":
 {"a": {"type": "integer", "minimum": 1}, "b": {"type": "string", "pattern": "^\\\\w$"}, "c": {"type": "string", "format": "date"}}}"""


class VocabularySource(Protocol):
    """The part of a tokenizer that grammars need."""

    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a constraint is not compiled. `path` goes on from the constraint's own, where `is_relative`.

    What is long is cut off: names in a schema may be as long as the whole, and refusals are kept.
    """

    message: str
    path: str
    is_relative: bool = True

    @classmethod
    def of(cls, error: UnsupportedGrammar, param: str) -> "Refusal":
        path = error.param or param
        return cls(_shortened(error.message), _shortened(path.removeprefix(param)), path.startswith(param))

    def error(self, param: str) -> UnsupportedGrammar:
        """A new exception: one that is raised again collects tracebacks."""
        return UnsupportedGrammar(self.message, param + self.path if self.is_relative else self.path)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the name of the backend that compiled it. `heap_bytes` is what the heap had then, where that was measured."""

    grammar: CompiledGrammar
    backend: str
    heap_bytes: int | None = None


class Abandoned(Exception):
    """No request waits for the compilation any more: it ended before the next backend was called."""


NO_REFUSALS: Mapping[str, Refusal] = {}


class GrammarChoice:
    """The backends, each made when it is first needed, or all by `warm_up`. `factories` are in the order in which they were registered."""

    def __init__(
        self,
        factories: Mapping[str, Callable[[Vocabulary], GrammarBackend]],
        tokenizer: VocabularySource,
        vocab_size: int,
        stop_token_ids: Iterable[int],
    ) -> None:
        self.factories = factories
        self.counts = CompileCounts()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._backends: dict[str, GrammarBackend] = {}
        self._making = threading.Lock()

    def order(self, kind: GrammarKind) -> list[str]:
        """Those that prefer this kind first; otherwise as registered."""
        return sorted(self.factories, key=lambda name: kind not in preferred_kinds(self.factories[name]))

    def compile(
        self,
        spec: GrammarSpec,
        backend_name: str | None,
        unsupported_by: Mapping[str, Refusal] = NO_REFUSALS,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Compiled | Refusal:
        """By the named backend, or by the first that takes the constraint, unless one before it says that it is too large for any. Slow.

        Backends in `unsupported_by` are skipped. Raises `Abandoned` if no request waits for it any more.

        Of several refusals it is the preferred backend's that is returned; one that only says that a backend does not support this
        kind of constraint is returned only if there is no other.
        """
        refusals: list[tuple[bool, Refusal]] = []
        for name in self.order(spec.kind) if backend_name is None else (backend_name,):
            if not is_wanted():
                raise Abandoned
            if name in unsupported_by:
                refusals.append((False, unsupported_by[name]))
                continue
            try:
                return Compiled(self._counted(name, spec), name)
            except ConstraintTooLarge as error:
                return Refusal.of(error, spec.param)
            except UnsupportedGrammar as error:
                refusals.append((isinstance(error, UnsupportedKind), Refusal.of(error, spec.param)))
        refusals.sort(key=lambda refusal: refusal[0])
        return refusals[0][1] if refusals else Refusal("no grammar backend is loaded", "")

    def warm_up(self) -> None:
        """Makes all backends, and runs the lazy initialization of those that common constraints use. Takes up to a second."""
        for name in self.factories:
            self._backend(name)
        for spec in (GrammarSpec(GrammarKind.JSON_SCHEMA, _WARM_UP_SCHEMA), GrammarSpec(GrammarKind.CHOICE, '["a"]')):
            self.compile(spec, None)
        self.counts = CompileCounts()

    def _counted(self, name: str, spec: GrammarSpec) -> CompiledGrammar:
        outcome = CompileOutcome.FAILED
        clock = CompileClock()
        try:
            with clock:
                grammar = self._backend(name).compile(spec)
            _check_derived(name, grammar, CompiledGrammar)
            outcome = CompileOutcome.COMPILED
            return grammar
        except UnsupportedGrammar:
            outcome = CompileOutcome.REFUSED
            raise
        except RecursionError:
            outcome = CompileOutcome.REFUSED
            raise ConstraintTooLarge("nested too deeply", spec.param) from None
        finally:
            self.counts.add(name, outcome, clock.seconds)

    def _backend(self, name: str) -> GrammarBackend:
        with self._making:
            if name not in self._backends:
                backend = self.factories[name](self._vocabulary)
                _check_derived(name, backend, GrammarBackend)
                self._backends[name] = backend
            return self._backends[name]

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary(self._vocab_size, self._stop_token_ids)


def preferred_kinds(factory: Callable[[Vocabulary], GrammarBackend]) -> frozenset[GrammarKind]:
    """Those of a backend's class; a factory that is a function has none."""
    if isinstance(factory, GrammarBackend) or (isinstance(factory, type) and issubclass(factory, GrammarBackend)):
        return factory.preferred_kinds
    return frozenset()


def _check_derived(name: str, made: object, contract: type) -> None:
    if not isinstance(made, contract):
        raise ConfigurationError(
            f"the grammar backend {name!r} makes a {type(made).__name__}, which does not derive from `penstock.{contract.__name__}`"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REFUSAL else f"{text[: MAX_REFUSAL - 3]}..."


def is_lenient(spec: GrammarSpec) -> bool:
    """Whether anything in it may be left unenforced. The constraint has passed its limits, so it nests only so deeply."""
    return spec.is_lenient or (spec.structure is not None and _is_lenient_structure(spec.structure))


def exact(spec: GrammarSpec) -> GrammarSpec:
    """The same constraint with nothing left unenforced."""
    if not is_lenient(spec):
        return spec
    return replace(spec, is_lenient=False, structure=None if spec.structure is None else _exact_structure(spec.structure))


def _is_lenient_structure(structure: Structure) -> bool:
    match structure:
        case Value(spec):
            return is_lenient(spec)
        case Sequence(parts) | Either(parts):
            return any(_is_lenient_structure(part) for part in parts)
        case Repeat(part):
            return _is_lenient_structure(part)
    return False


def _exact_structure(structure: Structure) -> Structure:
    match structure:
        case Value(spec):
            return Value(exact(spec))
        case Sequence(parts):
            return Sequence(tuple(_exact_structure(part) for part in parts))
        case Either(parts):
            return Either(tuple(_exact_structure(part) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(_exact_structure(part), minimum, maximum)
    return structure


Outcome = Compiled | Refusal


class _HeapMeter:
    """Measures the heap now and then. For any thread."""

    def __init__(self, heap_bytes: Callable[[], int]) -> None:
        self._heap_bytes = heap_bytes
        self._next_at = 0.0

    def read(self) -> int | None:
        """None where it was measured a moment ago."""
        now = time.monotonic()
        if now < self._next_at:
            return None
        self._next_at = now + MEASURE_SECONDS
        return self._heap_bytes()


@dataclass(slots=True, eq=False)
class _Flight:
    """One compilation and how many requests wait for it. It is `abandoned` once all of their clients have gone."""

    job: Job
    abandoned: threading.Event
    num_waiters: int = 0


class GrammarCompiler:
    """Compiles and caches the grammars of all requests, each at most once at a time; refusals are cached too.

    `factories` are the backends by name, in the order in which they were registered. Each is made when it is first needed,
    or by `warm_up`.
    `max_bytes` bounds the grammars kept, evicting the least recently used; one in use stays alive with its sequences. Where the heap has
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
        release_heap: Callable[[], None] = release_heap,
    ) -> None:
        self._choice = GrammarChoice(factories, tokenizer, vocab_size, stop_token_ids)
        self._queue = GrammarQueue()
        self._max_bytes = max_bytes
        self._time_limit = time_limit
        self._grammars: OrderedDict[str, Compiled] = OrderedDict()
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()
        self._unsupported_by: OrderedDict[str, dict[str, Refusal]] = OrderedDict()  # by backend
        self._flights: dict[str, _Flight] = {}
        self._heap_meter = _HeapMeter(heap_bytes)
        self._release_heap = release_heap
        self._first_heap_bytes: int | None = None
        self._num_evicted_bytes = 0  # since the heap was last released
        self.num_bytes = 0
        self._num_queries = 0
        self._num_hits = 0

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar:
        """The grammar of `spec`, by the named backend or by the first that takes it; exactly, or else as leniently as the spec allows.

        `client` is the client that the work counts for. Raises `UnsupportedGrammar` where the constraint is too large, where no backend
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

    def report_unsupported(self, grammar: CompiledGrammar, reason: str) -> None:
        """Remembers that the grammar's backend raised `UnsupportedGrammar` while it generated.

        Next time another backend compiles the constraint; if none can, it is refused at once.
        """
        key = next((key for key, kept in self._grammars.items() if kept.grammar is grammar), None)
        if key is None:  # reported before, or not kept
            return
        kept = self._grammars.pop(key)
        self.num_bytes -= kept.grammar.num_bytes
        self._unsupported_by.setdefault(key, {})[kept.backend] = Refusal(reason[:MAX_REFUSAL], "")
        self._unsupported_by.move_to_end(key)
        if len(self._unsupported_by) > MAX_REFUSALS:
            self._unsupported_by.popitem(last=False)

    def warm_up(self) -> None:
        """Initializes the backends before the first constraint, which would block the loop. Blocks for up to a second."""
        self._choice.warm_up()

    def _kept(self, key: str) -> Outcome | None:
        if key in self._grammars:
            self._grammars.move_to_end(key)
            return self._grammars[key]
        return self._refusals.get(key)

    async def _compiled(self, key: str, spec: GrammarSpec, backend_name: str | None, client: str | None) -> Outcome:
        flight = self._flights.get(key) or self._begin(key, spec, backend_name, client)
        flight.num_waiters += 1
        flight.abandoned.clear()
        try:
            return await self._within_limit(flight.job)
        except TimeoutError:
            raise self._timeout_error(flight.job, spec) from None
        except asyncio.CancelledError:
            if flight.num_waiters == 1:
                flight.abandoned.set()
            raise
        except Abandoned:  # it ended before this request arrived
            return await self._compiled(key, spec, backend_name, client)
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters and self._queue.cancel(flight.job):
                del self._flights[key]

    def _begin(self, key: str, spec: GrammarSpec, backend_name: str | None, client: str | None) -> _Flight:
        unsupported_by = dict(self._unsupported_by.get(key, NO_REFUSALS))
        abandoned = threading.Event()  # the work knows no more of the flight: in a circle, a grammar would outlive its place in the cache
        work = functools.partial(
            _outcome, self._choice, spec, backend_name, unsupported_by, lambda: not abandoned.is_set(), self._heap_meter
        )
        flight = _Flight(self._queue.submit(work, client), abandoned)
        flight.job.done.add_done_callback(functools.partial(self._collect, key, flight))
        self._flights[key] = flight
        return flight

    def _timeout_error(self, job: Job, spec: GrammarSpec) -> Exception:
        """The error for a request whose constraint is not compiled in time. Its job goes on, and the result is cached."""
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
            # Not cancelled: other requests may wait for the same grammar.
            await asyncio.wait([job.done], timeout=left + 0.001)
            if job.done.done():
                outcome: Outcome = job.done.result()
                return outcome
        raise TimeoutError

    def _collect(self, key: str, flight: _Flight, done: "asyncio.Future[Outcome]") -> None:
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
        # Grammars that no request waits for are evicted first.
        num_bytes = compiled.grammar.num_bytes
        if num_bytes > self._max_bytes:
            return
        self._grammars[key] = compiled
        self._grammars.move_to_end(key, last=is_wanted)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        if compiled.heap_bytes is not None:
            self._first_heap_bytes = compiled.heap_bytes if self._first_heap_bytes is None else self._first_heap_bytes
            if compiled.heap_bytes - self._first_heap_bytes > MAX_GROWTH:
                # Half of them, as what each has grown by is not known; the next measurement tells whether more have to go.
                for _ in range(len(self._grammars) // 2):
                    self._drop_oldest()
        if self._num_evicted_bytes >= RELEASE_BYTES:
            self._num_evicted_bytes = 0
            asyncio.get_running_loop().run_in_executor(None, self._release_heap)

    def _drop_oldest(self) -> None:
        num_bytes = self._grammars.popitem(last=False)[1].grammar.num_bytes
        self.num_bytes -= num_bytes
        self._num_evicted_bytes += num_bytes

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
        assert len(self._unsupported_by) <= MAX_REFUSALS
        self._queue.check_integrity()

    def close(self) -> None:
        """Compiles nothing more; returns at once."""
        self._queue.close()


def _outcome(
    choice: GrammarChoice,
    spec: GrammarSpec,
    backend_name: str | None,
    unsupported_by: Mapping[str, Refusal],
    is_wanted: Callable[[], bool],
    heap_meter: _HeapMeter,
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
        outcome = choice.compile(attempt, backend_name, unsupported_by, is_wanted)
        if isinstance(outcome, Compiled):
            return replace(outcome, heap_bytes=heap_meter.read())
    assert outcome is not None
    return outcome


def _key(spec: GrammarSpec, backend_name: str | None) -> str:
    """A digest: a cache of refused schemas should not keep megabytes of them. Members' order is part of the text.

    Raises `UnsupportedGrammar` for a constraint too large to read.

    The field itself counts only where it is in what comes out: in the warnings of a lenient grammar.
    """
    check_size(spec)
    whole = spec if spec.is_lenient else replace(spec, param="")
    return hashlib.sha256(repr((whole, backend_name)).encode("utf-8", "surrogatepass")).hexdigest()
