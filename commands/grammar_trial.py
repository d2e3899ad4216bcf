"""Schemas with instances, one schema a line: which compile, and whether their grammars accept and refuse what they should."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

from penstock.commands.grammar_bench import GrammarBench, Outcome, lenient, schema_spec
from penstock.commands.instance_walk import Walk, Walker
from penstock.commands.schema_order import in_schema_order
from penstock.engine.errors import PenstockError, UnsupportedGrammar
from penstock.engine.grammar import AdditionalProperties, CompiledGrammar, GrammarSpec

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


@dataclass(slots=True)
class Result:
    """What became of a case. `refusal` is why it was not compiled exactly; `outcome` what was then used."""

    case: Case
    outcome: Outcome
    refusal: UnsupportedGrammar | None = None
    failures: list[Failure] = field(default_factory=list)

    @property
    def mode(self) -> str:
        if self.outcome.failure is not None:
            return "failed"
        if self.outcome.grammar is None:
            return "refused"
        return "exact" if self.outcome.is_exact and self.refusal is None else "lenient"

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

    def of_mode(self, mode: str) -> list[Result]:
        return [result for result in self.results if result.mode == mode]

    @property
    def is_passed(self) -> bool:
        """No exact grammar is wrong, no lenient one refuses what is valid, no backend failed, and every line was read and tried."""
        exact_failures = any(result.failures for result in self.of_mode("exact"))
        too_narrow = any(failure.is_valid for result in self.of_mode("lenient") for failure in result.failures)
        return self.is_complete and not (exact_failures or too_narrow or self.of_mode("failed") or self.malformed)


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
        outcome = await bench.compile(spec, backend)
        refusal = outcome.refusal
        if refusal is not None and not is_strict:
            spec = lenient(spec)
            outcome = await bench.compile(spec, backend)
        result = Result(case, await _timed(bench, outcome, spec, backend), refusal)
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
    """An instance is accepted where one of its texts is. Of several that are not, the last is told of, which is in the schema's order."""
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
