"""Conversations through the library: what is told apart, and that a server would have answered the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, CompletionOutput, InvalidRequest, RequestOutput, SamplingParams, StructuredOutputsParams, per_sequence
from penstock.llm.preparing import ChatOptions, PromptSource, prepare_chat, prepare_prompt
from tests.llm.model_directory import SETTINGS
from tests.llm.said import saying

HELLO = [{"role": "user", "content": "hello"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
THOUGHT = "<think>hm</think>"
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


@pytest.fixture(scope="module")
def chatty(model_dir: Path) -> Iterator[LLM]:
    """It says what it is told to, and its reasoning and calls are read."""
    processors = {"say": per_sequence(saying(model_dir))}
    with LLM(model_dir, logits_processors=processors, reasoning_parser="deepseek_r1", tool_parser="hermes", **SETTINGS) as llm:
        yield llm


def said(text: str, **params: Any) -> SamplingParams:
    return SamplingParams(logits_processors=[{"name": "say", "arguments": {"text": text}}], **params)


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    (output,) = outputs
    return output.outputs[0]


def test_the_prompt_is_what_the_template_writes(llm: LLM) -> None:
    output = llm.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)


def test_a_prediction_is_of_the_text_and_changes_no_answer(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=12, temperature=0)
    predicted = SamplingParams(max_tokens=12, temperature=0, prediction="hello, hello")
    context = llm._model.generating
    options = ChatOptions()
    for prepared in (
        llm._loop.run(prepare_chat(context, HELLO, predicted, options, "messages")),
        llm._loop.run(prepare_prompt(context, PromptSource("prompts", text="hello"), predicted)),
    ):
        assert prepared.request.prediction is not None
        assert context.tokenizer.decode(prepared.request.prediction.token_ids) == "hello, hello"
    answers = [only(llm.chat(HELLO, params, use_tqdm=False)).token_ids for params in (plain, predicted)]
    assert answers[0] == answers[1]


def test_reasoning_and_content_are_apart(chatty: LLM) -> None:
    answer = only(chatty.chat(HELLO, said(THOUGHT + "done"), use_tqdm=False))
    assert (answer.reasoning_content, answer.text, answer.finish_reason) == ("hm", "done", "stop")
    assert answer.tool_calls == []


def test_calls_are_read_where_there_are_tools(chatty: LLM) -> None:
    answer = only(chatty.chat(HELLO, said(THOUGHT + CALL), tools=TOOLS, use_tqdm=False))
    (call,) = answer.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": 1}
    assert (answer.text, answer.reasoning_content, answer.finish_reason) == ("", "hm", "tool_calls")
    assert "tool_calls=" in repr(answer)


def test_without_a_parser_calls_stay_text(model_dir: Path) -> None:
    processors = {"say": per_sequence(saying(model_dir))}
    with LLM(model_dir, logits_processors=processors, plugins=["none"], **SETTINGS) as llm:
        answer = only(llm.chat(HELLO, said(CALL), tools=TOOLS, use_tqdm=False))
        assert "look" in answer.text
        assert answer.tool_calls == []
        with pytest.raises(InvalidRequest, match="tool parser"):
            llm.chat(HELLO, said(CALL), tools=TOOLS, tool_choice="required")


def test_generate_reads_nothing(chatty: LLM) -> None:
    answer = only(chatty.generate("x", said(THOUGHT + "done", skip_special_tokens=False), use_tqdm=False))
    assert answer.text.startswith(THOUGHT + "done")
    assert answer.reasoning_content is None


def test_a_batch_of_conversations_is_answered_in_order(chatty: LLM) -> None:
    texts = ["one", "two", "three"]
    outputs = chatty.chat([HELLO] * 3, [said(f"<think></think>{text}") for text in texts], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == texts


def test_the_template_may_be_the_callers_and_a_message_be_continued(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ ending }}"
    params = SamplingParams(max_tokens=1)
    output = llm.chat(HELLO, params, chat_template=template, chat_template_kwargs={"ending": "!"}, use_tqdm=False)[0]
    assert output.prompt == "hello!"
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    output = llm.chat(begun, params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)[0]
    assert output.prompt is not None
    assert output.prompt.endswith("assistant\nI am")
    with pytest.raises(InvalidRequest, match="Cannot set both"):
        llm.chat(begun, params, continue_final_message=True)


def test_a_constraint_holds_after_the_reasoning(chatty: LLM) -> None:
    params = SamplingParams(max_tokens=40, thinking_token_budget=2, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    answer = only(chatty.chat(HELLO, params, use_tqdm=False))
    assert answer.text in ("yes", "no")


def test_a_bad_conversation_is_named(llm: LLM) -> None:
    bad: list[tuple[Any, str, str]] = [
        ([HELLO, [{"role": "user"}, {"content": "x"}]], "role", "messages[1]"),
        ([HELLO, []], "at least one message", "messages[1]"),
        ([HELLO, "hi"], "must be a conversation", "messages[1]"),
        ("hi", "must be a conversation", "messages"),
        ([HELLO, [{"role": "user", "content": [{"type": "image_url"}]}]], "missing required field `image_url`", "messages[1]"),
    ]
    for messages, message, path in bad:
        with pytest.raises(InvalidRequest, match=message) as refused:
            llm.chat(messages, SamplingParams(max_tokens=1))
        assert (refused.value.param or "").startswith(path)


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": 3},
        {"chat_template_kwargs": [1]},
        {"tools": {}},
        {"tool_choice": 3},
        {"add_generation_prompt": "x"},
        {"continue_final_message": None},
    ],
)
def test_an_option_of_the_wrong_type_is_named(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.chat(HELLO, SamplingParams(max_tokens=1), **options)
    assert refused.value.param == next(iter(options))
