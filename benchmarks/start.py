"""A start of the server, from the command to its first answer, by its phases: seconds, processor seconds and memory.

    python benchmarks/start.py [--rounds 3] [--cold] [--json FILE] [-- FLAGS OF THE SERVER]

Warm, the caches are the user's, and a first start that is not measured fills them. With --cold each start has an empty cache: name a model
that is on the disk (`-- --model FILE.gguf`), or its download is measured. Processor time is little affected by what else runs. Phases are
those that the server logs at debug level; one may lie within another.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import Client
from benchmarks.target import Launched, first_answer, free_port, launched

ROOT = Path(__file__).resolve().parent.parent
SERVER = "server.py"
SECONDS = 900.0
PHASE = re.compile(r"startup: (.+): ([\d.]+) s, ([\d.]+) s of processor time")


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """Until the first answer has ended. Memory is what is resident then, and the most until then."""

    seconds: float
    processor_seconds: float
    rss_bytes: int
    rss_peak_bytes: int
    phases: list[Phase]


@contextmanager
def cache(is_cold: bool) -> Iterator[None]:
    """An empty one, for servers started within."""
    if not is_cold:
        yield
        return
    before = os.environ.get("PENSTOCK_CACHE")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_CACHE"] = directory
        try:
            yield
        finally:
            del os.environ["PENSTOCK_CACHE"]
            if before is not None:
                os.environ["PENSTOCK_CACHE"] = before


async def measure(flags: list[str]) -> Start:
    port = free_port()
    command = [sys.executable, SERVER, "--port", str(port), "--log-level", "debug", *flags]
    connector = aiohttp.TCPConnector(force_close=True)
    with launched("penstock", command, ROOT) as server:
        async with aiohttp.ClientSession(connector=connector) as session:
            seconds = await first_answer(Client(session, f"http://127.0.0.1:{port}/v1", "", {}), server, SECONDS)
        server.processes.look_for_children()
        return read_start(server, seconds)


def read_start(server: Launched, seconds: float) -> Start:
    """What the server has used by now."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident, peak = (int(re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Start(seconds, server.processes.processor_seconds(), resident, peak, phases(server.log.read_text(errors="replace")))


def phases(log: str) -> list[Phase]:
    """In the order of their ends."""
    return [Phase(name, float(seconds), float(processor_seconds)) for name, seconds, processor_seconds in PHASE.findall(log)]


def table(starts: list[Start]) -> str:
    """Medians."""
    all_phases = [phase for start in starts for phase in start.phases]
    resident = statistics.median(start.rss_bytes for start in starts) / 1e9
    peak = statistics.median(start.rss_peak_bytes for start in starts) / 1e9
    rows = [
        f"{'phase':<40} {'s':>8} {'CPU s':>8}",
        *(row(name, [phase for phase in all_phases if phase.name == name]) for name in dict.fromkeys(phase.name for phase in all_phases)),
        row("first answer", starts),
        f"resident {resident:.2f} GB, peak {peak:.2f} GB",
    ]
    return "\n".join(rows)


def row(name: str, measured: Sequence[Phase | Start]) -> str:
    seconds = statistics.median(one.seconds for one in measured)
    return f"{name:<40} {seconds:>8.2f} {statistics.median(one.processor_seconds for one in measured):>8.2f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--cold", action="store_true", help="with an empty cache each time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("flags", nargs="*", help="of the server")
    options = parser.parse_args(argv)
    if not options.cold:
        asyncio.run(measure(options.flags))
    starts = []
    for _ in range(options.rounds):
        with cache(options.cold):
            starts.append(asyncio.run(measure(options.flags)))
    print(table(starts))
    if options.json is not None:
        options.json.write_text(json.dumps({**report.surroundings([]), "starts": [asdict(one) for one in starts]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
