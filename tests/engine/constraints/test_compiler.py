import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from penstock.engine.constraints import queue
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.contracts.structure import Literal, Repeat, Sequence, Value
from penstock.engine.errors import EngineUnavailable, QueueFull, UnsupportedGrammar
from penstock.engine.system.process import uncounted


class Tokens:
    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary:
        return Vocabulary((b"a", b"b", None), logits_width, frozenset(stop_token_ids), "a, b and an end")


@dataclass
class Grammar(CompiledGrammar):
    text: str
    num_bytes: int
    warnings: tuple[str, ...] = ()

    def matcher(self) -> GrammarMatcher:
        raise AssertionError("nothing here runs a grammar")


@dataclass
class Backend(GrammarBackend):
    """Compiles texts that begin with `prefix`; waits for `gate` first."""

    prefix: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    compiled: list[str] = field(default_factory=list)
    vocabularies: list[Vocabulary] = field(default_factory=list)

    def factory(self, vocabulary: Vocabulary) -> "Backend":
        self.vocabularies.append(vocabulary)
        return self

    def compile(self, spec: GrammarSpec) -> Grammar:
        assert self.gate.wait(10)
        self.compiled.append(spec.text)
        if not spec.text.startswith(self.prefix):
            raise UnsupportedGrammar(f"{spec.text} does not start with {self.prefix}", f"{spec.param}.here")
        return Grammar(spec.text, 10)


def opened(prefix: str = "") -> Backend:
    backend = Backend(prefix)
    backend.gate.set()
    return backend


def compiler(*backends: Backend, max_bytes: int = 100, time_limit: float = 10.0) -> GrammarCompiler:
    factories = {f"backend{i}": backend.factory for i, backend in enumerate(backends)}
    return GrammarCompiler(factories, Tokens(), 3, [2], max_bytes=max_bytes, time_limit=time_limit)


def regex(text: str, param: str = "guided_regex") -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text, param)


def test_a_grammar_is_compiled_once_and_then_shared() -> None:
    backend = opened()
    grammars = compiler(backend)

    async def run() -> None:
        first = await grammars.compile(regex("a"))
        assert await grammars.compile(regex("a", "structured_outputs.regex")) is first
        assert await grammars.compile(regex("b")) is not first

    asyncio.run(run())
    assert backend.compiled == ["a", "b"]
    stats = grammars.stats()
    assert (stats.num_cache_queries, stats.num_cache_hits, stats.num_cache_entries) == (3, 1, 2)
    assert stats.num_cache_bytes == grammars.num_bytes
    assert stats.num_attempts == {("backend0", "compiled"): 2}
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    grammars.check_integrity()


def test_no_backend_is_made_before_the_first_constraint() -> None:
    backend = opened()
    grammars = compiler(backend)
    assert not backend.vocabularies
    asyncio.run(grammars.compile(regex("a")))
    assert [vocabulary.size for vocabulary in backend.vocabularies] == [3]
    assert backend.vocabularies[0].stop_token_ids == {2}


def test_clients_that_ask_at_once_wait_for_one_compilation_and_the_loop_stays_free() -> None:
    backend = Backend()
    grammars = compiler(backend)

    async def run() -> list[object]:
        tasks = [asyncio.create_task(grammars.compile(regex("a"))) for _ in range(5)]
        await asyncio.sleep(0.05)  # the backend is waiting in its thread; this loop is not
        assert not any(task.done() for task in tasks)
        tasks.pop().cancel()
        backend.gate.set()
        return [await task for task in tasks]

    results = asyncio.run(run())
    assert len({id(result) for result in results}) == 1
    assert backend.compiled == ["a"]
    grammars.check_integrity()


def test_the_first_backend_that_takes_a_constraint_gets_it() -> None:
    first, second = opened("x"), opened("y")
    grammars = compiler(first, second)

    async def run() -> None:
        await grammars.compile(regex("y1"))
        await grammars.compile(regex("x1"))
        with pytest.raises(UnsupportedGrammar, match="z1 does not start with x"):
            await grammars.compile(regex("z1"))
        with pytest.raises(UnsupportedGrammar, match="x1 does not start with y"):
            await grammars.compile(regex("x1"), "backend1")

    asyncio.run(run())
    assert first.compiled == ["y1", "x1", "z1"]
    assert second.compiled == ["y1", "z1", "x1"]
    grammars.check_integrity()


def test_a_refusal_is_remembered_and_names_each_requests_own_field() -> None:
    backend = opened("x")
    grammars = compiler(backend)

    async def refusal(param: str) -> UnsupportedGrammar:
        with pytest.raises(UnsupportedGrammar) as caught:
            await grammars.compile(regex("a", param))
        return caught.value

    async def run() -> list[UnsupportedGrammar]:
        return [await refusal("guided_regex"), await refusal("structured_outputs.regex")]

    refusals = asyncio.run(run())
    assert [refusal.param for refusal in refusals] == ["guided_regex.here", "structured_outputs.regex.here"]
    assert refusals[0].message == refusals[1].message
    assert backend.compiled == ["a"]


def test_the_least_recently_used_grammars_make_room() -> None:
    backend = opened()
    grammars = compiler(backend, max_bytes=30)

    async def run() -> None:
        for text in ("a", "b", "c", "a", "d", "a", "b"):
            await grammars.compile(regex(text))
            grammars.check_integrity()

    asyncio.run(run())
    assert backend.compiled == ["a", "b", "c", "d", "b"]


def test_the_heap_is_released_when_many_grammars_have_been_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.constraints.compiler.RELEASE_BYTES", 30)
    backend, released = opened(), threading.Semaphore(0)
    grammars = GrammarCompiler({"backend": backend.factory}, Tokens(), 3, [2], max_bytes=20, release_heap=released.release)

    async def compile_more(texts: str) -> None:
        for text in texts:
            await grammars.compile(regex(text))

    async def run() -> None:
        await compile_more("abcd")  # two are evicted
        assert not released.acquire(blocking=False)
        await compile_more("e")
        assert await asyncio.to_thread(released.acquire, timeout=10)
        await compile_more("fg")

    asyncio.run(run())
    assert not released.acquire(blocking=False)


def test_a_grammar_larger_than_the_cache_is_given_but_not_kept() -> None:
    backend = opened()
    grammars = compiler(backend, max_bytes=5)

    async def run() -> None:
        assert await grammars.compile(regex("a")) is not await grammars.compile(regex("a"))

    asyncio.run(run())
    grammars.check_integrity()


def test_what_a_backend_starts_first_does_not_count_as_compiling() -> None:
    class Starting(Backend):
        def compile(self, spec: GrammarSpec) -> Grammar:
            with uncounted():
                time.sleep(0.8)
            return super().compile(spec)

    backend = Starting()
    backend.gate.set()
    grammars = compiler(backend, time_limit=0.5)
    assert asyncio.run(grammars.compile(regex("a"))).num_bytes == 10


def test_a_compilation_that_takes_too_long_is_refused_and_its_result_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "thread_seconds", lambda native_id: 0.05)
    backend = Backend()
    grammars = compiler(backend, time_limit=0.05)

    async def run() -> None:
        with pytest.raises(UnsupportedGrammar, match="took longer") as caught:
            await grammars.compile(regex("a"))
        assert caught.value.param == "guided_regex"
        backend.gate.set()
        await until(lambda: bool(grammars.num_bytes))
        await grammars.compile(regex("a"))

    asyncio.run(run())
    assert backend.compiled == ["a"]
    grammars.check_integrity()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to pass")


def test_a_failing_backend_fails_its_request_and_nothing_stays_pending() -> None:
    class Broken(GrammarBackend):
        def compile(self, spec: GrammarSpec) -> Grammar:
            raise ZeroDivisionError

    grammars = GrammarCompiler({"broken": lambda vocabulary: Broken()}, Tokens(), 3, [2])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(grammars.compile(regex("a")))
    grammars.check_integrity()


def test_more_constraints_than_can_wait_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_PENDING", 3)
    backend = Backend()
    grammars = compiler(backend)

    async def run() -> None:
        tasks = [asyncio.create_task(grammars.compile(regex(text))) for text in "abc"]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await grammars.compile(regex("d"))
        backend.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    grammars.check_integrity()
    grammars.close()


def test_requests_that_wait_when_it_is_closed_get_an_error() -> None:
    backend = Backend()
    grammars = compiler(backend)

    async def run() -> None:
        tasks = [asyncio.create_task(grammars.compile(regex(text))) for text in ("a", "b", "b", "c")]
        await asyncio.sleep(0)
        grammars.close()
        backend.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Grammar] + [EngineUnavailable] * 3

    asyncio.run(run())
    grammars.check_integrity()


def value(spec: GrammarSpec) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=Sequence((Literal("x"), Value(spec))))


def test_all_that_matters_is_part_of_the_key_and_nothing_else() -> None:
    backend = opened()
    grammars = compiler(backend, opened(), max_bytes=1000)
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"a":1,"b":2}')
    different = [
        spec,
        replace(spec, text='{"b":2,"a":1}'),
        replace(spec, whitespace_pattern=" "),
        replace(spec, whitespace_pattern=""),
        replace(spec, kind=GrammarKind.LARK),
        replace(spec, is_lenient=True),
        replace(spec, is_lenient=True, param="elsewhere"),  # its warnings say where
        value(spec),
        value(replace(spec, is_lenient=True)),
        value(replace(spec, text="{}")),
        replace(value(spec), structure=Repeat(Value(spec))),
    ]

    async def run() -> None:
        kept = [await grammars.compile(spec) for spec in different]
        assert len({id(grammar) for grammar in kept}) == len(different)
        assert await grammars.compile(spec, "backend0") is not kept[0]
        assert await grammars.compile(replace(spec, param="elsewhere")) is kept[0]
        assert await grammars.compile(replace(value(spec), param="elsewhere"), client="someone") is kept[7]

    asyncio.run(run())
    grammars.check_integrity()


def test_what_is_too_large_reaches_no_backend_and_the_refusal_is_kept() -> None:
    backend = opened()
    grammars = compiler(backend)

    async def run() -> None:
        for spec in (regex("a" * 5000), regex("a" * 5000, "structured_outputs.regex"), regex("a" * 2**21)):
            with pytest.raises(UnsupportedGrammar, match="characters") as caught:
                await grammars.compile(spec)
            assert caught.value.param == spec.param

    asyncio.run(run())
    assert not backend.vocabularies
    grammars.check_integrity()


def test_one_client_cannot_keep_another_from_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_PENDING_OF_CLIENT", 3)
    monkeypatch.setattr(queue, "SLOW_SECONDS", 100)
    backend = Backend()
    grammars = compiler(backend)

    async def run() -> None:
        flood = [asyncio.create_task(grammars.compile(regex(str(i)), client="loud")) for i in range(10)]
        await asyncio.sleep(0)
        other = asyncio.create_task(grammars.compile(regex("other"), client="quiet"))
        joined = asyncio.create_task(grammars.compile(regex("other"), client="loud"))  # nothing more to compile
        await asyncio.sleep(0)
        backend.gate.set()
        assert await other is await joined
        outcomes = await asyncio.gather(*flood, return_exceptions=True)
        assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 7

    asyncio.run(run())
    assert backend.compiled == ["0", "1", "other", "2"]
    grammars.check_integrity()


def test_what_no_request_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SLOW_SECONDS", 100)
    backend = Backend()
    grammars = compiler(backend)

    async def run() -> None:
        first, second = [asyncio.create_task(grammars.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(grammars.compile(regex("b")))
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.wait([third])
        backend.gate.set()
        await first

    asyncio.run(run())
    assert backend.compiled == ["a"]
    grammars.check_integrity()


def test_a_constraint_whose_turn_does_not_come_in_time_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SLOW_SECONDS", 100)
    monkeypatch.setattr(queue, "thread_seconds", lambda native_id: 0.05)
    backend = Backend()
    grammars = compiler(backend, time_limit=0.05)

    async def run() -> None:
        tasks = [asyncio.create_task(grammars.compile(regex(text))) for text in "ab"]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnsupportedGrammar, QueueFull]
        backend.gate.set()
        await until(lambda: bool(grammars.num_bytes))

    asyncio.run(run())
    assert backend.compiled == ["a"]
    grammars.check_integrity()


def test_a_hundred_constraints_of_one_client_at_once_are_compiled() -> None:
    backend = opened()
    grammars = compiler(backend)

    async def run() -> None:
        await asyncio.gather(*(grammars.compile(regex(str(i)), client="a") for i in range(100)))

    asyncio.run(run())
    assert len(backend.compiled) == 100
    grammars.check_integrity()


def test_a_constraint_is_compiled_as_written_where_no_backend_takes_its_closed_reading() -> None:
    backend, other = opened("as"), opened("closed b")
    grammars = compiler(backend, other)

    async def run() -> None:
        for text, expected in (("closed a", "as written"), ("closed b", "closed b")):
            closed = replace(regex(text), as_written=regex("as written"))
            assert (await grammars.compile(closed)).text == expected  # type: ignore[attr-defined]
        with pytest.raises(UnsupportedGrammar, match="written does not start"):
            await grammars.compile(replace(regex("closed c"), as_written=regex("written")))

    asyncio.run(run())
    grammars.check_integrity()
    assert backend.compiled == ["closed a", "as written", "closed b", "closed c", "written"]


def test_every_reading_is_tried_exactly_before_any_is_leniently() -> None:
    attempts: list[tuple[str, bool]] = []

    class Recording(Backend):
        def compile(self, spec: GrammarSpec) -> Grammar:
            attempts.append((spec.text, spec.is_lenient))
            raise UnsupportedGrammar("no", spec.param)

    grammars = compiler(Recording())
    written = replace(regex("written"), is_lenient=True)

    async def run() -> None:
        with pytest.raises(UnsupportedGrammar):
            await grammars.compile(replace(written, text="closed", as_written=written))

    asyncio.run(run())
    assert attempts == [("closed", False), ("written", False), ("closed", True), ("written", True)]
