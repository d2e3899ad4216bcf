"""Times linear layers on the CPU: packed weights of 16 or 32 bits, quantized ones, and torch's own of 4 bits.

    python benchmarks/linear.py [--shapes 8b] [--dtype float32] [--threads 2] [--rows 1 8 32] [--variants int4 Q4_K Q6_K]

Each line is one kind of layer at one number of rows (tokens in a step). The numbers are milliseconds of a pass through all layers of that
kind, each with its own weights: the least of many passes, as neighbours on a machine only ever add to them. In brackets is the speedup
over the first variant: the median over rounds, in which all take turns. int4 and int8 are Q4_1 and Q8_0; other types have random codes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from penstock.engine.weights.linear import PackedLinear, QuantizedLinear, can_pack, can_quantize
from penstock.engine.weights.packed import GROUP_SIZE, TYPES, QuantizedWeight, pack, quantized

SHAPES = {  # in_features, out_features and how many, as the engine fuses them
    "default": {
        "qkv_proj": (576, 960, 30),
        "o_proj": (576, 576, 30),
        "gate_up_proj": (576, 3072, 30),
        "down_proj": (1536, 576, 30),
        "lm_head": (576, 49_152, 1),
    },
    "qwen-0.5b": {
        "qkv_proj": (896, 1152, 24),
        "o_proj": (896, 896, 24),
        "gate_up_proj": (896, 9728, 24),
        "down_proj": (4864, 896, 24),
        "lm_head": (896, 151_936, 1),
    },
    "qwen-1.5b": {
        "qkv_proj": (1536, 2048, 8),
        "o_proj": (1536, 1536, 8),
        "gate_up_proj": (1536, 17_920, 4),
        "down_proj": (8960, 1536, 4),
    },
    "8b": {"o_proj": (4096, 4096, 2), "up_proj": (4096, 14_336, 1), "down_proj": (14_336, 4096, 1)},
}
MIN_ROUNDS, MAX_ROUNDS = 3, 60
Layer = Callable[[Tensor], Tensor]


class TorchInt4:
    """What torch has for 4 bits, in groups of 32 with scales of the rows' type."""

    def __init__(self, linear: nn.Linear) -> None:
        weight = quantized(linear.weight.detach(), 4)
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes_OI.int(), 2)
        scales_OG = weight.scales_OG.float()
        assert weight.minimums_OG is not None
        zeros_OG = weight.minimums_OG.float() + 8 * scales_OG
        self._numbers = torch.stack([scales_OG.T, zeros_OG.T], dim=-1).to(linear.weight.dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, GROUP_SIZE, self._numbers)  # type: ignore[no-any-return]


def of_type(name: str) -> Callable[[nn.Linear], Layer]:
    """Makes layers of random codes and scales."""
    type_ = TYPES[name]

    def make(linear: nn.Linear) -> Layer:
        num_rows, num_columns = linear.weight.shape
        shape, factors = (num_rows, num_columns // type_.group), torch.rand(num_rows, num_columns // 256, 1 + type_.has_minimums) / 1000
        codes = torch.randint(0, 2**type_.bits, (num_rows, num_columns), dtype=torch.uint8)
        numbers = [torch.randint(0, 32, shape).to(type_.scale_dtype) for _ in range(1 + type_.has_minimums)]
        minimums = numbers[1] if type_.has_minimums else None
        weight = QuantizedWeight(type_, codes, numbers[0], minimums, factors.half() if type_.has_factors else None)
        return QuantizedLinear([pack(weight)], None)

    return make


VARIANTS: dict[str, Callable[[nn.Linear], Layer]] = {
    "packed": PackedLinear,
    "int4": lambda linear: QuantizedLinear([pack(quantized(linear.weight.detach(), 4))], None),
    "int8": lambda linear: QuantizedLinear([pack(quantized(linear.weight.detach(), 8))], None),
    "torch int4": TorchInt4,
    **{name: of_type(name) for name in TYPES},
}
DEFAULT_VARIANTS = ("packed", "int4", "int8", "torch int4")


def milliseconds(layers: Sequence[Layer], x: Tensor) -> float:
    # One thread's own time does not count what neighbours take.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for layer in layers:
        layer(x)
    return (clock() - started) * 1000


def compare(variants: Sequence[Sequence[Layer]], x: Tensor, seconds: float) -> list[list[float]]:
    """Each round's milliseconds of every variant, after a round that is not counted, for about as long as given."""
    rounds = [[milliseconds(layers, x) for layers in variants]]
    num_rounds = min(max(int(seconds * 1000 / sum(rounds[0])), MIN_ROUNDS), MAX_ROUNDS)
    rounds += [[milliseconds(layers, x) for layers in variants] for _ in range(num_rounds)]
    return rounds[1:]


def show(name: str, rows: int, least: Sequence[float], ratios: Sequence[float]) -> None:
    cells = [f"{least[0]:>16.3f}", *(f"{time:>9.3f} ({ratio:4.2f})" for time, ratio in zip(least[1:], ratios[1:], strict=True))]
    print(f"{name:<14} {rows:>4}", *cells, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Packed and quantized linear layers on the CPU.")
    parser.add_argument(
        "--shapes",
        choices=SHAPES,
        default="default",
        help="of which model: the default one, Qwen2.5, or a Llama of 8B (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of rows (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a matrix product (default: one per core)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 1024], help="(default: 1 8 32 128 1024)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=DEFAULT_VARIANTS, help="(default: packed int4 int8 'torch int4')"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line (default: %(default)s)")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if not can_pack(dtype) or not can_quantize():
        raise SystemExit(f"there are no kernels for {arguments.dtype} here")
    torch.set_num_threads(arguments.threads)
    totals = {rows: [0.0] * len(arguments.variants) for rows in arguments.rows}
    print(f"{'layers':<14} {'rows':>4}", *(f"{variant:>16}" for variant in arguments.variants))
    with torch.inference_mode():
        for name, (in_features, out_features, count) in SHAPES[arguments.shapes].items():
            plain = [nn.Linear(in_features, out_features, bias=False, dtype=dtype) for _ in range(count)]
            variants = [[VARIANTS[variant](linear) for linear in plain] for variant in arguments.variants]
            for rows in arguments.rows:
                times = compare(variants, torch.randn(rows, in_features, dtype=dtype), arguments.seconds)
                least = [min(column) for column in zip(*times, strict=True)]
                ratios = [statistics.median(packed / other for packed, other in zip(*pair, strict=True)) for pair in column_pairs(times)]
                totals[rows] = [total + time for total, time in zip(totals[rows], least, strict=True)]
                show(name, rows, least, ratios)
    for rows, least in totals.items():
        show("all", rows, least, [least[0] / time for time in least])


def column_pairs(times: Sequence[Sequence[float]]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """The first column with every column."""
    columns = list(zip(*times, strict=True))
    return [(columns[0], column) for column in columns]


if __name__ == "__main__":
    main()
