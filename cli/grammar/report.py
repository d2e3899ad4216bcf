"""What audits of masks found, in words and as JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.cli.grammar.audit import RESTRICTIONS, Audit

MAX_SHOWN = 20


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
