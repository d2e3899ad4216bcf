"""A constraint that a grammar engine cannot follow is the client's mistake, once; a busy machine is not."""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.engine.constraints import compiler as compilation
from penstock.engine.constraints import queue
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.contracts.grammar import GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.deltas import ClientFault, FinishReason
from penstock.engine.errors import EngineUnavailable, InvalidRequest, UnsupportedGrammar
from penstock.serving.messages import check_delta
from tests.fakes import generate, make_core, make_request
from tests.matchers import Grammar, Walk


class GivesUp(Walk):
    """At its third token, in whatever method is called then."""

    def __init__(self, method: str) -> None:
        super().__init__(1, forces=False)
        self.method = method
        self.num_taken = 0

    def fill_bitmask(self, row: Any) -> None:
        self.check("fill_bitmask")
        super().fill_bitmask(row)

    def advance(self, token_id: int) -> bool:
        self.num_taken += 1
        self.check("advance")
        return super().advance(token_id)

    def check(self, method: str) -> None:
        if self.num_taken >= 3 and method == self.method:
            raise UnsupportedGrammar("lexer error: too many expressions constructed")


@pytest.mark.parametrize("method", ["fill_bitmask", "advance"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_an_engine_that_gives_up_ends_its_own_request_with_a_400(method: str, is_quick: bool) -> None:
    request = make_request("r", grammar=Grammar(lambda: GivesUp(method), has_quick_masks=is_quick))
    last = generate(make_core(), request)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, ClientFault)
    with pytest.raises(InvalidRequest, match=r"^lexer error: too many expressions constructed$"):
        check_delta(last)


@dataclass
class Backend(GrammarBackend):
    """Its grammars do as `walk` does. It compiles once the gate is open."""

    walk: Any
    is_able: bool = True
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    num_compiled: int = 0

    def compile(self, spec: GrammarSpec) -> Any:
        self.begun.set()
        assert self.gate.wait(60)
        self.num_compiled += 1
        if not self.is_able:
            raise UnsupportedGrammar("not by this one", spec.param)
        grammar = Grammar(self.walk)
        grammar.num_bytes = NUM_BYTES
        return grammar


class Tokens:
    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary:
        return Vocabulary((b"a", None), logits_width, frozenset(stop_token_ids), "a and an end")


NUM_BYTES = 10
SPEC = GrammarSpec(GrammarKind.REGEX, "a")


def compiler(*backends: Backend, is_open: bool = True, **options: Any) -> GrammarCompiler:
    for backend in backends:
        if is_open:
            backend.gate.set()
    named: dict[str, Any] = {f"b{number}": lambda _, b=backend: b for number, backend in enumerate(backends)}
    return GrammarCompiler(named, Tokens(), 2, [1], **options)


async def idle(grammars: GrammarCompiler) -> None:
    while grammars.stats().num_running:  # noqa: ASYNC110 - it goes on in a thread that knows no events
        await asyncio.sleep(0.001)


def last_reason(compiled: Any, grammars: GrammarCompiler) -> FinishReason | None:
    core = make_core()
    core.report_unsupported = grammars.report_unsupported
    return generate(core, make_request("r", grammar=compiled, max_tokens=8))[-1].finish_reason


def test_a_backend_that_gave_up_on_a_constraint_is_not_asked_for_it_again() -> None:
    first, second = Backend(lambda: GivesUp("advance")), Backend(lambda: Walk(1, forces=False))
    grammars = compiler(first, second)

    async def scenario() -> None:
        assert last_reason(await grammars.compile(SPEC), grammars) is FinishReason.ERROR
        for _ in range(2):
            assert last_reason(await grammars.compile(SPEC), grammars) is not FinishReason.ERROR
        assert (first.num_compiled, second.num_compiled) == (1, 1)

    asyncio.run(scenario())
    grammars.check_integrity()


@pytest.mark.parametrize("backend_name", [None, "b0"])
def test_a_constraint_that_no_other_backend_takes_is_refused_without_generating(backend_name: str | None) -> None:
    first, second = Backend(lambda: GivesUp("fill_bitmask")), Backend(Walk, is_able=False)
    grammars = compiler(first, second)

    async def scenario() -> None:
        assert last_reason(await grammars.compile(SPEC, backend_name), grammars) is FinishReason.ERROR
        for _ in range(2):
            with pytest.raises(UnsupportedGrammar, match="too many expressions"):
                await grammars.compile(SPEC, backend_name)
        assert first.num_compiled == 1

    asyncio.run(scenario())
    grammars.check_integrity()


def test_constraints_that_were_reported_unsupported_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "MAX_REFUSALS", 2)
    backend = Backend(lambda: GivesUp("advance"))
    grammars = compiler(backend)

    async def scenario() -> None:
        for text in "abc":
            grammars.report_unsupported(await grammars.compile(GrammarSpec(GrammarKind.REGEX, text)), "no")
        await grammars.compile(GrammarSpec(GrammarKind.REGEX, "a"))
        with pytest.raises(UnsupportedGrammar, match="no"):
            await grammars.compile(GrammarSpec(GrammarKind.REGEX, "c"))

    asyncio.run(scenario())
    grammars.check_integrity()


@pytest.mark.parametrize(("cpu_seconds", "error"), [(0.01, EngineUnavailable), (0.05, UnsupportedGrammar), (None, UnsupportedGrammar)])
def test_a_busy_machine_is_not_blamed_on_the_constraint(
    monkeypatch: pytest.MonkeyPatch, cpu_seconds: float | None, error: type[Exception]
) -> None:
    monkeypatch.setattr(queue, "thread_seconds", lambda native_id: cpu_seconds)
    backend = Backend(Walk)
    grammars = compiler(backend, is_open=False, time_limit=0.05)

    async def scenario() -> None:
        with pytest.raises(error) as caught:
            await grammars.compile(SPEC)
        assert getattr(caught.value, "retry_after", 1) > 0
        backend.gate.set()
        await idle(grammars)
        await grammars.compile(SPEC)
        assert backend.num_compiled == 1

    asyncio.run(scenario())


def test_a_compilation_whose_clients_have_gone_ends_before_the_next_backend() -> None:
    first, second = Backend(Walk, is_able=False), Backend(Walk)
    grammars = compiler(first, second, is_open=False)
    second.gate.set()

    async def scenario() -> None:
        gone = asyncio.create_task(grammars.compile(SPEC))
        await asyncio.to_thread(first.begun.wait)
        gone.cancel()
        await asyncio.wait([gone])
        first.gate.set()
        await idle(grammars)
        assert (first.num_compiled, second.num_compiled) == (1, 0)
        await grammars.compile(SPEC)
        assert (first.num_compiled, second.num_compiled) == (2, 1)

    asyncio.run(scenario())
    grammars.check_integrity()


def test_a_request_that_comes_as_a_compilation_is_abandoned_gets_its_grammar() -> None:
    first, second = Backend(Walk, is_able=False), Backend(Walk)
    grammars = compiler(first, second, is_open=False)
    second.gate.set()

    async def scenario() -> None:
        gone = asyncio.create_task(grammars.compile(SPEC))
        await asyncio.to_thread(first.begun.wait)
        gone.cancel()
        await asyncio.wait([gone])
        thread = next(thread for thread in threading.enumerate() if thread.name == "penstock-grammar")
        first.gate.set()
        thread.join()  # it has seen that all have gone, and the loop has not heard of it
        await grammars.compile(SPEC)
        assert second.num_compiled == 1

    asyncio.run(scenario())
    grammars.check_integrity()


def test_a_grammar_that_no_request_waits_for_takes_the_place_of_no_other() -> None:
    backend = Backend(Walk)
    grammars = compiler(backend, max_bytes=NUM_BYTES)

    async def scenario() -> None:
        await grammars.compile(SPEC)
        backend.gate.clear()
        backend.begun.clear()
        gone = asyncio.create_task(grammars.compile(GrammarSpec(GrammarKind.REGEX, "b")))
        await asyncio.to_thread(backend.begun.wait)
        gone.cancel()
        await asyncio.wait([gone])
        backend.gate.set()
        await idle(grammars)
        await grammars.compile(SPEC)
        assert backend.num_compiled == 2

    asyncio.run(scenario())
    grammars.check_integrity()
