"""Audits a file of constraints of all kinds, with one or several grammar backends.

Tool calls are audited in a wire format: texts are put together from the format's declaration, and count only where the format's own parser
reads them as one valid call. It is the parser that judges, too: no grammar backend has a part in it.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from penstock.cli.grammar.arguments import AuditEffort
from penstock.cli.grammar.audit import WHITE_SPACE, Audit, Auditor, Spelling, Subject
from penstock.cli.grammar.context_free import Grammar, samples_of
from penstock.cli.grammar.languages import ChoiceLanguage, Language, RegexLanguage, TextState, read_choices
from penstock.cli.grammar.trial import PARAM, Case, Malformed, Tried, read_case, schema_spec
from penstock.engine.contracts.grammar import AdditionalProperties, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import CallableTool, Text, ToolCallArguments, ToolCallStart, ToolFormat, ToolParser, Turn
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import PenstockError
from penstock.serving.messages import Conformance, conformance

LANGUAGES = ("regex", "choice", "lark", "gbnf")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A line that holds no schema: a constraint on text, or a tool with the arguments of calls."""

    line: int
    name: str
    kind: str
    content: Any
    valid: tuple[Any, ...]


def read_constraints(lines: Iterable[bytes], malformed: list[Malformed]) -> Iterator[Case | Constraint]:
    """Of every line: `{"schema": ...}`, as for `test`, or one of `LANGUAGES`, or `{"tool": {"name": ..., "parameters": ...}}`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            kind = next((kind for kind in (*LANGUAGES, "tool") if isinstance(content, dict) and kind in content), None)
            yield read_case(number, line) if kind is None else _constraint(number, kind, content)
        except (ValueError, RecursionError) as error:
            malformed.append(Malformed(number, "nested too deeply" if isinstance(error, RecursionError) else str(error)))


def _constraint(number: int, kind: str, content: dict[str, Any]) -> Constraint:
    tests = content.get("tests", [])
    if not isinstance(tests, list) or not all(isinstance(test, dict) and "data" in test for test in tests):
        raise ValueError('`tests` must be an array of {"valid": true, "data": ...}')
    value = content[kind]
    is_tool = isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("parameters"), dict)
    if kind == "tool" and not is_tool:
        raise ValueError('`tool` must be {"name": ..., "parameters": ...}')
    if kind == "choice":
        value = read_choices(json.dumps(value))
    elif kind != "tool" and not isinstance(value, str):
        raise ValueError(f"`{kind}` must be a string")
    valid = tuple(test["data"] for test in tests if test.get("valid", True))
    return Constraint(number, str(content.get("name", "")), kind, value, valid)


class Bench(Protocol):
    """What compiles: `GrammarBench`, or an engine as it comes."""

    vocabulary: Vocabulary

    async def warm_up(self, backend: str | None) -> None: ...

    async def attempt(self, spec: GrammarSpec, backend: str | None, *, is_strict: bool) -> Tried: ...


class Campaign:
    """One backend's audit, or that of the one that a request gets which names none. `audit` is added to as it goes."""

    def __init__(
        self,
        audit: Audit,
        bench: Bench,
        backend: str | None,
        additional_properties: AdditionalProperties,
        effort: AuditEffort,
        tool_parsers: Mapping[str, ToolParserFactory],
    ) -> None:
        self._audit = audit
        self._bench = bench
        self._backend = backend
        self._reading = additional_properties
        self._effort = effort
        self._tool_parsers = tool_parsers
        self._auditor = Auditor(bench.vocabulary, effort, audit)

    async def run(self, lines: Iterable[bytes], limit: int | None = None) -> None:
        await self._bench.warm_up(self._backend)
        started = time.process_time()
        for constraint in islice(read_constraints(lines, self._audit.malformed), limit):
            if isinstance(constraint, Case):
                await self._schema(constraint)
            elif constraint.kind == "tool":
                await self._tool(constraint)
            else:
                await self._language(constraint)
            self._audit.seconds = time.process_time() - started
        self._audit.is_complete = True

    async def _schema(self, case: Case) -> None:
        tried = await self._bench.attempt(schema_spec(json.loads(case.schema), PARAM, self._reading), self._backend, is_strict=True)
        self._audit.count("schema", tried.verdict)
        if tried.outcome.grammar is not None:
            self._auditor.run_schema(case, tried.outcome.grammar, WHITE_SPACE[tried.outcome.backend or ""])

    async def _language(self, constraint: Constraint) -> None:
        numbers = random.Random(f"{self._effort.seed} {constraint.line}")
        try:
            language, texts = _language(constraint, self._effort.spellings, numbers)
        except ValueError as error:
            self._audit.malformed.append(Malformed(constraint.line, f"cannot be judged: {error}"))
            return
        text = json.dumps(constraint.content, ensure_ascii=False) if constraint.kind == "choice" else constraint.content

        def judge(text: str) -> Conformance:
            return Conformance(True) if language.holds(text) else Conformance(False, "no match")

        subject = Subject(constraint.line, constraint.name, tuple(map(Spelling, texts)), judge, TextState(language))
        await self._audited(constraint.kind, GrammarSpec(GrammarKind(constraint.kind), text, PARAM), subject)

    async def _tool(self, constraint: Constraint) -> None:
        """In every wire format of the loaded tool parsers."""
        name, parameters = constraint.content["name"], constraint.content["parameters"]
        numbers = random.Random(f"{self._effort.seed} {constraint.line}")
        for parser, factory in self._tool_parsers.items():
            try:
                wire = WireFormat(factory, name, parameters, schema_spec(parameters, PARAM, "open"))
                structure = GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=wire.structure)
            except (Unwritable, PenstockError):
                self._audit.count(f"tool ({parser})", "refused")
                continue
            texts = [text for arguments in constraint.valid for text in wire.texts(arguments, self._effort.spellings, numbers)]
            label = f"{parser}: {constraint.name or name}"
            subject = Subject(constraint.line, label, tuple(map(Spelling, texts)), wire.judge, None)
            await self._audited(f"tool ({parser})", structure, subject)

    async def _audited(self, kind: str, spec: GrammarSpec, subject: Subject) -> None:
        tried = await self._bench.attempt(spec, self._backend, is_strict=True)
        self._audit.count(kind, tried.verdict)
        if tried.outcome.grammar is not None:
            self._auditor.run(subject, tried.outcome.grammar)


def _language(constraint: Constraint, count: int, numbers: random.Random) -> tuple[Language, list[str]]:
    """With texts of it: those given, and others that are made up."""
    given = [text for text in constraint.valid if isinstance(text, str)]
    language: Language
    if constraint.kind == "choice":
        language = ChoiceLanguage(constraint.content)
        drawn = numbers.sample(constraint.content, min(count, len(constraint.content)))
    elif constraint.kind == "regex":
        language = RegexLanguage(constraint.content)
        drawn = samples_of(constraint.content, count, numbers)
    else:
        language = grammar = Grammar(constraint.content, constraint.kind)
        drawn = [grammar.sample(numbers) for _ in range(count)]
    if wrong := [text for text in given if not language.holds(text)]:
        raise ValueError(f"{wrong[0]!r} is given as valid, and is not")
    return language, list(dict.fromkeys([*given, *drawn]))


MAX_TRIES = 60


class Unwritable(Exception):
    """No text was found for these arguments."""


class WireFormat:
    """Calls of one tool in the format of one parser."""

    def __init__(self, factory: Callable[[Turn], ToolParser], name: str, parameters: Mapping[str, Any], spec: GrammarSpec) -> None:
        """Raises `Unwritable` for a parser that does not say how calls are written."""
        self._factory = factory
        self._name = name
        self._schema = json.dumps(parameters, ensure_ascii=False)
        function = {"type": "function", "function": {"name": name, "parameters": dict(parameters)}}
        self._turn = Turn(tools=[function], tool_choice="required", is_constrained=True)
        found: ToolFormat | None = factory(self._turn).tool_format
        if found is None:
            raise Unwritable
        calls = found.calls([CallableTool(name, spec)], is_single=True)
        self.structure = Sequence((Marker(found.opening), calls))

    def judge(self, text: str) -> Conformance:
        """One call of the tool, with arguments that its schema takes, and no other text."""
        parser = self._factory(self._turn)
        names: list[str] = []
        arguments = ""
        for event in [*parser.feed(text), *parser.finish()]:
            if isinstance(event, ToolCallStart):
                names.append(event.name)
            elif isinstance(event, ToolCallArguments):
                arguments += event.fragment
            elif isinstance(event, Text) and not event.text.isspace():
                return Conformance(False, f"{event.text!r} is left as text")
        if names != [self._name]:
            return Conformance(False, f"read as calls of {names}")
        return conformance(self._schema, arguments)

    def texts(self, arguments: Any, count: int, numbers: random.Random) -> list[str]:
        """At most `count` different ones."""
        pool = [*_parts(arguments)]
        found: dict[str, None] = {}
        for _ in range(MAX_TRIES):
            try:
                text = "".join(_written(self.structure, pool, numbers))
            except Unwritable:
                continue
            if self.judge(text).valid:
                found[text] = None
            if len(found) == count:
                break
        return [*found]


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def _written(part: Structure, pool: list[Any], numbers: random.Random) -> Iterator[str]:
    match part:
        case Literal(text) | Marker(text):
            yield text
        case FreeText():
            yield ""
        case TextUntil(marker):
            strings = [value for value in pool if isinstance(value, str) and marker not in value]
            yield (numbers.choice(strings) if strings else "") + marker
        case Value(spec):
            yield _value(spec, pool, numbers)
        case Sequence(parts):
            for one in parts:
                yield from _written(one, pool, numbers)
        case Either(parts):
            yield from _written(numbers.choice(parts), pool, numbers)
        case Repeat(one, least, most):
            for _ in range(numbers.randint(least, least + 2 if most is None else most)):
                yield from _written(one, pool, numbers)


def _value(spec: GrammarSpec, pool: list[Any], numbers: random.Random) -> str:
    if spec.kind is GrammarKind.CHOICE:
        return str(numbers.choice(json.loads(spec.text)))
    if spec.kind is GrammarKind.STRUCTURE and spec.structure is not None:
        return "".join(_written(spec.structure, pool, numbers))
    if spec.kind is GrammarKind.REGEX:
        language = RegexLanguage(spec.text)
        texts = [text for value in pool for text in (value if isinstance(value, str) else json.dumps(value),) if language.holds(text)]
    elif spec.kind is GrammarKind.JSON_SCHEMA:
        compact: tuple[str, str] = (",", ":")
        separators = compact if spec.whitespace_pattern == "" else numbers.choice([compact, (", ", ": ")])
        documents = [json.dumps(value, ensure_ascii=False, separators=separators) for value in pool]
        texts = [text for text in documents if conformance(spec.text, text).valid]
    else:
        texts = []
    if not texts:
        raise Unwritable
    return numbers.choice(texts)
