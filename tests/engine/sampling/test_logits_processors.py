import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.contracts.logits_processor import LogitsProcessor, LogitsRow, as_processor, choose, per_row, per_sequence
from penstock.engine.deltas import FinishReason
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import SamplingState
from tests.engine.sampling.test_sampler import make_state
from tests.fakes import drive, letter_after, make_core, make_request, tokens


def plain(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits + 1


def of_row(row: LogitsRow, logits: Tensor, *, by: float = 1.0) -> None:
    logits += by


def factory(*, by: float = 1.0) -> Any:
    return plain


class Batched(LogitsProcessor):
    """Adds what each row asked for, and keeps how many rows came at a time."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, int, int | str | None, list[int]]]] = []

    def begin(self, by: float = 0.0) -> dict[str, int]:
        if by < 0:
            raise ValueError("`by` must not be negative")
        return {"steps": 0}

    def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
        self.calls.append([(row.request_id, row.index, row.client_id, list(row.token_ids)) for row in rows])
        for row, logits_V in zip(rows, logits, strict=True):
            logits_V[5] += row.arguments.get("by", 0.0)
            row.state["steps"] += 1


class WithSize:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        return logits


def test_a_processor_is_registered_as_it_is_and_a_class_as_one_that_all_share() -> None:
    processor = Batched()
    assert as_processor(processor) is processor
    assert isinstance(as_processor(Batched), Batched)


@pytest.mark.parametrize("registered", ["plain", plain, of_row, factory, WithSize, WithSize(1), None])
def test_what_is_no_processor_is_refused_with_what_makes_one_of_it(registered: Any) -> None:
    with pytest.raises(TypeError, match=r"from `penstock.LogitsProcessor`; `per_sequence\(factory\)` and `per_row\(function\)`"):
        as_processor(registered)


@pytest.mark.parametrize(
    ("processor", "arguments"),
    [
        (per_sequence(lambda: plain), {"by": 2}),
        (per_sequence(factory), {"token_ids": [], "size": 2}),
        (per_sequence(WithSize), {}),
        (per_row(of_row), {"factor": 2}),
        (per_row(of_row), {"logits": 2}),
        (Batched(), {"by": -1}),
        (Batched(), {"size": 1}),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(processor: LogitsProcessor, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        choose(processor, arguments)


@pytest.mark.parametrize(
    ("processor", "arguments", "message"),
    [
        (per_sequence(WithSize), {"width": 1}, "it has no argument 'width': there are size"),
        (per_sequence(lambda: plain), {"self": 1}, "it has no argument 'self': it takes none"),
        (per_sequence(WithSize), {}, "the argument 'size' is missing"),
        (per_row(lambda row, logits, by=1.0: logits + by), {"logits": 2}, "it has no argument 'logits': there are by"),
        (per_row(lambda row, logits, **others: logits), {"logits": 2}, "it has no argument 'logits': it takes none"),
        (Batched(), {"size": 1}, "it has no argument 'size': there are by"),
    ],
)
def test_arguments_are_refused_in_words_that_say_nothing_of_the_code(
    processor: LogitsProcessor, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        choose(processor, arguments)
    assert str(caught.value) == message


def test_a_processor_without_begin_takes_no_arguments() -> None:
    class Bare(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None: ...

    choose(Bare(), {})
    with pytest.raises(TypeError, match="takes none, got by"):
        choose(Bare(), {"by": 1})


@pytest.mark.parametrize("processor", [per_row(of_row), per_sequence(lambda by: lambda token_ids, logits: logits + by)])
def test_adapters_take_the_requests_arguments(processor: LogitsProcessor) -> None:
    row = choose(processor, {"by": 3.0}).begin(LogitsRow("r", token_ids=[1])).row
    logits_RV = torch.zeros(1, 4)
    processor.process([row], logits_RV)
    assert logits_RV.tolist() == [[3.0] * 4]


def test_all_rows_of_a_step_come_in_one_call_with_their_ids() -> None:
    """Also where there are more than the sampler takes in one pass."""
    vocab_size = make_core().vocab_size
    batched = Batched()
    core = make_core(lambda token_ids: torch.zeros(vocab_size), max_num_seqs=16)
    core.runner.sampler._rows_per_pass = 3
    for number in range(3):
        chosen = choose(batched, {"by": 1.0 + number})
        request = make_request(f"r{number}", "ab" + "cd" * number, n=2 + number, max_tokens=3, ignore_eos=True, logits_processors=[chosen])
        request.client_id = number
        core.add(request)
    core.add(make_request("plain", max_tokens=4))
    said = drive(core)
    assert {row[:3] for row in batched.calls[0]} == {(f"r{number}", index, number) for number in range(3) for index in range(2 + number)}
    assert [len(call) for call in batched.calls] == [9] * 3
    assert [token_id for number in range(3) for token_id in tokens(said[f"r{number}"])] == [5] * 9
    for request_id, index, _, token_ids in batched.calls[-1]:
        assert token_ids[-2:] == tokens(said[request_id], index)[:2]


def test_every_sequence_has_a_state_of_its_own() -> None:
    states: list[Any] = []

    class Watched(Batched):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
            super().process(rows, logits)
            states.extend(row.state for row in rows if len(row.token_ids) == 4)

    core = make_core(letter_after)
    core.add(make_request(prompt="a", n=3, max_tokens=4, logits_processors=[choose(Watched(), {})]))
    drive(core)
    assert [state["steps"] for state in states] == [4] * 3
    assert len({id(state) for state in states}) == 3


@pytest.mark.parametrize("form", ["row", "batch"])
def test_one_that_raises_ends_the_guilty_request_alone(form: str) -> None:
    def raising(row: LogitsRow, logits: Tensor) -> None:
        logits[7] = 1000.0
        if row.client_id == "guilty" and len(row.token_ids) > 2:
            raise KeyError("no such client")

    class Raising(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
            for row, logits_V in zip(rows, logits, strict=True):
                raising(row, logits_V)
                logits_V[8:9] += 600.0  # twice would be too much

    processor = per_row(raising) if form == "row" else Raising()
    core = make_core(letter_after)
    for client in ("innocent", "guilty", "another"):
        request = make_request(client, "a", max_tokens=6, logits_processors=[choose(processor, {})])
        request.client_id = client
        core.add(request)
    said = drive(core)
    ends = {client: deltas[-1] for client, deltas in said.items()}
    assert ends["guilty"].finish_reason is FinishReason.ERROR
    assert "KeyError: 'no such client'" in (ends["guilty"].error or "")
    for client in ("innocent", "another"):
        assert ends[client].finish_reason is FinishReason.LENGTH
        assert tokens(said[client]) == [7] * 6


def test_functions_and_batched_processors_run_in_the_order_given() -> None:
    order: list[str] = []

    def naming(name: str) -> Any:
        def process(token_ids: list[int], logits: Tensor) -> Tensor:
            order.append(name)
            return logits * 2 if name == "double" else logits + 1

        return per_sequence(lambda: process)

    class Add(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> Tensor:
            order.append(f"batch of {len(rows)}")
            return logits + 10

    add = Add()
    vocab_size = make_core().vocab_size
    core = make_core(lambda token_ids: torch.zeros(vocab_size))
    seen: list[float] = []

    look = per_row(lambda row, logits: seen.append(float(logits[0])))
    first = [choose(processor, {}) for processor in (naming("add"), add, naming("double"), look)]
    second = [choose(processor, {}) for processor in (add, look)]
    core.add(make_request("first", max_tokens=1, logits_processors=first))
    core.add(make_request("second", max_tokens=1, logits_processors=second))
    drive(core)
    assert order == ["add", "batch of 2", "double"]
    assert sorted(seen) == [10.0, 22.0]


def test_batched_ones_in_crossed_orders_still_run_each_in_its_requests_order() -> None:
    class Times(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
            logits *= 3

    class Plus(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
            logits += 5

    seen: dict[str, float] = {}

    def note(row: LogitsRow, logits: Tensor) -> None:
        seen[row.request_id] = float(logits[0])

    times, plus, look = choose(Times(), {}), choose(Plus(), {}), choose(per_row(note), {})
    vocab_size = make_core().vocab_size
    core = make_core(lambda token_ids: torch.ones(vocab_size))
    core.add(make_request("times first", max_tokens=1, logits_processors=[times, plus, look]))
    core.add(make_request("plus first", max_tokens=1, logits_processors=[plus, times, look]))
    core.add(make_request("thrice", max_tokens=1, logits_processors=[plus, times, plus, look]))
    drive(core)
    assert seen == {"times first": 8.0, "plus first": 18.0, "thrice": 23.0}


@pytest.mark.parametrize(
    ("answer", "reason"), [(torch.zeros(1, 3), r"\(1, 3\)"), ([1.0], "list"), (math.inf, "float")], ids=["shape", "list", "number"]
)
def test_a_batched_answer_that_is_no_logits_fails_its_rows(answer: Any, reason: str) -> None:
    class Odd(LogitsProcessor):
        def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> Any:
            return answer

    core = make_core(letter_after)
    core.add(make_request("odd", max_tokens=3, logits_processors=[choose(Odd(), {})]))
    core.add(make_request("even", max_tokens=3))
    said = drive(core)
    assert said["even"][-1].finish_reason is FinishReason.LENGTH
    assert re.search(reason, said["odd"][-1].error or "")


def test_what_a_processor_remembers_is_copied_when_its_sequence_is_forked() -> None:
    class Counting:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
            self.seen.append(list(token_ids))
            return logits

    def run(state: SamplingState) -> Counting:
        (own,) = state.processors
        own.processor.process([own.row], torch.zeros(1, 4))
        counting: Counting = own.row.state
        return counting

    state = make_state(SamplingParams(), [1], processors=[Counting()])
    run(state)
    fork = state.fork()
    fork.append(3)
    state.append(2)
    assert run(fork).seen == [[1], [1, 3]]
    assert state.processors[0].row.state.seen == [[1]]
    assert state.processors[0].row.token_ids == [1, 2]
