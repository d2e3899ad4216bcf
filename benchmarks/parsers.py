"""Measures what parsers cost, token by token: it should not depend on how long the answer is.

    python benchmarks/parsers.py
    python benchmarks/parsers.py --parser hermes --lengths 500 30000 --repeats 5 --json results.json

Every registered parser reads its own example, made longer: reasoning and content each by half for a reasoning parser, the argument of the
call for a tool parser. A token is four characters. Printed are microseconds of CPU time per token, the least of the repeats, for each
length, and the last over the first. Nothing is served; no model is loaded.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a file run by its path, only the folder is there

from benchmarks.report import surroundings
from penstock.engine.contracts.parsing import FormatInfo, Parser, Reasoning, Text, Turn
from penstock.plugins.manager import Plugins

LENGTHS = (500, 2000, 8000, 30000)
TOKEN_CHARACTERS = 4
WORDS = "The wind over the harbour of Oslo is light today. "
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per token of one parser, for each length."""

    kind: str
    name: str
    microseconds: dict[int, float]

    @property
    def growth(self) -> float:
        """The longest answer's cost per token over the shortest's."""
        return self.microseconds[max(self.microseconds)] / self.microseconds[min(self.microseconds)]


@dataclass(frozen=True, slots=True)
class Workload:
    """A parser, and answers of any length for it."""

    kind: str
    name: str
    make: Callable[[], Parser]
    answer: Callable[[int], str]

    def seconds(self, num_tokens: int) -> float:
        """For one answer, all of its tokens."""
        text = self.answer(num_tokens)
        pieces = [text[start : start + TOKEN_CHARACTERS] for start in range(0, len(text), TOKEN_CHARACTERS)]
        parser = self.make()
        started = time.process_time()
        for piece in pieces:
            for _ in parser.feed(piece):
                pass
        for _ in parser.finish():
            pass
        return (time.process_time() - started) / len(pieces)

    def cost(self, lengths: Sequence[int], repeats: int) -> Cost:
        least = {length: min(self.seconds(length) for _ in range(repeats)) for length in lengths}
        return Cost(self.kind, self.name, {length: seconds * 1e6 for length, seconds in least.items()})


def filler(num_tokens: int) -> str:
    num_characters = num_tokens * TOKEN_CHARACTERS
    return (WORDS * (num_characters // len(WORDS) + 1))[:num_characters]


def workloads(plugins: Plugins) -> Iterator[Workload]:
    for name, make_reasoning in plugins.reasoning_parsers.items():
        info = plugins.reasoning_parsers.infos.get(name)
        if info is not None and info.example:
            make: Callable[[], Parser] = partial(make_reasoning, Turn(prompt_tail=info.prompt_tail))
            yield Workload("reasoning", name, make, long_thoughts(make(), info))
    for name, make_tools in plugins.tool_parsers.items():
        info = plugins.tool_parsers.infos.get(name)
        if info is not None and info.example:
            make = partial(make_tools, Turn(prompt_tail=info.prompt_tail, tools=[TOOL], tool_choice="auto"))
            yield Workload("tool", name, make, long_argument(info))


def long_thoughts(parser: Parser, info: FormatInfo) -> Callable[[int], str]:
    """The example with each of its texts replaced by longer ones."""
    events = [*parser.feed(info.example), *parser.finish()]
    texts = {event.text.strip() for event in events if isinstance(event, Text | Reasoning) and event.text.strip() in info.example}
    texts.discard("")

    def answer(num_tokens: int) -> str:
        text = info.example if texts else info.example + filler(num_tokens)
        for part in texts:
            text = text.replace(part, filler(num_tokens // len(texts)))
        return text

    return answer


def long_argument(info: FormatInfo) -> Callable[[int], str]:
    return lambda num_tokens: info.example.replace("Oslo", filler(num_tokens))


def table(costs: Sequence[Cost], lengths: Sequence[int]) -> Iterator[str]:
    yield f"{'kind':10} {'parser':26}" + "".join(f"{length:>9}" for length in lengths) + f"{'growth':>9}"
    for cost in costs:
        numbers = "".join(f"{cost.microseconds[length]:9.2f}" for length in lengths)
        yield f"{cost.kind:10} {cost.name:26}{numbers}{cost.growth:9.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--parser", action="append", metavar="NAME", help="only this one; repeatable (default: all)")
    parser.add_argument("--plugin", action="append", default=[], metavar="NAME|MODULE|FILE.py", help="load a plug-in; repeatable")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS", help="of the answers (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    given = parser.parse_args(argv)
    lengths = sorted(set(given.lengths))
    chosen = [load for load in workloads(Plugins.start(given.plugin)) if not given.parser or load.name in given.parser]
    if not chosen:
        print(f"no parser with an example is named {' or '.join(given.parser)}", file=sys.stderr)
        return 2
    costs = [load.cost(lengths, given.repeats) for load in chosen]
    print("\n".join(table(costs, lengths)))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        whole = {**surroundings([]), "costs": [asdict(cost) | {"growth": cost.growth} for cost in costs]}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
