import random
from itertools import pairwise

import pytest
from msgspec import UNSET

from penstock.api.protocol import ChatChoice, ChatChunkChoice, TokenLogprob
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, GenerationFailed
from penstock.engine.events import Event, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.serving.messages import ChoiceFold, MessageFold, ReasoningView, UsageFold

EVENTS: list[Event] = [
    Reasoning("Let "),
    Reasoning("me see."),
    Text("I will "),
    Text(SpecialText("<|look|>", is_hidden=False)),
    ToolCallStart(0, "weather", "call_a"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Ulm"}'),
    ToolCallStart(1, "time", "call_b"),
    ToolCallArguments(1, "{}"),
    Text("\nDone"),
]


def fold_in_steps(sizes: list[int], view: ReasoningView | None = None, reason: FinishReason = FinishReason.STOP) -> list[ChatChunkChoice]:
    fold = ChoiceFold(0, view or ReasoningView())
    choices: list[ChatChunkChoice] = []
    start = 0
    for size in sizes:
        choices += fold.feed(SequenceDelta(0, events=EVENTS[start : start + size]))
        start += size
    return choices + fold.feed(SequenceDelta(0, events=EVENTS[start:], finish_reason=reason))


def whole(choices: list[ChatChunkChoice]) -> ChatChoice:
    message = MessageFold(0)
    message.feed(choices)
    return message.choice(has_reasoning_parser=True)


def test_any_division_into_steps_gives_the_same_answer() -> None:
    expected = whole(fold_in_steps([]))
    assert expected.message.content == "I will <|look|>\nDone"
    assert expected.message.reasoning_content == "Let me see."
    assert expected.finish_reason == "tool_calls"
    rng = random.Random(0)
    for _ in range(50):
        assert whole(fold_in_steps([rng.randrange(4) for _ in range(6)])) == expected


def test_each_delta_holds_one_kind_of_thing_and_a_call_is_opened_before_its_arguments() -> None:
    for sizes in ([], [1] * len(EVENTS)):
        *deltas, last = [choice.delta for choice in fold_in_steps(sizes)]
        assert (last.content, last.reasoning_content, last.tool_calls) == (UNSET, UNSET, UNSET)
        for delta in deltas:
            assert sum(kind is not UNSET for kind in (delta.content, delta.reasoning_content, delta.tool_calls)) == 1
            for call in delta.tool_calls or ():
                assert (call.id is UNSET) == (call.function.name is UNSET) == (call.function.arguments != "")


def test_what_one_step_brought_of_one_kind_is_one_delta() -> None:
    for before, after in pairwise(choice.delta for choice in fold_in_steps([])):
        for name in ("content", "reasoning_content"):
            assert getattr(before, name) is UNSET or getattr(after, name) is UNSET


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")])
def test_a_cut_answer_says_length_even_with_calls(reason: FinishReason, expected: str) -> None:
    assert whole(fold_in_steps([], reason=reason)).finish_reason == expected


def test_reasoning_inside_the_content_is_closed_only_where_content_follows() -> None:
    view = ReasoningView(is_separate=False, opening="<think>", closing="</think>")
    assert whole(fold_in_steps([1, 1], view)).message.content == "<think>Let me see.</think>I will <|look|>\nDone"
    fold = ChoiceFold(0, view)
    cut = fold.feed(SequenceDelta(0, events=[Reasoning("Hm")], finish_reason=FinishReason.LENGTH))
    assert whole(cut).message.content == "<think>Hm"


def test_reasoning_that_is_not_streamed_comes_in_one_piece_even_where_nothing_follows() -> None:
    fold = ChoiceFold(0, ReasoningView(is_streamed=False))
    assert fold.feed(SequenceDelta(0, events=[Reasoning("a")])) == []
    first, _ = fold.feed(SequenceDelta(0, events=[Reasoning("b")], finish_reason=FinishReason.LENGTH))
    assert first.delta.reasoning_content == "ab"


def test_content_is_null_beside_reasoning_or_calls_and_empty_where_there_is_nothing() -> None:
    def content(*events: Event) -> str | None:
        return whole(
            ChoiceFold(0, ReasoningView()).feed(SequenceDelta(0, events=list(events), finish_reason=FinishReason.STOP))
        ).message.content

    assert content() == ""
    assert content(Reasoning("x")) is None
    assert content(ToolCallStart(0, "f", "1")) is None


TOKENS = [TokenLogprobs(0, -1.0, 1), TokenLogprobs(1, -1.0, 1, is_reasoning=True), TokenLogprobs(2, -1.0, 1)]


@pytest.mark.parametrize(
    ("view", "content", "reasoning"),
    [
        (ReasoningView(), ["0", "2"], ["1"]),
        (ReasoningView(is_separate=False), ["0", "1", "2"], []),
        (ReasoningView(is_included=False), ["0", "2"], []),
        (ReasoningView(is_included=False, is_separate=False), ["0", "2"], []),
    ],
)
def test_log_probabilities_are_shown_where_the_text_of_their_tokens_is(
    view: ReasoningView, content: list[str], reasoning: list[str]
) -> None:
    fold = ChoiceFold(0, view, lambda token: TokenLogprob(str(token.token_id), token.logprob, None, []))
    choices = [choice for token in TOKENS for choice in fold.feed(SequenceDelta(0, events=[Text("x")], logprobs=[token]))]
    choices += fold.feed(SequenceDelta(0, finish_reason=FinishReason.STOP))
    logprobs = whole(choices).logprobs
    assert logprobs is not None
    assert [token.token for token in logprobs.content] == content
    assert [token.token for token in logprobs.reasoning_content or ()] == reasoning


@pytest.mark.parametrize(("reason", "error"), [(FinishReason.ERROR, GenerationFailed), (FinishReason.ABORT, EngineUnavailable)])
def test_a_sequence_that_was_cut_off_raises(reason: FinishReason, error: type[Exception]) -> None:
    with pytest.raises(error, match="out of memory"):
        ChoiceFold(0, ReasoningView()).feed(SequenceDelta(0, finish_reason=reason, error="out of memory"))


def test_a_prompt_counts_once_however_many_sequences_share_it() -> None:
    fold = UsageFold(n=2)
    for index in range(4):
        fold.feed(SequenceDelta(index, token_ids=[1, 2], prompt=PromptInfo(10, 4), num_reasoning_tokens=1))
        fold.feed(SequenceDelta(index, token_ids=[3], num_reasoning_tokens=2))
    usage = fold.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 12, 32)
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert usage.completion_tokens_details.reasoning_tokens == 8
