"""Writes the tables of `benchmarks/README.md` from what was measured, so that each number has one source: `benchmarks/results/`.

    python benchmarks/results_tables.py
    python benchmarks/results_tables.py --check

A table is between `<!-- NAME -->` and `<!-- end of NAME -->`; what is there is replaced. `--check` writes nothing, and its exit status
says whether the tables are those of the results.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.measurement import METRICS, Metric

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results"
LOADS = [  # scenario, metric, what is said of it
    ("concurrency-1", "output_tokens_per_s", "1 stream, tokens/s"),
    ("concurrency-8", "output_tokens_per_s", "8 streams, tokens/s"),
    ("concurrency-32", "output_tokens_per_s", "32 streams, tokens/s"),
    ("concurrency-128", "output_tokens_per_s", "128 streams, tokens/s"),
    ("concurrency-32", "ttft_median_s", "32 streams, first token, ms"),
    ("prefill", "prompt_tokens_per_s", "long prompts, prompt tokens/s"),
    ("shared-prefix", "wall_s", "shared prefix, s for all 16 requests"),
    ("ngram", "output_tokens_per_s", "text written out again, tokens/s"),
    ("prose-1", "output_tokens_per_s", "prose, 1 stream, tokens/s"),
    ("prose-8", "output_tokens_per_s", "prose, 8 streams, tokens/s"),
    ("prose-32", "output_tokens_per_s", "prose, 32 streams, tokens/s"),
    ("prose-128", "output_tokens_per_s", "prose, 128 streams, tokens/s"),
    ("rag", "output_tokens_per_s", "questions on long documents, tokens/s"),
    ("code-edit", "output_tokens_per_s", "code written out again with changes, tokens/s"),
    ("agent", "output_tokens_per_s", "agents' loops of tool calls, tokens/s"),
    ("agent-1", "output_tokens_per_s", "one agent's loops of tool calls, tokens/s"),
    ("agent-tasks", "output_tokens_per_s", "agents' loops of other tasks, tokens/s"),
    ("long-among-short", "output_tokens_per_s", "31 streams beside a context of 32,000, tokens/s"),
    ("concurrency-32", "rss_bytes", "memory at 32 streams, GB"),
]
PARTS = [  # of `profile_step.py`, and what is said of them
    ("schedule", "schedule"),
    ("build batch", "build the batch"),
    ("embedding", "embedding"),
    ("  linear layers", "linear layers"),
    ("  attention", "attention"),
    ("  norms, positions, activations", "norms, positions, activations"),
    ("head", "head"),
    ("sampling", "sampling"),
    ("update, detokenize, parse", "update, detokenize, parse"),
    ("step", "whole step"),
]
WEIGHTS = {
    "reference": "float32 of what the file's codes stand for",
    "none": "`none`: those in bfloat16",
    "auto": "`auto`: the file's own, 4 bits and 8 for the vocabulary",
}
METRICS_BY_KEY = {metric.key: metric for metric in METRICS}
DRAFT_PLACES = (1, 2, 4, 8, 16)  # in a draft, from 1
QUIET_LOAD = 0.5  # of processes, on average
CONTEXTS = "roofline-contexts.json"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def origin(name: str, result: Mapping[str, Any]) -> str:
    """When, on what and with which command."""
    machine = result["hardware"]
    kind = f" (family {machine['cpu_family']}, model {machine['cpu_model']})" if machine.get("cpu_family") else ""
    hardware = f"{machine['cpu']}{kind}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB"
    commit = result.get("versions", {}).get("commit")
    at = f", commit {commit[:10]}" if commit else ""
    return f"{result['date'][:16].replace('T', ' ')}, {hardware}{at}; `results/{name}`:"


def command(result: Mapping[str, Any]) -> str:
    return "\n".join(["```", "python " + shlex.join(result["command_line"]), "```"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def serving() -> Iterator[str]:
    """For each run of several servers, the newest first, a table of its loads and one of the processor time that they took."""
    found = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    runs = {name: result for name, result in found.items() if is_of_several_servers(result)}
    for name, result in sorted(runs.items(), key=lambda run: run[1]["date"], reverse=True):
        ours, *others = result["servers"]
        yield f"#### {ours} and {', '.join(titled(result, other) for other in others)}"
        yield f"{origin(name, result)[:-1]}, medians of {counted(result['rounds'], 'round')}:"
        yield command(result)
        head = ["", ours, *others, "ratio" if len(peers_of(result)) == 1 else "ratio to the best peer"]
        yield table(head, load_rows(result))
        busy = [*processor_rows(result)]
        if busy:
            yield "Processor seconds for 1,000 tokens of prompts and answers:"
            yield table(head, busy)


def is_of_several_servers(result: Any) -> bool:
    return isinstance(result, dict) and {"servers", "scenarios"} <= result.keys() and len(result["servers"]) > 1


def titled(result: Mapping[str, Any], server: str) -> str:
    version = result["servers"][server]["version"]
    return f"{server} {version}" if version else server


def peers_of(result: Mapping[str, Any]) -> list[str]:
    """The servers that the first is compared with: those of other projects or, without any, its own variants."""
    first, *others = result["servers"]
    version = result["servers"][first]["version"]
    return [other for other in others if result["servers"][other]["version"] != version] or others


def load_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for scenario, key, label in LOADS:
        if scenario in result["scenarios"]:
            yield server_row(result, label, METRICS_BY_KEY[key], medians_of(result, scenario, key))
    starts = {name: statistics.median(server["startup_s"] or [0]) for name, server in result["servers"].items()}
    if all(starts.values()):
        yield server_row(result, "start to first answer, s", Metric("startup_s", "start", 1, 1, False), starts)


def processor_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Empty for results from before it was measured."""
    metric = METRICS_BY_KEY["processor_s_per_1000_tokens"]
    labels: dict[str, str] = {}
    for scenario, _, label in LOADS:
        labels.setdefault(scenario, label.rpartition(", ")[0])
    for scenario, label in labels.items():
        values = medians_of(result, scenario, metric.key) if scenario in result["scenarios"] else {}
        if any(values.values()):
            yield server_row(result, label, metric, values)


def medians_of(result: Mapping[str, Any], scenario: str, key: str) -> dict[str, float | None]:
    return {name: measured["medians"].get(key) for name, measured in result["scenarios"][scenario]["servers"].items()}


def server_row(result: Mapping[str, Any], label: str, metric: Metric, values: Mapping[str, float | None]) -> list[str]:
    """The last cell says how many times better the first server is than the best of its peers."""
    ours = values[next(iter(result["servers"]))]
    peers = [value for peer in peers_of(result) if (value := values.get(peer)) is not None]
    ratio = None
    if ours and peers:
        ratio = ours / max(peers) if metric.is_higher_better else min(peers) / ours
    return [label, *(number(values.get(name), metric.scale, metric.digits) for name in result["servers"]), times(ratio)]


def number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def constraints() -> Iterator[str]:
    names = [f"structured{schema}{speculation}.json" for schema in ("", "-records") for speculation in ("", "-no-speculation")]
    results = {name: read(name) for name in names if (RESULTS / name).exists()}
    yield table(
        ["schema", "one on every request", "another one on every request", "rounds", "measured"],
        (
            [
                f"`{result['schema']}`" + (", no speculation" if "no-speculation" in name else ""),
                *(f"{result['ratios_to_free'][key]['median']:.1%}" for key in ("schema", "distinct")),
                str(len(result["ratios_to_free"]["schema"]["rounds"])),
                origin(name, result)[:-1],
            ]
            for name, result in results.items()
        ),
    )


def hostile() -> Iterator[str]:
    result = read("hostile.json")
    medians = {name: one["medians"] for name, one in result["attacks"].items() if one["medians"]}
    gaps = sorted(one["gap"] for one in medians.values())
    yield f"{origin('hostile.json', result)[:-1]}, {len(medians)} attacks:"
    worst = sorted(medians, key=lambda name: medians[name]["gap"], reverse=True)[:5]
    rows = [[f"`{name}`", *(number(medians[name][key]) for key in ("answer_ms", "gap", "quiet_gap"))] for name in worst]
    yield table(["the five worst attacks", "answered after, ms", "largest gap of others, ms", "without it, ms"], rows)
    yield f"The median of all attacks' gaps is {number(statistics.median(gaps))} ms."


def quality() -> Iterator[str]:
    result = read("quality.json")
    yield origin("quality.json", result)
    head = ["weights", "perplexity", "KL divergence, thousandths of a nat", "same likeliest token, passages", "answers"]
    rows = []
    for one in result["qualities"]:
        if one["variant"] in WEIGHTS:
            shares = [] if one["variant"] == "reference" else [f"{one[key]:.1%}" for key in ("same", "greedy", "greedy_clear")]
            divergence = [number(one["divergence"], 1000, 1)] if shares else []
            row = [WEIGHTS[one["variant"]], number(one["perplexity"], digits=2), *divergence, *shares]
            rows.append(row + [""] * (len(head) + 1 - len(row)))
    yield table([*head, "answers, where it was clear"], rows)


def steps() -> Iterator[str]:
    result = read("profile_step.json")
    yield origin("profile_step.json", result)
    loads = [key for key in result if key.startswith("decode-")]
    head = ["", *(f"{count} stream{'s' if count != '1' else ''}" for count in (key.removeprefix("decode-") for key in loads))]
    yield table(head, ([label, *(part_cell(result[load], part) for load in loads)] for part, label in PARTS))


def part_cell(load: Mapping[str, Any], part: str) -> str:
    """Microseconds, and in brackets the limit where there is one. What is left over may come out as less than nothing."""
    least, limit = load[part]["min_us"], load[part]["limit_us"]
    return ("under 100" if least < 0 else number(least)) + (f" ({number(limit)})" if limit else "")


def roofline() -> Iterator[str]:
    """One table for each model."""
    for path in sorted(RESULTS.glob("roofline*.json")):
        if path.name == CONTEXTS:
            continue
        result = read(path.name)
        yield f"{origin(path.name, result)[:-1]}. {limits(result)}"
        yield command(result)
        loads: dict[str, dict[str, Any]] = {load: {line["name"]: line for line in lines} for load, lines in result["tables"].items()}
        names = dict.fromkeys(name for lines in loads.values() for name in lines if name != "step") | {"step": None}
        yield table(["", *loads], ([name, *(bound_cell(lines.get(name)) for lines in loads.values())] for name in names))


def contexts() -> Iterator[str]:
    if not (RESULTS / CONTEXTS).exists():
        return
    result = read(CONTEXTS)
    yield f"{origin(CONTEXTS, result)[:-1]}. {limits(result)}"
    lines = [line for lines in result["tables"].values() for line in lines]
    yield table(["", "times the bound", "by"], ([line["name"], times(line["seconds"] / line["bound"]), line["bound_by"]] for line in lines))


def limits(result: Mapping[str, Any]) -> str:
    found = result["limits"]
    rates = [number(found[key], 1e-9) for key in ("read_bytes", "byte_products", "bfloat16_products")]
    return f"{found['threads']} threads read {rates[0]} GB/s and multiply {rates[1]} G bytes or {rates[2]} G bfloat16 in a second:"


def bound_cell(line: Mapping[str, Any] | None) -> str:
    """Microseconds, and in brackets how many times the bound that is."""
    if line is None:
        return ""
    return number(line["seconds"], 1e6) + (f" ({times(line['seconds'] / line['bound'])})" if line["bound"] else "")


def lag() -> Iterator[str]:
    result = read("loop_lag.json")
    yield origin("loop_lag.json", result)
    head = ["streams", "step, us", "of the loop, us", "of the model, us", "late at p99, us"]
    keys = ("streams", "step_us", "loop_us", "model_us", "lag_p99_us")
    yield table(head, ([number(load[key]) for key in keys] for load in result["loads"]))


def proposers() -> Iterator[str]:
    """One table for each model."""
    for path in sorted(RESULTS.glob("draft-costs*.json")):
        result = read(path.name)
        draft = f", draft model `{result['draft_model']}`" if result["draft_model"] else ""
        yield f"#### `{result['model']}`{draft}"
        yield f"{loaded_origin(path.name, result)}, {counted(result['threads'], 'thread')}, {counted(result['rounds'], 'round')}:"
        yield command(result)
        places = [f"{place}." for place in DRAFT_PLACES]
        head = ["", "proposer", "CPU s/1,000 tokens", "gain", "steps", "drafted", "accepted", "accepted: " + places[0], *places[1:]]
        yield table(head, proposer_rows(result))


def proposer_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for scenario, found in result["scenarios"].items():
        for name, one in found.items():
            counts = [number(one[key]) for key in ("steps", "drafted", "accepted")]
            by_place = [number(one["accepted_by_position"][place - 1]) for place in DRAFT_PLACES]
            yield [f"`{scenario}`", name, number(one["processor_s_per_1000_tokens"], digits=2), times(one["gain"]), *counts, *by_place]


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def loaded_origin(name: str, result: Mapping[str, Any]) -> str:
    """As `origin`, of what was measured in processor time: whether other work ran meanwhile."""
    load = result["load_average_before"]
    beside = f", beside other work (load average {load:.1f})" if load > QUIET_LOAD else ""
    return origin(name, result)[:-1] + beside


def recurrent() -> Iterator[str]:
    if not (RESULTS / "recurrent.json").exists():
        return
    result = read("recurrent.json")
    sizes = f"{result['layers']} layers, prompts of {result['prompt']} tokens, answers of {result['answer']}"
    yield f"{loaded_origin('recurrent.json', result)}; {sizes}, {counted(result['threads'], 'thread')}:"
    yield command(result)
    head = ["", "streams", "tokens/s", "transformers", "CPU s/1,000 tokens", "transformers", "equal answers"]
    yield table(head, (row for name, one in result["families"].items() for row in recurrent_rows(name, one)))
    head = ["", "parameters", "states of a sequence", "keys and values of a token", "prompt tokens computed", "without", "CPU s", "without"]
    yield table(head, (conversation_row(name, one) for name, one in result["families"].items()))


def recurrent_rows(name: str, one: Mapping[str, Any]) -> Iterator[list[str]]:
    for load in one["loads"]:
        both = [load[engine] for engine in ("penstock", "transformers")]
        speeds = [number(each["output_tokens_per_s"], digits=1) for each in both]
        busy = [number(each["processor_s_per_1000_tokens"], digits=2) for each in both]
        yield [f"`{name}`", str(load["streams"]), *speeds, *busy, f"{load['equal_answers']} of {load['answers']}"]


def conversation_row(name: str, one: Mapping[str, Any]) -> list[str]:
    both = [one["conversations"][kind] for kind in ("snapshots", "without")]
    sizes = [f"{one['bytes']['states'] / 1e3:,.0f} kB", f"{one['bytes']['token'] / 1e3:.1f} kB"]
    computed, busy = ([number(each[key], digits=digits) for each in both] for key, digits in (("computed_tokens", 0), ("processor_s", 2)))
    return [f"`{name}`", f"{one['parameters'] / 1e6:.0f}M", *sizes, *computed, *busy]


def compiled() -> Iterator[str]:
    if not (RESULTS / "compiled-layers.json").exists():
        return
    result = read("compiled-layers.json")
    yield f"{origin('compiled-layers.json', result)[:-1]}; {result['layers']} layers, medians of {counted(result['rounds'], 'round')}:"
    yield command(result)
    head = ["", "streams", "tokens/s, compiled", "uncompiled", "ratio", "CPU s/1,000 tokens, compiled", "uncompiled"]
    ways = ("compiled", "uncompiled")
    rows = []
    for name, loads in result["families"].items():
        for streams, load in loads.items():
            speeds = [number(load[way]["output_tokens_per_s"], digits=1) for way in ways]
            busy = [number(load[way]["processor_s_per_1000_tokens"], digits=2) for way in ways]
            rows.append([f"`{name}`", streams, *speeds, times(load["ratio"]), *busy])
    yield table(head, rows)


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "serving": serving,
    "constraints": constraints,
    "attacks": hostile,
    "quality": quality,
    "steps": steps,
    "lag": lag,
    "roofline": roofline,
    "contexts": contexts,
    "proposers": proposers,
    "recurrent": recurrent,
    "compiled": compiled,
}


def rendered(readme: str) -> str:
    """The page with every table as it should be. Raises `ValueError` where one has no place."""
    for name, render in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = readme.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"README.md has no place for {name!r}: {begin} and {end}")
        readme = before + begin + "\n" + "\n\n".join(render()) + "\n" + end + after
    return readme


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    written = README.read_text(encoding="utf-8")
    right = rendered(written)
    if options.check:
        return int(written != right)
    README.write_text(right, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
