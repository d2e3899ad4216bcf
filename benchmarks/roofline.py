"""A roofline of the CPU path: the time of each part of a step beside what its bytes and its products need at the machine's limits.

    python benchmarks/roofline.py steps [--model FILE] [--rows 1 8 32] [--prompt 512] [--json FILE]
    python benchmarks/roofline.py contexts [--contexts 8192 32768 131072] [--heads 14] [--kv-heads 2] [--head-size 64] [--json FILE]

The limits are measured first: a plain read of memory that no cache holds, and products of bytes and of bfloat16 in registers. A part's
bound is the greater of its bytes over the one and its products over the other.

`steps` takes a model apart by kinds of linear layers, in the order in which a step computes them, so that weights come from memory as they
do there. Bytes are those of weights, keys and values. `rest` is what a whole step takes beside all parts: norms, activations, sampling, the
host. Of few rows the head gives the most probable tokens alone, as where requests are greedy.

`contexts` times attention alone, over caches that no processor's cache holds: of one new token, with blocks in order, as a new pool gives
them, and in random order, and of the last `--prompt` tokens of a prompt of that length. It says how many times longer than the bound each
takes. The plain read is repeated before each pass there, and the fastest counts: where memory is shared, its speed changes within seconds.
"""

import argparse
import ctypes
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.profile_step import Bench, Machine, Operands, run_linears, start_bench
from penstock.engine.attention.cpu import head_size, row_size
from penstock.engine.model.form import LinearForm, read_linear
from penstock.engine.native.runtime import FLAGS, SOURCE, find_compiler, instructions_flag, native_library, prepare_loops
from penstock.engine.system.cpus import default_num_threads
from penstock.engine.system.memory import advise_huge_pages
from penstock.engine.weights.packed import TYPES

READ_BYTES = 2**28  # more than caches hold
ROUNDS_OF_PRODUCTS = 1_000_000
TIMES = 10  # of which the least counts
BLOCK_SIZE = 16
ROOM = 4  # caches hold several contexts as long: of 2 MB on their own, none might be in a huge page


@dataclass(frozen=True, slots=True)
class Limits:
    """What so many threads do at most, in a second. A product is multiplied and added."""

    threads: int
    read_bytes: float
    byte_products: float
    bfloat16_products: float


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of a kernel computes."""

    name: str
    num_bytes: int
    products: int
    run: Callable[[], object]
    is_of_bytes: bool = True


@dataclass(slots=True)
class Line:
    """All calls of one name in a step."""

    name: str
    calls: int
    num_bytes: int
    products: int
    seconds: float
    bound: float
    bound_by: str
    read_bytes: float = 0.0  # in a second, by which the bound is; 0: that of several lines

    @property
    def times_bound(self) -> float:
        return self.seconds / self.bound if self.bound else 0.0


def measured_limits(num_threads: int) -> tuple[Limits, Callable[[], float]]:
    """What is measured now, and a function that measures again how many bytes are read in a second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.so"
        compiler = find_compiler()
        if compiler is None:
            raise SystemExit("there is no C++ compiler here, and so no native kernels")
        source = Path(__file__).with_name("limits.cpp")
        subprocess.run([compiler, *FLAGS, instructions_flag(), f"-I{SOURCE.parent}", "-o", str(path), str(source)], check=True)
        library = ctypes.CDLL(str(path))
    library.limits_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    memory = torch.ones(READ_BYTES, dtype=torch.uint8)

    def measure_reading(times: int = 1) -> float:
        return READ_BYTES / least_seconds(lambda: library.limits_read(memory.data_ptr(), READ_BYTES, num_threads), times)

    reading = measure_reading(TIMES)
    rates = []
    for multiply in (library.limits_multiply_bytes, library.limits_multiply_numbers):
        multiply.argtypes, multiply.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
        count = multiply(ROUNDS_OF_PRODUCTS, num_threads)
        rates.append(count / least_seconds(lambda multiply=multiply: multiply(ROUNDS_OF_PRODUCTS, num_threads)))  # type: ignore[misc]
    return Limits(num_threads, reading, *rates), measure_reading


def least_seconds(run: Callable[[], object], times: int = TIMES) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def lines(parts: Sequence[Part], limits: Limits, measure_reading: Callable[[], float] | None = None) -> list[Line]:
    """The parts by name, in the order of their first calls. Those of one pass are called one after the other, as in a step.

    Others may use the same memory, and its speed may change: with `measure_reading`, it is measured again before each pass, and
    the fastest counts.
    """
    passes: list[dict[str, float]] = []
    reads: list[float] = []
    for _ in range(TIMES):
        if measure_reading is not None:
            reads.append(measure_reading())
        seconds: dict[str, float] = defaultdict(float)
        for part in parts:
            began = time.perf_counter()
            part.run()
            seconds[part.name] += time.perf_counter() - began
        passes.append(seconds)
    if reads:
        limits = replace(limits, read_bytes=max(reads))
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_name[part.name].append(part)
    return [line(name, own, min(seconds[name] for seconds in passes), limits) for name, own in by_name.items()]


def line(name: str, parts: Sequence[Part], seconds: float, limits: Limits) -> Line:
    num_bytes, products = sum(part.num_bytes for part in parts), sum(part.products for part in parts)
    rate = limits.byte_products if parts[0].is_of_bytes else limits.bfloat16_products
    by_bytes, by_products = num_bytes / limits.read_bytes, products / rate if rate else 0.0
    bound_by = "bytes" if by_bytes >= by_products else "products"
    return Line(name, len(parts), num_bytes, products, seconds, max(by_bytes, by_products), bound_by, limits.read_bytes)


def timed_line(part: Part, seconds: float, limits: Limits) -> Line:
    return line(part.name, [part], seconds, limits)


def linear_part(place: str, linear: LinearForm, operands: Operands) -> Part:
    names = {type_.number: name for name, type_ in TYPES.items()}
    types = sorted({names[part.type] for part in linear.parts}) if isinstance(linear.parts, ctypes.Array) else ["bfloat16"]
    products = operands.num_rows * linear.inputs * linear.outputs
    return Part(
        f"{place} {'+'.join(types)}", linear.weight_bytes, products, lambda: run_linears([linear], operands), linear.parts is not None
    )


def linear_parts(bench: Bench, num_rows: int) -> Iterator[Part]:
    places = [
        (place, getattr(layer, place)) for layer in bench.decoder.form.layers for place in ("query_key_value", "output", "gate_up", "down")
    ]
    operands = Operands([linear for _, linear in places], num_rows)
    for place, linear in places:
        yield linear_part(place, linear, operands)


def head_part(bench: Bench, num_rows: int) -> Part:
    head, greedy_head = read_linear(bench.decoder.head), bench.greedy_head(num_rows)
    part = linear_part("head", head, Operands([head], num_rows))
    return part if greedy_head is None else replace(part, num_bytes=greedy_head.num_bytes)


@dataclass(slots=True)
class Caches:
    """Keys and values of one sequence, whose blocks lie anywhere in them, or in their order."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_keys: int
    dtype: torch.dtype
    num_layers: int | None = None  # as many as no processor's cache holds
    is_in_order: bool = False
    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    tables_PN: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = -(-self.num_keys // BLOCK_SIZE)
        shape = (num_blocks, BLOCK_SIZE, self.num_kv_heads, row_size(self.head_size, self.dtype))
        num_layers = self.num_layers or -(-READ_BYTES // (2 * torch.empty(shape, dtype=self.dtype).nbytes))
        self.layers = [(self._reserve(shape), self._reserve(shape)) for _ in range(num_layers)]
        blocks = list(range(num_blocks))
        if not self.is_in_order:
            random.Random(0).shuffle(blocks)
        self.tables_PN = torch.tensor([blocks], dtype=torch.int32)

    def _reserve(self, shape: Sequence[int]) -> torch.Tensor:
        num_blocks, *rest = shape
        tensor = torch.empty(ROOM * num_blocks, *rest, dtype=self.dtype)
        advise_huge_pages(tensor)  # as the engine does
        return tensor[:num_blocks].fill_(64)  # of four bytes of 64 a scale of 8 bits is 3.004

    @property
    def num_bytes(self) -> int:
        """Of a layer's keys and values."""
        return sum(tensor.nbytes for tensor in self.layers[0])

    def parts(self, num_rows: int) -> Iterator[Part]:
        """Attention of the last so many tokens, layer after layer."""
        num_pairs = num_rows * self.num_keys - num_rows * (num_rows - 1) // 2
        products = 2 * num_pairs * self.num_heads * self.head_size
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        name = f"{str(self.dtype).removeprefix('torch.')}, {self.num_keys:,} keys, {rows}{', blocks in order' * self.is_in_order}"
        for keys, values in self.layers:
            yield Part(name, self.num_bytes, products, self._attention(keys, values, num_rows), is_of_bytes=False)

    def _attention(self, keys: torch.Tensor, values: torch.Tensor, num_rows: int) -> Callable[[], None]:
        library = native_library()
        assert library is not None
        query = torch.ones(num_rows, self.num_heads, self.head_size, dtype=torch.bfloat16)
        out = torch.empty_like(query)
        starts, lens = torch.tensor([0, num_rows]), torch.tensor([self.num_keys])
        sizes = (self.num_heads, self.num_kv_heads, self.head_size, self.head_size, BLOCK_SIZE, self.tables_PN.shape[1])
        last = (1, *sizes, True, self.dtype == torch.int8, self.head_size**-0.5, 0, 0.0, None)

        def attend() -> None:
            tensors = [out, query, keys, values, self.tables_PN, starts, lens]  # the first of `starts`, 0, is the table's row
            addresses = [tensor.data_ptr() for tensor in tensors]
            if num_rows == 1:
                library.penstock_paged_decode(*addresses, *last)
            else:
                library.penstock_paged_prefill(*addresses[:6], *addresses[5:], None, *last)

        return attend


def step_lines(bench: Bench, limits: Limits, num_rows: int, context: int, num_steps: int) -> list[Line]:
    """A step that gives each of so many streams its next token."""
    profile = bench.decode(num_rows, context, num_steps)
    layers, caches = bench.decoder.form.layers, bench.core.runner.cache
    keys = caches.keys[0]
    size = keys[0, 0, 0].nbytes
    num_keys = num_rows * context * len(layers)
    attention = Part("attention", 2 * num_keys * keys.shape[2] * size, 0, lambda: None, is_of_bytes=False)
    found = bench.in_thread(lines, [*linear_parts(bench, num_rows)], limits)
    found.append(timed_line(attention, profile.least("  attention"), limits))
    found.append(timed_line(head_part(bench, num_rows), profile.least("head"), limits))
    return with_rest(found, profile.least("step"))


def prompt_lines(bench: Bench, limits: Limits, num_tokens: int) -> list[Line]:
    """A prompt that is computed in one step."""
    profile = bench.prefill(num_tokens, 3)
    layer, cache = bench.decoder.form.layers[0], bench.core.runner.cache
    size = head_size(cache.keys[0])
    caches = Caches(layer.output.inputs // size, cache.keys[0].shape[2], size, num_tokens, cache.dtype, len(bench.decoder.form.layers))
    found = bench.in_thread(lines, [*linear_parts(bench, num_tokens), *caches.parts(num_tokens)], limits)
    found.append(timed_line(head_part(bench, 1), profile.least("head"), limits))
    return with_rest(found, profile.least("step"))


def with_rest(found: Sequence[Line], seconds: float) -> list[Line]:
    """With what a whole step takes beside these parts, and the step."""
    named = sum(each.seconds for each in found)
    bound = sum(each.bound for each in found)
    total = Line("step", 1, sum(each.num_bytes for each in found), sum(each.products for each in found), seconds, bound, "parts")
    return [*found, Line("rest", 1, 0, 0, seconds - named, 0.0, ""), total]


def context_lines(options: argparse.Namespace, limits: Limits, measure_reading: Callable[[], float]) -> Iterator[list[Line]]:
    for num_keys in options.contexts:
        for name in options.cache:
            caches = Caches(options.heads, options.kv_heads, options.head_size, num_keys, getattr(torch, name))
            found = lines([*replace(caches, is_in_order=True).parts(1)], limits, measure_reading)
            yield found + [each for num_rows in (1, options.prompt) for each in lines([*caches.parts(num_rows)], limits, measure_reading)]


def table(found: Iterable[Line]) -> Iterator[str]:
    yield f"  {'':34} {'calls':>5} {'MB':>8} {'Gop':>8} {'us':>9} {'GB/s':>6} {'Gop/s':>7} {'bound us':>9}  times the bound"
    for each in found:
        rates = f"{each.num_bytes / each.seconds / 1e9:6.1f} {each.products / each.seconds / 1e9:7.0f}"
        cells = f"{each.calls:5} {each.num_bytes / 1e6:8.1f} {each.products / 1e9:8.2f} {each.seconds * 1e6:9.0f} {rates}"
        yield f"  {each.name:34} {cells} {each.bound * 1e6:9.0f}  " + (f"{each.times_bound:.2f}, by {each.bound_by}" if each.bound else "")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps", help="a model's steps, by kinds of linear layers")
    steps.add_argument("--model", help="a directory, GGUF file or Hugging Face id (default: the default model)")
    steps.add_argument("--quantization", default="auto", choices=("auto", "none", "int4", "int8"), help="as the server's (default: auto)")
    steps.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="streams in a step (default: 1 8 32)")
    steps.add_argument("--context", type=int, default=200, metavar="TOKENS", help="of each stream (default: %(default)s)")
    steps.add_argument("--steps", type=int, default=60, help="timed at each number of streams (default: %(default)s)")
    contexts = commands.add_parser("contexts", help="attention over long contexts")
    contexts.add_argument(
        "--contexts", type=int, nargs="+", default=[8192, 32768, 131072], metavar="N", help="keys (default: 8192 32768 131072)"
    )
    contexts.add_argument("--cache", nargs="+", default=["bfloat16", "int8"], choices=("bfloat16", "int8"), help="types (default: both)")
    contexts.add_argument("--heads", type=int, default=14, help="of queries (default: %(default)s, as Qwen2.5-0.5B)")
    contexts.add_argument("--kv-heads", type=int, default=2, help="(default: %(default)s)")
    contexts.add_argument("--head-size", type=int, default=64, choices=(64, 128), help="(default: %(default)s)")
    for command in (steps, contexts):
        command.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="computed in one step (default: %(default)s)")
        command.add_argument("--threads", type=int, default=default_num_threads(), help="(default: one per core)")
        command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    limits, measure_reading = measured_limits(options.threads)
    print(
        f"{limits.threads} threads read {limits.read_bytes / 1e9:.1f} GB/s and multiply {limits.byte_products / 1e9:,.0f} G bytes or "
        f"{limits.bfloat16_products / 1e9:,.0f} G bfloat16 in a second"
    )
    numbers: dict[str, list[Line]] = {}
    if options.command == "contexts":
        prepare_loops(options.threads, "auto")
        for found in context_lines(options, limits, measure_reading):
            print("\n".join(table(found)), flush=True)
            numbers |= {each.name: [each] for each in found}
    else:
        machine = Machine(limits.read_bytes, 2 * limits.bfloat16_products)
        bench = start_bench(options.model, options.quantization, options.threads, machine, time.perf_counter)
        for num_rows in options.rows:
            numbers[f"{num_rows} {'row' if num_rows == 1 else 'rows'}"] = step_lines(
                bench, limits, num_rows, options.context, options.steps
            )
        numbers[f"a prompt of {options.prompt}"] = prompt_lines(bench, limits, options.prompt)
        bench.core.runner.shutdown()
        for name, found in numbers.items():
            print("\n".join((name, *table(found))))
    if options.json is not None:
        tables = {name: [asdict(each) for each in found] for name, found in numbers.items()}
        whole = {**report.surroundings([]), "limits": asdict(limits), "tables": tables}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
