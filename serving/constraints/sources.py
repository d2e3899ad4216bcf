"""The schemas and grammars of a request: their size, how they are read, and the backend that the request names."""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeVar

from msgspec import Struct

from penstock.engine.constraints.limits import MAX_GRAMMAR, MAX_TEXT
from penstock.engine.contracts.grammar import AdditionalProperties, GrammarKind, GrammarSpec
from penstock.engine.errors import InvalidRequest
from penstock.plugins.grammars.regex.syntax import Dialect, RegexError, parse
from penstock.plugins.grammars.regex.tree import (
    Chars,
    CharSet,
    Either,
    Literal,
    MisplacedAnchor,
    Node,
    Repeat,
    Sequence,
    full_match,
    intersect,
    of,
)
from penstock.serving.constraints.closed_schema import closed
from penstock.serving.requests import GenerationFields, GrammarDefinition, StructuredOutputs


def read_json(text: str, param: str) -> Any:
    """The value. Raises `InvalidRequest` for what is not JSON, and for an object with a name in it twice: which of them counts is open."""
    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` is not valid JSON: {str(error)[:200]}", param) from None


def write_json(value: Any, param: str) -> str:
    """The value's text, its members in their order. Raises `InvalidRequest` for what has none, such as halves of surrogate pairs."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` cannot be written as JSON: {str(error)[:200]}", param) from None
    return text


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice[:100]!r} twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


MAX_WHITESPACE_PATTERN = 1000
SPELLED = {" ": " ", "\t": r"\t", "\n": r"\n", "\r": r"\r"}
WHITESPACE = of("".join(SPELLED))
# Shorthands mean what they can mean here: Python's `\s` has characters with which a document is no JSON.
DIALECT = Dialect(dot=WHITESPACE, digit=of("0"), word=of("a"), space=WHITESPACE)


def whitespace_regex(pattern: str, param: str) -> str:
    """The pattern with its sets spelled out; a shorthand for white space is JSON's white space.

    Raises `InvalidRequest` for one that cannot be read, and for one that matches anything else: the answer would not be JSON.
    Here, since a backend would say that the mistake is in the JSON that the pattern is for.
    """
    if len(pattern) > MAX_WHITESPACE_PATTERN:
        raise InvalidRequest(f"`{param}` may have {MAX_WHITESPACE_PATTERN} characters", param)
    try:
        return _written(full_match(parse(pattern, DIALECT)))
    except RegexError as error:
        raise InvalidRequest(f"`{param}`: {error}", param) from None
    except MisplacedAnchor as anchor:
        message = f"`{param}`: {anchor} is refused where more text may lie beyond it, at position {anchor.position}"
        raise InvalidRequest(message, param) from None
    except _NotWhitespace:
        message = f"`{param}` allows more between the tokens of JSON than spaces, tabs, line feeds and carriage returns"
        raise InvalidRequest(message, param) from None


class _NotWhitespace(Exception):
    pass


def _written(node: Node) -> str:
    match node:
        case Literal(text):
            return "".join(_class(of(character)) for character in text)
        case Chars(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(map(_written, items))
        case Either(items):
            return f"(?:{'|'.join(map(_written, items))})"
        case Repeat(item, minimum, maximum):
            return f"(?:{_written(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    if not chars or intersect(chars, WHITESPACE) != chars:
        raise _NotWhitespace
    return "[" + "".join(spelled for character, spelled in SPELLED.items() if intersect(of(character), chars)) + "]"


AUTO = "auto"
ALIASES = {"guidance": "llguidance", "outlines": "outlines_core"}  # vLLM's names of the same libraries
INSTALLABLE = {"xgrammar": "pip install ./examples/penstock-plugin-xgrammar"}  # vLLM has them built in; in a checkout of Penstock
NO_FALLBACK = "no-fallback"
COMPACT = "disable-any-whitespace"
CLOSED = "no-additional-properties"
OPTIONS = (NO_FALLBACK, COMPACT, CLOSED)
MAX_CHARACTERS = 1000


class NamedBackend(NamedTuple):
    """A backend as a request writes it, `name:option,option`, and the path of the field."""

    name: str
    options: tuple[str, ...]
    param: str


def named_backend(body: GenerationFields) -> NamedBackend | None:
    """What the request says, in either place. Raises `InvalidRequest` for two different ones and for options that there are not.

    Naming a backend means that no other is tried, so `no-fallback` asks for nothing more.
    """
    fields = [("guided_decoding_backend", body.guided_decoding_backend)]
    if body.structured_outputs is not None:
        fields.append(("structured_outputs.backend", body.structured_outputs.backend))
    given = [_parsed(text, param) for param, text in fields if text]
    if len(given) > 1 and given[0][:2] != given[1][:2]:
        raise InvalidRequest(f"`{given[0].param}` and `{given[1].param}` differ", given[1].param)
    return given[0] if given else None


def chosen_backend(body: GenerationFields, known: Iterable[str]) -> str | None:
    """The name of one of the `known` backends, or None for whichever takes the constraint. Raises `InvalidRequest` for any other name."""
    named = named_backend(body)
    if named is None or named.name == AUTO:
        return None
    names = list(known)
    name = known_backend(named.name, names)
    if name is None:
        if named.name in INSTALLABLE:
            message = f"the grammar backend {named.name!r} is not installed: {INSTALLABLE[named.name]}, and start the server again"
            raise InvalidRequest(message, named.param)
        raise InvalidRequest(f"no grammar backend {named.name[:100]!r}: there are {', '.join([AUTO, *names])}", named.param)
    return name


def known_backend(name: str, known: Collection[str]) -> str | None:
    """The one of the `known` backends that has this name, or had it in vLLM; None for an unknown name."""
    return next((spelling for spelling in (name, ALIASES.get(name)) if spelling in known), None)


def _parsed(text: str, param: str) -> NamedBackend:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"`{param}` may have {MAX_CHARACTERS} characters", param)
    name, _, rest = text.partition(":")
    options = tuple(option.strip().replace("_", "-") for option in rest.split(",") if option.strip())
    for option in options:
        if option not in OPTIONS:
            raise InvalidRequest(f"no backend option {option[:100]!r}: there are {', '.join(OPTIONS)}", param)
    return NamedBackend(name.strip(), options, param)


_PARTS_BETWEEN_PAUSES = 10_000
_PAUSE_SECONDS = 0.0005


def check_text(value: Any, param: str) -> None:
    """Raises `InvalidRequest` where the value's JSON is certainly too long for a constraint. For a worker where it may be long."""
    if exceeds(value, MAX_TEXT):
        raise InvalidRequest(f"a constraint of more than {MAX_TEXT} characters is refused", param)


def exceeds(value: Any, limit: int) -> bool:
    """Whether the value is certainly longer than `limit` characters as JSON. No more of it is looked at than this takes.

    Writing it out would hold the interpreter's lock to the end, as every call into C does; this here pauses.
    """
    pending = [value]
    num_characters = num_parts = 0
    while pending:
        part = pending.pop()
        num_parts += 1
        num_characters += 3  # a digit, a comma and a space
        if isinstance(part, str):
            num_characters += len(part)
        elif isinstance(part, dict | list):
            if 3 * len(part) > limit:
                return True
            pending += part if isinstance(part, list) else [*part, *part.values()]
        elif isinstance(part, Struct):
            pending += [getattr(part, field) for field in part.__struct_fields__]
        if num_characters > limit:
            return True
        if num_parts % _PARTS_BETWEEN_PAUSES == 0:
            time.sleep(_PAUSE_SECONDS)
    return False


@dataclass(frozen=True, slots=True)
class JsonReading:
    """`whitespace_pattern` is as in `GrammarSpec`. Where the request itself `is_asking` for the closed reading, there is no other."""

    whitespace_pattern: str | None = None
    additional_properties: AdditionalProperties = "open"
    is_asking: bool = False


AS_WRITTEN = JsonReading()
Spec = TypeVar("Spec", GrammarSpec, GrammarSpec | None)


def json_reading(body: GenerationFields, default: AdditionalProperties) -> JsonReading:
    """What the request says, or else the server's `default`. Raises `InvalidRequest` where two fields differ."""
    outputs, backend = body.structured_outputs or StructuredOutputs(), named_backend(body)
    whitespace = {
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": "" if outputs.disable_any_whitespace else None,
    }
    properties: dict[str, AdditionalProperties | None] = {
        "guided_additional_properties": body.guided_additional_properties,
        "structured_outputs.additional_properties": outputs.additional_properties,
        "structured_outputs.disable_additional_properties": "closed" if outputs.disable_additional_properties else None,
    }
    if backend is not None and COMPACT in backend.options:
        whitespace[backend.param] = ""
    if backend is not None and CLOSED in backend.options:
        properties[backend.param] = "closed"
    asking, spacing = _agreed(properties, "additional properties"), _agreed(whitespace, "whitespace")
    pattern = None if spacing is None else whitespace_regex(whitespace[spacing] or "", spacing)
    return JsonReading(pattern, (properties[asking] if asking else None) or default, is_asking=asking is not None)


def _agreed(fields: Mapping[str, str | None], subject: str) -> str | None:
    """The first of the fields that say anything; all of them say the same."""
    given = {param: value for param, value in fields.items() if value is not None}
    if len(set(given.values())) > 1:
        names = " and ".join(f"`{param}`" for param in given)
        raise InvalidRequest(f"{names} say different things of {subject}", [*given][-1])
    return next(iter(given), None)


def in_reading(reading: JsonReading, spec: Callable[[JsonReading], Spec]) -> Spec:
    """The constraint in this reading. Where the closed one was not asked for, it comes with the constraint as it is written."""
    chosen = spec(reading)
    if reading.additional_properties == "open" or reading.is_asking or chosen is None:
        return chosen
    written = spec(replace(reading, additional_properties="open"))
    return chosen if written == chosen else replace(chosen, as_written=written)


def schema_spec(schema: Any, param: str, reading: JsonReading, *, is_lenient: bool = False) -> GrammarSpec:
    """A schema as an object or as its JSON text; its members keep their order, which the answer's follow. Raises `InvalidRequest`."""
    check_text(schema, param)
    if isinstance(schema, str):
        schema = read_json(schema, param)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema: an object, or one as a string", param)
    if reading.additional_properties == "closed":
        schema = closed(schema)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, write_json(schema, param), param, reading.whitespace_pattern, is_lenient)


KINDS = {"lark": GrammarKind.LARK, "gbnf": GrammarKind.GBNF, "ebnf": GrammarKind.GBNF}
# Both dialects begin each rule on a line of its own. Lark's names may have a modifier, a priority, attributes or parameters.
RULE = re.compile(r"^[ \t]*[?!]{0,2}([A-Za-z_][\w-]*)(?:\.-?\d+|\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*(::=|:)", re.MULTILINE)


def grammar_of(source: str | GrammarDefinition, param: str) -> GrammarSpec:
    """The grammar in the dialect that is stated, or that its text leaves no doubt about. Raises `InvalidRequest` where it does."""
    if isinstance(source, str):
        return GrammarSpec(detected_kind(source, param), source, param)
    return GrammarSpec(KINDS[source.syntax], source.definition, f"{param}.definition")


def detected_kind(text: str, param: str) -> GrammarKind:
    """GBNF where every rule is defined by `::=` and one is `root`, Lark where each is by `:` and one is `start`."""
    if len(text) > MAX_GRAMMAR:  # which would be refused later, and here is the event loop
        raise InvalidRequest(f"a grammar of more than {MAX_GRAMMAR} characters is refused", param)
    operators: set[str] = set()
    names: set[str] = set()
    for rule in RULE.finditer(text):
        names.add(rule[1])
        operators.add(rule[2])
    if operators == {"::="} and "root" in names:
        return GrammarKind.GBNF
    if operators == {":"} and "start" in names:
        return GrammarKind.LARK
    raise InvalidRequest(
        f"`{param}` is neither clearly GBNF (rules with `::=`, one of them `root`) nor clearly Lark (rules with `:`, one of them `start`): "
        'say which, as {"syntax": "gbnf" or "lark", "definition": ...}',
        param,
    )
