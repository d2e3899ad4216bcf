"""A tree as the EBNF that xgrammar compiles. Every set is spelled out in ranges, so that it means there what it means here."""

from collections.abc import Collection, Mapping

from penstock.grammars import Chars, CharSet, Either, Literal, Node, Reference, Repeat, Sequence, of

MAX_CHARS = 4 * 2**20
_NOTHING = '""'


class UnwritableGrammar(Exception):
    """Text that is asked for holds NUL or a lone surrogate, nothing matches at all, or the grammar is larger than `MAX_CHARS`."""


def to_ebnf(root: Node, rules: Mapping[str, Node], token_rules: Mapping[str, int] | None = None) -> str:
    """The grammar of `root`, whose `Reference`s are to `rules`, or to single tokens. Raises `UnwritableGrammar`."""
    if not _are_finite({"root": root, **rules}, token_rules or {}):
        raise UnwritableGrammar("nothing can match, or what begins there never ends")
    writer = _Writer()
    lines = []
    num_chars = 0
    for name, node in {"root": root, **rules}.items():
        expression = writer.expression(node)
        if expression is None:
            raise UnwritableGrammar("nothing can match")
        lines.append(f"{name} ::= {expression}\n")
        num_chars += len(lines[-1])
        if num_chars > MAX_CHARS:
            raise UnwritableGrammar(f"more than {MAX_CHARS} characters of grammar")
    lines += [f"{name} ::= Token({token_id})\n" for name, token_id in (token_rules or {}).items()]
    return "".join(lines + writer.class_rules)


def _are_finite(rules: Mapping[str, Node], tokens: Collection[str]) -> bool:
    """Whether every rule can end."""
    finite = set(tokens)
    waiting = dict(rules)
    is_going_on = True
    while waiting and is_going_on:
        is_going_on = False
        for name in [*waiting]:
            if _is_finite(waiting[name], finite):  # counts at once: rules come after those that they need, in chains of thousands
                finite.add(name)
                del waiting[name]
                is_going_on = True
    return not waiting


def _is_finite(node: Node, finite: Collection[str]) -> bool:
    match node:
        case Reference(name):
            return name in finite
        case Chars(chars):
            return bool(chars)
        case Sequence(items):
            return all(_is_finite(item, finite) for item in items)
        case Either(items):
            return any(_is_finite(item, finite) for item in items)
        case Repeat(item, minimum, _):
            return minimum == 0 or _is_finite(item, finite)
    return True


class _Writer:
    """Large sets become rules of their own, once each. An expression is None where nothing can match."""

    def __init__(self) -> None:
        self.class_rules: list[str] = []
        self._classes: dict[CharSet, str] = {}

    def expression(self, node: Node) -> str | None:
        match node:
            case Literal(text):
                if any(not of(character) for character in text):
                    raise UnwritableGrammar("NUL and lone surrogates cannot be generated")
                return '"' + "".join(map(_character, text)) + '"'
            case Chars(chars):
                return self._class(chars) if chars else None
            case Reference(name):
                return name
            case Sequence(items):
                parts = [self.expression(item) for item in items]
                if None in parts:
                    return None
                written = [part for part in parts if part and part != _NOTHING]
                return "(" + " ".join(written) + ")" if len(written) > 1 else written[0] if written else _NOTHING
            case Either(items):
                branches = [branch for item in items if (branch := self.expression(item)) is not None]
                return "(" + " | ".join(branches) + ")" if branches else None
            case Repeat(Either((Chars() as plain, *others)), 0, None) if others:
                # (a|b)* as (a* b)* a*: a loop over a set of characters alone has masks that are known beforehand, 20 us instead of 50 ms.
                run = Repeat(plain, 0, None)
                return self.expression(Sequence((Repeat(Sequence((run, Either(tuple(others)))), 0, None), run)))
            case Repeat(item, minimum, maximum):
                repeated = self.expression(item)
                if repeated is None or maximum == 0:
                    return _NOTHING if minimum == 0 else None
                # Parentheses: one quantifier right after another is a syntax error.
                return f"({repeated}){_quantifier(minimum, maximum)}"
        raise AssertionError("anchors are resolved before a pattern is written")

    def _class(self, chars: CharSet) -> str:
        if chars not in self._classes:
            ranges = "[" + "".join(_range(low, high) for low, high in chars) + "]"
            if len(chars) < 8:
                self._classes[chars] = ranges
            else:
                name = self._classes[chars] = f"set_{len(self.class_rules)}"
                self.class_rules.append(f"{name} ::= {ranges}\n")
        return self._classes[chars]


def _quantifier(minimum: int, maximum: int | None) -> str:
    match (minimum, maximum):
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
        case (_, None):
            return f"{{{minimum},}}"
    return f"{{{minimum},{maximum}}}"


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _character(character: str) -> str:
    return character if character.isascii() and (character.isalnum() or character == " ") else _code(ord(character))


def _code(point: int) -> str:
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"
