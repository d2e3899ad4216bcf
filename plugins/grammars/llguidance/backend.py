"""The grammar backend `llguidance`: JSON Schemas, any JSON object, grammars and structures, compiled in milliseconds.

Its parser works as it goes, so that nothing is built beforehand that could be large; `limits.py` bounds what a step may cost.
"""

import json
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING

from penstock.engine.contracts.grammar import GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.system.process import heap_bytes
from penstock.plugins.grammars.json_schema.regular import MAX_WARNINGS, has_quick_masks
from penstock.plugins.grammars.llguidance.leaves import Leaf, client_grammar, explain, make_leaf
from penstock.plugins.grammars.llguidance.matcher import (
    MAX_STEP_SECONDS,
    TOO_SLOW,
    Complaint,
    Tokens,
    forcing_tokens,
    make_tokenizer,
    parser_limits,
    read_complaint,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar

# The matcher forces tokens itself.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_CLIENT_GRAMMARS = (GrammarKind.LARK, GrammarKind.GBNF)
_CIRCLE = "circular references with sibling keys"
NUM_PROBES = 4
_LENGTHS = (32, 16, 8, 4, 2)
# What a grammar takes at least, and what its lexer adds while it is used, which all its answers share: measured after hundreds of random
# answers to real schemas, 0.2 to 0.5 MB, and to patterns that ask much of it, up to 3. What compiling has allocated is measured each time.
_BASE_BYTES = 128 * 2**10
_LEXER_BYTES = 2**20
_BYTES_PER_CHARACTER = 80
_BYTES_PER_CHARACTER_OF_REGEX = 20


@hookimpl
def register_grammar_backends(register: Register) -> None:
    register("llguidance", LlguidanceBackend)


class LlguidanceBackend(GrammarBackend):
    """Compiles in the calling thread; the engine gives the interpreter lock up meanwhile."""

    preferred_kinds = frozenset(
        {GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.LARK, GrammarKind.GBNF, GrammarKind.STRUCTURE}
    )

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)

    def compile(self, spec: GrammarSpec) -> "LlguidanceGrammar":
        """Raises `UnsupportedGrammar`: a keyword with its path, a position in a regex or grammar, or a bound on size."""
        from penstock.plugins.grammars.llguidance.matcher import MatcherFailed

        try:
            return self._compiled(spec)
        except MatcherFailed as error:
            raise UnsupportedGrammar(str(error), spec.param) from error

    def _compiled(self, spec: GrammarSpec) -> "LlguidanceGrammar":
        from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar

        if not self._stop_token_ids:
            raise UnsupportedGrammar("this model has no stop token with which a constrained answer could end", spec.param)
        heap_before = heap_bytes()
        leaves = _Leaves()
        grammar = self._source(spec, leaves)
        has_schemas_only = spec.kind not in _CLIENT_GRAMMARS and all(part.kind not in _CLIENT_GRAMMARS for part in leaves.specs)
        start = self._start(grammar, has_schemas_only)
        is_circular = start.is_error() and _CIRCLE in start.get_error()
        if is_circular:
            leaves = _Leaves(is_inlined=True)
            grammar = self._source(spec, leaves)
            start = self._start(grammar, has_schemas_only)
        if start.is_error() and any(part.is_lenient for part in leaves.specs):
            leaves = _Leaves(is_relaxed=True, is_inlined=is_circular)
            grammar = self._source(spec, leaves)
            start = self._start(grammar, has_schemas_only)
        if start.is_error():
            raise self._refusal(spec, leaves, read_complaint(start.get_error()))
        warnings = tuple(dict.fromkeys(leaves.warnings))[:MAX_WARNINGS]
        bytes_per_character = _BYTES_PER_CHARACTER_OF_REGEX if spec.kind is GrammarKind.REGEX else _BYTES_PER_CHARACTER
        estimate = _BASE_BYTES + len(grammar) * bytes_per_character
        # Other threads' allocations count as well, which errs on the safe side: a cache that holds fewer grammars.
        num_bytes = _LEXER_BYTES + max(estimate, heap_bytes() - heap_before)
        return LlguidanceGrammar(
            start,
            partial(self._start, grammar, has_schemas_only),
            self._vocabulary.size,
            self._stop_token_ids,
            tokens=self._forcing_tokens,
            num_bytes=num_bytes,
            warnings=warnings,
            schema=spec.text if spec.kind is GrammarKind.JSON_SCHEMA and not spec.whitespace_pattern else None,
            has_quick_masks=all(map(has_quick_masks, leaves.specs)) and spec.kind not in _CLIENT_GRAMMARS,
        )

    def _source(self, spec: GrammarSpec, leaves: "_Leaves") -> str:
        if spec.kind is GrammarKind.STRUCTURE:
            from penstock.plugins.grammars.llguidance.structure import to_lark

            assert spec.structure is not None
            return to_lark(spec.structure, leaves.make, self._vocabulary)[0]
        if spec.kind in _CLIENT_GRAMMARS:
            return client_grammar(spec, self._vocabulary)  # not nested, so that lines are the client's
        leaf = leaves.make(spec, self._vocabulary)
        return f"start: TEXT\nTEXT: {leaf.expression}" if leaf.is_terminal else f"start: {leaf.expression}"

    def _start(self, grammar: str, has_schemas_only: bool) -> "LLMatcher":
        """A matcher that has computed its first mask, and whose copy has taken some steps: what fails at once does so here.

        Raises `MatcherFailed` where such a step is slow.
        """
        from llguidance import LLMatcher

        # In an envelope: llguidance would take a text that begins with a brace for one.
        source = json.dumps({"grammars": [{"lark_grammar": grammar + _NO_FORCING}]})
        start = LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits(is_schema=has_schemas_only))
        if not start.is_error():
            mask = start.compute_bitmask()
        if not start.is_error():
            probe = self._probe(start, mask, [])
            if not probe.is_error() and not has_schemas_only:
                probe = self._probe(start, mask, self._long_tokens)
            if probe.is_error():
                return probe
        return start

    def _probe(self, start: "LLMatcher", mask: bytes, preferred: list[int]) -> "LLMatcher":
        """A copy that has taken some tokens: of the first of the preferred masks of which one is allowed, else of any."""
        from penstock.plugins.grammars.llguidance.matcher import MatcherFailed

        probe = start.deep_copy()
        for _ in range(NUM_PROBES):
            bits = int.from_bytes(mask, "little")
            allowed = next((some for tokens in preferred if (some := bits & tokens)), bits)
            token_id = (allowed & -allowed).bit_length() - 1
            began_at = time.thread_time()
            if token_id in self._vocabulary.stop_token_ids or not probe.consume_token(token_id):
                break
            if time.thread_time() - began_at > MAX_STEP_SECONDS:  # a second time, unless by chance: see `LlguidanceMatcher._consume`
                probe.rollback(1)
                began_at = time.thread_time()
                probe.consume_token(token_id)
                if time.thread_time() - began_at > MAX_STEP_SECONDS:
                    raise MatcherFailed(TOO_SLOW)
            mask = probe.compute_bitmask()
        return probe

    @cached_property
    def _long_tokens(self) -> list[int]:
        """Masks of the tokens of at least so many bytes, the longest first."""
        masks = [bytearray(self._vocabulary.size // 8 + 1) for _ in _LENGTHS]
        for token_id, text in enumerate(self._vocabulary.token_bytes):
            for mask, length in zip(masks, _LENGTHS, strict=True):
                if text is not None and len(text) >= length:
                    mask[token_id >> 3] |= 1 << (token_id & 7)
        return [int.from_bytes(mask, "little") for mask in masks]

    def _refusal(self, spec: GrammarSpec, leaves: "_Leaves", complaint: Complaint) -> UnsupportedGrammar:
        if spec.kind is GrammarKind.STRUCTURE:
            for part in leaves.specs:
                try:
                    self.compile(part)
                except UnsupportedGrammar as refusal:
                    return refusal
        return explain(spec, complaint)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        return make_tokenizer(self._vocabulary)

    @cached_property
    def _forcing_tokens(self) -> Tokens | None:
        return forcing_tokens(self._vocabulary)


class _Leaves:
    """Remembers the parts of one grammar."""

    def __init__(self, *, is_relaxed: bool = False, is_inlined: bool = False) -> None:
        self._is_relaxed = is_relaxed
        self._is_inlined = is_inlined
        self.specs: list[GrammarSpec] = []
        self.warnings: list[str] = []

    def make(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Leaf:
        leaf = make_leaf(spec, vocabulary, is_relaxed=self._is_relaxed, is_inlined=self._is_inlined)
        self.specs.append(spec)
        self.warnings += leaf.warnings
        return leaf
