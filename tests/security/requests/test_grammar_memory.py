"""The cache of compiled constraints holds what it may, whatever a constraint takes once it is compiled or used."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.constraints import compiler
from penstock.engine.constraints.compiler import MAX_GROWTH, GrammarCompiler
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.system.process import heap_bytes
from penstock.plugins.grammars.llguidance import backend
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.manager import Plugins
from tests.plugins.grammars.grammar_walks import VOCABULARY


def schema(name: str) -> GrammarSpec:
    text = json.dumps({"type": "object", "properties": {name: {"type": "integer", "multipleOf": 131071}}})
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def test_a_grammar_counts_as_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """131,071 states, of which the text of the schema shows nothing."""
    monkeypatch.setattr(backend, "heap_bytes", heap_bytes)
    assert LlguidanceBackend(VOCABULARY).compile(schema("a")).num_bytes > 20 * 2**20


@dataclass
class Growing(GrammarBackend):
    """A backend whose grammars count little and take much."""

    heap_bytes: int = 0
    alive: set[str] = field(default_factory=set)

    def compile(self, spec: GrammarSpec) -> Any:
        return Grown(self, spec.text)

    @property
    def taken(self) -> int:
        return len(self.alive) * 2**26


class Grown(CompiledGrammar):
    num_bytes = 1000

    def __init__(self, backend: Growing, text: str) -> None:
        self.backend, self.text = backend, text
        backend.alive.add(text)

    def matcher(self) -> GrammarMatcher:
        raise AssertionError("nothing here runs a grammar")

    def __del__(self) -> None:
        self.backend.alive.discard(self.text)


class Tokens:
    def vocabulary(self, logits_width: int, stop_token_ids: Any) -> Vocabulary:
        return VOCABULARY


def test_grammars_that_grow_while_they_are_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap is measured where grammars are compiled: it takes a millisecond, for which the event loop is not held up."""
    monkeypatch.setattr(compiler, "MEASURE_SECONDS", 0.0)
    backend, threads = Growing(), set[int]()

    def measured() -> int:
        threads.add(threading.get_ident())
        return backend.taken

    grammars = GrammarCompiler({"growing": lambda vocabulary: backend}, Tokens(), 3, [2], heap_bytes=measured)

    async def run() -> None:
        for number in range(100):
            await grammars.compile(GrammarSpec(GrammarKind.REGEX, str(number)))
            assert backend.taken <= MAX_GROWTH + 2**27
        assert "99" in backend.alive
        assert threading.get_ident() not in threads

    asyncio.run(run())
    grammars.check_integrity()


def test_the_heap_is_measured_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MEASURE_SECONDS", 1e9)
    num_measured = 0

    def measured() -> int:
        nonlocal num_measured
        num_measured += 1
        return 0

    grammars = GrammarCompiler({"growing": lambda vocabulary: Growing()}, Tokens(), 3, [2], heap_bytes=measured)

    async def run() -> None:
        for number in range(5):
            await grammars.compile(GrammarSpec(GrammarKind.REGEX, str(number)))

    asyncio.run(run())
    assert num_measured == 1


@pytest.mark.thorough
def test_thousands_of_schemas_leave_nothing_in_memory_or_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its own, by the backends as they are, over a cache that holds about six."""
    for variable in ("PENSTOCK_CACHE", "OUTLINES_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    backends = Plugins.start([]).grammar_backends
    # Measuring the heap takes milliseconds in the process of all tests; the resident memory is measured here.
    grammars = GrammarCompiler(backends, Tokens(), VOCABULARY.size, [0], max_bytes=2**23, heap_bytes=lambda: 0)
    process = psutil.Process()

    async def run() -> None:
        resident = 0
        for number in range(8_000):
            values = {"enum": [number, str(number)]}
            words = {"type": "string", "pattern": f"[a-f]{{{1 + number % 7}}}{number}"}
            text = json.dumps({"type": "object", "properties": {f"k{number}": words, "n": values}, "required": [f"k{number}"]})
            await grammars.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
            if number == 1000:
                resident = process.memory_info().rss
        assert process.memory_info().rss - resident < 2**24
        assert grammars.num_bytes <= 2**23

    asyncio.run(run())
    grammars.check_integrity()
    assert list(tmp_path.iterdir()) == []
