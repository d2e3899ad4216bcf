"""The figures of `structured_quality.py`, their tables and plots.

Per model, task and arm: `valid`, the share of answers that the schema accepts (in text: out of which the parser reads such a value);
`right`, the share of those asked whose value is right; `wrong but valid`; tokens and seconds of an answer. Shares come with Wilson's
interval of 95 % (Wilson 1927), differences to `free` over the same items with one of the paired bootstrap, and so does the ratio of the
times. `AUROC` says how well the constraint's pressure tells an answer that is valid and wrong from one that is right: 0.5 is chance.
"""

import math
import os
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

NUM_RESAMPLES = 2000
Z = 1.959964  # of 95 %
MIN_OF_EACH = 5  # answers that are right, and as many that are not: below that, an AUROC says nothing
ALL = "all tasks"
ORDER = (
    *("free", "free+closed", "prompt", "retry", "outlines", "direct", "direct+closed", "think", "draft", "draft+pressure", "draft+closed"),
    *("tools", "tools+schema", "tools+draft"),
)
HEADINGS = (
    *("task", "arm", "answers", "valid, %", "right, %", "less free's", "wrong but valid, %", "tokens"),
    *("time over free's", "processor time"),
    "AUROC of pressure",
)
COLOURS = {"free": "#444444", "prompt": "#999999", "retry": "#c08a2e", "direct": "#2e6fc0", "think": "#7a4fc0", "draft": "#2e9e5b"}


@dataclass(slots=True)
class Record:
    """One answer. `processor_seconds` are 0 where other requests ran beside it. `pressure` is in nats.

    `error` is the server's message where it refused the request.
    """

    model: str
    task: str
    key: str
    arm: str
    text: str = ""
    preamble: str | None = None
    finish_reason: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    pressure: float | None = None
    is_valid: bool = False
    is_right: bool = False
    has_call: bool = False
    error: str | None = None

    @property
    def identity(self) -> tuple[str, str, str, str]:
        return self.model, self.task, self.key, self.arm


@dataclass(slots=True)
class Figures:
    """Of one arm. Intervals are (low, high); `minus_free` is the difference of the shares that are right."""

    model: str
    task: str
    arm: str
    num_answers: int
    num_refused: int
    valid: float
    right: float
    right_interval: tuple[float, float]
    wrong_but_valid: float
    tokens: float
    seconds: float
    processor_seconds: float
    called: float | None = None
    minus_free: float | None = None
    minus_free_interval: tuple[float, float] | None = None
    num_timed: int = 0  # answers, with those of `free` to the same items, whose times are compared
    times_free: float | None = None
    times_free_interval: tuple[float, float] | None = None
    processor_times_free: float | None = None
    processor_times_free_interval: tuple[float, float] | None = None
    auroc: float | None = None
    auroc_interval: tuple[float, float] | None = None


def summary(records: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """As JSON. The order is that of the models and tasks in the records; behind its tasks a model has `ALL` of them together."""
    places = {record.model: dict.fromkeys(other.task for other in records if other.model == record.model) for record in records}
    found = []
    for model, task in [(model, task) for model, tasks in places.items() for task in (*tasks, ALL)]:
        of_place = [replace(record, task=task) for record in records if record.model == model and task in (record.task, ALL)]
        free = {record.key: record for record in of_place if record.arm == "free"}
        for arm in ORDER:
            of_arm = [record for record in of_place if record.arm == arm]
            if of_arm:
                found.append(asdict(figures(of_arm, free, seed)))
    return {"figures": found}


def figures(records: Sequence[Record], free: Mapping[str, Record], seed: int) -> Figures:
    number = len(records)
    num_right, num_valid = sum(record.is_right for record in records), sum(record.is_valid for record in records)
    made = Figures(
        *(records[0].model, records[0].task, records[0].arm, number, sum(record.error is not None for record in records)),
        *(num_valid / number, num_right / number, wilson(num_right, number), (num_valid - num_right) / number),
        statistics.fmean(record.tokens for record in records),
        statistics.fmean(record.seconds for record in records),
        statistics.fmean(record.processor_seconds for record in records),
    )
    if records[0].arm.startswith("tools"):
        made.called = sum(record.has_call for record in records) / number
        return made
    pairs = [(record, free[record.key]) for record in records if record.key in free]
    if pairs and records[0].arm != "free":
        numbers = random.Random(seed)
        samples = [numbers.choices(pairs, k=len(pairs)) for _ in range(NUM_RESAMPLES)]
        made.minus_free, made.minus_free_interval = difference(pairs), middle(map(difference, samples))
        alone = [pair for pair in pairs if all(record.processor_seconds for record in pair)]
        if alone:
            made.num_timed = len(alone)
            samples = [numbers.choices(alone, k=len(alone)) for _ in range(NUM_RESAMPLES)]
            made.times_free, made.times_free_interval = times(alone), middle(map(times, samples))
            made.processor_times_free = processor_times(alone)
            made.processor_times_free_interval = middle(map(processor_times, samples))
    judged = [(record.pressure, record.is_right) for record in records if record.pressure is not None and record.is_valid]
    if min(sum(is_right for _, is_right in judged), sum(not is_right for _, is_right in judged)) >= MIN_OF_EACH:
        numbers = random.Random(seed)
        made.auroc = auroc(judged)
        resampled = (auroc(numbers.choices(judged, k=len(judged))) for _ in range(NUM_RESAMPLES))
        made.auroc_interval = middle(value for value in resampled if value is not None)
    return made


def wilson(successes: int, number: int) -> tuple[float, float]:
    share, spread = successes / number, Z * Z / number
    centre = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / number + spread / (4 * number))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference(pairs: Sequence[tuple[Record, Record]]) -> float:
    return sum(record.is_right - free.is_right for record, free in pairs) / len(pairs)


def times(pairs: Sequence[tuple[Record, Record]]) -> float:
    """All seconds of an arm over those of `free`."""
    return sum(record.seconds for record, _ in pairs) / sum(free.seconds for _, free in pairs)


def processor_times(pairs: Sequence[tuple[Record, Record]]) -> float:
    """The same of processor seconds, which other programs on the machine change less."""
    return sum(record.processor_seconds for record, _ in pairs) / sum(free.processor_seconds for _, free in pairs)


def middle(values: Any) -> tuple[float, float]:
    """The 95 % between the tails."""
    ordered = sorted(values)
    cut = int(len(ordered) * 0.025)
    return ordered[cut], ordered[-1 - cut]


def auroc(judged: Sequence[tuple[float | None, bool]]) -> float | None:
    """The probability that a wrong answer has more pressure than a right one; ties count half. None where one kind is missing."""
    right = [pressure for pressure, is_right in judged if is_right and pressure is not None]
    wrong = [pressure for pressure, is_right in judged if not is_right and pressure is not None]
    if not right or not wrong:
        return None
    return statistics.fmean((theirs > ours) + (theirs == ours) / 2 for theirs in wrong for ours in right)


# What is shown


def percent(value: float | None, interval: Sequence[float] | None = None, sign: str = "") -> str:
    if value is None:
        return ""
    span = "" if interval is None else f" ({100 * interval[0]:{sign}.0f} to {100 * interval[1]:{sign}.0f})"
    return f"{100 * value:{sign}.0f}{span}"


def decimal(value: float | None, interval: Sequence[float] | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if interval is None else f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Markdown, a table for each model, of all arms but those of tool calls; then one of these."""
    rows = found["figures"]
    for model in dict.fromkeys(row["model"] for row in rows):
        yield f"### {model}"
        yield ""
        yield f"| {' | '.join(HEADINGS)} |"
        yield "|---" * len(HEADINGS) + "|"
        for row in rows:
            if row["model"] == model and row["called"] is None:
                refused = f" ({row['num_refused']} refused)" if row["num_refused"] else ""
                cells = (
                    *(row["task"], f"`{row['arm']}`", f"{row['num_answers']}{refused}", percent(row["valid"])),
                    *(percent(row["right"], row["right_interval"]), percent(row["minus_free"], row["minus_free_interval"], "+")),
                    *(percent(row["wrong_but_valid"]), f"{row['tokens']:.0f}", decimal(row["times_free"], row["times_free_interval"])),
                    decimal(row["processor_times_free"], row["processor_times_free_interval"]),
                    decimal(row["auroc"], row["auroc_interval"]),
                )
                yield f"| {' | '.join(cells)} |"
        yield ""
    called = {(row["model"], row["task"], row["arm"]): row for row in rows if row["called"] is not None}
    if called:
        yield "### Tool calls beside a schema"
        yield ""
        yield "| model | task | questions | calls without a schema, % | with `response_format`, % | the same in mode `draft`, % |"
        yield "|---|---|---|---|---|---|"
        for model, task in dict.fromkeys((model, task) for model, task, _ in called):
            arms = [called.get((model, task, arm)) for arm in ("tools", "tools+schema", "tools+draft")]
            number = next(row["num_answers"] for row in arms if row is not None)
            shares = " | ".join(percent(None if row is None else row["called"]) for row in arms)
            yield f"| {model} | {task} | {number} | {shares} |"
        yield ""


def page(path: Path, found: Mapping[str, Any], plots: Path) -> None:
    """Writes the tables between the lines `<!-- tables -->` and `<!-- /tables -->`, and a plot of each model into the folder `plots`."""
    text = path.read_text(encoding="utf-8")
    pictures = []
    for model in dict.fromkeys(row["model"] for row in found["figures"]):
        picture = plots / f"structured-quality-{model}.svg"
        picture.write_text(plot([row for row in found["figures"] if row["model"] == model and row["called"] is None]), encoding="utf-8")
        pictures.append(f"![Right answers of {model} by task and arm]({os.path.relpath(picture, path.parent)})\n")
    written = "\n".join([*pictures, *table(found)])
    begin, end = "<!-- tables -->", "<!-- /tables -->"
    if begin not in text or end not in text:
        raise ValueError(f"{path} has no lines {begin} and {end}")
    changed = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{written}\n{end}", text, flags=re.DOTALL)
    path.write_text(changed, encoding="utf-8")


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG: the share of right answers of each arm with its interval, task by task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    arms = [arm for arm in COLOURS if any(row["arm"] == arm for row in rows)]
    group, left, top, height = 18 * len(arms) + 24, 50, 34, 220
    width, bottom = left + group * len(tasks) + 10, top + height

    def level(share: float) -> float:
        return bottom - share * height

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 40}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 40}" fill="white"/>',
    ]
    for place, arm in enumerate(arms):
        x = left + 90 * place
        lines.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[arm]}"/><text x="{x + 17}" y="18">{arm}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = level(share)
        lines.append(f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for row in rows:
        if row["arm"] not in arms:
            continue
        x = left + group * tasks.index(row["task"]) + 12 + 18 * arms.index(row["arm"])
        low, high = map(level, row["right_interval"])
        y = level(row["right"])
        lines.append(f'<rect x="{x}" y="{y:.1f}" width="14" height="{bottom - y:.1f}" fill="{COLOURS[row["arm"]]}"/>')
        lines.append(f'<line x1="{x + 7}" x2="{x + 7}" y1="{low:.1f}" y2="{high:.1f}" stroke="black"/>')
    for place, task in enumerate(tasks):
        middle_of = left + group * place + group / 2
        lines.append(f'<text x="{middle_of:.0f}" y="{bottom + 18}" text-anchor="middle">{task.replace("bfcl_", "BFCL ")}</text>')
    return "\n".join([*lines, "</svg>", ""])
