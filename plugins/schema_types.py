"""Which JSON types a tool's parameters may have: what text without types of its own is coerced by."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.values import json_type

Types = frozenset[str]

ANY_TYPE: Types = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
STRING: Types = frozenset({"string"})

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

    def of(self, tool: str) -> "ArgumentsSchema":
        """Of a tool that is not offered, one that says nothing."""
        return ArgumentsSchema(self._schemas.get(tool))


def has_strict_tool(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the request holds the calls of any tool to its schema."""
    functions = (tool.get("function", tool) for tool in tools)
    return any(isinstance(function, Mapping) and function.get("strict") for function in functions)


class ArgumentsSchema:
    """What one tool's schema says of its parameters."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self.properties = properties_of(schema, schema)

    def types(self, parameter: str) -> Types | None:
        """As in `types_of`; None for a parameter that is not in the schema."""
        return types_of(self.properties.get(parameter), self._root)

    @property
    def node(self) -> "SchemaNode":
        return SchemaNode(self._root, self._root)


class SchemaNode:
    """A schema somewhere inside the arguments, for formats that write out what is nested."""

    def __init__(self, schema: Any, root: Any) -> None:
        self._schema = schema
        self._root = root

    @property
    def types(self) -> Types | None:
        return types_of(self._schema, self._root)

    @property
    def names(self) -> frozenset[str]:
        """Of the properties that are described."""
        return frozenset(properties_of(self._schema, self._root))

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


def properties_of(schema: Any, root: Any) -> Mapping[str, Any]:
    """The properties that the schema describes, behind references and in combinations of schemas; the first of each name."""
    found: dict[str, Any] = {}
    for branch in branches(schema, root):
        properties = branch.get("properties")
        for name, described in properties.items() if isinstance(properties, Mapping) else ():
            found.setdefault(name, described)
    return found


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
