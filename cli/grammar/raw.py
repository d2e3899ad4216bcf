"""The engines as they come, with their defaults and without Penstock's rewriting: what an audit is held beside.

They get Penstock's bytes for each token, so that only grammars are compared. What takes an engine's compiler long, or brings it down, does
so in a process of its own.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.cli.grammar.trial import Outcome, Tried
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar, UnsupportedKind
from penstock.engine.system.sandbox import Limits, Sandbox

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = Limits(cpu_seconds=20.0, memory_bytes=4 * 2**30, wall_seconds=60.0, result_bytes=2**29, niceness=0)


def raw_backends() -> dict[str, Callable[[Vocabulary], GrammarBackend]]:
    """Of the engines that are installed."""
    engines = {"llguidance": RawLlguidance, "outlines_core": RawOutlinesCore, "xgrammar": RawXgrammar}
    return {f"{name} as it comes": engine for name, engine in engines.items() if find_spec(name) is not None}


class RawBench:
    """Compiles with one engine as it comes, in the calling thread."""

    def __init__(self, name: str, make: Callable[[Vocabulary], GrammarBackend], vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._name = name
        self._backend = make(vocabulary)

    async def warm_up(self, backend: str | None) -> None:
        pass

    async def attempt(self, spec: GrammarSpec, backend: str | None, *, is_strict: bool) -> Tried:
        grammar, refusal, failure = None, None, None
        try:
            grammar = self._backend.compile(spec)
        except UnsupportedGrammar as error:
            refusal = error
        except Exception as error:  # whatever an engine raises is a result
            failure = f"{type(error).__name__}: {error}"
        return Tried(spec=spec, outcome=Outcome(grammar, self._name, refusal, None, None, failure=failure), refusal=refusal)


class RawGrammar(CompiledGrammar):
    num_bytes = 0

    def __init__(self, make: Callable[[], GrammarMatcher]) -> None:
        self._make = make

    def matcher(self) -> GrammarMatcher:
        return self._make()


def _choices(spec: GrammarSpec) -> str:
    return "|".join(re.escape(choice) for choice in json.loads(spec.text))


class RawLlguidance(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        from penstock.plugins.grammars.llguidance.matcher import make_tokenizer

        self._vocabulary = vocabulary
        self._tokenizer = make_tokenizer(vocabulary)

    def compile(self, spec: GrammarSpec) -> RawGrammar:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                grammar = LLMatcher.grammar_from_json_schema(spec.text)
            case GrammarKind.REGEX:
                grammar = LLMatcher.grammar_from_regex(spec.text)
            case GrammarKind.CHOICE:
                grammar = LLMatcher.grammar_from_regex(_choices(spec))
            case GrammarKind.LARK:
                grammar = LLMatcher.grammar_from_lark(spec.text)
            case GrammarKind.GBNF:
                grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(spec.text))
            case _:
                raise UnsupportedKind("not compared", spec.param)
        start = LLMatcher(self._tokenizer, grammar, log_level=0)
        if start.is_error():
            raise UnsupportedGrammar(start.get_error().partition("\n")[0][:200], spec.param)
        return RawGrammar(lambda: _LlguidanceMatcher(start.deep_copy(), self._vocabulary))


class _LlguidanceMatcher(GrammarMatcher):
    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._stops = vocabulary.stop_token_ids

    def fill_bitmask(self, row: "Tensor") -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def advance(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def forced_tokens(self) -> list[int]:
        return [token_id for token_id in self._matcher.compute_ff_tokens() if token_id not in self._stops]


class RawOutlinesCore(GrammarBackend):
    """Its JSON Schemas as its own regexes, and its index as it is: with one end token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        sent = replace(vocabulary, encode=None, added_token_ids=dict(vocabulary.added_token_ids))
        self._sandbox = Sandbox("compiling with outlines_core", LIMITS, max_wait=120.0, initializer=_load_outlines, initargs=(sent,))

    def compile(self, spec: GrammarSpec) -> RawGrammar:
        if spec.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE):
            raise UnsupportedKind("not compared", spec.param)
        from outlines_core import Index  # type: ignore[import-untyped]

        text = _choices(spec) if spec.kind is GrammarKind.CHOICE else spec.text
        try:
            sent = self._sandbox.run_blocking(_outlines_index, text, spec.kind is GrammarKind.JSON_SCHEMA)
        except InvalidRequest as refusal:
            raise UnsupportedGrammar(refusal.message[:200], spec.param) from refusal
        index = Index.from_binary(sent)
        return RawGrammar(lambda: _OutlinesMatcher(index, self._vocabulary))


_outlines: Any = None  # in the sandbox: its vocabulary


def _load_outlines(vocabulary: Vocabulary) -> None:
    from outlines_core import Vocabulary as Engine

    global _outlines
    texts: dict[bytes, list[int]] = {}
    for token_id, text in enumerate(vocabulary.token_bytes[: vocabulary.size]):
        if text and token_id not in vocabulary.stop_token_ids:
            texts.setdefault(text, []).append(token_id)
    _outlines = Engine(min(vocabulary.stop_token_ids), texts)


def _outlines_index(text: str, is_schema: bool) -> bytes:
    """As `Index.from_binary` reads it."""
    from outlines_core import Index
    from outlines_core.json_schema import build_regex_from_schema  # type: ignore[import-untyped]

    try:
        index = Index(build_regex_from_schema(text) if is_schema else text, _outlines)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error).partition("\n")[0][:200]) from None
    _, (sent,) = index.__reduce__()
    return bytes(sent)


class _OutlinesMatcher(GrammarMatcher):
    def __init__(self, index: Any, vocabulary: Vocabulary) -> None:
        from outlines_core import Guide

        self._index, self._vocabulary = index, vocabulary
        self._stop = min(vocabulary.stop_token_ids)
        self._guide = Guide(index)
        self._taken: list[int] = []

    def fill_bitmask(self, row: "Tensor") -> None:
        row.zero_()
        self._guide.write_mask_into(row.data_ptr(), row.numel(), 4)

    def advance(self, token_id: int) -> bool:
        if token_id == self._stop or not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id)
        self._taken.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        from outlines_core import Guide

        if num_tokens:
            del self._taken[-num_tokens:]
            self._guide = Guide(self._index)
            for token_id in self._taken:
                self._guide.advance(token_id)

    @property
    def finished(self) -> bool:
        return False


class RawXgrammar(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        sent = replace(vocabulary, encode=None, added_token_ids=dict(vocabulary.added_token_ids))
        self._sandbox = Sandbox("compiling with xgrammar", LIMITS, max_wait=120.0, initializer=_load_xgrammar, initargs=(sent,))
        self._info = xgrammar.TokenizerInfo.deserialize_json(self._sandbox.run_blocking(_xgrammar_info))

    def compile(self, spec: GrammarSpec) -> RawGrammar:
        import xgrammar

        if spec.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.GBNF):
            raise UnsupportedKind("not compared", spec.param)
        try:
            text = _choices(spec) if spec.kind is GrammarKind.CHOICE else spec.text
            kind = GrammarKind.REGEX if spec.kind is GrammarKind.CHOICE else spec.kind
            compiled = xgrammar.CompiledGrammar.deserialize_json(
                self._sandbox.run_blocking(_xgrammar_grammar, kind.value, text), self._info
            )
        except InvalidRequest as refusal:
            raise UnsupportedGrammar(refusal.message[:200], spec.param) from refusal
        return RawGrammar(lambda: _XgrammarMatcher(xgrammar.GrammarMatcher(compiled)))


_xgrammar: Any = None  # in the sandbox: the vocabulary and its compiler


def _load_xgrammar(vocabulary: Vocabulary) -> None:
    import xgrammar

    global _xgrammar
    stops = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
    tokens = [b"" if token_id in stops else text or b"" for token_id, text in enumerate(vocabulary.token_bytes[: vocabulary.size])]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=stops)
    _xgrammar = info, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _xgrammar_info() -> str:
    return str(_xgrammar[0].serialize_json())


def _xgrammar_grammar(kind: str, text: str) -> str:
    import xgrammar

    grammars: dict[str, Any] = {
        "json_schema": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "gbnf": xgrammar.Grammar.from_ebnf,
    }
    try:
        return str(_xgrammar[1].compile_grammar(grammars[kind](text)).serialize_json())
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(str(error).strip().partition("\n")[0][:200]) from None


class _XgrammarMatcher(GrammarMatcher):
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_bitmask(self, row: "Tensor") -> None:
        if not self._matcher.fill_next_token_bitmask(row.view(1, -1)):
            row.fill_(-1)

    def advance(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_terminated())
