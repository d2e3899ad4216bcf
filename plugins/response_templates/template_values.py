"""What the text of a response template's field means: JSON and its dialects, tags, lines, and the shape that values are put in."""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.plugins.response_templates.symbol_pattern import Program, Search

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_KEY = re.compile(r"(?<=[{,])\s*(\w+)\s*:")


def parse_content(text: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """The value of a field's text. Raises `ValueError` where it has none, and for what the template itself gets wrong."""
    if name == "json":
        return _json(text, arguments)
    if name == "xml-inline":
        return _tags(text, arguments)
    if name == "kv-lines":
        return _lines(text, arguments)
    stripped = text.strip() if arguments.get("strip", True) else text
    if name == "text":
        return stripped
    if name == "int":
        return int(stripped)
    if name == "float":
        return float(stripped)
    if name == "bool":
        return stripped.lower() in ("true", "1")
    raise ValueError(f"there is no content parser {name!r}")


def transformed(value: Any, transform: Any, captures: Mapping[str, str], *, each: bool) -> Any:
    """The value in the shape that the template gives it. Raises `ValueError` for a placeholder without a value."""
    if transform is None:
        return value
    if not each:
        return _filled(transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("`transform_each` is for lists of objects")
    return [_filled(transform, {**captures, **item}) for item in value]


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing is known for the placeholder {transform}")
        value = value[key]
    return value


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    """JSON, perhaps with keys without quotation marks and with strings between delimiters of their own."""
    parts = _strings(text, arguments.get("string_delims", []))
    if arguments.get("unquoted_keys"):
        parts = _quoted_keys(parts)
    try:
        return json.loads("".join(json.dumps(part) if is_string else part for part, is_string in parts))
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip() if arguments.get("strip", True) else text
        raise


def _strings(text: str, delimiters: list[list[str]]) -> list[tuple[str, bool]]:
    """The text in parts; those that are strings without what delimits them."""
    parts: list[tuple[str, bool]] = []
    position = 0
    while delimiters:
        found = [(text.find(opening, position), opening, closing) for opening, closing in delimiters]
        start, opening, closing = min((one for one in found if one[0] >= 0), default=(-1, "", ""))
        end = text.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            break
        parts += [(text[position:start], False), (text[start + len(opening) : end], True)]
        position = end + len(closing)
    return [*parts, (text[position:], False)]


def _quoted_keys(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(part if is_string else _KEY.sub(r'"\1":', part), is_string) for part, is_string in parts]


def _tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `tag_pattern` finds, by its groups `key` and `value`."""
    program = Program(frozenset())
    program.add_pattern(arguments.get("tag_pattern", ""))
    values: dict[str, Any] = {}
    position = 0
    while position < len(text):
        search = Search(program, position)
        while search.found is None and search.position < len(text):
            search.feed(text[search.position])
        if search.found is None:
            search.finish()
        if search.found is None:
            break
        groups = groups_of(text, search.found.captures)
        if "key" not in groups:
            raise ValueError("`tag_pattern` has no group `key`")
        value = _nested(groups.get("value", ""), arguments)
        key = groups["key"]
        if key in values and arguments.get("merge_duplicates"):
            earlier = values[key] if isinstance(values[key], list) else [values[key]]
            value = [*earlier, value]
        values[key] = value
        position = max(search.found.end, position + 1)
    return values


def groups_of(text: str, captures: tuple[tuple[str, int], ...]) -> dict[str, str]:
    """The texts of named groups; of one that was passed several times, the last."""
    groups: dict[str, str] = {}
    starts: dict[str, int] = {}
    for name, position in captures:
        if name in starts:
            groups[name] = text[starts.pop(name) : position]
        else:
            starts[name] = position
    return groups


def _lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    values: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, found, value = line.partition(separator)
        if found:
            values[key.strip()] = _nested(value.strip(), arguments)
    return values


def _nested(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else parse_content(text, parser.get("name", "text"), parser.get("args", {}))
