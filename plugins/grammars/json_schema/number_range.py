"""Numbers between bounds, digit by digit."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.json_text import DIGIT, FRACTION, INTEGER, MAX_DIGITS, MAX_FRACTION_DIGITS, NUMBER
from penstock.plugins.grammars.regex.charset import charset
from penstock.plugins.grammars.regex.regular import EMPTY, Chars, Literal, Node, Repeat, Sequence, chars, either, optional

_LIMIT = 10**MAX_DIGITS - 1
_ZEROS = Sequence((Literal("."), Repeat(Literal("0"), 1, MAX_FRACTION_DIGITS)))
_LEADING_ZEROS = Repeat(Literal("0"), 0, MAX_FRACTION_DIGITS // 2)
_NOT_ZERO = Sequence((Literal("."), _LEADING_ZEROS, chars("123456789"), Repeat(DIGIT, 0, MAX_FRACTION_DIGITS // 2)))


def number(schema: Mapping[str, Any], path: str, *, is_integer: bool) -> Node:
    """The numbers that a schema's bounds leave. Beside a bound, a number is spelled without an exponent.

    Raises `UnsupportedGrammar` for bounds that are no numbers, bounds of `number` that are no integers, and where nothing is left.
    """
    low, is_above = _bound(schema, "minimum", "exclusiveMinimum", path)
    high, is_below = _bound(schema, "maximum", "exclusiveMaximum", path)
    if low is None and high is None:
        return INTEGER if is_integer else NUMBER
    if is_integer:
        lowest = -_LIMIT if low is None else math.floor(low) + 1 if is_above else math.ceil(low)
        highest = _LIMIT if high is None else math.ceil(high) - 1 if is_below else math.floor(high)
        forms = _integers(lowest, highest)
    else:
        for bound, keyword in ((low, "exclusiveMinimum" if is_above else "minimum"), (high, "exclusiveMaximum" if is_below else "maximum")):
            if bound is not None and bound != int(bound):
                raise UnsupportedGrammar(f"`{keyword}` of a `number` is supported only where it is an integer", f"{path}.{keyword}")
        forms = _numbers(-_LIMIT if low is None else int(low), is_above, _LIMIT if high is None else int(high), is_below)
    if not forms:
        raise UnsupportedGrammar("no number is within the bounds", path)
    return either(*forms)


def _bound(schema: Mapping[str, Any], inclusive: str, exclusive: str, path: str) -> tuple[int | float | None, bool]:
    """The tighter of two bounds and whether it is itself left out."""
    for keyword in (inclusive, exclusive):
        bound = schema.get(keyword, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > _LIMIT:
            raise UnsupportedGrammar(f"`{keyword}` must be a number of at most {MAX_DIGITS} digits", f"{path}.{keyword}")
    first, second = schema.get(inclusive), schema.get(exclusive)
    if first is None or second is None:
        return (first, False) if second is None else (second, True)
    is_tighter = second >= first if inclusive == "minimum" else second <= first
    return (second, True) if is_tighter else (first, False)


def _integers(lowest: int, highest: int) -> list[Node]:
    forms: list[Node] = []
    if max(lowest, 0) <= highest:
        forms.append(_naturals(max(lowest, 0), min(highest, _LIMIT)))
    if lowest <= min(highest, -1):
        forms.append(Sequence((Literal("-"), _naturals(max(1, -highest), min(-lowest, _LIMIT)))))
    return forms


def _numbers(low: int, is_above: bool, high: int, is_below: bool) -> list[Node]:
    forms = _magnitudes(max(low, 0), is_above and low >= 0, high, is_below)
    if low < 0:
        forms += [Sequence((Literal("-"), form)) for form in _magnitudes(max(-high, 0), is_below and high <= 0, -low, is_above)]
    return forms


def _magnitudes(low: int, is_above: bool, high: int, is_below: bool) -> list[Node]:
    """Numbers without a sign: those that begin with the lower bound's integer, those between, and the upper bound itself."""
    forms: list[Node] = []
    if low < high:
        forms.append(Sequence((Literal(str(low)), _NOT_ZERO if is_above else optional(FRACTION))))
    if low + 1 < high:
        forms.append(Sequence((_naturals(low + 1, high - 1), optional(FRACTION))))
    if not is_below and (low < high or (low == high and not is_above)):
        forms.append(Sequence((Literal(str(high)), optional(_ZEROS))))
    return forms


def _naturals(low: int, high: int) -> Node:
    forms: list[Node] = []
    first_full = len(str(low)) if low in (0, 1) or low == 10 ** (len(str(low)) - 1) else len(str(low)) + 1
    last_full = len(str(high)) if high == 10 ** len(str(high)) - 1 else len(str(high)) - 1
    if low == 0:
        forms.append(Literal("0"))
        low, first_full = 1, 1
    if first_full <= last_full:
        # All numbers of these lengths.
        forms.append(Sequence((chars("123456789"), Repeat(DIGIT, first_full - 1, last_full - 1))))
    for num_digits in range(len(str(low)), len(str(high)) + 1):
        if not first_full <= num_digits <= last_full:
            lowest, highest = max(low, 10 ** (num_digits - 1)), min(high, 10**num_digits - 1)
            if lowest <= highest:
                forms.append(_same_length(str(lowest), str(highest)))
    return either(*forms)


def _same_length(low: str, high: str) -> Node:
    """The digit strings from `low` to `high`, which are equally long."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return Sequence((_digits(low[0], high[0]), Repeat(DIGIT, rest, rest)))
    if low[0] == high[0]:
        return Sequence((Literal(low[0]), _same_length(low[1:], high[1:])))
    forms: list[Node] = [Sequence((Literal(low[0]), _same_length(low[1:], "9" * rest)))]
    if int(low[0]) + 1 < int(high[0]):
        forms.append(Sequence((_digits(str(int(low[0]) + 1), str(int(high[0]) - 1)), Repeat(DIGIT, rest, rest))))
    forms.append(Sequence((Literal(high[0]), _same_length("0" * rest, high[1:]))))
    return either(*forms)


def _digits(low: str, high: str) -> Node:
    return Chars(charset((ord(low), ord(high))))
