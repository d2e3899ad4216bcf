"""Whether a schema's references lead back to where they are met with other demands."""

from typing import Any
from urllib.parse import unquote

from penstock.plugins.grammars.json_schema.schema_keywords import ASSERTIONS
from penstock.plugins.grammars.json_schema.schema_walk import SCHEMA_KEYWORDS, at_pointer, schemas_below

_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf"})
_LEADING_ON = SCHEMA_KEYWORDS | {"$ref"}


def can_be_circular(document: Any) -> bool:
    """Whether something that is being looked into is referred to from within where it would have to be joined with what stands beside it.

    That is what a compiler cannot do that reads what a reference leads to before it joins it. Members are taken in the document's order.
    """
    return _Search(document).finds(document, is_met=False)


class _Search:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._seen: set[str] = set()
        self._open: set[str] = set()

    def finds(self, schema: Any, *, is_met: bool) -> bool:
        """`is_met`: what the schema says is joined with what others say."""
        if not isinstance(schema, dict):
            return False
        if _LEADING_ON.isdisjoint(schema):
            return False
        has_beside = is_met or sum(map(ASSERTIONS.__contains__, schema)) > 1
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and self._follows(reference, is_met=has_beside):
            return True
        for keyword, children in schemas_below(schema):
            if keyword in ("$defs", "definitions"):
                continue
            is_joined = keyword in _IN_PLACE and (has_beside or (keyword == "allOf" and len(schema["allOf"]) > 1))
            for child in children:
                if isinstance(child, dict) and self.finds(child, is_met=is_joined):
                    return True
        return False

    def _follows(self, reference: str, *, is_met: bool) -> bool:
        if reference in self._open:
            return is_met
        if reference in self._seen:
            return False
        self._seen.add(reference)
        self._open.add(reference)
        found = self.finds(at_pointer(self._document, unquote(reference[1:])), is_met=False)
        self._open.discard(reference)
        return found
