from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.deltas import FinishReason
from penstock.plugins.reasoning.formats import FORMATS
from tests.fakes import END_THINK, EOS, THINK, content, drive, generate, ids, make_core, make_request, reasoning, saying, tokens

deepseek_r1 = FORMATS["deepseek_r1"]
granite = FORMATS["granite"]
qwen3 = FORMATS["qwen3"]


def pondering(token_ids: Sequence[int]) -> int:
    """Reasons for ever, and says `ok` once its reasoning has been closed."""
    if END_THINK not in token_ids:
        return ids("m")[0]
    said = len(token_ids) - token_ids.index(END_THINK) - 1
    return [*ids("ok"), EOS][min(said, 2)]


@given(budget=st.integers(0, 12))
@settings(max_examples=13)
def test_reasoning_is_closed_when_the_budget_is_spent_and_content_follows(budget: int) -> None:
    core = make_core(pondering)
    deltas = generate(core, make_request(parser=deepseek_r1, thinking_token_budget=budget, max_tokens=40, logprobs=0))
    core.runner.shutdown()
    assert reasoning(deltas) == "m" * budget
    assert content(deltas) == "ok"
    assert tokens(deltas) == [*ids("m" * budget), END_THINK, *ids("ok"), EOS]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].num_reasoning_tokens == budget + 1
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in logprobs] == tokens(deltas)
    assert [entry.is_reasoning for entry in logprobs] == [place <= budget for place in range(len(logprobs))], "the marker counts"


def test_without_a_budget_reasoning_goes_on() -> None:
    deltas = generate(make_core(pondering), make_request(parser=deepseek_r1, max_tokens=20))
    assert reasoning(deltas) == "m" * 20
    assert content(deltas) == ""


def test_each_of_n_sequences_has_the_whole_budget() -> None:
    deltas = generate(make_core(pondering), make_request(parser=deepseek_r1, thinking_token_budget=5, n=3, max_tokens=40))
    for index in range(3):
        assert reasoning(deltas, index) == "mmmmm"
        assert content(deltas, index) == "ok"


@pytest.mark.parametrize("stop_token_ids", [(), ids("!")])
def test_an_end_in_the_reasoning_closes_it_and_the_answer_cannot_end_at_once(stop_token_ids: list[int]) -> None:
    """The model wants to stop, by its own stop id or the client's, and goes on wanting to."""

    def next_token(token_ids: Sequence[int]) -> int:
        return stop_token_ids[0] if stop_token_ids else EOS

    request = make_request(parser=deepseek_r1, thinking_token_budget=9, max_tokens=40, stop_token_ids=tuple(stop_token_ids))
    deltas = generate(make_core(next_token), request)
    said = tokens(deltas)
    assert said[0] == END_THINK
    assert len(said) == 3
    assert said[1] not in (EOS, *stop_token_ids)
    assert said[2] == next_token([])
    assert reasoning(deltas) == ""
    assert len(content(deltas)) == 1 or said[1] > EOS
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_without_a_budget_an_end_in_the_reasoning_ends_the_answer() -> None:
    deltas = generate(make_core(saying("hm")), make_request(parser=deepseek_r1, max_tokens=40))
    assert tokens(deltas) == [*ids("hm"), EOS]
    assert reasoning(deltas) == "hm"


def test_a_model_that_closes_its_reasoning_in_time_is_left_alone() -> None:
    deltas = generate(make_core(saying("hm</think>yes")), make_request(parser=deepseek_r1, thinking_token_budget=20))
    assert (reasoning(deltas), content(deltas)) == ("hm", "yes")
    assert tokens(deltas).count(END_THINK) == 1


def test_a_model_that_never_reasons_is_left_alone() -> None:
    deltas = generate(make_core(saying("just so")), make_request(parser=qwen3, thinking_token_budget=0))
    assert (reasoning(deltas), content(deltas)) == ("", "just so")


def test_a_model_that_opens_its_reasoning_itself_is_held_to_the_budget() -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        return THINK if THINK not in token_ids else pondering(token_ids)

    deltas = generate(make_core(next_token), make_request(parser=qwen3, thinking_token_budget=4, max_tokens=40))
    assert (reasoning(deltas), content(deltas)) == ("mmm", "ok")


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_a_marker_of_many_tokens_is_written_whole_or_not_at_all(max_tokens: int) -> None:
    budget, end = 3, ids(granite.end)

    def next_token(token_ids: Sequence[int]) -> int:
        return ids("m")[0]

    request = make_request(parser=granite, tail=granite.start, thinking_token_budget=budget, max_tokens=max_tokens, logprobs=1)
    deltas = generate(make_core(next_token), request)
    fits = max_tokens >= budget + len(end)
    assert tokens(deltas) == [*ids("mmm"), *(end if fits else ()), *ids("m" * 20)][:max_tokens]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [len(delta.logprobs) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
    assert reasoning(deltas) == ("mmm" if fits else "m" * max_tokens)
    assert content(deltas) == "m" * (max_tokens - budget - len(end))


@pytest.mark.parametrize("budget", [1, 4])
def test_a_forced_marker_larger_than_the_step_is_computed_in_chunks(budget: int) -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        return ids("m")[0]

    for max_num_batched_tokens in (1, 6, 100):
        core = make_core(next_token, max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens)
        deltas = generate(core, make_request(parser=granite, tail=granite.start, thinking_token_budget=budget, max_tokens=40))
        assert (reasoning(deltas), len(content(deltas))) == ("m" * budget, 40 - budget - len(ids(granite.end)))


def test_the_budget_holds_over_preemption() -> None:
    core = make_core(pondering, num_blocks=10, max_model_len=40)
    for number in range(4):
        core.add(make_request(str(number), "hello", parser=deepseek_r1, thinking_token_budget=12))
    said = drive(core)
    assert core.stats().num_preemptions > 0
    for deltas in said.values():
        assert (reasoning(deltas), content(deltas)) == ("m" * 12, "ok")


def test_a_block_that_the_model_opens_again_is_closed_at_once_and_the_answer_may_end_there() -> None:
    """The budget holds for all blocks together."""

    def next_token(token_ids: Sequence[int]) -> int:
        said = token_ids[token_ids.index(END_THINK) :] if END_THINK in token_ids else []
        return ids("m")[0] if not said else [*ids("ok"), THINK, *ids("m"), EOS][min(len(said) - 1, 4)]

    deltas = generate(make_core(next_token), make_request(parser=deepseek_r1, thinking_token_budget=3, max_tokens=40))
    assert tokens(deltas) == [*ids("mmm"), END_THINK, *ids("ok"), THINK, END_THINK, EOS]
    assert (reasoning(deltas), content(deltas)) == ("mmm", "ok")
    assert deltas[-1].finish_reason is FinishReason.STOP
