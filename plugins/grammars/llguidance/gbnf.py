"""GBNF as Lark for llguidance, whose lexer takes the longest match and never reconsiders, where GBNF knows only characters.

What of a grammar is regular becomes lexemes where these can be told apart by the next character at every place. Where they cannot, every
character is a lexeme of its own: the same language, at ten to a hundred times the cost of a mask.
"""

from collections.abc import Mapping
from itertools import groupby

from penstock.plugins.grammars.llguidance.gbnf_edges import Indistinct, check_apart
from penstock.plugins.grammars.llguidance.gbnf_syntax import Alternatives, Expression, Name, Parts, Repeated, Text, parse_gbnf
from penstock.plugins.grammars.regex import regular
from penstock.plugins.grammars.regex.llguidance_regex import quoted, to_terminal
from penstock.plugins.grammars.regex.regular import Node

MAX_FUSED = 20_000  # characters and sets of what is made one text: rules that name others twice double it each time

_SIGNS: Mapping[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def to_lark(text: str) -> str:
    """Lark statements for the same language. Raises `GbnfError`, and `UnwritableRegex` for what cannot be generated."""
    rules = parse_gbnf(text)
    fused = _Fusion(rules).run()
    try:
        check_apart(fused)
    except Indistinct:
        return _Writer(rules, is_fused=False).statements()
    return _Writer(fused, is_fused=True).statements()


class _Fusion:
    """Makes one text of what is regular, rules that are not recursive included, up to `MAX_FUSED`."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._nodes: dict[str, Node | None] = {}
        self._sizes: dict[int, tuple[Node, int]] = {}

    def run(self) -> dict[str, Expression]:
        fused = {"root": self.fused(self._rules["root"])}
        pending = ["root"]
        while pending:
            for name in _names(fused[pending.pop()]):
                if name not in fused:
                    fused[name] = self.fused(self._rules[name])
                    pending.append(name)
        return fused

    def node(self, expression: Expression) -> Node | None:
        """None where the expression is not regular, or too large to be one text."""
        match expression:
            case Text(node):
                return node
            case Name(name):
                if name not in self._nodes:
                    self._nodes[name] = None  # what it is while one looks at it from within
                    self._nodes[name] = self.node(self._rules[name])
                return self._nodes[name]
            case Repeated(item, minimum, maximum):
                inner = self.node(item)
                return None if inner is None else self.bounded(regular.Repeat(inner, minimum, maximum))
            case Parts(items) | Alternatives(items):
                nodes = [node for node in map(self.node, items) if node is not None]
                if len(nodes) < len(items):
                    return None
                return self.bounded((regular.Sequence if isinstance(expression, Parts) else regular.Either)(tuple(nodes)))

    def bounded(self, node: Node) -> Node | None:
        return node if self.size(node) <= MAX_FUSED else None

    def size(self, node: Node) -> int:
        """Written out, without its repeats. What stands in several places is looked at once."""
        if id(node) not in self._sizes:
            size = 1
            match node:
                case regular.Literal(text):
                    size += len(text)
                case regular.Chars(chars):
                    size += len(chars)
                case regular.Sequence(items) | regular.Either(items):
                    size += sum(map(self.size, items))
                case regular.Repeat(item):
                    size += self.size(item)
            self._sizes[id(node)] = node, size  # with the node, whose identity is another's once it is gone
        return self._sizes[id(node)][1]

    def fused(self, expression: Expression) -> Expression:
        node = self.node(expression)
        if node is not None:
            return Text(node)
        match expression:
            case Parts(items):
                parts: list[Expression] = []
                for is_regular, run in groupby(items, key=lambda item: self.node(item) is not None):
                    members = tuple(run)
                    parts += self.whole(Parts(members)) if is_regular else map(self.fused, members)
                return parts[0] if len(parts) == 1 else Parts(tuple(parts))
            case Alternatives(items):
                texts = tuple(item for item in items if self.node(item) is not None)
                others = [self.fused(item) for item in items if self.node(item) is None]
                return Alternatives((*(self.whole(Alternatives(texts)) if texts else []), *others))
            case Repeated(item, minimum, maximum):
                return Repeated(self.fused(item), minimum, maximum)
        return expression

    def whole(self, expression: Parts | Alternatives) -> list[Expression]:
        """As one text where that is small enough, else each of its texts."""
        node = self.node(expression)
        nodes = map(self.node, expression.items) if node is None else [node]
        return [Text(node) for node in nodes if node is not None]


def _names(expression: Expression) -> list[str]:
    match expression:
        case Name(name):
            return [name]
        case Repeated(item):
            return _names(item)
        case Parts(items) | Alternatives(items):
            return [name for item in items for name in _names(item)]
    return []


class _Writer:
    def __init__(self, rules: Mapping[str, Expression], *, is_fused: bool) -> None:
        self._rules = rules
        self._is_fused = is_fused
        self._names = {name: "start" if name == "root" else f"rule_{place}" for place, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def statements(self) -> str:
        lines = [f"{self._names[name]}: {self._written(expression)}" for name, expression in self._rules.items()]
        return "\n".join([*lines, *(f"{name}: {body}" for body, name in self._terminals.items()), ""])

    def _written(self, expression: Expression) -> str:
        match expression:
            case Text(regular.Literal(text)) if not self._is_fused:
                return " ".join(map(quoted, text)) or quoted("")
            case Text(node):
                return self._terminals.setdefault(to_terminal(node), f"TEXT_{len(self._terminals)}")
            case Name(name):
                return self._names[name]
            case Parts(items):
                return " ".join(
                    f"({self._written(item)})" if isinstance(item, Alternatives) else self._written(item) for item in items
                ) or quoted("")
            case Alternatives(items):
                return " | ".join(map(self._written, items))
            case Repeated(item, minimum, maximum):
                times = _SIGNS.get((minimum, maximum), f"{{{minimum},{'' if maximum is None else maximum}}}")
                return f"({self._written(item)}){times}"
