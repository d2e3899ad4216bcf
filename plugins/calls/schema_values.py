"""The schema of a tool's arguments, and text coerced to JSON by it."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.values import json_type
from penstock.plugins.json.scanner import JsonScanner, State

Types = frozenset[str]

ANY_TYPE: Types = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
STRING: Types = frozenset({"string"})
SCALARS: Types = frozenset({"string", "number", "integer", "boolean", "null"})

_MAX_REFERENCES = 16
_COMBINERS = ("anyOf", "oneOf")
# Python's and databases' names, which tools that are written by hand have in the place of JSON Schema's.
_SPELLINGS = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "num", "decimal"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "set"), "array"),
    "none": "null",
}


class ToolSchemas:
    """The schemas of the arguments of the tools that a request offers, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._schemas[function["name"]] = function.get("parameters")

    def __deepcopy__(self, memo: object) -> "ToolSchemas":
        return self  # it never changes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def __contains__(self, tool: object) -> bool:
        return tool in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def of(self, tool: str) -> "SchemaNode":
        """Of a tool that is not offered, one that says nothing."""
        schema = self._schemas.get(tool)
        return SchemaNode(schema, schema)


def has_strict_tool(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the request holds the calls of any tool to its schema."""
    functions = (tool.get("function", tool) for tool in tools)
    return any(isinstance(function, Mapping) and function.get("strict") for function in functions)


class SchemaNode:
    """The schema of a tool's arguments, or of something inside them."""

    def __init__(self, schema: Any, root: Any) -> None:
        self._schema = schema
        self._root = root

    @property
    def types(self) -> Types | None:
        return types_of(self._schema, self._root)

    @property
    def names(self) -> frozenset[str]:
        """Of the properties that are described, behind references and in combinations of schemas too."""
        described = (branch.get("properties") for branch in branches(self._schema, self._root))
        return frozenset(name for properties in described if isinstance(properties, Mapping) for name in properties)

    def member(self, name: str) -> "SchemaNode":
        """The schema of a property of the object; where it is not described, that of all others."""
        for branch in branches(self._schema, self._root):
            properties = branch.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return SchemaNode(properties[name], self._root)
        return self._first("additionalProperties")

    @property
    def item(self) -> "SchemaNode":
        return self._first("items")

    def _first(self, keyword: str) -> "SchemaNode":
        found = (branch[keyword] for branch in branches(self._schema, self._root) if isinstance(branch.get(keyword), Mapping))
        return SchemaNode(next(found, None), self._root)


def branches(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """The schema itself and all that it combines, references followed, each once."""
    found: dict[int, Mapping[str, Any]] = {}
    pending = [schema]
    while pending:
        current = followed(pending.pop(), root)
        if not isinstance(current, Mapping) or id(current) in found:
            continue
        found[id(current)] = current
        for keyword in (*_COMBINERS, "allOf"):
            combined = current.get(keyword)
            pending += reversed(combined) if isinstance(combined, list) else ()
    return list(found.values())


def types_of(schema: Any, root: Any) -> Types | None:
    """The types that a value may have; None where the schema does not tell. `root` is the document that references lead into."""
    return _TypeReader(root).read(schema)


class _TypeReader:
    """One walk, in which each schema is looked at once however often it is referred to; one inside itself adds nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Types | None] = {}

    def read(self, schema: Any) -> Types | None:
        schema = followed(schema, self._root)
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()
            types = self._own(schema)
            self._known[id(schema)] = types | {"null"} if types is not None and schema.get("nullable") is True else types
        return self._known[id(schema)]

    def _own(self, schema: Mapping[str, Any]) -> Types | None:
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset({_spelled(given)})
        if isinstance(given, list) and given:
            return frozenset(_spelled(name) for name in given if isinstance(name, str)) or None
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return frozenset(json_type(value) for value in values)
        for keyword in _COMBINERS:
            if isinstance(schema.get(keyword), list):
                united = [self.read(branch) for branch in schema[keyword]]
                return None if None in united else frozenset[str]().union(*(types for types in united if types)) or None
        if isinstance(schema.get("allOf"), list):
            known = (self.read(branch) for branch in schema["allOf"])
            return next((types for types in known if types), None)
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else None


def _spelled(name: str) -> str:
    lower = name.lower()
    return lower if lower in ANY_TYPE else _SPELLINGS.get(lower, "string")


def followed(schema: Any, root: Any) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        try:
            _, schema = resolve(root, schema["$ref"], "$ref")
        except UnsupportedGrammar:
            return None
    return None


_INTEGER = re.compile(r"[+-]?\d{1,4000}", re.ASCII)  # Python reads no longer ones
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBER_SO_FAR = re.compile(r"[+-]?[\d.eE+-]*", re.ASCII)
_JSON_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMERIC = frozenset({"integer", "number"})
_CONTAINER_OF = {"{": "object", "[": "array"}
_CONTAINERS = frozenset(_CONTAINER_OF.values())
_BOOLEANS = {"true": "true", "false": "false"}
_DIGITS = {"1": "true", "0": "false"}
_NULLS = frozenset({"null", "none", "nil"})
_STRICT_NULLS = frozenset({"null", "Null", "NULL"})  # where a string is allowed, `none` is more likely one
_MAX_UNDECIDED = 64


def quoted(text: str) -> str:
    """A JSON string. What is not ASCII stays as it is."""
    return json.dumps(text, ensure_ascii=False)


def to_json(text: str, types: Types | None, *, is_json: bool = False) -> str:
    """The JSON document that `text` stands for: one of `types` where it can be read as such, else the text itself as a string.

    None stands for a string. JSON is kept as it was written; other spellings (`True`, `None`, `+5`, Python's dicts and lists) are
    rewritten. Where `is_json`, a JSON string in quotes is one, as the format writes it; elsewhere its quotes belong to it.
    """
    if types is None or (types == STRING and not is_json):
        return quoted(text)
    bare = text.strip()
    found = _as_json(bare, types, is_json=is_json) or _as_word(bare, types, is_json=is_json)
    return found or _as_number(bare, types) or _as_python(bare, types) or _as_escaped(bare, types) or quoted(text)


def _as_json(text: str, types: Types, *, is_json: bool) -> str | None:
    kind = _CONTAINER_OF.get(text[:1])
    if kind is not None:  # which may be deeper than Python reads
        return text if kind in types and _is_whole(text) else None
    if types & _NUMERIC and _JSON_INTEGER.fullmatch(text):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return None
    if isinstance(value, str):
        if "string" in types:
            return text if is_json else None
        return _unwrapped(value, types)
    if isinstance(value, float):
        return text if "number" in types else str(int(value)) if "integer" in types and value.is_integer() else None
    return text if json_type(value) in types else None


def _is_whole(text: str) -> bool:
    scanner = JsonScanner()
    return _scan(scanner, text) == len(text) and scanner.state is State.COMPLETE


def _unwrapped(text: str, types: Types) -> str | None:
    """A value that was written inside a string, where the schema allows no string."""
    json_text = to_json(text, types)
    return None if json_text.startswith('"') else json_text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _as_word(text: str, types: Types, *, is_json: bool) -> str | None:
    if "string" in types:
        if "null" in types and text in _nulls(is_json=is_json):
            return "null"
    elif text.lower() in _NULLS or (not text and "null" in types):
        return "null"
    if "boolean" not in types:
        return None
    word = _BOOLEANS.get(text.lower())
    return _DIGITS.get(text) if word is None and not types & (STRING | _NUMERIC) else word


def _nulls(*, is_json: bool) -> frozenset[str]:
    """The spellings of null where a string is allowed. Where JSON is expected, Python's is one too: a string would have quotation marks."""
    return _STRICT_NULLS | {"None"} if is_json else _STRICT_NULLS


def _as_number(text: str, types: Types) -> str | None:
    """Numbers that Python reads and JSON does not: `+5`, `007`, `.5`."""
    if types & _NUMERIC and _INTEGER.fullmatch(text):
        return str(int(text))
    if "number" in types and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return repr(float(text))
    return None


def _as_python(text: str, types: Types) -> str | None:
    """A dict or a list as Python prints it."""
    if not types & _CONTAINERS or not text.startswith(("{", "[", "(")):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that mean nothing
            value = ast.literal_eval(text)
        value = list(value) if isinstance(value, tuple) else value
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written if json_type(value) in types else None


def _as_escaped(text: str, types: Types) -> str | None:
    r"""A container escaped as if inside a string, `[\"a\"]`, as GLM-4.6 sometimes writes it."""
    if not types & _CONTAINERS or not text.startswith(("{", "[")) or "\\" not in text:
        return None
    try:
        inner = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
    return _as_json(inner, types, is_json=False)


class TextValue:
    """One value that arrives as text: what of its JSON is certain comes out as it is fed.

    Strings come out character by character, other values at their end. Where both may be, nothing comes out before the text can be
    nothing but a string. With `trims_newline` one line break at either end belongs to the format.
    """

    def __init__(self, types: Types | None, *, is_json: bool = False, trims_newline: bool = False) -> None:
        self._types = types
        self._is_json = is_json
        self._trims_newline = trims_newline
        self._is_at_start = trims_newline
        self._newline = ""  # the last one so far, which may be the format's
        self._held: list[str] = []
        self._head = ""  # what has come after white space, while it is open what it is
        self._scanner: JsonScanner | None = None  # where the value is JSON and no string
        self._is_string: bool | None = True if types is None or (types == STRING and not is_json) else None
        self._is_open = False

    @property
    def is_in_json_string(self) -> bool:
        """Inside a string of JSON, where markup is part of the string."""
        return self._scanner is not None and self._scanner.state in (State.STRING, State.ESCAPE)

    def feed(self, text: str) -> str:
        if self._is_at_start and text:
            self._is_at_start = False
            text = text.removeprefix("\n")
        if self._trims_newline and text:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._is_string:
            return self._string(text)
        self._held.append(text)
        if self._is_string is None:
            self._head += text if self._head else text.lstrip()
            return self._decide() if self._head else ""
        if self._scanner is not None:
            _scan(self._scanner, text)
        return ""

    def _decide(self) -> str:
        self._is_string = _is_string(self._head, self._types or STRING, is_json=self._is_json)
        if self._is_string:
            return self._string(self.raw)
        if self._is_string is None and len(self._head) > _MAX_UNDECIDED:
            self._is_string = False
        if self._is_string is False and "string" not in (self._types or STRING):
            self._scanner = JsonScanner()
            _scan(self._scanner, self._head)
        return ""

    def _string(self, text: str) -> str:
        escaped = quoted(text)[1:-1]
        if self._is_open or not escaped:
            return escaped
        self._is_open = True
        return f'"{escaped}'

    def finish(self) -> str:
        """The rest: the value is complete."""
        if self._is_string:
            return '"' if self._is_open else '""'
        return to_json(self.raw, self._types, is_json=self._is_json)

    def cut(self) -> str:
        """The rest of an incomplete value, unchanged: the beginning of JSON, or else of a string."""
        if self._is_string:
            return self._string(self._newline)
        scanner = JsonScanner()
        end = _scan(scanner, self.raw)
        is_json = scanner.state is not State.MALFORMED and not self.raw[end:].strip()
        return self.raw if is_json else self._string(self.raw)

    @property
    def raw(self) -> str:
        """What has come of a value that was held to its end."""
        if len(self._held) > 1:
            self._held = ["".join(self._held)]
        return self._held[0] if self._held else ""


def _scan(scanner: JsonScanner, text: str) -> int:
    """How far it goes."""
    position = 0
    while position < len(text) and not scanner.is_over:
        position = scanner.take(text, position)
    return position


def _is_string(text: str, types: Types, *, is_json: bool) -> bool | None:
    """Whether what begins like this can be nothing but a string (True) or is held to its end (False); None where that is open."""
    if text[0] in '{["':
        return {"{": "object" not in types, "[": "array" not in types, '"': not is_json and "string" in types}[text[0]]
    if "string" not in types:
        return False
    bare = text.rstrip()
    if types & _NUMERIC and _NUMBER_SO_FAR.fullmatch(bare):
        return None
    words = [*(_nulls(is_json=is_json) if "null" in types else ()), *(_BOOLEANS if "boolean" in types else ())]
    return None if any(word.startswith((bare, bare.lower())) for word in words) else True
