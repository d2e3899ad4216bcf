"""Compiles schemas as a server does, and takes instances through their grammars token by token."""

import difflib
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn
from urllib.parse import unquote

from penstock.engine.constraints.compiler import GrammarCompiler, preferred_kinds
from penstock.engine.constraints.masks import BITS_PER_WORD, allocate_bitmask
from penstock.engine.contracts.grammar import AdditionalProperties, CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import ConfigurationError, PenstockError, UnsupportedGrammar
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.serving.constraints.schemas import closed
from penstock.serving.structured_outputs import INSTALLABLE, known_backend

# A schema that no trial contains, since that one would then come from the cache. It makes backends load what they load on first use.
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


@dataclass(slots=True, kw_only=True)
class Tried:
    """A constraint, tried exactly and then, where that is wanted, leniently: `outcome` as it would be used, and the exact `refusal`."""

    spec: GrammarSpec
    outcome: Outcome
    refusal: UnsupportedGrammar | None

    @property
    def verdict(self) -> str:
        if self.outcome.failure is not None:
            return "failed"
        if self.outcome.grammar is None:
            return "refused"
        return "exact" if self.outcome.is_exact and self.refusal is None else "lenient"


class _Watched(GrammarBackend):
    """Replaces a plug-in's factory and makes a backend that records what it is asked."""

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
        """The backend of this name, which may be vLLM's as in a request. Raises `ConfigurationError` for an unknown one."""
        if name is None:
            return None
        if (known := known_backend(name, self.backend_names)) is not None:
            return known
        if name in INSTALLABLE:
            raise ConfigurationError(f"--backend {name}: it is not installed: {INSTALLABLE[name]}")
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

    async def attempt(self, spec: GrammarSpec, backend: str | None, *, is_strict: bool) -> Tried:
        """Exactly, and leniently where that is refused, unless `is_strict`."""
        outcome = await self.compile(spec, backend)
        refusal = outcome.refusal
        if refusal is not None and not is_strict:
            spec = lenient(spec)
            outcome = await self.compile(spec, backend)
        return Tried(spec=spec, outcome=outcome, refusal=refusal)

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


@dataclass(slots=True)
class Walk:
    """How far a text came. `refused_at` is the index of the token that was not allowed, the number of tokens where the end was not.

    `contradiction` says in words where the matcher's mask and the matcher itself disagreed. `mask_seconds` has an entry for each mask.
    """

    num_tokens: int
    refused_at: int | None = None
    contradiction: str | None = None
    mask_seconds: list[float] = field(default_factory=list)

    @property
    def is_accepted(self) -> bool:
        return self.refused_at is None and self.contradiction is None


class Walker:
    """Spells texts in one vocabulary's tokens and walks them through grammars over it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._row = allocate_bitmask(1, vocabulary.size)[0]
        self._words = self._row.numpy()  # the same memory
        self._tokens_by_start: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
        for token_id, data in enumerate(vocabulary.token_bytes):
            if data and token_id not in vocabulary.stop_token_ids:
                self._tokens_by_start[data[:2]].append((data, token_id))
        for tokens in self._tokens_by_start.values():
            tokens.sort(key=lambda token: -len(token[0]))

    def spell(self, text: str) -> list[int]:
        """The tokenizer's own token ids where they spell this text and nothing else, otherwise the longest tokens from left to right.

        A tokenizer may put a blank in front, or take a part of the text for an added token. Raises `ValueError` where no tokens spell it.
        """
        data = text.encode()
        if self._vocabulary.encode is not None:
            token_ids = self._vocabulary.encode(text)
            if b"".join(self._bytes(token_id) for token_id in token_ids) == data:
                return token_ids
        return list(self._longest_tokens(data))

    def walk(self, grammar: CompiledGrammar, token_ids: list[int]) -> Walk:
        """A token counts as accepted where its bit is set and the matcher then takes it; the text, where a stop token may follow."""
        matcher = grammar.matcher()
        walk = Walk(len(token_ids))
        for position, token_id in enumerate([*token_ids, None]):
            started = time.perf_counter()
            matcher.fill_bitmask(self._row)
            walk.mask_seconds.append(time.perf_counter() - started)
            if token_id is None:
                if not any(self._is_set(stop) for stop in self._vocabulary.stop_token_ids if stop < self._vocabulary.size):
                    walk.refused_at = position
            elif not self._is_set(token_id):
                walk.refused_at = position
                break
            elif not matcher.advance(token_id):
                walk.contradiction = f"the mask allows token {position}, but the matcher does not take it"
                break
        return walk

    def text(self, token_ids: list[int]) -> str:
        """For showing."""
        return b"".join(self._bytes(token_id) for token_id in token_ids).decode(errors="replace")

    def _is_set(self, token_id: int) -> bool:
        word, bit = divmod(token_id, BITS_PER_WORD)
        return bool(int(self._words[word]) >> bit & 1)

    def _bytes(self, token_id: int) -> bytes:
        known = self._vocabulary.token_bytes
        return (known[token_id] if token_id < len(known) else None) or b"\0"  # never part of JSON

    def _longest_tokens(self, data: bytes) -> Iterator[int]:
        position = 0
        while position < len(data):
            starts = (data[position : position + 2], data[position : position + 1])
            found = next(
                (token for start in starts for token in self._tokens_by_start.get(start, ()) if data.startswith(token[0], position)), None
            )
            if found is None:
                raise ValueError(f"no token spells byte {data[position]:#04x}")
            yield found[1]
            position += len(found[0])


MAX_PARTS = 10_000  # of all schemas for all values within one; alternatives within alternatives multiply
_OF_MEMBERS = ("properties", "patternProperties", "additionalProperties", "required", "items", "prefixItems", "additionalItems")
_ALTERNATIVES = ("anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies")
ABSENT = object()

Part = tuple[str, Any]


def in_schema_order(value: Any, schema: Any) -> Any:
    """An equal value. Members that the schema does not name come last, in the order they had.

    Of alternatives count those that are not plainly about another value: by `required`, `const` and `enum`. As it is, where the schema
    says too much.
    """
    return _Order(schema).ordered(value, [schema])


class _Order:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_parts = 0

    def ordered(self, value: Any, schemas: Iterable[Any]) -> Any:
        if not isinstance(value, dict | list) or self._num_parts > MAX_PARTS:
            return value
        parts = [part for schema in schemas for part in self._parts(schema, value)]
        if isinstance(value, list):
            return [self.ordered(item, _of_item(parts, place)) for place, item in enumerate(value)]
        listed = [name for wanted in ("properties", "required") for keyword, names in parts if keyword == wanted for name in names]
        names = dict.fromkeys(name for name in [*listed, *value] if isinstance(name, str) and name in value)
        return {name: self.ordered(value[name], _of_member(parts, name)) for name in names}

    def _parts(self, schema: Any, value: Any, within: tuple[str, ...] = (), *, has_alternatives: bool = True) -> Iterator[Part]:
        """The keywords that speak of the value's members, in the schema's order. `within` are references that are being followed."""
        self._num_parts += 1
        if not isinstance(schema, dict) or self._num_parts > MAX_PARTS:
            return
        for keyword, part in schema.items():
            if keyword in _OF_MEMBERS and isinstance(part, dict | list):
                yield keyword, part
            elif keyword == "dependentRequired" and isinstance(part, dict):
                yield from (("required", [name, *names]) for name, names in part.items() if name in value and isinstance(names, list))
            elif keyword == "$ref" and isinstance(part, str) and part not in within:
                yield from self._parts(self._target(part), value, (*within, part), has_alternatives=has_alternatives)
            elif keyword == "allOf" and isinstance(part, list):
                for other in part:
                    yield from self._parts(other, value, within, has_alternatives=has_alternatives)
            elif keyword in _ALTERNATIVES and has_alternatives:
                for other in self._alternatives(keyword, part, value):
                    yield from self._parts(other, value, within)

    def _alternatives(self, keyword: str, part: Any, value: Any) -> Iterator[Any]:
        if isinstance(part, list):
            yield from (branch for branch in part if not self._is_about_another(branch, value))
        elif keyword in ("then", "else"):
            yield part
        elif isinstance(part, dict) and isinstance(value, dict):
            yield from (demand for name, demand in part.items() if name in value)

    def _is_about_another(self, branch: Any, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        parts = list(self._parts(branch, value, has_alternatives=False))
        required = [name for keyword, names in parts if keyword == "required" for name in names]
        members = [member for keyword, named in parts if keyword == "properties" and isinstance(named, dict) for member in named.items()]
        return any(name not in value for name in required) or any(not _may_be(value.get(name, ABSENT), schema) for name, schema in members)

    def _target(self, reference: str) -> Any:
        try:
            return resolve(self._root, unquote(reference), "")[1]
        except UnsupportedGrammar:
            return True


def _may_be(value: Any, schema: Any) -> bool:
    if not isinstance(schema, dict) or value is ABSENT:
        return True
    values = schema.get("enum")
    return value == schema.get("const", value) and (not isinstance(values, list) or value in values)


def _of_member(parts: list[Part], name: str) -> Iterator[Any]:
    """What is said of it by name comes first."""
    yield from (part[name] for keyword, part in parts if keyword == "properties" and isinstance(part, dict) and name in part)
    for keyword, part in parts:
        if keyword == "patternProperties" and isinstance(part, dict):
            yield from part.values()
        elif keyword == "additionalProperties":
            yield part


def _of_item(parts: list[Part], place: int) -> Iterator[Any]:
    for keyword, part in parts:
        if isinstance(part, list) and keyword in ("prefixItems", "items"):
            yield from part[place : place + 1]
        elif isinstance(part, dict) and keyword in ("items", "additionalItems"):
            yield part


PARAM = "$"  # paths in messages begin with it
SHOWN_CHARACTERS = 40
NUM_COMPILATIONS = 3
PATIENCE = 0.1  # seconds; what takes longer is compiled once


@dataclass(frozen=True, slots=True)
class Instance:
    """A document, and whether the schema should allow it. `texts` are the orders its members may come in: the file's and the schema's."""

    texts: tuple[str, ...]
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the file."""

    line: int
    name: str
    schema: str
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no case, and why."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance that the grammar got wrong; `test` is its place in the line, from 1."""

    test: int
    is_valid: bool
    why: str


@dataclass(slots=True, kw_only=True)
class Result(Tried):
    """A case's outcome."""

    case: Case
    failures: list[Failure] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether it compiled and every instance was accepted or refused as it should be."""
        return self.outcome.grammar is not None and not self.failures


@dataclass(slots=True)
class Trial:
    """All results of a file, in its order, and the seconds of every mask. Not `is_complete` while schemas are still to be tried."""

    results: list[Result] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    is_complete: bool = False

    def of(self, verdict: str) -> list[Result]:
        return [result for result in self.results if result.verdict == verdict]

    @property
    def is_passed(self) -> bool:
        """No exact grammar is wrong, no lenient one refuses what is valid, no backend failed, and every line was read and tried."""
        exact_failures = any(result.failures for result in self.of("exact"))
        too_narrow = any(failure.is_valid for result in self.of("lenient") for failure in result.failures)
        return self.is_complete and not (exact_failures or too_narrow or self.of("failed") or self.malformed)


async def run_trial(
    trial: Trial,
    bench: GrammarBench,
    lines: Iterable[bytes],
    backend: str | None,
    additional_properties: AdditionalProperties,
    *,
    is_strict: bool,
    limit: int | None = None,
) -> None:
    """Compiles each schema exactly, then, unless `is_strict`, leniently where that was refused, and walks its instances.

    The results are added to `trial` one by one, so that an interrupted run loses none.
    """
    await bench.warm_up(backend)
    walker = Walker(bench.vocabulary)
    for case in islice(read_cases(lines, trial.malformed), limit):
        spec = schema_spec(json.loads(case.schema), PARAM, additional_properties)
        tried = await bench.attempt(spec, backend, is_strict=is_strict)
        outcome = await _timed(bench, tried.outcome, tried.spec, backend)
        result = Result(spec=tried.spec, outcome=outcome, refusal=tried.refusal, case=case)
        if outcome.grammar is not None:
            result.failures = list(_failures(walker, outcome.grammar, case.instances, trial.mask_seconds))
        trial.results.append(result)
    trial.is_complete = True


async def _timed(bench: GrammarBench, outcome: Outcome, spec: GrammarSpec, backend: str | None) -> Outcome:
    """With the medians of several compilations, each of which is one of a new constraint: a blank more makes another text."""
    if outcome.grammar is None or outcome.seconds is None or outcome.waited is None or outcome.waited > PATIENCE:
        return outcome
    again = [await bench.compile(replace(spec, text=spec.text + " " * number), backend) for number in range(1, NUM_COMPILATIONS)]
    seconds = [outcome.seconds, *(other.seconds for other in again if other.seconds is not None)]
    waited = [outcome.waited, *(other.waited for other in again if other.waited is not None)]
    return replace(outcome, seconds=statistics.median(seconds), waited=statistics.median(waited))


def read_cases(lines: Iterable[bytes], malformed: list[Malformed]) -> Iterator[Case]:
    """Lines without anything on them are passed over; those that cannot be used are added to `malformed`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            case = read_case(number, line)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            malformed.append(Malformed(number, reason))
        else:
            yield case


def read_case(number: int, line: bytes) -> Case:
    """Raises `ValueError` saying what is wrong with the line."""
    content = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(content, dict):
        raise ValueError('not an object: a line is {"schema": ..., "tests": [...]}')
    if not isinstance(content.get("schema"), dict | bool):
        raise ValueError("`schema` must be a JSON Schema: an object, true or false")
    tests = content.get("tests")
    if not isinstance(tests, list):
        raise ValueError("`tests` must be an array")
    for index, test in enumerate(tests):
        if not isinstance(test, dict) or not isinstance(test.get("valid"), bool) or "data" not in test:
            raise ValueError(f'`tests[{index}]` must be an object with "valid", true or false, and "data"')
    instances = tuple(
        Instance(_texts(test["data"], content["schema"], f"tests[{index}].data"), test["valid"]) for index, test in enumerate(tests)
    )
    name = content.get("name", content.get("id", ""))
    return Case(number, str(name), json.dumps(content["schema"], ensure_ascii=False), instances)


def _texts(data: Any, schema: Any, place: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_text(order, place) for order in (data, in_schema_order(data, schema))))


def _text(data: Any, place: str) -> str:
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeError:
        raise ValueError(f"`{place}` holds a lone surrogate, which no text can hold") from None
    except ValueError:
        raise ValueError(f"`{place}` holds a number that is too large") from None
    return text


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _failures(walker: Walker, grammar: CompiledGrammar, instances: Iterable[Instance], mask_seconds: list[float]) -> Iterator[Failure]:
    for test, instance in enumerate(instances, start=1):
        why = _what_is_wrong(walker, grammar, instance, mask_seconds)
        if why is not None:
            yield Failure(test, instance.is_valid, why)


def _what_is_wrong(walker: Walker, grammar: CompiledGrammar, instance: Instance, mask_seconds: list[float]) -> str | None:
    """An instance is accepted where one of its texts is. Of several that are not, the last one is reported: it is in the schema's order."""
    why = None
    for text in instance.texts:
        try:
            token_ids = walker.spell(text)
            walk = walker.walk(grammar, token_ids)
        except (PenstockError, ValueError) as error:
            return f"stopped: {error}"
        mask_seconds += walk.mask_seconds
        if walk.contradiction is not None:
            return walk.contradiction
        if walk.is_accepted:
            return None if instance.is_valid else "invalid, but accepted"
        why = _explained(walker, token_ids, walk) if instance.is_valid else None
    return why


def _explained(walker: Walker, token_ids: list[int], walk: Walk) -> str:
    assert walk.refused_at is not None
    before = walker.text(token_ids[: walk.refused_at])
    shown = repr(before if len(before) <= SHOWN_CHARACTERS else f"…{before[-SHOWN_CHARACTERS:]}")
    if walk.refused_at == walk.num_tokens:
        return f"valid, but may not end after {shown}"
    token = walker.text([token_ids[walk.refused_at]])
    return f"valid, but {token!r} is refused after {shown}, at token {walk.refused_at} of {walk.num_tokens}"
