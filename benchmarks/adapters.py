"""Writes LoRA adapters with random weights for a model, as peft saves them: what they say means nothing, what they cost is real.

    python benchmarks/adapters.py smollm2 /tmp/adapters
    python benchmarks/serve.py --scenario concurrency-8 --scenario adapters-8 \\
        --launch penstock="python server.py --port {port} --speculation none $(cat /tmp/adapters/flags)"
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from penstock.engine.adapters.checkpoint import CONFIG_FILE, DOWN, PREFIX, UP, WEIGHTS_FILE
from penstock.engine.model.store import resolve_model

SIZE = 0.01  # of the weights: answers stay fluent


def write_adapters(model: str | None, directory: Path, *, number: int, rank: int) -> list[Path]:
    """Of all linear layers but the head."""
    config = AutoConfig.from_pretrained(resolve_model(model, False))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    head = built.get_output_embeddings()
    layers = {path: layer for path, layer in built.named_modules() if isinstance(layer, nn.Linear) and layer is not head}
    names = sorted({path.rpartition(".")[2] for path in layers})
    written = []
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        weights = {}
        for path, layer in layers.items():
            weights[PREFIX + path + DOWN] = torch.randn(rank, layer.in_features, generator=generator) * SIZE
            weights[PREFIX + path + UP] = torch.randn(layer.out_features, rank, generator=generator) * SIZE
        own = directory / f"adapter-{index}"
        own.mkdir(parents=True, exist_ok=True)
        save_file(weights, own / WEIGHTS_FILE)
        fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": names}
        (own / CONFIG_FILE).write_text(json.dumps(fields), encoding="utf-8")
        written.append(own)
    flags = " ".join(f"--adapter {own.name}={own.resolve()}" for own in written)
    (directory / "flags").write_text(flags, encoding="utf-8")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as the server's --model")
    parser.add_argument("directory", type=Path, help="where they go, and a file `flags` with the server's flags for them")
    parser.add_argument("--number", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args()
    write_adapters(options.model, options.directory, number=options.number, rank=options.rank)


if __name__ == "__main__":
    main()
