"""Results of `gpu.py` for people."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]


def table(records: Sequence[Record]) -> Iterator[str]:
    for record in _of(records, "ceilings"):
        yield f"copy {record['bandwidth'] / 1e9:,.0f} GB/s, bf16 matrix product {record['matmul'] / 1e12:,.1f} TFLOP/s"
    for record in _of(records, "built"):
        yield f"{record['model']}: {record['engine']} was ready after {record['seconds']:.1f} s"
    yield from _server(_of(records, "server"))
    yield from _decode(_of(records, "decode"))
    for record in _of(records, "profile"):
        yield ""
        yield f"{record['model']}, a forward pass over {record['batch']}, by kernel: launches, ms"
        for name, launches, seconds in record["kernels"]:
            yield f"  {launches:7.0f} {seconds * 1e3:8.3f}  {name[:100]}"
    yield from _mixed(_of(records, "mixed"))
    yield from _prefill(_of(records, "prefill"))
    yield from _generate(_of(records, "generate"))
    yield from _kernels(_of(records, "kernel"))


def _of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _percent(record: Record, key: str) -> str:
    return f"{record[key]:7.1%}" if key in record else "      -"


def _server(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield f"{'server':16} {'flags':20} {'load':32} {'streams':>7} {'tokens/s':>9} {'first ms':>8} {'token ms':>8} {'GiB':>6}"
    for record in records:
        start = f"{record['model']:16} {record['flags']:20} {record['load']:32}"
        if record["load"] == "start":
            yield f"{start} ready after {record['seconds']:.1f} s"
        elif "failed" in record:
            yield f"{start} {record['failed'][:100]}"
        else:
            yield (
                f"{start} {record['streams']:7} {record['tokens_per_s']:9,.0f} {record['first_token_s'] * 1e3:8.1f}"
                f" {record['token_s'] * 1e3:8.2f} {record['memory_bytes'] / 2**30:6.1f}"
            )


def _decode(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield f"{'decode':16} {'batch':>5} {'context':>7} {'step ms':>8} {'tokens/s':>9} {'of copy':>7} {'forward ms':>10} {'of copy':>7}"
    for record in records:
        yield (
            f"{record['model']:16} {record['batch']:5} {record['context_len']:7.0f}"
            f" {record['step_s'] * 1e3:8.3f} {record['tokens_per_s']:9,.0f}"
            f" {_percent(record, 'share_of_bandwidth')} {record['forward_s'] * 1e3:10.3f} {_percent(record, 'forward_share_of_bandwidth')}"
        )


def _mixed(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield (
            f"{'prompts come':16} {'places':>6} {'lengths':>8} {'graphs':>6} {'with prompts':>12} {'in graphs':>9} {'of those':>8}"
            f" {'step ms':>8} {'with prompts':>12} {'tokens/s':>9}"
        )
    for record in records:
        lengths = f"{record['prompt_len']}+{record['output_len']}"
        yield (
            f"{record['model']:16} {record['batch']:6} {lengths:>8} {'yes' if record['has_graphs'] else 'no':>6}"
            f" {record['share_with_prompts']:12.1%} {record['share_in_graphs']:9.1%} {record['share_with_prompts_in_graphs']:8.1%}"
            f" {record['step_s'] * 1e3:8.3f} {record['mixed_step_s'] * 1e3:12.3f} {record['tokens_per_s']:9,.0f}"
        )


def _prefill(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield f"{'prefill':16} {'prompts':>7} {'tokens':>6} {'a step':>6} {'tokens/s':>9} {'of matrix product':>17}"
    for record in records:
        yield (
            f"{record['model']:16} {record['prompts']:7} {record['prompt_len']:6} {record['budget']:6} {record['tokens_per_s']:9,.0f}"
            f" {_percent(record, 'share_of_matmul'):>17}"
        )


def _generate(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield f"{'whole requests':16} {'engine':13} {'batch':>5} {'lengths':>9} {'tokens/s':>9} {'ratio':>6}"
    for record in records:
        lengths = f"{record['prompt_len']}+{record['output_len']}"
        ratio = f"{record['times_generate_batch']:5.1f}x" if "times_generate_batch" in record else ""
        line = f"{record['model']:16} {record['engine']:13} {record['batch']:5} {lengths:>9} {record['tokens_per_s']:9,.0f} {ratio:>6}"
        yield line.rstrip()


def _kernels(records: list[Record]) -> Iterator[str]:
    if records:
        yield ""
        yield f"{'kernels, of Llama-3.1-8B':58} {'kernel ms':>9} {'torch ms':>9} {'ratio':>6}  rate"
    for record in records:
        times = f"{record['kernel_s'] * 1e3:9.3f} {record['reference_s'] * 1e3:9.3f} {record['reference_s'] / record['kernel_s']:5.1f}x"
        yield f"{record['name']:58} {times}  {record['rate']:,.1f} {record['unit']}"
