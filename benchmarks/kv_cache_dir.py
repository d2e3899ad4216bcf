"""The time to the first token of a long prompt: computed, and in a second process that loads its blocks from a directory.

    python benchmarks/kv_cache_dir.py [--tokens 6000] [--rounds 3] [--json FILE] [-- FLAGS OF THE SERVER]

Each round has a directory and a prompt of its own. Its first server computes the prompt and is stopped; the second one finds the directory.
The second server computes another prompt of the same length as well, for a comparison under the same load.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks import report
from benchmarks.client import Client, read_answer
from benchmarks.scenarios import words
from benchmarks.target import Target, running

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0
SERVER = "server.py"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Of one prompt."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """`cold` was computed by the first server, `warm` is the same prompt and `other` another one in the second."""

    cold: FirstToken
    warm: FirstToken
    other: FirstToken

    @property
    def share(self) -> float:
        """Of the cold time that is left."""
        return self.warm.seconds / self.cold.seconds


async def first_token(client: Client, text: str) -> FirstToken:
    recording = await client.stream(client.body(text, 1))
    answer = read_answer(recording)
    usage = next(event["usage"] for _, event in recording.events() if event.get("usage"))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return FirstToken(answer.time_to_first_token, usage["prompt_tokens"], cached)


async def measure(directory: str, seed: str, num_tokens: int, flags: list[str]) -> Round:
    command = shlex.join([sys.executable, SERVER, "--port", "{port}", "--kv-cache-dir", directory, *flags])
    target = Target("penstock", command=command, checkout=ROOT)
    text, other = (" ".join(words(num_tokens, name)) for name in (seed, f"{seed} other"))
    async with running(target, True, SECONDS, SECONDS) as server:
        cold = await first_token(server.client, text)
    async with running(target, True, SECONDS, SECONDS) as server:
        return Round(cold, await first_token(server.client, text), await first_token(server.client, other))


def table(rounds: list[Round]) -> str:
    head = f"{'cold s':>8} {'warm s':>8} {'share':>7} {'cached':>7} {'of':>6} {'other s':>8}"
    rows = [
        f"{one.cold.seconds:>8.2f} {one.warm.seconds:>8.2f} {one.share:>7.1%} {one.warm.cached_tokens:>7} {one.warm.prompt_tokens:>6}"
        f" {one.other.seconds:>8.2f}"
        for one in rounds
    ]
    return "\n".join([head, *rows, f"median share of the cold time: {statistics.median(one.share for one in rounds):.1%}"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000, metavar="N", help="of the prompt, about (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("flags", nargs="*", help="of the server")
    options = parser.parse_args(argv)
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(asyncio.run(measure(directory, str(number), options.tokens, options.flags)))
    print(table(rounds))
    if options.json is not None:
        whole = {**report.surroundings([]), "rounds": [asdict(one) for one in rounds]}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
