"""Text up to a marker, or without one, as a plain regular expression.

llguidance reads `&` and `~` too, but finds out by search that nothing can match any more, and long markers use its limits up. Here the
markers' automaton becomes an expression by state elimination, deepest states first, so that shared beginnings stay shared.
"""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable

_MAX_STATES = 500
_MAX_LENGTH = 20_000  # of an expression; markers that overlap with themselves in many places make long ones

Edges = dict[int, dict[int, str]]  # expressions from one state to another


def text_regex(bans: Collection[str], marker: str | None = None) -> str | None:
    """Text in which none of the `bans` comes up: up to the end of the first `marker`, or any at all.

    None where the expression would be too long, or nothing could match.
    """
    markers = {*bans} if marker is None else {*bans, marker}
    prefixes = {text[:end] for text in markers for end in range(len(text) + 1)}
    banned = {prefix for prefix in prefixes if any(map(prefix.endswith, bans))}
    ends = set() if marker is None else {prefix for prefix in prefixes if prefix.endswith(marker)} - banned
    states = sorted(prefixes - banned - ends, key=len)
    if not states or len(states) > _MAX_STATES:
        return None
    numbers = {state: number for number, state in enumerate(states)} | dict.fromkeys(ends, len(states))
    final = len(states)
    edges = {number: _edges(state, markers, prefixes, numbers) for number, state in enumerate(states)}
    if marker is None:
        for outgoing in edges.values():
            outgoing[final] = ""
    for number in range(final - 1, 0, -1):
        if not _eliminate(edges, number):
            return None
    rest = edges[0].get(final)
    return None if rest is None else f"(?:{edges[0][0]})*{_grouped(rest)}"


def _edges(state: str, markers: Iterable[str], prefixes: Container[str], numbers: dict[str, int]) -> dict[int, str]:
    """Where each character leads to: those of no marker, and of none that could go on here, to the start."""
    targets: dict[int, str] = defaultdict(str)
    special = ""
    for character in sorted(set("".join(markers))):
        longest = state + character
        while longest not in prefixes:
            longest = longest[1:]
        if longest:
            special += character
            if longest in numbers:
                targets[numbers[longest]] += character
    return {0: f"[^{_spelled(special)}]"} | {target: f"[{_spelled(characters)}]" for target, characters in targets.items()}


def _eliminate(edges: Edges, state: int) -> bool:
    """Goes around the state; False where an expression would become too long."""
    outgoing = edges.pop(state)
    loop = outgoing.pop(state, None)
    repeated = "" if loop is None else f"(?:{loop})*"
    for others in edges.values():
        into = others.pop(state, None)
        if into is None:
            continue
        for target, onwards in outgoing.items():
            path = f"{_grouped(into)}{repeated}{_grouped(onwards)}"
            others[target] = f"{others[target]}|{path}" if target in others else path
            if len(others[target]) > _MAX_LENGTH:
                return False
    return True


def _grouped(expression: str) -> str:
    return f"(?:{expression})" if "|" in expression else expression


def _spelled(characters: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in characters)
