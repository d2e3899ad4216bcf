"""The client's JSON Schema as it is read: its content, and by what names its parts go."""

import json
import math
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.json_document import parse_document
from penstock.plugins.grammars.json_schema.schema_circle import can_be_circular
from penstock.plugins.grammars.json_schema.schema_walk import Steps, path, schemas_within

OPTIONS = "x-guidance"  # what llguidance itself would take from the schema's root


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """`has_anchors`: parts of it may be named other than by their place."""

    content: Any
    identifiers: "Identifiers"
    has_anchors: bool
    can_be_circular: bool


@lru_cache(maxsize=1)  # one document is read strictly, leniently and with references inlined, one after the other; no reading changes it
def read_document(text: str, param: str) -> SchemaDocument:
    schema = parse_document(text, param)
    is_escaped = _holds(text, ("\\u",), "\\")  # where a keyword may be spelled otherwise
    if is_escaped or not text.isascii():
        _check_text(schema, text, param)
    if isinstance(schema, dict) and OPTIONS in schema:
        raise UnsupportedGrammar(f"`{OPTIONS}` is refused: what it sets is not the schema's to say", f"{param}.{OPTIONS}")
    if isinstance(schema, dict) and not isinstance(schema.get("$defs", {}), dict):
        raise UnsupportedGrammar("`$defs` must be an object", f"{param}.$defs")
    has_anchors = is_escaped or _holds(text, ('"$anchor"', '"$dynamicAnchor"'), "$")
    is_circular = (is_escaped or ('"$ref"' in text and '"allOf"' in text)) and can_be_circular(schema)
    identifiers = Identifiers.of(schema, text) if is_escaped or _holds(text, ('"$id"',), "$") or '"id"' in text else Identifiers.NONE
    return SchemaDocument(schema, identifiers, has_anchors, is_circular)


class Identifiers(Enum):
    """Whether parts of a document have names of their own, from which references count."""

    NONE = auto()
    OF_ROOT = auto()
    OF_PARTS = auto()

    @classmethod
    def of(cls, schema: Any, text: str) -> "Identifiers":
        names = ("$id", "id")
        if isinstance(schema, dict) and sum(text.count(f'"{name}"') for name in names) == sum(name in schema for name in names):
            return cls.OF_ROOT if any(isinstance(schema.get(name), str) for name in names) else cls.NONE
        named = [part for part in schemas_within(schema) if isinstance(part.get("$id"), str) or isinstance(part.get("id"), str)]
        return cls.OF_PARTS if any(part is not schema for part in named) else cls.OF_ROOT if named else cls.NONE


def _holds(text: str, words: tuple[str, ...], rare: str) -> bool:
    """Whether any of the words is in a long text. All of them have the rare character at the same place."""
    offset = words[0].index(rare)
    place = text.find(rare)
    while place >= 0:
        if text.startswith(words, place - offset):
            return True
        place = text.find(rare, place + 1)
    return False


def _check_text(document: Any, text: str, param: str) -> None:
    """Raises `UnsupportedGrammar` for text that JSON in UTF-8 cannot hold."""
    if "\\ud" not in text and "\\uD" not in text and _is_writable(text):
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise unwritable(document, param) from error


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unwritable(document: Any, param: str) -> UnsupportedGrammar:
    """The refusal of text or a number in the document that JSON cannot hold, with its place."""
    return UnsupportedGrammar("a lone surrogate or a number out of range", param + path(_innermost((), document) or ()))


def _innermost(steps: Steps, value: Any) -> Steps | None:
    """Where the innermost offending value stands. The document is known not to be deep."""
    if isinstance(value, dict):
        for name, child in value.items():
            found = steps if _is_unwritable(name) else _innermost((*steps, name), child)
            if found is not None:
                return found
    elif isinstance(value, list):
        for place, child in enumerate(value):
            found = _innermost((*steps, place), child)
            if found is not None:
                return found
    return steps if _is_unwritable(value) else None


def _is_unwritable(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)
