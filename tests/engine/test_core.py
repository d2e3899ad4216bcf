from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.contracts.parsing import Event, Text, ToolParser
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.output import ResultProcessor
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from tests.fakes import (
    EOS,
    LETTERS,
    TOKENIZER,
    VOCAB_SIZE,
    beam_request,
    content,
    drive,
    generate,
    ids,
    letter_after,
    make_core,
    make_request,
    runner_of,
    saying,
    tokens,
    undecided,
)


def last(deltas: list[SequenceDelta], index: int = 0) -> SequenceDelta:
    ours = [delta for delta in deltas if delta.index == index]
    assert [delta.finish_reason for delta in ours[:-1]] == [None] * (len(ours) - 1)
    assert ours[-1].finish_reason is not None
    return ours[-1]


class Parser(ToolParser):
    """A tool parser that raises when it is told `poison`, or at the end if that is `poison`."""

    def __init__(self, poison: str | None) -> None:
        self.poison = poison

    def feed(self, text: str) -> Iterable[Event]:
        if self.poison and self.poison in text:
            raise ValueError("poisoned")
        return [Text(text)]

    def finish(self) -> Iterable[Event]:
        if self.poison == "":
            raise ValueError("poisoned at the end")
        return []


def poisoned(poison: str | None) -> Answer:
    return Answer(Detokenizer(TOKENIZER), None, Parser(poison), (), False, True)


@given(prompt=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=9), max_tokens=st.integers(1, 12))
@settings(max_examples=30)
def test_every_token_is_the_one_that_follows_from_those_before(prompt: list[int], max_tokens: int) -> None:
    core = make_core()
    deltas = generate(core, make_request(prompt=prompt, max_tokens=max_tokens))
    runner_of(core).shutdown()
    history = list(prompt)
    for token_id in tokens(deltas):
        assert token_id == letter_after(history)
        history.append(token_id)
    assert len(history) == len(prompt) + max_tokens
    assert content(deltas) == TOKENIZER.decode(tokens(deltas))
    assert last(deltas).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_at_all_still_say_what_is_known_of_the_prompt(n: int) -> None:
    deltas = generate(make_core(), make_request(prompt="hello", max_tokens=0, n=n, prompt_logprobs=1))
    assert len(deltas) == n
    for delta in deltas:
        assert delta.finish_reason is FinishReason.LENGTH
        assert delta.token_ids == []
        assert delta.prompt is not None
        assert delta.prompt.num_tokens == 5
    assert deltas[0].prompt is not None
    assert deltas[0].prompt.logprobs is not None
    assert deltas[0].prompt.logprobs[0] is None
    assert [entry.token_id for entry in deltas[0].prompt.logprobs[1:] if entry is not None] == ids("ello")


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context() -> None:
    deltas = generate(make_core(max_model_len=30), make_request(prompt="hello"))
    assert len(tokens(deltas)) == 25
    assert last(deltas).finish_reason is FinishReason.LENGTH


def test_the_bound_that_ended_an_answer_has_the_stop_reason_that_the_request_gave_it() -> None:
    request = make_request(prompt="hello", max_tokens=3)
    params = replace(request.params, length_stop_reason="bound")
    assert last(generate(make_core(), replace(request, params=params))).stop_reason == "bound"
    cut_by_the_eos = make_core(lambda token_ids: EOS)
    assert last(generate(cut_by_the_eos, replace(request, params=params))).stop_reason is None


def test_the_bound_that_ended_a_search_has_its_stop_reason_too() -> None:
    deltas = generate(make_core(undecided), beam_request("r", "hello", BeamSearchParams(2, 3), length_stop_reason="bound"))
    assert {delta.stop_reason for delta in deltas if delta.finish_reason is FinishReason.LENGTH} == {"bound"}


def test_more_tokens_than_the_context_holds_are_cut_at_its_end() -> None:
    deltas = generate(make_core(max_model_len=30), make_request(prompt="h" * 29, max_tokens=100))
    assert len(tokens(deltas)) == 1


def test_a_prompt_that_fills_the_context_is_served_where_nothing_is_to_follow() -> None:
    assert last(generate(make_core(max_model_len=30), make_request(prompt="h" * 30, max_tokens=0))).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"prompt": []}, "prompt", "the prompt is empty"),
        ({"prompt": "h" * 31, "max_tokens": 0}, "prompt", "the prompt has 31 tokens, and prompt and answer together may have 30"),
        ({"prompt": "h" * 30}, "prompt", "the prompt has 30 tokens"),
        ({"prompt": "h" * 30, "max_tokens": 1}, "prompt", "the prompt has 30 tokens"),
        ({"prompt": [5, VOCAB_SIZE, 5]}, "prompt", f"token id {VOCAB_SIZE}, outside the vocabulary"),
        ({"prompt": [5, -1]}, "prompt", "token id -1, outside the vocabulary"),
        ({"n": 5}, "n", "`n` must be at most 4"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", "outside the vocabulary"),
        ({"request_id": "taken"}, "request_id", "request id 'taken' is in use"),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_nothing_behind(options: dict[str, Any], param: str, message: str) -> None:
    core = make_core(max_model_len=30, max_num_seqs=4)
    core.add(make_request("taken", max_tokens=2))
    with pytest.raises(InvalidRequest) as refusal:
        core.add(make_request(**options))
    assert refusal.value.param == param
    assert message in refusal.value.message
    core.check_integrity()
    assert list(drive(core)) == ["taken"]


def test_a_request_id_is_free_again_once_its_request_has_ended() -> None:
    core = make_core()
    assert generate(core, make_request("same", max_tokens=2))
    core.add(make_request("same", max_tokens=2))
    core.abort("same")
    assert generate(core, make_request("same", max_tokens=2))


@pytest.mark.parametrize(
    ("params", "text", "reason", "stop_reason"),
    [
        ({}, "hello", FinishReason.STOP, None),
        ({"stop_token_ids": (ids("l")[0],)}, "he", FinishReason.STOP, ids("l")[0]),
        ({"stop_token_ids": (ids("l")[0],), "include_stop_str_in_output": True}, "hel", FinishReason.STOP, ids("l")[0]),
        ({"stop_token_ids": (EOS,), "include_stop_str_in_output": True}, "hello", FinishReason.STOP, EOS),
        ({"ignore_eos": True, "max_tokens": 7}, "hello", FinishReason.LENGTH, None),
        ({"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 7}, "hello<|end|><|end|>", FinishReason.LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": (ids("o")[0],)}, "hell", FinishReason.STOP, ids("o")[0]),
        ({"stop": ("ll",)}, "he", FinishReason.STOP, "ll"),
        ({"stop": ("ll",), "include_stop_str_in_output": True}, "hell", FinishReason.STOP, "ll"),
        ({"stop": ("lo!",)}, "hello", FinishReason.STOP, None),
        ({"max_tokens": 3, "stop": ("lo",)}, "hel", FinishReason.LENGTH, None),
        ({"max_tokens": 4, "stop": ("ll",)}, "he", FinishReason.STOP, "ll"),
        ({"max_tokens": 5}, "hello", FinishReason.LENGTH, None),
        ({"max_tokens": 1, "stop_token_ids": (ids("h")[0],)}, "", FinishReason.STOP, ids("h")[0]),
    ],
)
def test_an_answer_ends_where_it_should(params: dict[str, Any], text: str, reason: FinishReason, stop_reason: int | str | None) -> None:
    deltas = generate(make_core(saying("hello")), make_request(**params))
    assert content(deltas) == text
    assert last(deltas).finish_reason is reason
    assert last(deltas).stop_reason == stop_reason


def test_stop_ids_are_held_off_until_min_tokens() -> None:
    deltas = generate(make_core(saying("he")), make_request(min_tokens=4, max_tokens=9))
    assert len(tokens(deltas)) == 5
    assert EOS not in tokens(deltas)[:4]


def test_a_token_that_stops_counts_and_has_its_log_probability() -> None:
    core = make_core(saying("hi"))
    deltas = generate(core, make_request(logprobs=2))
    assert tokens(deltas) == [*ids("hi"), EOS]
    assert [[entry.token_id for entry in delta.logprobs] for delta in deltas] == [[token_id] for token_id in tokens(deltas)]
    assert core.stats().num_generation_tokens == 3
    assert core.stats().num_prompt_tokens == 1


@given(num_prompt=st.integers(1, 12), budget=st.integers(1, 9), n=st.integers(1, 3))
@settings(max_examples=30)
def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(num_prompt: int, budget: int, n: int) -> None:
    prompts = []
    for max_num_batched_tokens in (budget, 1000):
        core = make_core(max_num_seqs=3, max_num_batched_tokens=max_num_batched_tokens)
        generate(core, make_request("before", prompt=LETTERS[:num_prompt], max_tokens=1))
        deltas = generate(core, make_request(prompt=LETTERS[:num_prompt], prompt_logprobs=2, n=n, max_tokens=3))
        runner_of(core).shutdown()
        prompts.append([delta.prompt for delta in deltas if delta.prompt is not None])
    assert prompts[0][0].logprobs == prompts[1][0].logprobs
    assert prompts[0][0].logprobs is not None
    assert [None if entry is None else entry.token_id for entry in prompts[0][0].logprobs] == [None, *LETTERS[1:num_prompt]]
    assert len(prompts[0]) == n


def test_forks_differ_by_their_seed_and_repeat_with_it() -> None:
    request: dict[str, Any] = {"n": 4, "temperature": 2.0, "seed": 7, "max_tokens": 8}
    runs = []
    for _ in range(2):
        deltas = generate(make_core(), make_request(**request))
        runs.append([tokens(deltas, index) for index in range(4)])
    assert runs[0] == runs[1]
    assert len({tuple(said) for said in runs[0]}) > 1


def test_forks_that_end_at_their_first_token_do_not_end_the_others() -> None:
    core = make_core()
    request = make_request(prompt="hello", n=4, temperature=2.0, seed=3, max_tokens=6)
    first = {index: tokens(generate(core, request), index)[0] for index in range(4)}
    stop = first[0]
    deltas = generate(core, make_request(prompt="hello", n=4, temperature=2.0, seed=3, max_tokens=6, stop_token_ids=(stop,)))
    for index in range(4):
        assert (len(tokens(deltas, index)) == 1) == (first[index] == stop)
        last(deltas, index)
    assert len(set(first.values())) > 1


def test_a_logits_processor_that_raises_ends_its_own_request() -> None:
    def fail(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) > 3:
            raise ValueError("no more")
        return logits

    core = make_core()
    core.add(make_request("good", max_tokens=5))
    core.add(make_request("bad", n=2, max_tokens=5, logits_processors=[lambda: fail]))
    said = drive(core)
    assert last(said["good"]).finish_reason is FinishReason.LENGTH
    for index in range(2):
        assert last(said["bad"], index).finish_reason is FinishReason.ERROR
        assert "no more" in str(last(said["bad"], index).error)
        assert len(tokens(said["bad"], index)) == 3


@pytest.mark.parametrize("poison", ["l", ""])
def test_a_parser_that_raises_ends_its_own_sequence(poison: str) -> None:
    core = make_core(saying("hello"))
    core.add(make_request("good"))
    parsers = iter([None, poison, None])
    core.add(make_request("mixed", n=3, make_answer=lambda: poisoned(next(parsers))))
    said = drive(core)
    assert content(said["good"]) == "hello"
    assert [last(said["mixed"], index).finish_reason for index in range(3)] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert "poisoned" in str(last(said["mixed"], 1).error)
    assert content(said["mixed"], 0) == content(said["mixed"], 2) == "hello"
    assert content(said["mixed"], 1) == ("hello" if poison == "" else "he")


def test_what_cannot_even_be_begun_leaves_nothing_behind() -> None:
    def fail() -> Any:
        raise ValueError("no such thing")

    core = make_core()
    for options in ({"make_answer": fail}, {"logits_processors": [fail]}):
        with pytest.raises(ValueError, match="no such thing"):
            core.add(make_request(**options))
    core.check_integrity()
    assert not core.has_work


def step_that_fails(core: EngineCore) -> dict[str, list[SequenceDelta]]:
    step = core.schedule()
    assert step is not None
    deltas = core.fail(step, "it broke")
    core.check_integrity()
    return deltas


def test_a_step_that_fails_ends_the_requests_in_it_whole_and_no_others() -> None:
    core = make_core(num_blocks=10, max_model_len=40, max_num_seqs=4)
    core.add(make_request("forks", prompt="hello", n=3, max_tokens=30))
    core.add(make_request("waits", prompt="hello", n=2, max_tokens=3))
    while core.stats().num_preemptions == 0:
        core.step()
    deltas = step_that_fails(core)
    assert sorted(delta.index for delta in deltas["forks"]) == [0, 1, 2]
    assert all(delta.finish_reason is FinishReason.ERROR and delta.error == "it broke" for delta in deltas["forks"])
    assert list(deltas) == ["forks"]
    said = drive(core)
    assert [last(said["waits"], index).finish_reason for index in range(2)] == [FinishReason.LENGTH] * 2


def test_a_step_that_fails_while_forks_wait_for_their_prompt_ends_them_too() -> None:
    core = make_core()
    core.add(make_request("forks", prompt="hello", n=3))
    assert sorted(delta.index for delta in step_that_fails(core)["forks"]) == [0, 1, 2]
    assert not core.has_work


def test_a_step_that_fails_does_not_end_a_request_that_took_over_an_id() -> None:
    core = make_core()
    core.add(make_request("same"))
    step = core.schedule()
    assert step is not None
    core.abort("same")
    core.add(make_request("same", max_tokens=2))
    assert core.fail(step, "it broke") == {}
    assert last(drive(core)["same"]).finish_reason is FinishReason.LENGTH


def test_blocks_of_a_failed_step_are_never_found_again() -> None:
    core = make_core()
    core.add(make_request(prompt=LETTERS[:12]))
    step_that_fails(core)
    deltas = generate(core, make_request(prompt=LETTERS[:12], max_tokens=4))
    assert deltas[0].prompt is not None
    assert deltas[0].prompt.num_cached_tokens == 0


def test_aborting_what_is_unknown_or_over_does_nothing() -> None:
    core = make_core()
    core.abort("unknown")
    generate(core, make_request("r", max_tokens=1))
    core.abort("r")
    core.check_integrity()


def test_nothing_to_do_is_no_step() -> None:
    core = make_core()
    assert core.schedule() is None
    assert core.step() == {}
    assert core.stats().num_steps == 0


@pytest.mark.parametrize("rules", [{}, {"logprobs": 1}, {"stop": ("never",)}])
def test_plain_tokens_are_taken_without_a_closer_look(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    take_samples = ResultProcessor.take_samples

    def counted(*arguments: Any) -> None:
        nonlocal looks
        looks += 1
        take_samples(*arguments)

    monkeypatch.setattr(ResultProcessor, "take_samples", counted)
    core = make_core()
    deltas = generate(core, make_request(prompt=ids("question"), max_tokens=9, **rules))
    runner_of(core).shutdown()
    assert content(deltas) == TOKENIZER.decode(tokens(deltas))
    assert looks == (9 if "logprobs" in rules else 1)  # the first token brings the prompt's facts
