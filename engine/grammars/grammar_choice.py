"""Which backend compiles a constraint, and what is said where none does."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from penstock.engine.compile_clock import CompileClock
from penstock.engine.errors import ConfigurationError, ConstraintTooLarge, UnsupportedGrammar, UnsupportedKind
from penstock.engine.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.grammars.grammar_stats import CompileCounts, CompileOutcome
from penstock.engine.structure import Either, Repeat, Sequence, Structure, Value

# A number, a pattern and a format: each makes engines build tables of their own.
_WARM_UP_SCHEMA = """{"type": "object", "properties":
 {"a": {"type": "integer", "minimum": 1}, "b": {"type": "string", "pattern": "^\\\\w$"}, "c": {"type": "string", "format": "date"}}}"""

MAX_REFUSAL = 1000  # characters of a message, and as many of a path


class VocabularySource(Protocol):
    """A tokenizer, as far as grammars need it."""

    def vocabulary(self, logits_width: int, stop_token_ids: Iterable[int]) -> Vocabulary: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a constraint is not compiled. `path` goes on from the constraint's own, where `is_relative`.

    What is long is cut off: names in a schema may be as long as the whole, and refusals are kept.
    """

    message: str
    path: str
    is_relative: bool = True

    @classmethod
    def of(cls, error: UnsupportedGrammar, param: str) -> "Refusal":
        path = error.param or param
        return cls(_shortened(error.message), _shortened(path.removeprefix(param)), path.startswith(param))

    def error(self, param: str) -> UnsupportedGrammar:
        """A fresh exception: one that is raised again collects tracebacks."""
        return UnsupportedGrammar(self.message, param + self.path if self.is_relative else self.path)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the name of the backend that compiled it."""

    grammar: CompiledGrammar
    backend: str


class Abandoned(Exception):
    """All that waited for the compilation have gone, and it has ended before the next backend was asked."""


NOTHING_GIVEN_UP: Mapping[str, Refusal] = {}


class GrammarChoice:
    """The backends, each made when it is first needed, or all by `warm_up`. `factories` are in the order in which they were registered."""

    def __init__(
        self,
        factories: Mapping[str, Callable[[Vocabulary], GrammarBackend]],
        tokenizer: VocabularySource,
        vocab_size: int,
        stop_token_ids: Iterable[int],
    ) -> None:
        self.factories = factories
        self.counts = CompileCounts()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._backends: dict[str, GrammarBackend] = {}
        self._making = threading.Lock()

    def order(self, kind: GrammarKind) -> list[str]:
        """Those that prefer this kind first; otherwise as registered."""
        return sorted(self.factories, key=lambda name: kind not in preferred_kinds(self.factories[name]))

    def compile(
        self,
        spec: GrammarSpec,
        backend_name: str | None,
        given_up: Mapping[str, Refusal] = NOTHING_GIVEN_UP,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Compiled | Refusal:
        """By the named backend, or by the first that takes the constraint, unless one before it says that it is too large for any. Slow.

        Backends that have `given_up` on the constraint refuse it unasked. Raises `Abandoned` where it is not wanted any more.

        Of several refusals it is the preferred backend's that is returned; one that says no more than that a backend does not know this
        kind of constraint, only where there is no other.
        """
        refusals: list[tuple[bool, Refusal]] = []
        for name in self.order(spec.kind) if backend_name is None else (backend_name,):
            if not is_wanted():
                raise Abandoned
            if name in given_up:
                refusals.append((False, given_up[name]))
                continue
            try:
                return Compiled(self._counted(name, spec), name)
            except ConstraintTooLarge as error:
                return Refusal.of(error, spec.param)
            except UnsupportedGrammar as error:
                refusals.append((isinstance(error, UnsupportedKind), Refusal.of(error, spec.param)))
        refusals.sort(key=lambda refusal: refusal[0])
        return refusals[0][1] if refusals else Refusal("no grammar backend is loaded", "")

    def warm_up(self) -> None:
        """Makes all backends, and has those that the usual constraints get load what they load when first needed. Takes up to a second."""
        for name in self.factories:
            self._backend(name)
        for spec in (GrammarSpec(GrammarKind.JSON_SCHEMA, _WARM_UP_SCHEMA), GrammarSpec(GrammarKind.CHOICE, '["a"]')):
            self.compile(spec, None)
        self.counts = CompileCounts()

    def _counted(self, name: str, spec: GrammarSpec) -> CompiledGrammar:
        outcome = CompileOutcome.FAILED
        clock = CompileClock()
        try:
            with clock:
                grammar = self._backend(name).compile(spec)
            _check_derived(name, grammar, CompiledGrammar)
            outcome = CompileOutcome.COMPILED
            return grammar
        except UnsupportedGrammar:
            outcome = CompileOutcome.REFUSED
            raise
        except RecursionError:
            outcome = CompileOutcome.REFUSED
            raise ConstraintTooLarge("nested too deeply", spec.param) from None
        finally:
            self.counts.add(name, outcome, clock.seconds)

    def _backend(self, name: str) -> GrammarBackend:
        with self._making:
            if name not in self._backends:
                backend = self.factories[name](self._vocabulary)
                _check_derived(name, backend, GrammarBackend)
                self._backends[name] = backend
            return self._backends[name]

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary(self._vocab_size, self._stop_token_ids)


def preferred_kinds(factory: Callable[[Vocabulary], GrammarBackend]) -> frozenset[GrammarKind]:
    """Those of a backend's class; a factory that is a function has none."""
    if isinstance(factory, GrammarBackend) or (isinstance(factory, type) and issubclass(factory, GrammarBackend)):
        return factory.preferred_kinds
    return frozenset()


def _check_derived(name: str, made: object, contract: type) -> None:
    if not isinstance(made, contract):
        raise ConfigurationError(
            f"the grammar backend {name!r} makes a {type(made).__name__}, which does not derive from `penstock.{contract.__name__}`"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REFUSAL else f"{text[: MAX_REFUSAL - 3]}..."


def is_lenient(spec: GrammarSpec) -> bool:
    """Whether anything in it may be left unenforced. The constraint has passed its limits, so it nests only so deeply."""
    return spec.is_lenient or (spec.structure is not None and _is_lenient_structure(spec.structure))


def exact(spec: GrammarSpec) -> GrammarSpec:
    """The same constraint with nothing left unenforced."""
    if not is_lenient(spec):
        return spec
    return replace(spec, is_lenient=False, structure=None if spec.structure is None else _exact_structure(spec.structure))


def _is_lenient_structure(structure: Structure) -> bool:
    match structure:
        case Value(spec):
            return is_lenient(spec)
        case Sequence(parts) | Either(parts):
            return any(_is_lenient_structure(part) for part in parts)
        case Repeat(part):
            return _is_lenient_structure(part)
    return False


def _exact_structure(structure: Structure) -> Structure:
    match structure:
        case Value(spec):
            return Value(exact(spec))
        case Sequence(parts):
            return Sequence(tuple(_exact_structure(part) for part in parts))
        case Either(parts):
            return Either(tuple(_exact_structure(part) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(_exact_structure(part), minimum, maximum)
    return structure
