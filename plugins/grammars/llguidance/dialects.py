"""Grammars that clients write: Lark as llguidance takes it, less what reaches beyond the text that the grammar describes."""

import json
import re
from collections.abc import Iterator

from penstock.engine.errors import ConstraintTooLarge, UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.plugins.grammars.llguidance.exact_schema import read_schema
from penstock.plugins.grammars.llguidance.gbnf import to_lark
from penstock.plugins.grammars.llguidance.gbnf_syntax import GbnfError
from penstock.plugins.grammars.llguidance.schema_source import schema_source
from penstock.plugins.grammars.regex.llguidance_regex import OversizedRegex, UnwritableRegex

_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<regex>/(?:\\.|[^/\\])+/)
    |(?P<special><[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<attribute>(?:stop|stop_capture|max_tokens|temperature)\s*=)
    |(?P<reference>@[\w-]*)
    |(?P<brace>[{}])
    |(?P<name>[\w-]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_TOKEN_IDS = re.compile(r"<\[([0-9,\s-]+)\]>")
_REFUSED_DIRECTIVES = ("%llguidance", "%override", "%declare")
MAX_TOKEN_RANGE = 10_000
MAX_TERMINALS_WITHIN = 100_000  # each written out wherever it is named


def client_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Lark statements, lines where the client has them. Raises `UnsupportedGrammar` with line and column.

    Schemas inside get the white space that others get. Added tokens may be named, stop tokens may not.
    """
    if spec.kind is GrammarKind.LARK:
        return "".join(_Reader(spec, vocabulary).statements())
    try:
        return to_lark(spec.text)
    except GbnfError as error:
        raise UnsupportedGrammar(f"{error}, at line {error.line}, column {error.column}", spec.param) from error
    except OversizedRegex as error:
        raise ConstraintTooLarge(str(error), spec.param) from error
    except UnwritableRegex as error:
        raise UnsupportedGrammar(str(error), spec.param) from error


class _Terminals:
    """What each definition names. llguidance writes out the terminals in a terminal, which may double at every one."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self._named: dict[str, list[str]] = {}
        self._current: list[str] = []

    def name(self, text: str) -> None:
        self._current.append(text)

    def define(self, place: int) -> None:
        """What was named last."""
        if self._current:
            name = self._current.pop()
            self.places[name] = place
            self._current = self._named.setdefault(name, [])

    def too_large(self) -> str | None:
        sizes: dict[str, int] = {}
        for terminal in self._named:
            pending = [terminal] if terminal[0].isupper() else []
            while pending:
                name = pending[-1]
                if name not in sizes:
                    sizes[name] = 1  # what it is while one looks at it from within
                    pending += dict.fromkeys(part for part in self._named[name] if part in self._named and part not in sizes)
                    continue
                pending.pop()
                sizes[name] = 1 + sum(sizes.get(part, 0) for part in self._named[name])
                if sizes[name] > MAX_TERMINALS_WITHIN:
                    return name
        return None


class _Reader:
    """One pass over a Lark grammar."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self.text = spec.text
        self.added = vocabulary.added_token_ids
        self.allowed = frozenset(vocabulary.added_token_ids.values()) - vocabulary.stop_token_ids

    def statements(self) -> Iterator[str]:
        depth = place = 0
        terminals = _Terminals()
        while place < len(self.text):
            token = _TOKEN.match(self.text, place)
            assert token is not None
            kind, text = token.lastgroup, token[0]
            if kind == "brace":
                depth += 1 if text == "{" else -1
                if depth < 0:
                    raise self.refusal("an unbalanced `}`", place)
            elif kind == "name":
                terminals.name(text)
            elif text == ":":
                terminals.define(place)
            elif kind == "special":
                text = self.special(text, place)
            elif kind in ("attribute", "reference") or (kind == "directive" and text in _REFUSED_DIRECTIVES):
                raise self.refusal(f"`{text.rstrip(' =')[:40]}` is refused", place)
            place = token.end()
            yield text
            if kind == "directive" and text == "%json":
                schema, place = self.schema(place)
                yield schema
        name = terminals.too_large()
        if name is not None:
            message = f"{name[:40]} is made of more than {MAX_TERMINALS_WITHIN} terminals, each written out"
            raise self.refusal(message, terminals.places[name])

    def special(self, text: str, place: int) -> str:
        """Added tokens by their ids."""
        if not text.startswith("<["):
            token_id = self.added.get(text)
            if token_id is None:
                raise self.refusal(f"this model has no special token {text[:40]}", place)
            self.check_token(token_id, place)
            return f"<[{token_id}]>"
        ranges = _TOKEN_IDS.fullmatch(text)
        if ranges is None:
            raise self.refusal("special tokens are given by name or by ids", place)
        for span in ranges[1].split(","):
            first, _, last = span.strip().partition("-")
            if not first.isdigit() or not (last or first).isdigit() or int(last or first) - int(first) > MAX_TOKEN_RANGE:
                raise self.refusal("not a range of token ids", place)
            for token_id in range(int(first), int(last or first) + 1):
                self.check_token(token_id, place)
        return text

    def check_token(self, token_id: int, place: int) -> None:
        if token_id not in self.allowed:
            raise self.refusal(f"token {token_id} is not a special token that a grammar may name", place)

    def schema(self, place: int) -> tuple[str, int]:
        """A schema as it is compiled, with as many line breaks as the client's, and where the client's ends."""
        start = place + len(self.text[place:]) - len(self.text[place:].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(self.text, start)
        except (ValueError, RecursionError) as error:
            raise self.refusal("`%json` without a JSON value", place) from error
        source = self.text[start:end]
        schema = read_schema(GrammarSpec(GrammarKind.JSON_SCHEMA, source, self.spec.param))
        compiled = schema_source(schema.content, self.spec.whitespace_pattern, self.spec.param)
        return compiled.replace("{", "{" + "\n" * self.text.count("\n", place, end), 1), end

    def refusal(self, message: str, place: int) -> UnsupportedGrammar:
        line = self.text.count("\n", 0, place) + 1
        column = place - self.text.rfind("\n", 0, place)
        return UnsupportedGrammar(f"{message}, at line {line}, column {column}", self.spec.param)
