"""The text of a JSON Schema as llguidance takes it, with how its instances are spelled."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.schema_document import OPTIONS, unwritable
from penstock.plugins.grammars.regex.llguidance_regex import to_pattern
from penstock.plugins.grammars.regex.regex_syntax import RegexError, parse, python_dialect
from penstock.plugins.grammars.regex.regular import MisplacedAnchor, full_match

# The engine's own white space may stand between any two tokens, before commas and colons too; separators have theirs for themselves.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT = {"whitespace_flexible": False}


def schema_source(schema: Any, whitespace_pattern: str | None, param: str) -> str:
    """JSON for `%json`: the schema's instances with white space as asked for, and raw UTF-8 in strings."""
    options: dict[str, Any] = _ONE_LINE if whitespace_pattern is None else _COMPACT
    if whitespace_pattern:
        options = {"whitespace_pattern": _whitespace(whitespace_pattern, param)}
    if schema is True:
        schema = {}
    content = {**schema, OPTIONS: options} if isinstance(schema, Mapping) else schema
    try:
        return json.dumps(content, allow_nan=False, check_circular=False)
    except ValueError as error:
        raise unwritable(schema, param) from error


def _whitespace(pattern: str, param: str) -> str:
    try:
        return to_pattern(full_match(parse(pattern, python_dialect())))
    except (RegexError, MisplacedAnchor) as error:
        raise UnsupportedGrammar(f"the pattern for white space: {error}", param) from error
