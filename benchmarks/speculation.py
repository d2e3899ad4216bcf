# mypy: disable-error-code="import-untyped"
"""How many steps each proposer of draft tokens takes for the same answers, and how long it works on the host for each token.

    python benchmarks/speculation.py --model qwen-coder --scenarios agent prose-1 rag code-edit --json results/speculation.json

The answers are a model's own, to the conversations of `serve.py`; then they are replayed without the model, some at once, by the rule that
gives sequences their draft tokens. So the tokens per step of a sequence are the same on every machine. The processor time on the host is
the least of several rounds, in which the proposers take turns, less that of a proposer that never guesses.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import surroundings
from benchmarks.scenarios import SCENARIOS, NaturalScenario, Scenario
from penstock import LLM, DraftedSequence, Proposer, SamplingParams, SequenceProposer, proposer_of
from penstock.engine.config import MAX_NUM_SEQS_CPU, ROWS_FOR_WEIGHTS_CPU
from penstock.engine.scheduling.step import Speculation
from penstock.engine.speculation.proposers import BUILT_IN

BLOCK_SIZE = 16
PROPOSERS: dict[str, Callable[[], Proposer]] = {"none": lambda: proposer_of(lambda token_ids: []), **BUILT_IN}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and the model's answer; of the prompt's tokens, how many an earlier one had."""

    prompt: list[int]
    answer: list[int]
    num_known: int
    text: str = ""


@dataclass(slots=True)
class Replay:
    """What a proposer does for these answers. A sequence's step is one in which it has a token computed."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    host_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


@dataclass(slots=True)
class Replayed:
    """One sequence under way."""

    exchange: Exchange
    token_ids: list[int]
    proposer: SequenceProposer

    @property
    def rest(self) -> list[int]:
        return self.exchange.answer[len(self.token_ids) - len(self.exchange.prompt) :]


def replay(exchanges: Sequence[Exchange], proposer: Proposer, num_streams: int) -> Replay:
    """The exchanges in groups of so many that begin at once. Each has the first token of its answer from its prompt."""
    speculation, done = Speculation(ROWS_FOR_WEIGHTS_CPU, has_device=False, proposer=proposer), Replay()
    for start in range(0, len(exchanges), num_streams):
        running = []
        for exchange in exchanges[start : start + num_streams]:
            token_ids = list(exchange.prompt)
            sequence = DraftedSequence(token_ids=token_ids, num_prompt_tokens=len(exchange.prompt))
            running.append(Replayed(exchange, token_ids, speculation.begin(sequence, None)))
            token_ids += exchange.answer[:1]
        while running := [one for one in running if one.rest]:
            step(running, speculation, done)
    return done


def step(running: Sequence[Replayed], speculation: Speculation, done: Replay) -> None:
    """One step of all that run, as the scheduler drafts for it."""
    begun = time.thread_time()
    proposers, num_rows = [one.proposer for one in running], len(running)
    lengths = speculation.share(proposers, MAX_NUM_SEQS_CPU - num_rows, num_rows=num_rows, num_sequences=num_rows)
    drafts = [proposer.propose(length) if length else [] for proposer, length in zip(proposers, lengths, strict=True)]
    done.host_seconds += time.thread_time() - begun
    for one, drafted in zip(running, drafts, strict=True):
        rest = one.rest
        draft = drafted[: len(rest) - 1]
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, rest, strict=False)))
        if draft:
            speculation.expect(one.proposer, len(draft))
            speculation.count(len(draft), num_right)
        one.token_ids += rest[: num_right + 1]
        done.num_tokens += num_right + 1
        done.num_steps += 1
        done.num_drafted += len(draft)
        done.num_accepted += num_right
        if not one.rest:
            begun = time.thread_time()
            one.proposer.end(one.exchange.num_known)
            done.host_seconds += time.thread_time() - begun


def ask(
    llm: LLM, scenario: NaturalScenario, num_conversations: int, seed: str = "speculation", predictions: Sequence[str] = ()
) -> list[Exchange]:
    """The model's answers to all turns of some conversations, in the order in which they are asked, as the `predictions` are, if any."""
    conversations = scenario.conversations(seed, num_conversations)
    predicted = iter(predictions)
    params = SamplingParams(max_tokens=scenario.output_tokens, temperature=scenario.temperature)
    exchanges: list[Exchange] = []
    for start in range(0, len(conversations), scenario.concurrency):
        group = conversations[start : start + scenario.concurrency]
        every = [[] if one.system is None else [{"role": "system", "content": one.system}] for one in group]
        for turn in range(max(len(conversation.turns) for conversation in group)):
            asking = [index for index, conversation in enumerate(group) if turn < len(conversation.turns)]
            histories = [every[index] for index in asking]
            for index in asking:
                every[index].append({"role": "user", "content": group[index].turns[turn]})
            # A seed of its own for each, as in `serve.py`: the same random numbers make texts alike that have nothing in common otherwise.
            own = [replace(params, seed=start + index, prediction=next(predicted, None)) for index in asking]
            for history, output in zip(histories, llm.chat(histories, own, use_tqdm=False), strict=True):
                prompt, answer = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
                exchanges.append(Exchange(prompt, answer, num_known_tokens(prompt, exchanges), output.outputs[0].text))
                history.append({"role": "assistant", "content": output.outputs[0].text})
    return exchanges


def num_known_tokens(prompt: Sequence[int], exchanges: Sequence[Exchange]) -> int:
    """How many of the prompt's first tokens are in whole blocks of an earlier text."""
    lengths = [0]
    for exchange in exchanges:
        pairs = zip(prompt, exchange.prompt + exchange.answer, strict=False)
        lengths.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return max(lengths) // BLOCK_SIZE * BLOCK_SIZE


def compare(exchanges: Sequence[Exchange], num_streams: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """By proposer: what it does, and its microseconds on the host for each token."""
    replays = [{name: replay(exchanges, make(), num_streams) for name, make in PROPOSERS.items()} for _ in range(num_rounds)]
    seconds = {name: min(replayed[name].host_seconds for replayed in replays) for name in PROPOSERS}
    return {
        name: {
            **asdict(done),
            "tokens_per_step": done.tokens_per_step,
            "host_microseconds": (seconds[name] - seconds["none"]) / done.num_tokens * 1e6,
        }
        for name, done in replays[0].items()
    }


def natural_scenarios(names: Sequence[str]) -> list[NaturalScenario]:
    """Raises `SystemExit` for a name that is not one of them."""
    known: dict[str, Scenario] = {scenario.name: scenario for scenario in SCENARIOS if isinstance(scenario, NaturalScenario)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no such scenarios: {', '.join(unknown)}; there are {', '.join(known)}")
    return [scenario for name in names if isinstance(scenario := known[name], NaturalScenario)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: %(default)s)")
    parser.add_argument("--scenarios", nargs="+", default=["agent", "prose-1", "rag", "code-edit"], help="(default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=8, help="of each scenario (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least time on the host counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    scenarios = natural_scenarios(options.scenarios)
    found: dict[str, Any] = surroundings([]) | {"model": options.model, "scenarios": {}}
    with LLM(options.model, speculation="none") as llm:
        answers = {scenario.name: ask(llm, scenario, options.conversations) for scenario in scenarios}
    print(f"{'scenario':12} {'streams':>7} {'proposer':10} {'tokens/step':>11} {'drafted':>8} {'accepted':>8} {'host us/token':>13}")
    for scenario in scenarios:
        for num_streams in sorted({1, scenario.concurrency}):
            compared = compare(answers[scenario.name], num_streams, options.rounds)
            found["scenarios"].setdefault(scenario.name, {})[str(num_streams)] = compared
            for name, values in compared.items():
                print(
                    f"{scenario.name:12} {num_streams:7} {name:10} {values['tokens_per_step']:11.2f} {values['num_drafted']:8.0f} "
                    f"{values['num_accepted']:8.0f} {values['host_microseconds']:13.1f}"
                )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
