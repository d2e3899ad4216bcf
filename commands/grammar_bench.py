"""A server's way from a constraint to its grammar, without the server: which backend took it, and how long each attempt was."""

import difflib
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.api.constraints.backend_choice import known_backend
from penstock.api.constraints.closed_schema import closed
from penstock.engine.errors import ConfigurationError, PenstockError, UnsupportedGrammar
from penstock.engine.grammar import AdditionalProperties, CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.grammars.grammar_cache import GrammarCompiler
from penstock.engine.grammars.grammar_choice import preferred_kinds
from penstock.engine.tokenizer import Tokenizer

# What nobody asks for, since it would come from the cache, and what makes backends load whatever they load when first needed.
WARM_UP_SCHEMA = """
{"title": "warm-up", "type": "object",
 "properties": {"a": {"type": "string", "pattern": "^a+$"}, "b": {"type": "integer", "minimum": 1}, "c": {"$ref": "#/$defs/d"}},
 "required": ["a"], "additionalProperties": false, "$defs": {"d": {"type": "string", "format": "date"}}}
"""
WARM_UP = (GrammarSpec(GrammarKind.CHOICE, '["warm-up"]'), GrammarSpec(GrammarKind.JSON_SCHEMA, WARM_UP_SCHEMA))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One backend's answer to one spec."""

    backend: str
    spec: GrammarSpec
    seconds: float
    outcome: CompiledGrammar | UnsupportedGrammar


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request with this constraint would get: the grammar and whose it is, the refusal, or the failure of the backend.

    `seconds` is what the backend took to compile it, `waited` that and what was tried before; None where the answer was known already.
    Where it `is_as_written`, no backend took the closed reading.
    """

    grammar: CompiledGrammar | None
    backend: str | None
    refusal: UnsupportedGrammar | None
    seconds: float | None
    waited: float | None
    failure: str | None = None
    is_as_written: bool = False

    @property
    def is_exact(self) -> bool:
        return self.grammar is not None and not self.grammar.warnings


class _Watched(GrammarBackend):
    """Stands where a plug-in's factory would, and makes a backend that writes down what it is asked."""

    def __init__(self, name: str, factory: Callable[[Vocabulary], GrammarBackend], attempts: Callable[[], list[Attempt]]) -> None:
        self.preferred_kinds = preferred_kinds(factory)
        self._name = name
        self._factory = factory
        self._attempts = attempts
        self._backend: GrammarBackend | None = None

    def __call__(self, vocabulary: Vocabulary) -> GrammarBackend:
        self._backend = self._factory(vocabulary)
        return self

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        assert self._backend is not None
        attempts = self._attempts()  # those of now: a compilation beyond its time limit ends while a later one is under way
        started = time.perf_counter()
        try:
            grammar = self._backend.compile(spec)
        except UnsupportedGrammar as refusal:
            attempts.append(Attempt(self._name, spec, time.perf_counter() - started, refusal))
            raise
        attempts.append(Attempt(self._name, spec, time.perf_counter() - started, grammar))
        return grammar


class GrammarBench:
    """Compiles as requests are compiled, one at a time, with the same backends, order and limits."""

    def __init__(
        self,
        factories: Mapping[str, Callable[[Vocabulary], GrammarBackend]],
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.vocabulary = tokenizer.vocabulary(vocab_size, stop_token_ids)
        self.backend_names = tuple(factories)
        self._attempts: list[Attempt] = []
        self._taken_before: dict[tuple[GrammarSpec, str | None], Outcome] = {}
        self._watched = {name: _Watched(name, factory, lambda: self._attempts) for name, factory in factories.items()}
        self._compiler = GrammarCompiler(self._watched, tokenizer, vocab_size, stop_token_ids)

    def backend_named(self, name: str | None) -> str | None:
        """The backend of this name, which may be vLLM's as in a request. Raises `ConfigurationError` where there is none."""
        if name is None:
            return None
        if (known := known_backend(name, self.backend_names)) is not None:
            return known
        near = difflib.get_close_matches(name, self.backend_names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are auto, {', '.join(self.backend_names)}"
        raise ConfigurationError(f"--backend {name}: no grammar backend of that name is loaded; {hint}")

    async def warm_up(self, backend: str | None) -> None:
        """What backends do once, such as reading the vocabulary, should not count as the first constraint's time."""
        for name in self.backend_names if backend is None else (backend,):
            for spec in WARM_UP:
                await self.compile(spec, name)
        gc.collect()
        gc.freeze()  # as a server does: a collection that walks through all that was imported takes 0.1 s

    async def compile(self, spec: GrammarSpec, backend: str | None = None) -> Outcome:
        """As a request that names this backend, or none."""
        attempts = self._attempts = []
        try:
            grammar = await self._compiler.compile(spec, backend)
        except UnsupportedGrammar as refusal:
            return Outcome(None, None, refusal, None, _total(attempts))
        except Exception as error:  # whatever a plug-in raises is a result, and the other constraints are still to be tried
            return Outcome(None, None, None, None, _total(attempts), failure=_described(error))
        return self._taken(spec, backend, grammar, attempts)

    def _taken(self, spec: GrammarSpec, backend: str | None, grammar: CompiledGrammar, attempts: Sequence[Attempt]) -> Outcome:
        request = replace(spec, param=""), backend
        for attempt in attempts:
            if attempt.outcome is grammar:
                is_as_written = spec.as_written is not None and attempt.spec.text == spec.as_written.text
                outcome = Outcome(grammar, attempt.backend, None, attempt.seconds, _total(attempts), is_as_written=is_as_written)
                self._taken_before[request] = replace(outcome, seconds=None, waited=None)
                return outcome
        return self._taken_before[request]

    def compile_again(self, spec: GrammarSpec, backend: str) -> float | None:
        """Seconds that a backend takes for what it has compiled before, past the cache; None where it fails this time."""
        started = time.perf_counter()
        try:
            self._watched[backend].compile(spec)
        except Exception:  # the first compilation succeeded: that is the answer, and this one only a time less
            return None
        return time.perf_counter() - started

    def close(self) -> None:
        self._compiler.close()


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def schema_spec(schema: Any, param: str, additional_properties: AdditionalProperties) -> GrammarSpec:
    """A schema as a request would bring it, read in this way."""
    written = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), param)
    text = json.dumps(closed(schema), ensure_ascii=False) if additional_properties == "closed" else written.text
    return written if text == written.text else replace(written, text=text, as_written=written)


def lenient(spec: GrammarSpec) -> GrammarSpec:
    """The same constraint, of which something may be left out."""
    written = spec.as_written
    return replace(spec, is_lenient=True, as_written=None if written is None else replace(written, is_lenient=True))


def _total(attempts: Sequence[Attempt]) -> float | None:
    return sum(attempt.seconds for attempt in attempts) if attempts else None
