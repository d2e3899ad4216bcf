"""Checks finished answers against the JSON Schemas that a lenient grammar enforced only in part."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.grammar import CompiledGrammar
from penstock.serving.constraints.conformance import Conformance, undecided
from penstock.serving.constraints.conformance_worker import Task

SECONDS = 2.0
MAX_WAIT = 10.0


class ConformanceChecker:
    """One process, started when the first answer comes and again where a check has ended it; checks take turns.

    `seconds` bounds one check, and `MAX_WAIT` how long an answer waits for its turn and result together: then it goes out unchecked.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def check(self, schema: str, answer: str) -> Conformance:
        try:
            return await asyncio.wait_for(self._in_turn(schema, answer), MAX_WAIT)
        except TimeoutError:
            return undecided("too many others wait to be checked")

    async def _in_turn(self, schema: str, answer: str) -> Conformance:
        async with self._turn:
            is_complete = False
            try:
                found = await self._ask(Task(schema, answer, self._seconds))
                is_complete = True
            finally:
                if not is_complete:  # the answer to a question that nobody waits for must not be taken for the next one's
                    self._kill()
        return found

    async def _ask(self, task: Task) -> Conformance:
        if self._process is None:
            arguments = (sys.executable, "-P", "-m", "penstock.serving.constraints.conformance_worker")
            self._process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            await self._process.wait()
            self._process = None
            return undecided(f"it took longer than {self._seconds:g} s, or too much memory")
        return msgspec.json.decode(line, type=Conformance)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        """Ends the process. The next answer would start another."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()


WARNING_HEADER = "x-structured-output-warning"
MAX_HEADER = 1000


def warning_header(grammar: CompiledGrammar | None) -> dict[str, str]:
    """Names what of the constraint is not enforced. Keywords and paths come from the client: nothing of them can break out of a header."""
    if grammar is None or not grammar.warnings:
        return {}
    text = "; ".join(grammar.warnings)[: MAX_HEADER + 1].encode("ascii", "backslashreplace").decode()
    text = "".join(character if character.isprintable() else " " for character in text)
    return {WARNING_HEADER: text if len(text) <= MAX_HEADER else f"{text[: MAX_HEADER - 3]}..."}


@dataclass(slots=True)
class _Said:
    """What a sequence has said so far: its content, and of each tool call the name and the arguments."""

    content: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, list[str]]] = field(default_factory=dict)


class AnswerCheck:
    """Checks the choices of one request against `schema`, the JSON Schema of its content, and `arguments`, those of its tools.

    Without either there is nothing to check, and no cost. What was found of a choice is in `found` from before its last delta on.
    """

    def __init__(self, checker: ConformanceChecker, schema: str | None = None, arguments: Mapping[str, str] | None = None) -> None:
        self._checker = checker
        self._schema = schema
        self._arguments = arguments or {}
        self._said: dict[int, _Said] = {}
        self.found: dict[int, Conformance] = {}

    def watch(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        """The same deltas."""
        return deltas if self._schema is None and not self._arguments else self._watched(deltas)

    async def _watched(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        async with aclosing(deltas):
            async for delta in deltas:
                self._take(delta)
                if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    await self._check(delta.index)
                yield delta

    def _take(self, delta: SequenceDelta) -> None:
        said = self._said.setdefault(delta.index, _Said())
        for event in delta.events:
            match event:
                case Text(text):
                    said.content.append(text)
                case ToolCallStart(index, name):
                    said.calls[index] = (name, [])
                case ToolCallArguments(index, fragment):
                    said.calls[index][1].append(fragment)

    async def _check(self, index: int) -> None:
        """Of several parts the first mistake counts, else the first that could not be checked."""
        outcomes: list[Conformance] = []
        for prefix, schema, text in self._parts(self._said.pop(index)):
            found = await self._checker.check(schema, text)
            path = found.path if found.path is UNSET or not prefix else f"$.{prefix}{found.path.removeprefix('$')}"
            outcomes.append(Conformance(found.valid, found.error, path))
            if found.valid is False:
                break
        if outcomes:
            self.found[index] = min(outcomes, key=lambda outcome: (False, None, True).index(outcome.valid))

    def _parts(self, said: _Said) -> Iterator[tuple[str, str, str]]:
        """Each with where it is in the message, its schema, and its text."""
        if self._schema is not None and not said.calls:
            yield "", self._schema, "".join(said.content)
        for index, (name, fragments) in sorted(said.calls.items()):
            if name in self._arguments:
                yield f"tool_calls[{index}].function.arguments", self._arguments[name], "".join(fragments)
