"""Audits masks in both directions: no token of a valid text is masked, and no token is allowed that leads to none.

For each constraint, valid texts are written in many legal spellings and in random tokens. At every position

- the tokens that the text may continue with, all that its rest begins with, have to be allowed (`masked` otherwise);
- the tokens that no text has there have to be masked, stop tokens among them (`allowed` otherwise): in JSON those that no JSON text has, by
  `Syntax` in `languages.py`, whatever the schema; for regexes, choices and grammars those that nothing could complete, by the other classes
  there, and all others have to be allowed;
- some of the other allowed tokens are taken, and completed by walking the masks to an end: what comes out has to be valid (`invalid`), and
  there has to be a way on (`dead_end`).

Nothing that is judged by is shared with the backends: the syntax is RFC 8259's, validity that of the package jsonschema, of Python's `re`,
of an Earley parser, and of a tool format's own parser.
"""

import functools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.cli.grammar.arguments import AuditEffort
from penstock.cli.grammar.languages import DecidedTokens, Syntax, TextState
from penstock.cli.grammar.trial import Case, Malformed
from penstock.engine.constraints.endings import EndingTokens
from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher, Vocabulary
from penstock.engine.errors import PenstockError
from penstock.plugins.grammars.json_schema.values import INDENT_PER_LEVEL, MAX_INDENT
from penstock.serving.messages import Conformance, conformance

State: TypeAlias = Syntax | TextState
Judge: TypeAlias = Callable[[str], Conformance]
Fault: TypeAlias = Literal["masked", "allowed", "invalid", "dead_end", "error"]
# What docs/grammars.md says is not generated though it is valid: texts that are spelled so may be refused.
RESTRICTIONS = ("exponent", "trailing_zero", "fraction_of_integer", "delete_character")
MAX_TOKENS_OF_COMPLETION = 400
MAX_TOKEN_BYTES = 48


@dataclass(frozen=True, slots=True)
class Spelling:
    """A text of an instance. `restrictions` are those of `RESTRICTIONS` that it needs lifted."""

    text: str
    restrictions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WhiteSpace:
    """What a backend writes: after a comma and colon, and within brackets and braces that hold something."""

    comma: tuple[str, ...] = ("", " ")
    colon: tuple[str, ...] = ("", " ")
    inside: tuple[str, ...] = ("",)
    delete_character: str = "\\u007f"  # U+007F in strings


def _with_lines(max_indent: int) -> WhiteSpace:
    lines = ("", " ", "\n", "\n  ", "\n" + " " * max_indent)
    return WhiteSpace(comma=lines, inside=lines, delete_character="\x7f")


# outlines_core indents each level by so much more: this is what all levels may have.
WHITE_SPACE = defaultdict(WhiteSpace, {"outlines_core": _with_lines(INDENT_PER_LEVEL), "xgrammar": _with_lines(MAX_INDENT)})


class Speller:
    """Writes values in random legal ways."""

    def __init__(self, numbers: random.Random, white_space: WhiteSpace) -> None:
        self._random = numbers
        self._white_space = white_space

    def spellings(self, value: Any, count: int) -> Iterator[Spelling]:
        """Texts without a restriction first, then one for each restriction that the value can be spelled against."""
        for _ in range(count):
            yield Spelling(self._written(value, None))
        for restriction in RESTRICTIONS:
            text = self._written(value, restriction)
            if self._is_other(text, value):
                yield Spelling(text, frozenset({restriction}))

    def _is_other(self, text: str, value: Any) -> bool:
        return _bare(text) != _bare(self._written(value, None))

    def _written(self, value: Any, restriction: str | None) -> str:
        space = self._random.choice
        if isinstance(value, dict) and value:
            items = [
                f"{self._text(name, restriction)}:{space(self._white_space.colon)}{self._written(member, restriction)}"
                for name, member in value.items()
            ]
            return "{" + self._joined(items) + "}"
        if isinstance(value, list) and value:
            return "[" + self._joined([self._written(item, restriction) for item in value]) + "]"
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(value, restriction)
        return self._text(value, restriction)

    def _text(self, value: Any, restriction: str | None) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return text if restriction == "delete_character" else text.replace("\x7f", self._white_space.delete_character)

    def _joined(self, parts: Sequence[str]) -> str:
        inside = self._random.choice(self._white_space.inside)
        separated = "".join(f",{self._random.choice(self._white_space.comma)}{part}" for part in parts[1:])
        return f"{inside}{parts[0]}{separated}{inside}"


def _bare(text: str) -> str:
    return "".join(text.split())


def _number(value: float, restriction: str | None) -> str:
    text = json.dumps(value)
    if "e" in text or restriction is None:
        return text
    if restriction == "exponent":
        return f"{text}e0"
    if isinstance(value, int):
        return f"{text}.0" if restriction == "fraction_of_integer" else text
    return f"{text}0" if restriction == "trailing_zero" else text


@dataclass(frozen=True, slots=True)
class Finding:
    """A token that is wrongly masked or allowed: `token` after `text`. `detail` says more, as what an allowed one was completed to."""

    line: int
    name: str
    fault: Fault
    text: str
    token: str
    detail: str = ""


@dataclass(slots=True)
class Audit:
    """What was audited. `decisions` counts pairs of a position and a token by what proves them right."""

    constraints: dict[str, Counter[str]] = field(default_factory=dict)  # by kind and `Tried.verdict`
    walks: int = 0
    positions: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0  # completions that were given up
    unjudged: int = 0  # completions whose validity is not known
    unspelled: int = 0  # instances that no tokens spell
    seconds: float = 0.0  # of the processor
    restricted: Counter[str] = field(default_factory=Counter)  # spellings that were refused, by the declared restriction
    spelled: Counter[str] = field(default_factory=Counter)  # spellings, by restriction; "" for none
    findings: list[Finding] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)
    is_complete: bool = False

    @property
    def is_passed(self) -> bool:
        failed = sum(verdicts["failed"] for verdicts in self.constraints.values())
        return self.is_complete and self.walks > 0 and not self.findings and not self.malformed and not failed

    def count(self, kind: str, verdict: str) -> None:
        self.constraints.setdefault(kind, Counter())[verdict] += 1


class Tokens:
    """A vocabulary's tokens by their bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.decided = DecidedTokens(_texts_of(vocabulary), vocabulary.size)
        self._by_bytes: dict[bytes, list[int]] = defaultdict(list)
        for token_id, data in enumerate(_texts_of(vocabulary)):
            if data and len(data) <= MAX_TOKEN_BYTES:
                self._by_bytes[data].append(token_id)
        self.longest = max(map(len, self._by_bytes), default=0)
        self.endings = EndingTokens(vocabulary)

    def beginning(self, rest: bytes) -> dict[int, int]:
        """The tokens that a text begins with, each with its length."""
        lengths = range(1, min(len(rest), self.longest) + 1)
        return {token_id: length for length in lengths for token_id in self._by_bytes.get(rest[:length], ())}

    def own(self, text: str) -> list[int]:
        """The tokenizer's, where they spell this text and nothing else, in tokens that `beginning` finds; none otherwise."""
        token_ids = [] if self.vocabulary.encode is None else self.vocabulary.encode(text)
        parts = [self.bytes_of(token_id) for token_id in token_ids]
        return (
            token_ids
            if b"".join(parts) == text.encode()
            and all(token_id in self._by_bytes.get(part, ()) for token_id, part in zip(token_ids, parts, strict=True))
            else []
        )

    def forced(self, matcher: GrammarMatcher, rest: bytes) -> dict[int, int]:
        """The token that must come next, if there is one and the text goes on with it."""
        token_ids = matcher.forced_tokens()[:1]
        return {token_id: len(self.bytes_of(token_id)) for token_id in token_ids if rest.startswith(self.bytes_of(token_id))}

    def bytes_of(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes[token_id] or b""


def _texts_of(vocabulary: Vocabulary) -> Iterator[bytes | None]:
    return (None if token_id in vocabulary.stop_token_ids else data for token_id, data in enumerate(vocabulary.token_bytes))


class Unspellable(Exception):
    """The vocabulary has no tokens for a text."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A constraint with texts that it has to allow. `start` is the beginning of its language; None where that is not known."""

    line: int
    name: str
    texts: tuple[Spelling, ...]
    judge: Judge
    start: State | None


class Auditor:
    """Audits one grammar at a time."""

    def __init__(self, vocabulary: Vocabulary, effort: AuditEffort, audit: Audit) -> None:
        self._tokens = Tokens(vocabulary)
        self._effort = effort
        self._audit = audit
        self._row = allocate_bitmask(1, vocabulary.size)[0]
        self._bytes: npt.NDArray[np.uint8] = self._row.numpy().view(np.uint8)  # the same memory
        self._random = random.Random(effort.seed)

    def run_schema(self, case: Case, grammar: CompiledGrammar, white_space: WhiteSpace) -> None:
        """Each instance in an order of its members that the grammar takes."""
        speller = Speller(self._random, white_space)
        subject = Subject(case.line, case.name, (), functools.partial(conformance, case.schema), Syntax())
        for instance in case.instances:
            if not instance.is_valid:
                continue
            try:
                text = self._accepted(grammar, [text.replace("\x7f", white_space.delete_character) for text in instance.texts])
            except Unspellable:
                self._audit.unspelled += 1
                continue
            except PenstockError as error:
                self._found(subject, "error", instance.texts[-1], "", str(error))
                continue
            if text is None:
                self._found(subject, "masked", instance.texts[-1], "", "the instance is not accepted in any order of its members")
            else:
                spellings = speller.spellings(json.loads(text), self._effort.spellings)
                self.run(replace(subject, texts=tuple(spellings)), grammar)

    def run(self, subject: Subject, grammar: CompiledGrammar) -> None:
        for spelling in subject.texts:
            self._audit.spelled["".join(spelling.restrictions)] += 1
            own = self._tokens.own(spelling.text)
            is_walked = self._walk(subject, grammar, spelling, own) if own else True
            for _ in range(self._effort.tokenizations):
                if not self._walk(subject, grammar, spelling):
                    is_walked = False
                    break
            self._audit.restricted.update(() if is_walked else spelling.restrictions)

    def _accepted(self, grammar: CompiledGrammar, texts: Iterable[str]) -> str | None:
        """Raises `Unspellable` where no tokens spell a text."""
        for text in texts:
            matcher, rest = grammar.matcher(), text.encode()
            while rest:
                found = self._tokens.forced(matcher, rest) or self._tokens.beginning(rest)
                if not found:
                    raise Unspellable
                longest = max(found, key=lambda token_id: found[token_id])
                if not self._mask(matcher)[longest] or not matcher.advance(longest):
                    break
                rest = rest[found[longest] :]
            if not rest:
                return text
        return None

    def _mask(self, matcher: GrammarMatcher) -> npt.NDArray[np.uint8]:
        """[size], 1 where a token is allowed."""
        matcher.fill_bitmask(self._row)
        return np.unpackbits(self._bytes, bitorder="little")[: self._tokens.vocabulary.size]

    def _walk(self, subject: Subject, grammar: CompiledGrammar, spelling: Spelling, own: Sequence[int] = ()) -> bool:
        """One way through a text, in the tokenizer's own tokens if they are given; False where its end is not reached."""
        matcher, state, data, position = grammar.matcher(), subject.start, spelling.text.encode(), 0
        self._audit.walks += 1
        own_tokens = iter(own)
        completed = sorted(self._random.randrange(len(data) + 1) for _ in range(self._effort.completions))
        try:
            while True:
                allowed, before = self._mask(matcher), data[:position]
                self._audit.positions += 1
                if state is not None:
                    self._check_all(subject, state, matcher, allowed, before)
                rest = self._tokens.beginning(data[position:])
                while completed and completed[0] <= position:
                    completed.pop(0)
                    self._complete(subject, matcher, allowed, rest, before)
                if position == len(data):
                    is_ended = bool(allowed[self._tokens.endings.stops].any())
                    self._audit.decisions["spelled"] += is_ended
                    return is_ended or self._refuse(subject, spelling, before, "the end")
                if not rest:
                    self._audit.unspelled += 1
                    return False
                if own:
                    token_id = next(own_tokens)
                    rest = {token_id: rest[token_id]}
                else:  # where one text alone can follow, the tokenizer's own tokens for it alone are allowed
                    rest = self._tokens.forced(matcher, data[position:]) or rest
                masked = [token_id for token_id in rest if not allowed[token_id]]
                if masked:
                    return self._refuse(subject, spelling, before, repr(self._tokens.bytes_of(masked[0])))
                self._audit.decisions["spelled"] += len(rest)
                token_id = self._random.choice([*rest])
                if not matcher.advance(token_id):
                    self._found(subject, "error", before, repr(self._tokens.bytes_of(token_id)), "allowed, and refused by the matcher")
                    return False
                position += rest[token_id]
                if state is not None:
                    state = state.after(self._tokens.bytes_of(token_id))
                    assert state is not None  # the text is in the language
        except PenstockError as error:
            self._found(subject, "error", data[:position], "", str(error))
            return False

    def _refuse(self, subject: Subject, spelling: Spelling, before: bytes, token: str) -> bool:
        if not spelling.restrictions:
            self._found(subject, "masked", before, token, f"of {spelling.text}")
        return False

    def _check_all(self, subject: Subject, state: State, matcher: GrammarMatcher, allowed: npt.NDArray[np.uint8], before: bytes) -> None:
        """Every token of the vocabulary that the language decides about."""
        impossible, needed = self._tokens.decided.at(state)
        wrong = allowed.astype(np.bool_) & impossible
        if state.is_complete:
            wrong[self._tokens.endings.stops] = False
        self._audit.decisions["impossible"] += int(impossible.sum()) - len(self._tokens.endings.stops) * state.is_complete
        for token_id in np.flatnonzero(wrong)[:1]:
            token = repr(self._tokens.bytes_of(int(token_id)))
            self._found(subject, "allowed", before, token, f"{int(wrong.sum())} tokens that nothing valid has here")
        if needed.any() and not matcher.forced_tokens():
            missing = needed & ~allowed.astype(np.bool_)
            self._audit.decisions["possible"] += int(needed.sum())
            for token_id in np.flatnonzero(missing)[:1]:
                token = repr(self._tokens.bytes_of(int(token_id)))
                self._found(subject, "masked", before, token, f"{int(missing.sum())} tokens that something valid has here")

    def _complete(
        self,
        subject: Subject,
        matcher: GrammarMatcher,
        allowed: npt.NDArray[np.uint8],
        rest: dict[int, int],
        before: bytes,
    ) -> None:
        """Takes an allowed token that the text does not continue with, and walks to an end; the matcher is then as before."""
        others = [
            int(token_id) for token_id in np.flatnonzero(allowed) if token_id not in rest and token_id not in self._tokens.endings.stops
        ]
        if not others:
            return
        first, num_taken, text = self._random.choice(others), 0, before
        token_id: int | None = first
        try:
            while token_id is not None and num_taken < MAX_TOKENS_OF_COMPLETION:
                if not matcher.advance(token_id):
                    self._found(subject, "error", text, repr(self._tokens.bytes_of(token_id)), "allowed, and refused by the matcher")
                    return
                num_taken += 1
                text += self._tokens.bytes_of(token_id)
                mask = self._mask(matcher)
                if mask[self._tokens.endings.stops].any():
                    break
                if not mask.any():
                    self._found(subject, "dead_end", before, repr(self._tokens.bytes_of(first)), f"nothing is allowed after {text!r}")
                    return
                token_id = self._nearest_end(mask)
            else:
                self._audit.unfinished += 1
                return
        finally:
            matcher.rollback(num_taken)
        try:
            verdict = subject.judge(text.decode())
        except UnicodeDecodeError:
            self._found(subject, "invalid", before, repr(self._tokens.bytes_of(first)), f"completed to {text!r}, which is no UTF-8")
            return
        if verdict.valid is False:
            detail = f"completed to {text.decode()}: {verdict.error}"
            self._found(subject, "invalid", before, repr(self._tokens.bytes_of(first)), detail)
        self._audit.unjudged += verdict.valid is None
        self._audit.decisions["completed"] += verdict.valid is True

    def _nearest_end(self, mask: npt.NDArray[np.uint8]) -> int:
        closer = self._tokens.endings.closer(mask.view(np.bool_))
        return int(self._random.choice(np.flatnonzero(mask).tolist())) if closer is None else closer

    def _found(self, subject: Subject, fault: Fault, text: bytes | str, token: str, detail: str = "") -> None:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        self._audit.findings.append(Finding(subject.line, subject.name, fault, shown, token, detail))
