"""What a trial came to: as one JSON object, and as text for people."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.commands.grammar_trial import Failure, Result, Trial

MAX_SHOWN = 20


def trial_as_json(trial: Trial, about: dict[str, Any]) -> dict[str, Any]:
    """`about` says what was tried: file, model, backend. Shares are of all schemas.

    `compile_ms` is what backends took for the grammars that were used, `waited_ms` what requests would have waited for
    them or for a refusal: what other backends refused first counts in it, and so does the exact attempt before a lenient one.
    Each is the median of several compilations, none of them from the cache, where they are quick.
    """
    exact, lenient = (trial.of_mode(mode) for mode in ("exact", "lenient"))
    right = sum(result.is_right for result in exact)
    right_leniently = sum(result.is_right for result in lenient)
    compiled = [result.outcome.seconds for result in trial.results if result.outcome.seconds is not None]
    waited = [result.outcome.waited for result in trial.results if result.outcome.waited is not None]
    reasons = Counter(result.refusal.message for result in trial.results if result.refusal is not None)
    return {
        **about,
        "schemas": len(trial.results),
        "compiled": {mode: len(trial.of_mode(mode)) for mode in ("exact", "lenient", "refused", "failed")},
        "backends": dict(Counter(result.outcome.backend for result in [*exact, *lenient])),
        "right": {
            "strictly": _share(right, len(trial.results)),
            "with_lenient_fallback": _share(right + right_leniently, len(trial.results)),
        },
        "instances": {"exact": _instances(exact), "lenient": _instances(lenient)},
        "compile_ms": _times(compiled, 1e3),
        "waited_ms": _times(waited, 1e3),
        "mask_us": _times(trial.mask_seconds, 1e6),
        "refused_exactly": [{"reason": reason, "schemas": count} for reason, count in reasons.most_common()],
        "not_right": [_described(result) for result in trial.results if not result.is_right],
        "malformed": [{"line": line.line, "message": line.message} for line in trial.malformed],
        "is_complete": trial.is_complete,
        "is_passed": trial.is_passed,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _share(count: int, total: int) -> dict[str, float | int | None]:
    return {"schemas": count, "share": count / total if total else None}


def _times(seconds: Sequence[float], scale: float) -> dict[str, float | int] | None:
    if not seconds:
        return None
    values = {f"p{percent}": percentile(seconds, percent) * scale for percent in (50, 95, 99)}
    return {"count": len(seconds), **values, "max": max(seconds) * scale}


def _instances(results: Sequence[Result]) -> dict[str, int]:
    wrong = Counter(failure.is_valid for result in results for failure in result.failures)
    total = Counter(instance.is_valid for result in results for instance in result.case.instances)
    return {
        "valid": total[True],
        "valid_accepted": total[True] - wrong[True],
        "invalid": total[False],
        "invalid_refused": total[False] - wrong[False],
    }


def _described(result: Result) -> dict[str, Any]:
    """A schema that is not fully right: refused, or wrong about an instance."""
    return {
        "line": result.case.line,
        "name": result.case.name,
        "mode": result.mode,
        "backend": result.outcome.backend,
        "not_enforced": [] if result.outcome.grammar is None else list(result.outcome.grammar.warnings),
        "refusal": None if result.refusal is None else {"message": result.refusal.message, "path": result.refusal.param},
        "failure": result.outcome.failure,
        "failures": [{"test": failure.test, "valid": failure.is_valid, "why": failure.why} for failure in result.failures],
    }


def trial_as_text(trial: Trial, about: dict[str, Any]) -> Iterator[str]:
    report = trial_as_json(trial, about)
    total, compiled = report["schemas"], report["compiled"]
    reading = f"read as {about['additional_properties']}"
    yield f"{about['file']}: {total} schemas, {reading}; model {about['model']}, backend {about['backend']}"
    yield ""
    for mode, heading in (("exact", "compiled exactly"), ("lenient", "compiled leniently")):
        if compiled[mode]:
            counts = report["instances"][mode]
            accepted, refused = (
                f"{counts[key]} of {counts[of]}" for key, of in (("valid_accepted", "valid"), ("invalid_refused", "invalid"))
            )
            yield f"{heading:19} {_of(compiled[mode], total):>20}   valid accepted {accepted}, invalid refused {refused}"
    yield f"{'refused':19} {_of(compiled['refused'], total):>20}"
    if compiled["failed"]:
        yield f"{'failed':19} {_of(compiled['failed'], total):>20}"
    yield f"{'right strictly':19} {_of(report['right']['strictly']['schemas'], total):>20}"
    if not about["is_strict"]:
        yield f"{'right with fallback':19} {_of(report['right']['with_lenient_fallback']['schemas'], total):>20}"
    yield ""
    for heading, key, digits in (("compile, ms", "compile_ms", 2), ("until then, ms", "waited_ms", 2), ("mask, µs", "mask_us", 1)):
        if report[key]:
            yield f"{heading:19} " + "   ".join(f"{name} {report[key][name]:,.{digits}f}" for name in ("p50", "p95", "p99", "max"))
    if report["refused_exactly"]:
        yield from ["", "not compiled exactly:"]
        for entry in report["refused_exactly"][:MAX_SHOWN]:
            yield f"{entry['schemas']:5}  {entry['reason']}"
    yield from _details(trial)
    yield ""
    if not trial.is_complete:
        yield "interrupted: the schemas that follow were not tried"
    yield "passed" if trial.is_passed else "NOT passed"


def _details(trial: Trial) -> Iterator[str]:
    wrong = [result for result in trial.results if not result.is_right]
    if wrong:
        yield from ["", "not right:"]
    for result in wrong:
        yield f"  line {result.case.line}{f' ({result.case.name})' if result.case.name else ''}, {result.mode}"
        if result.refusal is not None:
            yield f"    {result.refusal.message}, at {result.refusal.param}"
        if result.outcome.failure is not None:
            yield f"    the backend failed: {result.outcome.failure}"
        for failure in result.failures:
            yield f"    {_line(failure)}"
    if trial.malformed:
        yield from ["", "malformed, and left out:"]
    for line in trial.malformed:
        yield f"  line {line.line}: {line.message}"


def _line(failure: Failure) -> str:
    return f"test {failure.test}: {failure.why}"


def _of(count: int, total: int) -> str:
    return f"{count} of {total}" + (f" ({count / total:.1%})" if total else "")
