"""`penstock grammar check`, `test` and `audit`: tries constraints with a server's grammar backends, and writes what was found."""

import asyncio
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from penstock.cli.flags import opened
from penstock.cli.grammar.arguments import KINDS, GrammarArguments
from penstock.cli.grammar.audit import RESTRICTIONS, Audit
from penstock.cli.grammar.campaign import Campaign
from penstock.cli.grammar.raw import RawBench, raw_backends
from penstock.cli.grammar.trial import PARAM, GrammarBench, Outcome, Result, Trial, Tried, lenient, run_trial, schema_spec
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import ConfigurationError, UnsupportedGrammar
from penstock.engine.model.config import read_answer_tokens
from penstock.engine.model.store import model_name, resolve_model
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins

NUM_COMPILATIONS = 5
PATIENCE = 1.0  # seconds for all of them


@dataclass(slots=True, kw_only=True)
class BackendAnswer(Tried):
    """What one backend makes of the constraint. `seconds` is the median of its times to compile it."""

    backend: str
    seconds: float | None


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
    tried = await bench.attempt(spec, backend, is_strict=is_strict)
    spec, outcome, seconds = tried.spec, tried.outcome, tried.outcome.seconds
    if outcome.grammar is not None and seconds is not None:
        num_more = min(NUM_COMPILATIONS, int(PATIENCE / max(seconds, 1e-6)))
        compiled = spec.as_written if outcome.is_as_written and spec.as_written is not None else spec
        more = [bench.compile_again(compiled, backend) for _ in range(num_more)]
        seconds = statistics.median([again for again in more if again is not None] or [seconds])
    return BackendAnswer(spec=spec, outcome=outcome, refusal=tried.refusal, backend=backend, seconds=seconds)


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


MAX_SHOWN = 20


def trial_as_json(trial: Trial, about: dict[str, Any]) -> dict[str, Any]:
    """`about` says what was tried: file, model, backend. Shares are of all schemas.

    `compile_ms` is what backends took for the grammars that were used, `waited_ms` what requests would have waited for
    them or for a refusal: what other backends refused first counts in it, and so does the exact attempt before a lenient one.
    Each is the median of several compilations, none of them from the cache, where they are quick.
    """
    exact, lenient = (trial.of(mode) for mode in ("exact", "lenient"))
    right = sum(result.is_right for result in exact)
    right_leniently = sum(result.is_right for result in lenient)
    compiled = [result.outcome.seconds for result in trial.results if result.outcome.seconds is not None]
    waited = [result.outcome.waited for result in trial.results if result.outcome.waited is not None]
    reasons = Counter(result.refusal.message for result in trial.results if result.refusal is not None)
    return {
        **about,
        "schemas": len(trial.results),
        "compiled": {mode: len(trial.of(mode)) for mode in ("exact", "lenient", "refused", "failed")},
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
        "mode": result.verdict,
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
        yield f"  line {result.case.line}{f' ({result.case.name})' if result.case.name else ''}, {result.verdict}"
        if result.refusal is not None:
            yield f"    {result.refusal.message}, at {result.refusal.param}"
        if result.outcome.failure is not None:
            yield f"    the backend failed: {result.outcome.failure}"
        for failure in result.failures:
            yield f"    test {failure.test}: {failure.why}"
    if trial.malformed:
        yield from ["", "malformed, and left out:"]
    for line in trial.malformed:
        yield f"  line {line.line}: {line.message}"


def _of(count: int, total: int) -> str:
    return f"{count} of {total}" + (f" ({count / total:.1%})" if total else "")


def run_grammar_command(arguments: GrammarArguments, plugins: Plugins) -> int:
    """Prints what was found and returns the exit code, 0 or 1. Raises `ConfigurationError` for what cannot be tried at all."""
    with opened(arguments.path) as file:
        return {"check": check_file, "test": test_file, "audit": audit_file}[arguments.action](file, arguments, plugins)


def check_file(file: BinaryIO, arguments: GrammarArguments, plugins: Plugins) -> int:
    spec = read_spec(file, arguments)
    with grammar_bench(arguments, plugins) as bench:
        checked = asyncio.run(check(bench, spec, bench.backend_named(arguments.backend), is_strict=arguments.is_strict))
    about = {
        "file": arguments.path,
        "kind": spec.kind.value,
        "model": model_name(arguments.model),
        "additional_properties": arguments.additional_properties,
    }
    if arguments.is_json:
        print(json.dumps(check_as_json(checked, about), ensure_ascii=False))
    else:
        print("\n".join(check_as_text(checked, about)))
    return 0 if checked.chosen.grammar is not None else 1


def test_file(file: BinaryIO, arguments: GrammarArguments, plugins: Plugins) -> int:
    trial = Trial()
    with grammar_bench(arguments, plugins) as bench:
        backend = bench.backend_named(arguments.backend)
        try:
            reading, is_strict = arguments.additional_properties, arguments.is_strict
            asyncio.run(run_trial(trial, bench, file, backend, reading, is_strict=is_strict, limit=arguments.limit))
        finally:  # Ctrl-C in the middle of a long file loses none of the results
            print_trial(trial, arguments, backend)
    return 0 if trial.is_passed else 1


def audit_file(file: BinaryIO, arguments: GrammarArguments, plugins: Plugins) -> int:
    audit, beside, lines = Audit(), dict[str, Audit](), file.readlines()
    with grammar_bench(arguments, plugins) as bench:
        backend, reading = bench.backend_named(arguments.backend), arguments.additional_properties
        try:
            campaign = Campaign(audit, bench, backend, reading, arguments.effort, plugins.tool_parsers)
            asyncio.run(campaign.run(lines, arguments.limit))
            for name in bench.backend_names if "backends" in arguments.beside else ():
                beside[name] = Audit()
                other = Campaign(beside[name], bench, name, reading, arguments.effort, plugins.tool_parsers)
                asyncio.run(other.run(lines, arguments.limit))
            if "raw" in arguments.beside:
                audit_raw(beside, lines, arguments, bench.vocabulary)
        finally:  # Ctrl-C loses nothing that was found
            about = {
                "file": arguments.path,
                "model": model_name(arguments.model),
                "backend": backend or "auto",
                "additional_properties": reading,
                **asdict(arguments.effort),
            }
            if arguments.is_json:
                others = {"beside": {name: audit_as_json(other, {}) for name, other in beside.items()}} if beside else {}
                print(json.dumps(audit_as_json(audit, about) | others, ensure_ascii=False))
            else:
                print("\n".join(audit_as_text(audit, about)))
                print("\n".join(["", *compared({"penstock": audit, **beside})] if beside else []))
    return 0 if audit.is_passed else 1


def audit_raw(audits: dict[str, Audit], lines: Sequence[bytes], arguments: GrammarArguments, vocabulary: Vocabulary) -> None:
    """Adds an audit of each installed engine as it comes. Tools are left out: the engines know no wire formats."""
    for name, make in raw_backends().items():
        audits[name] = Audit()
        bench = RawBench(name, make, vocabulary)
        asyncio.run(Campaign(audits[name], bench, name, "open", arguments.effort, {}).run(lines, arguments.limit))


def print_trial(trial: Trial, arguments: GrammarArguments, backend: str | None) -> None:
    about = {
        "file": arguments.path,
        "model": model_name(arguments.model),
        "backend": backend or "auto",
        "is_strict": arguments.is_strict,
        "additional_properties": arguments.additional_properties,
    }
    if arguments.is_json:
        print(json.dumps(trial_as_json(trial, about), ensure_ascii=False))
    else:
        print("\n".join(trial_as_text(trial, about)))


def read_spec(file: BinaryIO, arguments: GrammarArguments) -> GrammarSpec:
    """The constraint as a request would bring it. Raises `ConfigurationError` where the file holds none of this kind."""
    kind = GrammarKind(KINDS[arguments.kind])
    try:
        text = file.read().decode("utf-8-sig")
        content = json.loads(text) if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE) else None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{arguments.path} cannot be read as {arguments.kind}: {error}") from error
    match kind:
        case GrammarKind.JSON_SCHEMA if not isinstance(content, dict | bool):
            raise ConfigurationError(f"{arguments.path} holds no JSON Schema: that is an object, true or false")
        case GrammarKind.CHOICE if not isinstance(content, list) or not all(isinstance(choice, str) for choice in content):
            raise ConfigurationError(f"{arguments.path} holds no choices: they are a JSON array of strings")
        case GrammarKind.JSON_SCHEMA:
            return schema_spec(content, PARAM, arguments.additional_properties)
        case GrammarKind.CHOICE:
            return GrammarSpec(kind, json.dumps(content, ensure_ascii=False), PARAM)
        case GrammarKind.REGEX:
            return GrammarSpec(kind, text.removesuffix("\n").removesuffix("\r"), "")
    return GrammarSpec(kind, text, "")


@contextmanager
def grammar_bench(arguments: GrammarArguments, plugins: Plugins) -> Iterator[GrammarBench]:
    """Over the model's tokenizer; its weights are not read."""
    directory = resolve_model(arguments.model, arguments.trust_remote_code)
    tokenizer = Tokenizer.load(directory, arguments.trust_remote_code)
    tokens = read_answer_tokens(directory, tokenizer, arguments.trust_remote_code)
    bench = GrammarBench(plugins.grammar_backends, tokenizer, tokens.vocab_size, tokens.stop_token_ids)
    try:
        yield bench
    finally:
        bench.close()


def audit_as_json(audit: Audit, about: dict[str, Any]) -> dict[str, Any]:
    """`about` says what was audited and how: file, model, backend, effort.

    `decisions` are pairs of a position and a token: `impossible` ones that no JSON text has there and that are masked, `spelled` ones
    that a valid text goes on with and that are allowed, `possible` ones that some valid text has there and that are allowed, `completed`
    ones that are allowed and were completed to something valid.
    """
    verdicts = ("exact", "refused", "failed")
    constraints = {kind: {verdict: counts[verdict] for verdict in verdicts} for kind, counts in audit.constraints.items()}
    return {
        **about,
        "constraints": constraints,
        "processor_seconds": round(audit.seconds, 1),
        "walks": audit.walks,
        "positions": audit.positions,
        "decisions": dict(audit.decisions),
        "completions": {"unfinished": audit.unfinished, "not_judged": audit.unjudged},
        "not_spelled": audit.unspelled,
        "restrictions": {name: {"tried": audit.spelled[name], "refused": audit.restricted[name]} for name in RESTRICTIONS},
        "faults": dict(Counter(finding.fault for finding in audit.findings)),
        "findings": [
            {
                "line": found.line,
                "name": found.name,
                "fault": found.fault,
                "after": found.text,
                "token": found.token,
                "detail": found.detail,
            }
            for found in audit.findings
        ],
        "malformed": [{"line": line.line, "message": line.message} for line in audit.malformed],
        "is_complete": audit.is_complete,
        "is_passed": audit.is_passed,
    }


def audit_as_text(audit: Audit, about: dict[str, Any]) -> Iterator[str]:
    report = audit_as_json(audit, about)
    by_kind = {kind: counts for kind, counts in audit.constraints.items() if not kind.startswith("tool (")}
    formats = [counts for kind, counts in audit.constraints.items() if kind.startswith("tool (")]
    if formats:
        by_kind[f"calls, in {sum(bool(counts['exact']) for counts in formats)} formats"] = sum(formats, Counter())
    yield f"{about['file']}: schemas read as {about['additional_properties']}; model {about['model']}, backend {about['backend']}"
    yield ""
    for kind, counts in by_kind.items():
        total = sum(counts.values())
        others = "".join(f"; {verdict} {counts[verdict]:,}" for verdict in ("refused", "failed") if counts[verdict])
        yield f"{kind + ', exact':32} {counts['exact']:>14,} of {total:,} ({counts['exact'] / total:.1%}){others}"
    yield f"{'positions':32} {audit.positions:>14,} in {audit.walks:,} walks"
    for kind, what in (
        ("impossible", "masked, in nothing valid"),
        ("possible", "allowed, begins something valid"),
        ("spelled", "allowed, in the text walked"),
        ("completed", "allowed, completed to valid"),
    ):
        yield f"{what:32} {audit.decisions[kind]:>14,}"
    yield f"{'completions given up':32} {audit.unfinished:>14,}; not judged: {audit.unjudged:,}"
    yield f"{'texts that no tokens spell':32} {audit.unspelled:>14,}"
    yield f"{'processor seconds':32} {audit.seconds:>14,.1f}"
    for name, numbers in report["restrictions"].items():
        yield f"{'spelled with ' + name.replace('_', ' '):32} {numbers['tried']:>14,}; refused, as documented: {numbers['refused']:,}"
    yield ""
    yield f"faults: {len(audit.findings):,}" + "".join(f"; {fault}: {number:,}" for fault, number in sorted(report["faults"].items()))
    for found in audit.findings[:MAX_SHOWN]:
        yield f"  line {found.line}{f' ({found.name})' if found.name else ''}, {found.fault}: {found.token} after {found.text[-60:]!r}"
        yield f"    {found.detail[:300]}"
    for line in audit.malformed:
        yield f"  line {line.line}: malformed: {line.message}"
    if not audit.is_complete:
        yield "interrupted: the schemas that follow were not audited"
    elif not audit.walks:
        why = "no constraint was compiled, or none has a valid text" if audit.constraints else "the file has no constraint"
        yield f"nothing was audited: {why}"
    yield "passed" if audit.is_passed else "NOT passed"


def compared(audits: Mapping[str, Audit]) -> Iterator[str]:
    """A table with a row for each."""
    faults = ("masked", "allowed", "invalid", "dead_end", "error")
    columns = f"{'exact':>7} {'refused':>8} {'failed':>7} {'decisions':>16}"
    yield "".join((f"{'':28} {columns}", *(f"{fault:>9}" for fault in faults), "    wrong"))
    for name, audit in audits.items():
        verdicts = sum(audit.constraints.values(), Counter[str]())
        found = Counter[str](finding.fault for finding in audit.findings)
        wrong = len({(finding.line, finding.name) for finding in audit.findings})
        counts = f"{verdicts['exact']:>7,} {verdicts['refused']:>8,} {verdicts['failed']:>7,} {sum(audit.decisions.values()):>16,}"
        yield "".join((f"{name:28} {counts}", *(f"{found[fault]:>9,}" for fault in faults), f"{wrong:>9,}"))
