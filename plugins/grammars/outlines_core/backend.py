"""The grammar backend `outlines_core`: regexes, choices and the JSON Schemas that are regular languages.

Neither torch nor outlines_core is imported before the first compilation.
"""

import importlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.errors import UnsupportedGrammar, UnsupportedKind
from penstock.engine.system.process import left_out
from penstock.plugins.grammars.json_schema import regular as json_schema
from penstock.plugins.grammars.json_schema.document import parse_document
from penstock.plugins.grammars.json_schema.values import Whitespace
from penstock.plugins.grammars.outlines_core.index_size import IndexSize, IndexTooLarge, TokenOpenings, measure
from penstock.plugins.grammars.regex import lark as text_constraints
from penstock.plugins.grammars.regex.lark import num_ranges
from penstock.plugins.grammars.regex.tree import Chars, CharSet, Either, Literal, Node, Repeat, Sequence, of

if TYPE_CHECKING:
    from outlines.types.dsl import Term
    from torch import Tensor

MAX_ROLLBACK = 2**20
MAX_FORCED_TOKENS = 64
MAX_CACHED_ROWS = 256


class UnwritableText(Exception):
    """Text that is asked for holds NUL or a lone surrogate."""


def to_pattern(node: Node) -> str:
    """The regex, in the syntax of Rust's `regex`. Every set is spelled out in ranges, so that it means there what it means here."""
    _import_outlines()
    from outlines.types.dsl import to_regex

    return to_regex(_term(node))


@cache
def _import_outlines() -> None:
    with left_out("transformers"):  # which Outlines imports where it is installed, for models of its own: half a second, and 60 MB
        importlib.import_module("outlines.types.dsl")


def _term(node: Node) -> "Term":
    from outlines.types import dsl

    match node:
        case Literal(text):
            if any(not of(character) for character in text):
                raise UnwritableText("NUL and lone surrogates cannot be generated")
            return dsl.String(text)
        case Chars(chars):
            return dsl.Regex(_class(chars))
        case Sequence(items):
            return dsl.Sequence([_term(item) for item in items])
        case Either(items):
            return dsl.Alternatives([_term(item) for item in items])
        case Repeat(item, 0, None):
            return dsl.KleeneStar(_term(item))
        case Repeat(item, 0, 1):
            return dsl.Optional(_term(item))
        case Repeat(item, minimum, None):
            return dsl.QuantifyMinimum(_term(item), minimum)
        case Repeat(item, minimum, maximum) if maximum is not None:
            return dsl.QuantifyBetween(_term(item), minimum, maximum)
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in chars) + "]"


MAX_SECONDS = 2.0
MAX_BYTES = 128 * 2**20

# Measured on two shared cores with vocabularies of 49,152 and 151,669 tokens; rounded up.
_SECONDS_PER_STATE = 50e-6
_SECONDS_PER_STATE_AND_TOKEN = 9e-9
_SECONDS_PER_TRANSITION = 140e-9
_SECONDS_PER_RANGE = 5e-6  # of characters: a set such as \w is spelled out in hundreds
_BYTES_PER_TRANSITION = 48

_NUL = b"\0"


@hookimpl
def register_grammar_backends(register: Register) -> None:
    register("outlines_core", OutlinesCoreBackend)


class OutlinesCoreBackend(GrammarBackend):
    """Compiles in the calling thread: the engine releases the interpreter lock meanwhile, and what would take long is refused beforehand.

    A process that can be killed would have to send the index back, and unpacking that holds the lock for 10 ms a megabyte.
    """

    preferred_kinds = frozenset({GrammarKind.REGEX, GrammarKind.CHOICE})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)

    def compile(self, spec: GrammarSpec) -> "OutlinesCoreGrammar":
        """Raises `UnsupportedGrammar`: a keyword with its path, a position in a regex, or a bound on time and memory."""
        from outlines_core import Index  # type: ignore[import-untyped]

        if not self._stop_token_ids:
            raise UnsupportedGrammar("this model has no stop token with which a constrained answer could end", spec.param)
        node = _tree(spec)
        try:
            size = measure(node, self._openings, int(MAX_SECONDS / self._seconds_per_state))
            self._check(size, num_ranges(node), spec)
            pattern = to_pattern(node)
        except (IndexTooLarge, UnwritableText) as error:
            raise UnsupportedGrammar(f"the constraint cannot be compiled: {error}", spec.param) from error
        try:
            index = Index(f"\\x00(?:{pattern})\\x00", self._engine_vocabulary)
        except ValueError as error:
            # The engine's own message quotes the pattern, which may be long and is the client's.
            message = "the constraint cannot be spelled with this model's tokens, or nests too deeply"
            raise UnsupportedGrammar(message, spec.param) from error
        schema = spec.text if spec.kind is GrammarKind.JSON_SCHEMA and not spec.whitespace_pattern else None
        num_bytes = size.num_transitions * _BYTES_PER_TRANSITION
        return OutlinesCoreGrammar(index, self._vocabulary.size, self._stop_token_ids, num_bytes, schema=schema)

    def _check(self, size: IndexSize, ranges: int, spec: GrammarSpec) -> None:
        seconds = size.num_states * self._seconds_per_state
        seconds += size.num_transitions * _SECONDS_PER_TRANSITION + ranges * _SECONDS_PER_RANGE
        num_bytes = size.num_transitions * _BYTES_PER_TRANSITION
        if seconds > MAX_SECONDS or num_bytes > MAX_BYTES:
            message = f"the constraint is too large: about {seconds:.0f} s and {num_bytes / 2**20:.0f} MiB to compile"
            raise UnsupportedGrammar(f"{message}; allowed are {MAX_SECONDS:.0f} s and {MAX_BYTES / 2**20:.0f} MiB", spec.param)

    @property
    def _seconds_per_state(self) -> float:
        return _SECONDS_PER_STATE + len(self._vocabulary.token_bytes) * _SECONDS_PER_STATE_AND_TOKEN

    @cached_property
    def _texts(self) -> dict[bytes, list[int]]:
        """The vocabulary without special tokens, stop tokens and what holds a NUL."""
        left_out, texts = self._vocabulary.stop_token_ids, defaultdict[bytes, list[int]](list)
        for token_id, text in enumerate(self._vocabulary.token_bytes[: self._vocabulary.size]):
            if text and _NUL not in text and token_id not in left_out:
                texts[text].append(token_id)
        return texts

    @cached_property
    def _openings(self) -> TokenOpenings:
        return TokenOpenings(text for text, token_ids in self._texts.items() for _ in token_ids)

    @cached_property
    def _engine_vocabulary(self) -> Any:
        from outlines_core import Vocabulary as EngineVocabulary

        # The engine's single end token is one that does not exist: the real ones spell the NUL.
        return EngineVocabulary(self._vocabulary.size, {**self._texts, _NUL: self._stop_token_ids})


def _tree(spec: GrammarSpec) -> Node:
    match spec.kind:
        case GrammarKind.REGEX:
            return text_constraints.regex(spec.text, spec.param)
        case GrammarKind.CHOICE:
            return text_constraints.choice(spec.text, spec.param)
        case GrammarKind.JSON_SCHEMA:
            pattern = spec.whitespace_pattern
            whitespace = Whitespace(None if pattern is None else text_constraints.regex(pattern, spec.param))
            return json_schema.translate(parse_document(spec.text, spec.param), spec.param, whitespace)
        case GrammarKind.JSON_OBJECT:
            raise UnsupportedKind("any JSON object is not a regular language: give a JSON schema instead", spec.param)
        case GrammarKind.LARK | GrammarKind.GBNF | GrammarKind.STRUCTURE:
            raise UnsupportedKind("outlines_core compiles JSON schemas, regexes and choices only", spec.param)


@dataclass(frozen=True, slots=True)
class _StateFacts:
    """What only a look at a whole row tells. `only_token` is the token that must come next, stop tokens apart."""

    only_token: int | None
    may_only_stop: bool


class OutlinesCoreGrammar(CompiledGrammar):
    """An index and what has been learnt of its states; shared by all sequences with this constraint.

    Its masks are looked up: `has_quick_masks`.

    In `index` the text is between two NULs, which stop tokens spell and nothing else does. `index_bytes` is its size in memory.
    """

    has_quick_masks = True

    def __init__(self, index: Any, vocab_size: int, stop_token_ids: list[int], index_bytes: int, *, schema: str | None = None) -> None:
        from penstock.engine.constraints.masks import allocate_bitmask, num_words

        self.index = index
        self.schema = schema
        self.stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = vocab_size
        self.num_bytes = index_bytes + MAX_CACHED_ROWS * num_words(vocab_size) * 4
        self._not_stop_row = allocate_bitmask(1, vocab_size)[0].bitwise_not_()
        for token_id in stop_token_ids:
            self._not_stop_row[token_id // 32] &= ~_bit(token_id)
        self._rows: dict[int, Tensor] = {}
        self._facts: dict[int, _StateFacts] = {}

    def matcher(self) -> "OutlinesCoreMatcher":
        from outlines_core import Guide

        guide = Guide(self.index, MAX_ROLLBACK)
        guide.advance(min(self.stop_token_ids), return_tokens=False)  # past the NUL in front of the text
        return OutlinesCoreMatcher(self, guide)

    def row(self, guide: Any) -> "Tensor":
        """int32 [ceil(V / 32)]: the guide's state's row, to be copied from."""
        state = guide.get_state()
        row = self._rows.get(state)
        if row is None:
            from penstock.engine.constraints.masks import allocate_bitmask

            row = allocate_bitmask(1, self._vocab_size)[0]
            guide.write_mask_into(row.data_ptr(), row.numel(), row.element_size())
            if len(self._rows) < MAX_CACHED_ROWS:
                self._rows[state] = row
        return row

    def facts(self, guide: Any) -> _StateFacts:
        state = guide.get_state()
        facts = self._facts.get(state)
        if facts is None:
            facts = self._facts[state] = self._look(self.row(guide))
        return facts

    def _look(self, row: "Tensor") -> _StateFacts:
        texts = row & self._not_stop_row
        if not texts.any():
            return _StateFacts(None, True)
        words = row.nonzero().flatten().tolist()
        bits = int(row[words[0]]) & 0xFFFFFFFF
        is_single = len(words) == 1 and bits & (bits - 1) == 0
        return _StateFacts(words[0] * 32 + bits.bit_length() - 1 if is_single else None, False)


class OutlinesCoreMatcher(GrammarMatcher):
    """One sequence's place in the index. A stop token ends it: after one, nothing is allowed."""

    def __init__(self, grammar: OutlinesCoreGrammar, guide: Any) -> None:
        self._grammar = grammar
        self._guide = guide
        self._is_stopped = False

    def fill_bitmask(self, row: "Tensor") -> None:
        if self._is_stopped:
            row.zero_()
        else:
            row.copy_(self._grammar.row(self._guide))

    def advance(self, token_id: int) -> bool:
        if self._is_stopped or self._grammar.index.get_next_state(self._guide.get_state(), token_id) is None:
            return False
        self._guide.advance(token_id, return_tokens=False)
        self._is_stopped = token_id in self._grammar.stop_token_ids
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._guide.rollback_state(num_tokens)
            self._is_stopped = False

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while not self._is_stopped and len(forced) < MAX_FORCED_TOKENS:
            token_id = self._grammar.facts(self._guide).only_token
            if token_id is None:
                break
            self._guide.advance(token_id, return_tokens=False)
            forced.append(token_id)
        if forced:
            self._guide.rollback_state(len(forced))
        return forced

    @property
    def finished(self) -> bool:
        return self._is_stopped or self._grammar.facts(self._guide).may_only_stop


def _bit(token_id: int) -> int:
    """The token's bit in its word, as int32: the highest is the sign."""
    bit = token_id % 32
    return 1 << bit if bit < 31 else -(1 << 31)
