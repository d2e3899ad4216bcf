"""Embeddings of many texts at once: texts per second, beside those of sentence-transformers over the same model and texts.

    python benchmarks/embeddings.py --against VENV/bin/python [--model minilm] [--rounds 5] [--json FILE]

`--against` is a Python that has sentence-transformers (with this one's torch, or it compares versions of torch). Both keep their model in a
process of their own, take turns, A B A B ..., and are given texts, so tokenization counts. What each makes of them is compared as well.
Ratios are medians over the rounds: above 1, Penstock is faster.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

NAMES = ("penstock", "sentence-transformers")
Embed = Callable[[list[str]], Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Workload:
    """So many texts, each of a number of words drawn evenly between two bounds."""

    num_texts: int
    fewest_words: int
    most_words: int

    def texts(self, seed: int) -> list[str]:
        from benchmarks.passages import PASSAGES

        words = " ".join(PASSAGES).split()
        draw = random.Random(f"{self} {seed}")
        return [" ".join(draw.choices(words, k=draw.randint(self.fewest_words, self.most_words))) for _ in range(self.num_texts)]


WORKLOADS = {
    "short": Workload(768, 5, 15),
    "medium": Workload(192, 50, 90),
    "long": Workload(64, 150, 200),
    "mixed": Workload(256, 3, 180),
}
QUICK = {"short": Workload(8, 5, 15), "mixed": Workload(8, 3, 60)}


@contextlib.contextmanager
def embedding_with_penstock(model: str, threads: int | None) -> Iterator[Embed]:
    import asyncio

    from penstock.engine.config import EngineConfig
    from penstock.engine.model.store import resolve_model
    from penstock.engine.pooling.engine import pool_all
    from penstock.engine.pooling.loader import build_pooling_engine
    from penstock.engine.pooling.model import PoolingParams
    from penstock.engine.text.tokenizer import Tokenizer

    directory = resolve_model(model)
    engine = build_pooling_engine(directory, Tokenizer.load(directory), EngineConfig(num_threads=threads))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    async def embed(texts: list[str]) -> list[list[float]]:
        inputs = [engine.encode(text, max_tokens=engine.model.max_model_len) for text in texts]
        return [output.data.tolist() for output in await pool_all(engine, inputs, PoolingParams(task="embed"))]

    try:
        yield lambda texts: loop.run_until_complete(embed(texts))
    finally:
        loop.run_until_complete(engine.stop())
        loop.close()


@contextlib.contextmanager
def embedding_with_sentence_transformers(model: str, threads: int | None) -> Iterator[Embed]:
    import torch
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu")
    yield lambda texts: loaded.encode(texts, show_progress_bar=False).tolist()


def work(name: str, model: str, threads: int | None) -> int:
    """A worker: for every line of JSON with texts on standard input, one with seconds and embeddings where standard output was."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    embedding = embedding_with_penstock if name == NAMES[0] else embedding_with_sentence_transformers
    with embedding(model, threads) as embed:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            texts = json.loads(line)
            started = time.perf_counter()
            embeddings = embed(texts)
            print(json.dumps({"seconds": time.perf_counter() - started, "embeddings": embeddings}), file=answers, flush=True)
    return 0


class Worker:
    """A process with one of the two libraries and the model in it."""

    def __init__(self, name: str, python: str, model: str, threads: int | None) -> None:
        command = [python, __file__, "--worker", name, "--model", model, *(["--threads", str(threads)] if threads else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def embed(self, texts: list[str]) -> tuple[float, list[list[float]]]:
        """Seconds and embeddings."""
        assert self._process.stdin is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        answer = self._read()
        return answer["seconds"], answer["embeddings"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def measure(workers: dict[str, Worker], workload: Workload, rounds: int) -> dict[str, Any]:
    """Every worker in turn, over texts that are new in every round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    difference = 0.0
    for number in range(rounds + 1):
        texts = workload.texts(number)
        found = {name: worker.embed(texts) for name, worker in workers.items()}
        if number > 0:
            for name, (took, _) in found.items():
                seconds[name].append(took)
        first, *others = [embeddings for _, embeddings in found.values()]
        for other in others:
            pairs = zip(first, other, strict=True)
            difference = max(difference, *(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)))
    result: dict[str, Any] = {"texts": workload.num_texts, "seconds": seconds, "largest_difference": difference}
    result["texts_per_s"] = {name: workload.num_texts / statistics.median(times) for name, times in seconds.items()}
    if len(seconds) == 2:
        ours, theirs = seconds.values()
        result["ratio"] = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--against", metavar="PYTHON", help="the Python of an environment that has sentence-transformers")
    parser.add_argument("--model", default="minilm", help="a packaged model or a local directory (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each library (default: as many as it takes by itself)")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one; repeatable")
    parser.add_argument("--quick", action="store_true", help="a few short texts, only to see that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker is not None:
        return work(given.worker, given.model, given.threads)
    from penstock.engine.model.store import resolve_model

    directory = str(resolve_model(given.model))
    pythons = {NAMES[0]: sys.executable} | ({NAMES[1]: given.against} if given.against else {})
    workers = {name: Worker(name, python, directory, given.threads) for name, python in pythons.items()}
    results: dict[str, Any] = {}
    try:
        for name, workload in (QUICK if given.quick else WORKLOADS).items():
            if given.workload is None or name in given.workload:
                results[name] = result = measure(workers, workload, given.rounds)
                rates = ", ".join(f"{library} {rate:.1f}" for library, rate in result["texts_per_s"].items())
                compared = f"; ratio {result['ratio']:.2f}; differ by {result['largest_difference']:.1e}" if "ratio" in result else ""
                print(f"{name}: texts/s {rates}{compared}", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    if given.json is not None:
        given.json.write_text(json.dumps(report(given, results), indent=1) + "\n")
    return 0


def report(given: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": sys.argv,
        "hardware": {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": given.model,
        "rounds": given.rounds,
        "workloads": results,
    }


if __name__ == "__main__":
    sys.exit(main())
