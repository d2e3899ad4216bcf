"""Response templates: how a checkpoint's own tokenizer config says that its answers are to be read.

The format is Hugging Face's (transformers 5, "Response Parsing"): fields that stand between what opens and what closes them, literals or
patterns; the one that nothing opens is what stands outside all others.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.engine.errors import ConfigurationError
from penstock.engine.turn import Turn
from penstock.plugins.automaton import split_symbols
from penstock.plugins.response_templates.symbol_pattern import Program, Search

REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
CALLS_FIELD = "tool_calls"


@dataclass(frozen=True, slots=True)
class Delimiter:
    """Literals, the longest first, or one pattern; neither where there is none."""

    literals: tuple[str, ...] = ()
    pattern: str | None = None

    def __bool__(self) -> bool:
        return bool(self.literals) or self.pattern is not None

    def add_to(self, program: Program) -> int:
        """Returns for how many patterns of the program it stands."""
        for literal in self.literals:
            program.add_literal(literal)
        if self.pattern is not None:
            program.add_pattern(self.pattern)
        return len(self.literals) + (self.pattern is not None)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the answer. `content` is the name of what reads it, with its `arguments`; `transform` makes the value of that."""

    name: str
    opening: Delimiter
    closing: Delimiter
    content: str
    arguments: Mapping[str, Any]
    join: str
    transform: Any
    transforms_each: bool

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING_FIELDS

    @property
    def trims_space(self) -> bool:
        return self.content == "text" and self.arguments.get("strip", True) is not False


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """`implicit` is the field outside all others, of which `fields` are those that something opens."""

    fields: tuple[Field, ...]
    implicit: Field | None
    anchor: Delimiter

    def field(self, *names: str) -> Field | None:
        """The first of these names that the template has."""
        fields = [*self.fields, *([self.implicit] if self.implicit else [])]
        return next((found for name in names for found in fields if found.name == name), None)

    def watched(self, current: Field | None, added_tokens: frozenset[str]) -> "tuple[Program, tuple[Field | None, ...]]":
        """What may come up in `current`, and the field that each opens: None for what closes it."""
        return _watched(self.fields, self.implicit, current, added_tokens)


def template_of(turn: Turn) -> ResponseTemplate:
    """The checkpoint's; without one, a template in which nothing opens anything. Raises `ConfigurationError` for one that is wrong."""
    if turn.response_template is None:
        return ResponseTemplate((), None, Delimiter())
    return _load(json.dumps(turn.response_template))


@lru_cache(maxsize=8)
def _load(text: str) -> ResponseTemplate:
    spec = json.loads(text)
    fields = spec.get("fields") if isinstance(spec, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(one, dict) for one in fields.values()) or spec.get("version", 1) != 1:
        raise ConfigurationError("the model's `response_template` is none of version 1: it has to have `fields`")
    loaded = [_field(name, one) for name, one in fields.items()]
    implicit = [one for one in loaded if not one.opening]
    if len(implicit) > 1:
        raise ConfigurationError("more than one field of the model's `response_template` is without `open`")
    return ResponseTemplate(
        tuple(one for one in loaded if one.opening), implicit[0] if implicit else None, _delimiter(spec, "start_anchor")
    )


def _field(name: str, spec: Mapping[str, Any]) -> Field:
    return Field(
        name=name,
        opening=_delimiter(spec, "open"),
        closing=_delimiter(spec, "close"),
        content=spec.get("content", "text"),
        arguments=spec.get("content_args", {}),
        join=spec.get("join") or "",
        transform=spec.get("transform"),
        transforms_each=bool(spec.get("transform_each")),
    )


def _delimiter(spec: Mapping[str, Any], key: str) -> Delimiter:
    given, pattern = spec.get(key, ()), spec.get(f"{key}_pattern")
    literals = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(one, str) and one for one in literals) or not isinstance(pattern, str | None):
        raise ConfigurationError(f"`{key}` of the model's `response_template` has to be a text or several")
    return Delimiter(tuple(sorted(literals, key=len, reverse=True)), pattern)


@lru_cache(maxsize=64)
def _program(delimiters: tuple[Delimiter, ...], added_tokens: frozenset[str]) -> tuple[Program, tuple[int, ...]]:
    program = Program(added_tokens)
    owners = [place for place, delimiter in enumerate(delimiters) for _ in range(delimiter.add_to(program))]
    return program, tuple(owners)


def _watched(
    fields: Sequence[Field], implicit: Field | None, current: Field | None, added_tokens: frozenset[str]
) -> tuple[Program, tuple[Field | None, ...]]:
    if current is not None and current is not implicit:
        program, owners = _program((current.closing,), added_tokens)
        return program, (None,) * len(owners)
    closing = (implicit.closing,) if implicit is not None else ()
    program, owners = _program((*(one.opening for one in fields), *closing), added_tokens)
    opened = (*fields, None)
    return program, tuple(opened[owner] for owner in owners)


def after_anchor(template: ResponseTemplate, tail: str, added_tokens: frozenset[str]) -> list[str]:
    """The symbols of a prompt's tail that belong to the answer already."""
    symbols = split_symbols(tail, added_tokens)
    program, _ = _program((template.anchor,), added_tokens)
    start = 0
    for end in _ends(program, symbols):
        start = end
    return symbols[start:]


def _ends(program: Program, symbols: Sequence[str]) -> Iterable[int]:
    """Where each match ends, one after the other."""
    position = 0
    while program.entries and position <= len(symbols):
        search = Search(program, position)
        while search.found is None and search.position < len(symbols):
            search.feed(symbols[search.position])
        if search.found is None:
            search.finish()
        if search.found is None:
            return
        yield search.found.end
        position = max(search.found.end, position + 1)
