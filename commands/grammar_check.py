"""One constraint against every backend: who takes it, what each would leave out or why it refuses."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.commands.grammar_bench import GrammarBench, Outcome, lenient
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec

NUM_COMPILATIONS = 5
PATIENCE = 1.0  # seconds for all of them


@dataclass(frozen=True, slots=True)
class BackendAnswer:
    """What one backend makes of the constraint: `outcome` as it would be used; `refusal` why it is not enforced as a whole."""

    backend: str
    outcome: Outcome
    refusal: UnsupportedGrammar | None
    seconds: float | None

    @property
    def verdict(self) -> str:
        if self.outcome.failure is not None:
            return "failed"
        if self.outcome.grammar is None:
            return "refused"
        return "exact" if self.outcome.is_exact and self.refusal is None else "lenient"


@dataclass(frozen=True, slots=True)
class Check:
    """`chosen` is what a request that names no backend gets, or one that names the only backend asked about."""

    chosen: Outcome
    answers: tuple[BackendAnswer, ...]


async def check(bench: GrammarBench, spec: GrammarSpec, backend: str | None, *, is_strict: bool) -> Check:
    """Tries every backend, or the named one, exactly and then, unless `is_strict`, leniently."""
    await bench.warm_up(backend)
    names = bench.backend_names if backend is None else (backend,)
    answers = tuple([await _answer(bench, spec, name, is_strict) for name in names])
    chosen = await bench.compile(spec if is_strict else lenient(spec), backend)
    return Check(chosen, answers)


async def _answer(bench: GrammarBench, spec: GrammarSpec, backend: str, is_strict: bool) -> BackendAnswer:
    outcome = await bench.compile(spec, backend)
    refusal = outcome.refusal
    if refusal is not None and not is_strict:
        spec = lenient(spec)
        outcome = await bench.compile(spec, backend)
    seconds = outcome.seconds
    if outcome.grammar is not None and seconds is not None:
        num_more = min(NUM_COMPILATIONS, int(PATIENCE / max(seconds, 1e-6)))
        compiled = spec.as_written if outcome.is_as_written and spec.as_written is not None else spec
        more = [bench.compile_again(compiled, backend) for _ in range(num_more)]
        seconds = statistics.median([again for again in more if again is not None] or [seconds])
    return BackendAnswer(backend, outcome, refusal, seconds)


def check_as_json(checked: Check, about: dict[str, Any]) -> dict[str, Any]:
    """`about` says what was checked: file, kind, model."""
    return {
        **about,
        "is_taken": checked.chosen.grammar is not None,
        "is_exact": checked.chosen.is_exact,
        "is_as_written": checked.chosen.is_as_written,
        "backend": checked.chosen.backend,
        "backends": [_as_json(answer) for answer in checked.answers],
    }


def _as_json(answer: BackendAnswer) -> dict[str, Any]:
    grammar, refusal = answer.outcome.grammar, answer.refusal
    return {
        "name": answer.backend,
        "verdict": answer.verdict,
        "is_as_written": answer.outcome.is_as_written,
        "refusal": None if refusal is None else {"message": refusal.message, "path": refusal.param},
        "failure": answer.outcome.failure,
        "not_enforced": [] if grammar is None else list(grammar.warnings),
        "compile_ms": None if grammar is None or answer.seconds is None else answer.seconds * 1e3,
        "num_bytes": None if grammar is None else grammar.num_bytes,
    }


def check_as_text(checked: Check, about: dict[str, Any]) -> Iterator[str]:
    chosen = checked.chosen
    reading = f", {about['additional_properties']}" if about["kind"] == GrammarKind.JSON_SCHEMA else ""
    if chosen.grammar is None:
        yield f"{about['file']} ({about['kind']}{reading}): no backend takes it"
    else:
        how = "as a whole" if chosen.is_exact else "leniently: not all of it is enforced"
        yield f"{about['file']} ({about['kind']}{reading}): taken by {chosen.backend}, {how}"
    yield ""
    width = max([len("BACKEND"), *(len(answer.backend) for answer in checked.answers)])
    yield f"{'BACKEND':{width}}  VERDICT  {'COMPILE':>11}  {'SIZE':>11}"
    for answer in checked.answers:
        grammar = answer.outcome.grammar
        cost = f"{'':>11}  {'':>11}"
        if grammar is not None:
            cost = f"{(answer.seconds or 0) * 1e3:8,.2f} ms  {grammar.num_bytes / 2**10:7,.0f} KiB"
        yield f"{answer.backend:{width}}  {answer.verdict:7}  {cost}".rstrip()
        if answer.refusal is not None:
            yield f"  {'refused' if grammar is None else 'not exact'}: {_sentence(answer.refusal)}"
        if answer.outcome.failure is not None:
            yield f"  failed: {answer.outcome.failure}"
        if answer.outcome.is_as_written:
            yield "  open: refused as closed"
        yield from (f"  not enforced: {warning}" for warning in (grammar.warnings if grammar is not None else ()))


def _sentence(refusal: UnsupportedGrammar) -> str:
    return refusal.message + (f", at {refusal.param}" if refusal.param else "")
