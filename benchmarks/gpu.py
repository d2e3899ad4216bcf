"""Measures the server, decode, prefill and each kernel on a CUDA GPU, against what the device can do and against transformers.

    python benchmarks/gpu.py --json results.json
    python benchmarks/gpu.py --model qwen3-0.6b --limit-s 200

Models have the shapes of real ones and random weights; nothing is fetched. Each part runs in a process of its own under a time limit, and
what it measured before that counts. Decode is held against the bandwidth of a copy on the device: a step reads each weight once, and each
sequence's keys and values. Prefill is held against the rate of a large matrix product. All are medians.
"""

import argparse
import json
import platform
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import killpg
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.gpu_shapes import SHAPES
from benchmarks.gpu_table import table
from benchmarks.gpu_verdict import judged

ROOT = Path(__file__).resolve().parent.parent
MARK = "RESULT "
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b")
LIMIT_S = 580.0  # of all parts together
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A command that prints records, and the seconds it may take."""

    name: str
    command: list[str]
    limit_s: float


@dataclass(slots=True)
class Outcome:
    """A part's outcome: `done`, `out of time`, or how it failed."""

    name: str
    status: str
    seconds: float


KINDS = ("ceilings", "server", "penstock", "mixed", "generate_batch", "kernels")


def parts(models: Sequence[str], device: str, kinds: Collection[str] = KINDS) -> list[Part]:
    """The most telling ones first: what comes last may find no time left."""

    def part(name: str, limit_s: float, *arguments: str) -> Part:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_parts.py"), *arguments, "--device", device]
        return Part(name, command, limit_s)

    # The server's start and its HTTP are what is new in this part, and a small model shows them best: steps are short beside them.
    served = min(models, key=lambda model: SHAPES[model].num_weights)
    chosen = [part("ceilings", 60, "ceilings", "--model", models[0])]
    for number, model in enumerate(models):
        if number == 0:
            chosen.append(part(f"server {served}", 220, "server", "--model", served))
        chosen.append(part(f"penstock {model}", 120, "penstock", "--model", model))
        if number == 0:
            chosen.append(part(f"mixed {model}", 70, "mixed", "--model", model))
        chosen.append(part(f"generate_batch {model}", 100, "generate_batch", "--model", model))
        if number == 0:
            chosen.append(part("kernels", 90, "kernels"))
    return [each for each in chosen if each.name.split()[0] in kinds]


def run_part(part: Part, limit_s: float, take: Callable[[Record], None]) -> Outcome:
    """Hands over the part's records as they come, and ends it with all that it has started when its time is up."""
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(part.command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        status = "out of time"
        with suppress(queue.Empty):
            while (line := lines.get(timeout=max(0.0, start + limit_s - time.monotonic()))) is not None:
                if line.startswith(MARK):
                    take(json.loads(line.removeprefix(MARK)))
            status = "done" if process.wait() == 0 else f"failed: {_last_line(errors)}"
        with suppress(ProcessLookupError):
            killpg(process.pid, signal.SIGKILL)
        reader.join()
    return Outcome(part.name, status, time.monotonic() - start)


def _read(stream: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    written = errors.read().strip().splitlines()
    return written[-1] if written else "it said nothing"


def surroundings(device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "accelerate"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "hardware": device,
        "versions": versions | ({"commit": commit} if commit else {}),
    }


def device_name(device: str) -> str:
    """What the device is called. Exits where it is not there."""
    import torch  # after the arguments have been read: `--help` does not wait for it

    if device != "cuda":
        return f"{device}: {platform.processor() or platform.machine()}"
    if not torch.cuda.is_available():
        sys.exit(
            "This measures a CUDA GPU, and torch sees none here. Without one, tests/engine/model/test_cuda_graphs.py and"
            " tests/engine/kernels check the results of the GPU path, and benchmarks/serve.py measures a server on the CPU."
        )
    return torch.cuda.get_device_name()


def main(argv: list[str] | None = None) -> None:
    options = _parse(argv)
    whole = surroundings(device_name(options.device)) | {"limit_s": options.limit_s, "is_complete": False}
    print(f"{whole['date']}, {whole['hardware']}, " + ", ".join(f"{name} {found}" for name, found in whole["versions"].items()), flush=True)
    records: list[Record] = []
    outcomes: list[Outcome] = []
    start = time.monotonic()
    kinds = [kind for kind in options.only or KINDS if kind != "kernels" or options.kernels]
    chosen = parts(options.model or MODELS, options.device, kinds)
    for part in chosen:
        left = options.limit_s - (time.monotonic() - start)
        outcome = run_part(part, min(part.limit_s, left), records.append) if left > 0 else Outcome(part.name, "no time left", 0.0)
        outcomes.append(outcome)
        print(f"# {outcome.name}: {outcome.status} ({outcome.seconds:.0f} s)", flush=True)
        whole |= {"parts": [asdict(each) for each in outcomes], "results": judged(records)}
        whole["is_complete"] = len(outcomes) == len(chosen) and all(each.status == "done" for each in outcomes)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(table(judged(records))))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"a shape of gpu_shapes.py; repeatable (default: {', '.join(MODELS)})")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it (default: %(default).0f)")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="PART", help=f"these parts alone: {', '.join(KINDS)}")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="leave out the kernels one by one")
    parser.add_argument("--device", default="cuda", help="anything but cuda is for trying the script out, with --model tiny")
    parser.add_argument("--json", type=Path, help="where to write everything, after each part")
    parser.set_defaults(kernels=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
