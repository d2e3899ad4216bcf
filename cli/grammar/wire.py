"""Tool calls in a wire format: texts of calls with given arguments, and whether a text is calls that fit.

Texts are put together from the format's declaration, and count only where the format's own parser reads them as one valid call. It is the
parser that judges, too: no grammar backend has a part in it.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.cli.grammar.languages import RegexLanguage
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, Text, ToolCallArguments, ToolCallStart, ToolFormat, ToolParser, Turn
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.serving.messages import Conformance, conformance

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
