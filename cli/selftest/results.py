"""What is compared, what differs, and what is counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.cli.selftest.cases import Case, Feature
from penstock.llm.offline import AsyncLLM
from penstock.llm.outputs import CompletionOutput
from penstock.llm.sampling_params import SamplingParams


class Situation(StrEnum):
    ALONE = "alone"
    BATCH = "batch"
    PREEMPTION = "preemption"
    PREFIX = "prefix hit"
    DISK = "disk hit"
    ALL = "all at once"


# What has to have happened, or the situation was not tested.
EVIDENCE = {
    Situation.BATCH: "aborted",
    Situation.PREEMPTION: "preemptions",
    Situation.PREFIX: "cached tokens",
    Situation.DISK: "blocks from disk",
    Situation.ALL: "preemptions",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What is compared. Ids of calls are random. `error` is the message where the request failed."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def of(cls, output: CompletionOutput) -> "Answer":
        calls = tuple((call.function.name, call.function.arguments) for call in output.tool_calls)
        return cls(
            tuple(output.token_ids),
            output.text,
            output.reasoning_content,
            calls,
            output.finish_reason,
            output.stop_reason,
            output.error,
        )

    def differs_from(self, reference: "Answer", *, is_aborted: bool) -> bool:
        """An aborted answer is a beginning of the reference."""
        if is_aborted and self.error is None:
            return self.token_ids != reference.token_ids[: len(self.token_ids)]
        return self != reference

    def position(self, reference: "Answer") -> int:
        """Of the first token that differs; where none does, the length of the shorter answer."""
        pairs = zip(self.token_ids, reference.token_ids, strict=False)
        shorter = min(len(self.token_ids), len(reference.token_ids))
        return next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)


@dataclass(slots=True)
class Difference:
    """`margin` is between the log probabilities of the two tokens in the reference, in nats; None where there are no two tokens."""

    proposer: str
    situation: Situation
    case: Case
    expected: Answer
    got: Answer
    prompt_token_ids: list[int]
    is_aborted: bool
    margin: float | None = None

    @property
    def position(self) -> int:
        return self.got.position(self.expected)

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The reference's and the other one, where both answers have a token at the position and it is another one."""
        place = self.position
        if place < min(len(self.got.token_ids), len(self.expected.token_ids)):
            return self.expected.token_ids[place], self.got.token_ids[place]
        return None


@dataclass(slots=True)
class Cell:
    num_runs: int = 0
    num_different: int = 0
    num_rounded: int = 0  # of the different ones: those within the margin
    num_failed: int = 0  # requests that had an error in place of an answer


Key = tuple[str, Situation]


@dataclass(slots=True)
class Results:
    """`evidence` is counted by the engines, over all features. `untested` says of a feature, or of a proposer in a situation, why not."""

    cells: dict[tuple[str, Situation, Feature], Cell] = field(default_factory=dict)
    evidence: dict[Key, Counter[str]] = field(default_factory=dict)
    untested: dict[Feature | Key, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    num_aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by their messages

    @property
    def num_runs(self) -> int:
        return sum(cell.num_runs for cell in self.cells.values())

    @property
    def num_different(self) -> int:
        return sum(cell.num_different for cell in self.cells.values())

    @property
    def num_rounded(self) -> int:
        return sum(cell.num_rounded for cell in self.cells.values())

    @property
    def is_passed(self) -> bool:
        return self.num_runs > 0 and self.num_different == self.num_rounded and not self.errors

    def add(self, other: "Results") -> None:
        """Those of another round."""
        for place, cell in other.cells.items():
            mine = self.cells.setdefault(place, Cell())
            mine.num_runs += cell.num_runs
            mine.num_different += cell.num_different
            mine.num_rounded += cell.num_rounded
            mine.num_failed += cell.num_failed
        for key, counts in other.evidence.items():
            self.evidence.setdefault(key, Counter()).update(counts)
        self.untested |= other.untested
        self.differences += other.differences
        self.num_aborted += other.num_aborted
        self.errors.update(other.errors)

    def missing(self) -> Iterator[tuple[Key, str]]:
        """Where what a situation is about has not happened, or where a proposer has proposed nothing."""
        for (proposer, situation), counts in self.evidence.items():
            if situation in EVIDENCE and not counts[EVIDENCE[situation]]:
                yield (proposer, situation), f"no {EVIDENCE[situation]}"
            if proposer != "none" and not counts["draft tokens"]:
                yield (proposer, situation), "no draft tokens"


async def margin_of(llm: AsyncLLM, difference: Difference) -> float | None:
    """The least error in log probabilities that explains the answer, in nats; None where no error does.

    At the first token that differs, that is between the two tokens with their penalties, which the same mask has allowed. Where nothing but
    the model decides, each token that follows is compared with the most probable one in its place as well.
    """
    if difference.tokens is None:
        return None
    case, place, got = difference.case, difference.position, difference.got.token_ids
    before = [*difference.prompt_token_ids, *got[:place]]
    expected, other = [
        (await logprobs(llm, [*before, token_id], 1))[0][1] - case.penalty(token_id, got[:place]) for token_id in difference.tokens
    ]
    margin = abs(expected - other)
    has_reasoning = difference.got.reasoning or difference.expected.reasoning  # which ends by a budget of the server's own
    if case.is_free and not has_reasoning and len(got) > place + 1:
        followed = await logprobs(llm, [*difference.prompt_token_ids, *got], len(got) - place - 1)
        margin = max(margin, *(best - chosen for best, chosen in followed))
    return margin


async def logprobs(llm: AsyncLLM, token_ids: list[int], number: int) -> list[tuple[float, float]]:
    """Of the last tokens: for each the greatest log probability in its place, and its own."""
    params, found = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1), None
    async for output in llm.generate(token_ids, params):
        found = output.prompt_logprobs or found
    assert found is not None, "a prompt has log probabilities"
    places = zip(found[-number:], token_ids[-number:], strict=True)
    return [(max(one.logprob for one in place.values()), place[token_id].logprob) for place, token_id in places if place is not None]
