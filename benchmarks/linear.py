"""Times linear layers with plain and with packed weights on the CPU, for the shapes of the default model.

    python benchmarks/linear.py [--dtype float32] [--threads 2] [--rounds 30]

Each line is one kind of layer at one number of rows (tokens in a step): the median time of a pass through all layers of that kind, each
with its own weights, and how many times faster packed ones are. Plain and packed take turns.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.packed_linear import PackedLinear, can_pack

LAYERS = {  # in_features, out_features and how many, as the engine fuses them
    "qkv_proj": (576, 960, 30),
    "o_proj": (576, 576, 30),
    "gate_up_proj": (576, 3072, 30),
    "down_proj": (1536, 576, 30),
    "lm_head": (576, 49_152, 1),
}
ROWS = (1, 8, 32)


def milliseconds(layers: Sequence[nn.Module], x: Tensor) -> float:
    started = time.perf_counter()
    for layer in layers:
        layer(x)
    return (time.perf_counter() - started) * 1000


def compare(plain: Sequence[nn.Module], packed: Sequence[nn.Module], x: Tensor, rounds: int) -> tuple[float, float]:
    """The median milliseconds of both, after a round that is not counted."""
    times = [(milliseconds(plain, x), milliseconds(packed, x)) for _ in range(rounds + 1)][1:]
    return statistics.median(first for first, _ in times), statistics.median(second for _, second in times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain against packed linear layers on the CPU.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and rows (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a matrix product (default: one per core)")
    parser.add_argument("--rounds", type=int, default=30, help="timed passes of each (default: %(default)s)")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if not can_pack(dtype):
        raise SystemExit(f"this build of torch or this processor has no packed kernels for {arguments.dtype}")
    torch.set_num_threads(arguments.threads)
    totals = dict.fromkeys(ROWS, (0.0, 0.0))
    print(f"{'layers':<14} {'rows':>4} {'plain ms':>9} {'packed ms':>9} {'ratio':>6}")
    with torch.inference_mode():
        for name, (in_features, out_features, count) in LAYERS.items():
            plain = [nn.Linear(in_features, out_features, bias=False, dtype=dtype) for _ in range(count)]
            packed = [PackedLinear(layer) for layer in plain]
            for rows in ROWS:
                times = compare(plain, packed, torch.randn(rows, in_features, dtype=dtype), arguments.rounds)
                totals[rows] = (totals[rows][0] + times[0], totals[rows][1] + times[1])
                show(name, rows, *times)
    for rows, times in totals.items():
        show("all", rows, *times)


def show(name: str, rows: int, plain: float, packed: float) -> None:
    print(f"{name:<14} {rows:>4} {plain:>9.3f} {packed:>9.3f} {plain / packed:>6.2f}")


if __name__ == "__main__":
    main()
