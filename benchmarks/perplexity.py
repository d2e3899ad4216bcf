"""Compares the perplexity of a GGUF file as served with that of its dequantized weights in float32, and with llama.cpp's.

    python benchmarks/perplexity.py FILE.gguf [--text FILE ...] [--context 512] [--chunks 8] [--llama-perplexity PATH]

The text, by default this project's architecture documentation, is cut into chunks of `--context` tokens. Each is read from its beginning,
and the tokens of its second half count, as in llama.cpp's `llama-perplexity`, which with `--llama-perplexity` reads the same text and file.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

import torch
from transformers import AutoTokenizer

from benchmarks.quality import Subject
from penstock.engine.model.store import resolve_model
from penstock.engine.weights.quantization import quantized_layers

TEXT = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
FINAL = re.compile(r"Final estimate: PPL = ([0-9.]+)")


def chunks(token_ids: Sequence[int], context: int, most: int) -> list[list[int]]:
    """Whole chunks of so many tokens, at most so many of them."""
    starts = range(0, len(token_ids) - context + 1, context)[:most]
    return [list(token_ids[start : start + context]) for start in starts]


@torch.inference_mode()
def perplexity(subject: Subject, texts: Sequence[Sequence[int]]) -> float:
    total, count = 0.0, 0
    for token_ids in texts:
        half = len(token_ids) // 2
        ids_1T = torch.tensor([list(token_ids)])
        logits_TV = subject.model(ids_1T, logits_to_keep=len(token_ids) - half).logits[0, :-1]
        logprobs_T = logits_TV.float().log_softmax(-1).gather(1, ids_1T[0, half + 1 :, None])[:, 0]
        total -= float(logprobs_T.sum())
        count += len(logprobs_T)
    return math.exp(total / count)


def llama_perplexity(program: Path, model: Path, text: str, context: int, num_chunks: int) -> float:
    """What llama.cpp's program reports. Raises `ValueError` where it reports nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [
            program,
            "-m",
            model,
            "-f",
            file.name,
            "-c",
            context,
            "-b",
            context,
            "--chunks",
            num_chunks,
            "-t",
            torch.get_num_threads(),
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    found = FINAL.search(done.stdout + done.stderr)
    if found is None:
        raise ValueError(f"{program} reported no perplexity: {done.stderr[-500:]}")
    return float(found[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--text", type=Path, nargs="+", default=[TEXT], metavar="FILE", help="(default: docs/architecture.md)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="read at most so many (default: %(default)s)")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PATH", help="llama.cpp's program, to compare with")
    given = parser.parse_args(argv)
    directory = resolve_model(str(given.model))
    text = "\n".join(path.read_text(encoding="utf-8") for path in given.text)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    texts = chunks(tokenizer(text)["input_ids"], given.context, given.chunks)
    if not texts:
        parser.error(f"the text has fewer than {given.context} tokens")
    print(f"{given.model.name}: {len(texts)} chunks of {given.context} tokens")
    reference = perplexity(Subject(directory, "float32", "none"), texts)
    print(f"{'dequantized, float32':22} {reference:8.4f}", flush=True)
    subject = Subject(directory, "auto", "auto")
    layers = ", ".join(f"{count} {kind}" for kind, count in quantized_layers(subject.model).items())
    served = perplexity(subject, texts)
    print(f"{'auto, ' + subject.dtype:22} {served:8.4f}  {served / reference - 1:+.2%}  ({layers})", flush=True)
    if given.llama_perplexity is not None:
        other = llama_perplexity(given.llama_perplexity, given.model, text, given.context, len(texts))
        print(f"{'llama.cpp':22} {other:8.4f}  {other / reference - 1:+.2%}; auto compared with it {served / other - 1:+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
