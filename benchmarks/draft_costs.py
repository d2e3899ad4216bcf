"""What each proposer of draft tokens costs and saves: processor seconds for the same conversations, and drafts by position.

    python benchmarks/draft_costs.py --json benchmarks/results/draft-costs.json
    python benchmarks/draft_costs.py --model 1.5B --draft-model qwen-coder --proposers none ngram suffix draft

All proposers are loaded in this process and answer in turn, in each round conversations of `serve.py` that none has seen, in the opposite
order in every other round. Seconds are those of all threads, prompts included, so that other work on the machine changes them little; with
one thread (`--threads 1`) none is spent waiting for another. `gain` is how many times as long the first proposer takes: the median of the
rounds, of which each has the same answers for all; `equal_rounds` says in how many they were so, token for token.

The proposer `known` is `ngram` with each answer, as another proposer gave it, as the request's prediction: no proposer can do better.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import surroundings
from benchmarks.scenarios import NaturalScenario
from benchmarks.speculation import ask, natural_scenarios
from penstock import LLM
from penstock.engine.core import EngineStats
from penstock.engine.scheduling.step import DraftCounts

SCENARIOS = ["agent", "agent-tasks", "code-edit", "prose-1", "prose-8"]
PROPOSERS = ["none", "ngram", "suffix"]
KNOWN = "known"


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of a proposer. `drafts` are draft tokens and drafts by how many of their tokens were accepted."""

    answers: list[list[int]]
    texts: list[str]
    processor_s: float
    num_steps: int
    drafts: DraftCounts

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def answer(llm: LLM, scenario: NaturalScenario, num_conversations: int, seed: str, predictions: Sequence[str] = ()) -> Turn:
    before, begun = counted(llm), time.process_time()
    exchanges = ask(llm, scenario, num_conversations, seed, predictions)
    seconds, after = time.process_time() - begun, counted(llm)
    drafts = DraftCounts(
        after.num_draft_tokens - before.num_draft_tokens,
        [later - earlier for later, earlier in zip(lengths_of(after), lengths_of(before), strict=True)],
    )
    answers, texts = [exchange.answer for exchange in exchanges], [exchange.text for exchange in exchanges]
    return Turn(answers, texts, seconds, after.num_steps - before.num_steps, drafts)


def counted(llm: LLM) -> EngineStats:
    return llm._model.rest.awake().stats()


def lengths_of(stats: EngineStats) -> list[int]:
    return [sum(column) for column in zip(DraftCounts().lengths, *(counts.lengths for counts in stats.drafts.values()), strict=True)]


def measure(
    names: Sequence[str], load: Callable[[str], LLM], scenarios: Sequence[NaturalScenario], num_rounds: int, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """By scenario: what each proposer took, after one conversation that is not measured."""
    with ExitStack() as stack:
        llms = {name: stack.enter_context(load(name)) for name in names}
        for scenario in scenarios:
            rounds: list[dict[str, Turn]] = []
            for number in range(num_rounds + 1):
                num_conversations = scenario.num_conversations if number else 1
                turns: dict[str, Turn] = {}
                for name in sorted(names[:: 1 if number % 2 else -1], key=KNOWN.__eq__):
                    predictions = next(iter(turns.values())).texts if name == KNOWN else ()
                    turns[name] = answer(llms[name], scenario, num_conversations, f"{seed} {number} {scenario.name}", predictions)
                rounds.append(turns)
            yield scenario.name, summary(names, rounds[1:])


def summary(names: Sequence[str], rounds: Sequence[dict[str, Turn]]) -> dict[str, Any]:
    first, found = names[0], {}
    for name in names:
        turns = [one[name] for one in rounds]
        num_tokens, lengths = (
            sum(turn.num_tokens for turn in turns),
            [sum(row) for row in zip(*(turn.drafts.lengths for turn in turns), strict=True)],
        )
        drafts = DraftCounts(sum(turn.drafts.num_drafted for turn in turns), lengths)
        per_token = [[one[each].processor_s / one[each].num_tokens for each in (first, name)] for one in rounds]
        found[name] = {
            "output_tokens": num_tokens,
            "steps": sum(turn.num_steps for turn in turns),
            "processor_s_per_1000_tokens": 1000 * sum(turn.processor_s for turn in turns) / num_tokens,
            "gain": statistics.median(of_first / own for of_first, own in per_token),
            "gains": [of_first / own for of_first, own in per_token],
            "equal_rounds": sum(one[name].answers == one[first].answers for one in rounds),
            "rounds": len(rounds),
            "drafts": drafts.num_drafts,
            "drafted": drafts.num_drafted,
            "accepted": drafts.num_accepted,
            "accepted_by_position": drafts.accepted_by_place,
        }
    return found


def lines(scenario: str, found: dict[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        counts = " ".join(f"{one[key]:8}" for key in ("steps", "output_tokens", "drafted", "accepted", "equal_rounds"))
        yield f"{scenario:12} {name:8} {one['processor_s_per_1000_tokens']:8.2f} {one['gain']:6.3f} {counts} of {one['rounds']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: %(default)s)")
    parser.add_argument("--draft-model", help="for the proposer `draft`")
    parser.add_argument(
        "--proposers", nargs="+", default=PROPOSERS, help="the first is what the others are compared with (default: %(default)s)"
    )
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, help="conversations at a time (default: as many as the scenario has)")
    parser.add_argument("--conversations", type=int, help="of each scenario in a round (default: as many as the scenario has)")
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)

    def load(name: str) -> LLM:
        draft = {"draft_model": options.draft_model} if name == "draft" else {}
        return LLM(options.model, speculation="ngram" if name == KNOWN else name, threads=options.threads, **draft)

    found: dict[str, Any] = surroundings([]) | {
        name: getattr(options, name) for name in ("model", "draft_model", "threads", "streams", "conversations", "rounds")
    }
    scenarios = natural_scenarios(options.scenarios)
    changes = {"concurrency": options.streams, "num_conversations": options.conversations}
    scenarios = [replace(scenario, **{name: value for name, value in changes.items() if value is not None}) for scenario in scenarios]
    found["scenarios"] = {}
    print(
        f"{'scenario':12} {'proposer':8} {'CPU s/1k':>8} {'gain':>6} {'steps':>8} {'tokens':>8} {'drafted':>8} {'accepted':>8} {'equal':>8}"
    )
    for name, one in measure(options.proposers, load, scenarios, options.rounds, options.seed):
        found["scenarios"][name] = one
        print("\n".join(lines(name, one)), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
