"""The values of JSON Schema's `format` that are regular, exactly: a date is a day that exists."""

from functools import cache

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.regex.regex_syntax import ecma_dialect, parse
from penstock.plugins.grammars.regex.regular import Node

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:\d{{4}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_HEX = "[0-9a-fA-F]"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
PATTERNS = {
    "date": _DATE,  # RFC 3339
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
}


def string_format(name: object, param: str) -> Node:
    """The strings of a format. Raises `UnsupportedGrammar` for others than dates, times, UUIDs and IPv4 addresses."""
    if not isinstance(name, str) or name not in PATTERNS:
        raise UnsupportedGrammar(f"`format` is supported as one of {', '.join(PATTERNS)}", param)
    return _tree(name)


@cache
def _tree(name: str) -> Node:
    return parse(PATTERNS[name], ecma_dialect())
