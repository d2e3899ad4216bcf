"""Validates an answer against its schema, for the parts that a lenient grammar left out. In a sandbox, as a schema may be hostile."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.contracts.parsing import Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import EngineUnavailable, JobLimitExceeded, QueueFull
from penstock.engine.system.sandbox import Limits, Sandbox
from penstock.plugins.grammars.json_schema.values import PATTERNS


class Conformance(Struct, omit_defaults=True):
    """Whether an answer keeps to a schema that its grammar enforced only in part; `valid` is null where that could not be decided.

    `path` is where in the answer the first mistake is, as JSONPath.
    """

    valid: bool | None
    error: str | UnsetType = UNSET
    path: str | UnsetType = UNSET


MAX_MESSAGE = 300
LIMITS = Limits(cpu_seconds=2.0, memory_bytes=2**29, niceness=10)  # the model's own threads go first
MAX_WAIT = 10.0


class ConformanceChecker:
    """Checks answers in one process, which takes one at a time. An answer that waits for longer than `MAX_WAIT` goes out unchecked."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._sandbox = Sandbox("checking the answer", limits, initializer=prepare)

    async def check(self, schema: str, answer: str) -> Conformance:
        try:
            return await asyncio.wait_for(self._sandbox.run(conformance, schema, answer), MAX_WAIT)
        except (TimeoutError, QueueFull):
            return undecided("too many others wait to be checked")
        except JobLimitExceeded as limit:
            return undecided(limit.message)
        except EngineUnavailable as failure:
            return undecided(str(failure))

    def close(self) -> None:
        self._sandbox.close()


def prepare() -> None:
    """What the first check in a process would import."""
    sys.set_int_max_str_digits(0)
    conformance("true", "1")


def conformance(schema_text: str, answer: str) -> Conformance:
    """Judges by the schema's own draft, 2020-12 where it does not say, formats included. Nothing is fetched that a schema refers to."""
    from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    try:
        instance = json.loads(answer, parse_constant=_no_constant)
    except ValueError as error:
        return _mistake(f"this is not JSON: {error}", "$")
    except RecursionError:
        return undecided("it is nested too deeply")
    try:
        mistake = best_match(_validator(schema_text).iter_errors(instance))
    except SchemaError as schema_error:
        return undecided(f"the schema is not valid at {schema_error.json_path}: {schema_error.message}")
    except Unresolvable as unresolvable:
        return undecided(f"nothing is fetched: {unresolvable}")
    except re.error as pattern_error:
        return undecided(f"a pattern cannot be read: {pattern_error}")
    except RecursionError:
        return undecided("it is nested too deeply, or the schema refers to itself without end")
    return Conformance(True) if mistake is None else _mistake(mistake.message, mistake.json_path)


def undecided(reason: str) -> Conformance:
    return Conformance(None, _bounded(f"not checked: {reason}"))


def _mistake(message: str, path: str) -> Conformance:
    return Conformance(False, _bounded(message), _bounded(path))


def _bounded(text: str) -> str:
    """It quotes answers, which may hold anything."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


@cache
def _formats() -> Any:
    """Those that jsonschema knows by itself; where the grammars know them too, they mean the same."""
    from jsonschema import FormatChecker  # type: ignore[import-untyped]

    checker = FormatChecker()
    for name, pattern in PATTERNS.items():
        whole = re.compile(pattern, re.ASCII)
        checker.checks(name)(lambda instance, whole=whole: not isinstance(instance, str) or whole.fullmatch(instance) is not None)
    return checker


def _validator(schema_text: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    schema: Any = json.loads(schema_text)
    has_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    kind = validator_for(schema, default=Draft202012Validator) if has_draft else Draft202012Validator
    kind.check_schema(schema)
    return kind(schema, registry=REGISTRY, format_checker=_formats())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


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
