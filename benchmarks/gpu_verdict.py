"""What raw times mean: rates, and shares of what the device can do."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu_shapes import SHAPES, share

Record = dict[str, Any]


def judged(records: Iterable[Record]) -> list[Record]:
    """One record for each thing measured, medians of its runs, with rates; with shares where the ceilings are known."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        what = {key: item for key, item in record.items() if not isinstance(item, float) and key != "is_warm"}
        groups[repr(sorted(what.items()))].append(record)
    merged = [_merge(group) for group in groups.values()]
    ceilings = next((record for record in merged if record["kind"] == "ceilings"), None)
    theirs = {
        (record["model"], record["batch"]): record["seconds"]
        for record in merged
        if record["kind"] == "generate" and record["engine"] == "transformers"
    }
    return [_with_rates(record, ceilings, theirs) for record in merged]


def _merge(group: list[Record]) -> Record:
    whole = dict(group[0])
    for key, item in whole.items():
        if isinstance(item, float):
            whole[key] = statistics.median(record[key] for record in group)
    return whole | ({"runs": len(group)} if len(group) > 1 else {})


def _with_rates(record: Record, ceilings: Record | None, theirs: dict[tuple[str, int], float]) -> Record:
    kind = record["kind"]
    if kind == "decode":
        rates = {"tokens_per_s": record["batch"] / record["step_s"]}
        if ceilings is not None:
            bound_s = SHAPES[record["model"]].decode_bytes(record["batch"], record["context_len"]) / ceilings["bandwidth"]
            rates |= {
                "bound_s": bound_s,
                "share_of_bandwidth": share(bound_s, record["step_s"]),
                "forward_share_of_bandwidth": share(bound_s, record["forward_s"]),
            }
        return record | rates
    if kind == "prefill":
        rates = {"tokens_per_s": record["prompts"] * record["prompt_len"] / record["seconds"]}
        if ceilings is not None:
            bound_s = SHAPES[record["model"]].prefill_operations(record["prompts"], record["prompt_len"]) / ceilings["matmul"]
            rates["share_of_matmul"] = share(bound_s, record["seconds"])
        return record | rates
    if kind == "generate":
        rates = {"tokens_per_s": record["batch"] * record["output_len"] / record["seconds"]}
        peer_s = theirs.get((record["model"], record["batch"]))
        if record["engine"] == "penstock" and peer_s is not None:
            rates["times_generate_batch"] = peer_s / record["seconds"]
        return record | rates
    return record
