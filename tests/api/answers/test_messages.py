import random
from itertools import pairwise

import pytest
from msgspec import UNSET

from penstock.engine.contracts.parsing import Event, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, GenerationFailed
from penstock.serving.endpoints.answers import TokenWriter, usage_of
from penstock.serving.endpoints.chat import ChatChunkChoice, ChoiceWriter
from penstock.serving.messages import AssistantMessage, Message, MessageReader, MessageStep, ReasoningView, TokenCounts
from tests.api.scripted import byte_tokenizer

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


def read_in_steps(sizes: list[int], view: ReasoningView | None = None, reason: FinishReason = FinishReason.STOP) -> list[MessageStep]:
    reader = MessageReader(view)
    steps: list[MessageStep] = []
    start = 0
    for size in sizes:
        steps.append(reader.feed(SequenceDelta(0, events=EVENTS[start : start + size])))
        start += size
    return [*steps, reader.feed(SequenceDelta(0, events=EVENTS[start:], finish_reason=reason))]


def whole(steps: list[MessageStep]) -> Message:
    message = Message()
    for step in steps:
        message.add(step)
    return message


def chunks(sizes: list[int]) -> list[ChatChunkChoice]:
    writer = ChoiceWriter(0, TokenWriter(byte_tokenizer(), as_token_ids=True), None)
    return [choice for step in read_in_steps(sizes) for choice in writer.write(step)]


def test_any_division_into_steps_gives_the_same_answer() -> None:
    def parts(message: Message) -> tuple[object, ...]:
        return message.content, message.reasoning, message.tool_calls, message.finish_reason, message.stop_reason

    expected = whole(read_in_steps([]))
    assert expected.content == "I will <|look|>\nDone"
    assert expected.reasoning == "Let me see."
    assert [(call.id, call.function.arguments) for call in expected.tool_calls] == [("call_a", '{"city": "Ulm"}'), ("call_b", "{}")]
    assert expected.finish_reason == "tool_calls"
    rng = random.Random(0)
    for _ in range(50):
        assert parts(whole(read_in_steps([rng.randrange(4) for _ in range(6)]))) == parts(expected)


def test_each_delta_holds_one_kind_of_thing_and_a_call_is_opened_before_its_arguments() -> None:
    for sizes in ([], [1] * len(EVENTS)):
        *deltas, last = [choice.delta for choice in chunks(sizes)]
        assert (last.content, last.reasoning_content, last.tool_calls) == (UNSET, UNSET, UNSET)
        for delta in deltas:
            assert sum(kind is not UNSET for kind in (delta.content, delta.reasoning_content, delta.tool_calls)) == 1
            for call in delta.tool_calls or ():
                assert (call.id is UNSET) == (call.function.name is UNSET) == (call.function.arguments != "")


def test_what_one_step_brought_of_one_kind_is_one_delta() -> None:
    for before, after in pairwise(choice.delta for choice in chunks([])):
        for name in ("content", "reasoning_content"):
            assert getattr(before, name) is UNSET or getattr(after, name) is UNSET


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, "tool_calls"), (FinishReason.LENGTH, "length")])
def test_a_cut_answer_says_length_even_with_calls(reason: FinishReason, expected: str) -> None:
    assert whole(read_in_steps([], reason=reason)).finish_reason == expected


def test_reasoning_inside_the_content_is_closed_only_where_content_follows() -> None:
    view = ReasoningView(is_separate=False, opening="<think>", closing="</think>")
    assert whole(read_in_steps([1, 1], view)).content == "<think>Let me see.</think>I will <|look|>\nDone"
    cut = MessageReader(view).feed(SequenceDelta(0, events=[Reasoning("Hm")], finish_reason=FinishReason.LENGTH))
    assert whole([cut]).content == "<think>Hm"


def test_reasoning_that_is_not_streamed_comes_in_one_piece_even_where_nothing_follows() -> None:
    reader = MessageReader(ReasoningView(is_streamed=False))
    assert reader.feed(SequenceDelta(0, events=[Reasoning("a")])).events == []
    assert reader.feed(SequenceDelta(0, events=[Reasoning("b")], finish_reason=FinishReason.LENGTH)).events == [Reasoning("ab")]


def test_content_is_null_beside_reasoning_or_calls_and_empty_where_there_is_nothing() -> None:
    def content(*events: Event) -> str | None:
        step = MessageReader().feed(SequenceDelta(0, events=list(events), finish_reason=FinishReason.STOP))
        return AssistantMessage.of(whole([step]), has_reasoning_parser=True).content

    assert content() == ""
    assert content(Reasoning("x")) is None
    assert content(ToolCallStart(0, "f", "1")) is None


TOKENS = [TokenLogprobs(0, -1.0, 1), TokenLogprobs(1, -1.0, 1, is_reasoning=True), TokenLogprobs(2, -1.0, 1)]


@pytest.mark.parametrize(
    ("view", "content", "reasoning"),
    [
        (ReasoningView(), ["token_id:0", "token_id:2"], ["token_id:1"]),
        (ReasoningView(is_separate=False), ["token_id:0", "token_id:1", "token_id:2"], []),
        (ReasoningView(is_included=False), ["token_id:0", "token_id:2"], []),
        (ReasoningView(is_included=False, is_separate=False), ["token_id:0", "token_id:2"], []),
    ],
)
def test_log_probabilities_are_shown_where_the_text_of_their_tokens_is(
    view: ReasoningView, content: list[str], reasoning: list[str]
) -> None:
    reader = MessageReader(view)
    steps = [reader.feed(SequenceDelta(0, events=[Text("x")], logprobs=[token])) for token in TOKENS]
    message = whole([*steps, reader.feed(SequenceDelta(0, finish_reason=FinishReason.STOP))])
    writer = ChoiceWriter(0, TokenWriter(byte_tokenizer(), as_token_ids=True), 0)
    logprobs = writer.logprobs(message.content_logprobs, message.reasoning_logprobs)
    assert logprobs is not None
    assert [token.token for token in logprobs.content] == content
    assert [token.token for token in logprobs.reasoning_content or ()] == reasoning


@pytest.mark.parametrize(("reason", "error"), [(FinishReason.ERROR, GenerationFailed), (FinishReason.ABORT, EngineUnavailable)])
def test_a_sequence_that_was_cut_off_raises(reason: FinishReason, error: type[Exception]) -> None:
    with pytest.raises(error, match="out of memory"):
        MessageReader().feed(SequenceDelta(0, finish_reason=reason, error="out of memory"))


def test_a_prompt_counts_once_however_many_sequences_share_it() -> None:
    counts = TokenCounts(n=2)
    for index in range(4):
        counts.add(SequenceDelta(index, token_ids=[1, 2], prompt=PromptInfo(10, 4), num_reasoning_tokens=1))
        counts.add(SequenceDelta(index, token_ids=[3], num_reasoning_tokens=2))
    usage = usage_of(counts)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 12, 32)
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert usage.completion_tokens_details.reasoning_tokens == 8
