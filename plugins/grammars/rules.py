"""A constraint as a grammar with rules, which takes recursion: for backends whose library compiles rules rather than schemas.

For JSON Schema it is what `json_schema` translates into regular languages, and more: references may recur, a schema may allow any value,
a required property need not be described, and `additionalProperties` may be used with `properties`, whose values come first. Where it is
absent, no further properties are allowed. How values are spelled, and what is refused, is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedKind
from penstock.plugins.grammars.json_schema import values as json_text
from penstock.plugins.grammars.json_schema.document import parse_document, resolve
from penstock.plugins.grammars.json_schema.regular import LenientSchema, Place, Translation, described, object_members, refusal
from penstock.plugins.grammars.json_schema.values import (
    ANNOTATIONS,
    INTEGER,
    KEYWORDS_OF,
    NUMBER,
    STRING_CHARACTER,
    TRANSLATED,
    Whitespace,
    dumps,
)
from penstock.plugins.grammars.llguidance.matcher import MAX_OPTIONAL_PROPERTIES
from penstock.plugins.grammars.regex import lark as text_constraints
from penstock.plugins.grammars.regex.tree import (
    EMPTY,
    Chars,
    Either,
    Literal,
    Node,
    Reference,
    Repeat,
    Sequence,
    chars,
    charset,
    complement,
    either,
    intersect,
    of,
    optional,
    union,
)

MAX_NAME = 200
_MUST_ESCAPE = union(charset((1, 0x1F)), of('"\\'))
_HEX = charset((0x30, 0x39), (0x61, 0x66))
_NAME_ESCAPE = Sequence((Literal("\\"), Either((chars('"\\bfnrt'), Sequence((Literal("u00"), chars("01"), Chars(_HEX)))))))
_KEYWORDS = frozenset().union(
    TRANSLATED,
    *KEYWORDS_OF.values(),
    ("enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    ("$ref", "$dynamicRef", "$recursiveRef"),
)
_SHARED = {"string": json_text.string(), "integer": INTEGER, "number": NUMBER}


@dataclass(frozen=True, slots=True)
class GrammarRules:
    """Every `Reference` in `root` and in `rules` is to one of the `rules`, which may recur.

    `warnings` are what of a lenient spec the rules do not enforce, each a keyword with its JSON path.
    """

    root: Node
    rules: Mapping[str, Node]
    warnings: tuple[str, ...] = ()


def grammar_rules(spec: GrammarSpec, prefix: str = "") -> GrammarRules:
    """The rules of a regex, a choice, a JSON Schema, or any JSON object.

    Rules whose names do not begin with `prefix` are the same for every spec, so specs with different prefixes may share a grammar.
    Raises `UnsupportedKind` for other kinds, and `UnsupportedGrammar` naming the keyword with its path, or the position in a regex.
    """
    match spec.kind:
        case GrammarKind.REGEX:
            return GrammarRules(text_constraints.regex(spec.text, spec.param), {})
        case GrammarKind.CHOICE:
            return GrammarRules(text_constraints.choice(spec.text, spec.param), {})
        case GrammarKind.JSON_SCHEMA:
            return _schema_rules(parse_document(spec.text, spec.param), spec, prefix)
        case GrammarKind.JSON_OBJECT:
            return _schema_rules({"type": "object"}, spec, prefix)
    raise UnsupportedKind(f"a constraint of the kind {spec.kind} has no rules", spec.param)


def _schema_rules(schema: Any, spec: GrammarSpec, prefix: str) -> GrammarRules:
    pattern = spec.whitespace_pattern
    whitespace = None if pattern is None else text_constraints.regex(pattern, spec.param)
    translation = SchemaRules(schema, spec.param, whitespace, prefix=prefix, is_lenient=spec.is_lenient)
    root = translation.start()
    return GrammarRules(root, translation.rules, tuple(translation.warnings))


@dataclass(frozen=True, slots=True)
class _SharedWhitespace(Whitespace):
    """The same at every depth, since rules recur: a rule, written once."""

    rule: str = "line"

    def line(self, depth: int) -> Node:
        return Reference(self.rule)

    def written(self) -> Node:
        return Whitespace(self.pattern).line(json_text.MAX_INDENT)


class SchemaRules(Translation):
    """The rules of a schema, their names with `prefix`. `warnings` has what a lenient translation left out.

    `whitespace` is what is allowed between tokens; None is the default.
    """

    def __init__(self, root: Any, param: str, whitespace: Node | None = None, *, prefix: str = "", is_lenient: bool = False) -> None:
        shared = _SharedWhitespace(whitespace, f"{prefix}line")
        super().__init__(root, param, shared)
        self.rules: dict[str, Node] = {shared.rule: shared.written()}
        self.warnings: list[str] = []
        self._prefix = prefix
        self._lenient = LenientSchema(self.warnings) if is_lenient else None
        self._targets: dict[str, str] = {}

    def start(self) -> Node:
        """The tree of the whole schema. Raises `UnsupportedGrammar`."""
        return self.node(self.root, Place(self.param))

    def node(self, schema: Any, place: Place) -> Node:
        if schema is True or (isinstance(schema, Mapping) and all(_is_idle(keyword) for keyword in schema)):
            return self.any_value(place)
        if schema is False:
            raise refusal("`false` allows no value at all", place)
        if isinstance(schema, Mapping):
            schema = {keyword: value for keyword, value in schema.items() if not _is_idle(keyword) or keyword in ("$id", "id")}
        if self._lenient is not None and isinstance(schema, Mapping):
            schema = self._lenient.relaxed(schema, self.root, place.path)
            if not schema:
                return self.any_value(place)
        return super().node(schema, place)

    def typed(self, name: str, schema: Mapping[str, Any], place: Place) -> Node:
        node = super().typed(name, schema, place)
        return self.shared(name) if _SHARED.get(name) == node else node

    def shared(self, name: str) -> Node:
        self.rules[name] = _SHARED[name]
        return Reference(name)

    def rule(self, kind: str, node: Node) -> Node:
        """A rule of its own for what occurs in several places, or deep inside others."""
        name = f"{self._prefix}{kind}_{len(self.rules)}"
        self.rules[name] = node
        return Reference(name)

    def reference(self, target: Any, place: Place) -> Node:
        if not isinstance(target, str):
            raise refusal("`$ref` must be a string", place.at("$ref"))
        name = self._targets.get(target)
        if name is None:
            name = self._targets[target] = f"{self._prefix}ref_{len(self._targets)}"
            steps, schema = resolve(self.root, target, place.at("$ref").path)
            self.rules[name] = self.node(schema, Place(Place(self.param).at(*steps).path, references=(target,)))
        return Reference(name)

    def object_node(self, schema: Mapping[str, Any], place: Place) -> Node:
        properties, required = described(schema, place)
        additional = schema.get("additionalProperties", not properties)
        undescribed = {name: schema.get("additionalProperties", True) for name in required if name not in properties}
        if undescribed and False in undescribed.values():
            name = next(iter(undescribed))
            raise refusal(f"`required` names {dumps(name)[:80]}, which nothing allows", place.at("required"))
        if len(properties) - len(required) > MAX_OPTIONAL_PROPERTIES:
            raise refusal(f"more than {MAX_OPTIONAL_PROPERTIES} properties that are not required", place.at("properties"))
        members = []
        are_required = frozenset(required)
        for name, value in {**properties, **undescribed}.items():
            is_required = name in are_required
            if value is False and not is_required:
                continue
            step = ("properties", name) if name in properties else ("additionalProperties",)
            node = self.whitespace.member(Literal(dumps(name)), self.node(value, place.inside(*step)))
            members.append((self.rule("member", node), is_required))
        more = None if additional is False else self.additional(additional, [*properties, *undescribed], place)
        if not members and more is None:
            return self.empty_object()
        return self.rule("object", self.filled("{}", self.members(members, more), 0, is_optional=not required))

    def members(self, members: list[tuple[Node, bool]], more: Node | None) -> Node:
        """At least one of the members in order, all required ones among them, and then any number of further ones."""
        comma = self.whitespace.comma(0)
        rest = EMPTY if more is None else self.rule("more", Repeat(Sequence((comma, more)), 0, None))
        if any(is_required for _, is_required in members):
            return Sequence((object_members(members, comma), rest))
        # From the last to the first: what may follow once something is there, and what may come first.
        first: Node | None = None if more is None else Sequence((more, rest))
        for member, _ in reversed(members):
            begun = Sequence((member, rest))
            first = begun if first is None else self.rule("first", either(begun, first))
            rest = self.rule("rest", Sequence((optional(Sequence((comma, member))), rest)))
        assert first is not None
        return first

    def empty_object(self) -> Node:
        return self.whitespace.container("{}", None, 0)

    def additional(self, schema: Any, names: list[str], place: Place) -> Node:
        """One property of another name than these."""
        for name in names:
            if len(name) > MAX_NAME or any(intersect(of(character), _MUST_ESCAPE) for character in name):
                message = f"beside further properties, {dumps(name)[:80]} is not supported as a name: it is long or needs escapes"
                raise refusal(message, place.at("properties"))
        value = self.node(schema, place.inside("additionalProperties"))
        other = self.rule("name", json_text.quoted(other_names(names))) if names else self.shared("string")
        return self.rule("member", self.whitespace.member(other, value))

    def any_value(self, place: Place) -> Node:
        value = Reference(f"{self._prefix}value")
        if value.name not in self.rules:
            self.rules[value.name] = EMPTY  # what follows refers to it
            comma = self.whitespace.comma(0)
            member = self.whitespace.member(self.shared("string"), value)
            self.rules[value.name] = Either(
                (
                    self.filled("{}", Sequence((member, Repeat(Sequence((comma, member)), 0, None))), 0, is_optional=True),
                    self.filled("[]", Sequence((value, Repeat(Sequence((comma, value)), 0, None))), 0, is_optional=True),
                    *(self.shared(name) for name in ("string", "number")),
                    json_text.BOOLEAN,
                    json_text.NULL,
                )
            )
        return value


def other_names(names: list[str]) -> Node:
    """The content of every JSON string but these, none of which needs escapes; a slash is not escaped either."""
    rests: dict[str, list[str]] = {}
    for name in names:
        if name:
            rests.setdefault(name[0], []).append(name[1:])
    branches: list[Node] = [] if "" in names else [EMPTY]
    others = complement(union(_MUST_ESCAPE, of("".join(rests))))
    # What follows is no rule of its own: that would take a quarter of the memory and five times as long to compile.
    branches.append(Sequence((Either((Chars(others), _NAME_ESCAPE)), Repeat(STRING_CHARACTER, 0, None))))
    branches += [Sequence((Literal(head), other_names(rest))) for head, rest in rests.items()]
    return either(*branches)


def _is_idle(keyword: str) -> bool:
    """Whether the keyword says nothing about values; by the specification, what is no keyword says nothing."""
    return keyword in ANNOTATIONS or keyword in ("$id", "id") or keyword not in _KEYWORDS
