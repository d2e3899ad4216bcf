"""`--model scripted:FILE.jsonl` over HTTP: reasoning, tool calls, schemas and cut answers, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from penstock import LLM, SamplingParams
from penstock.engine.multimodal.inputs import LoadedImage
from tests.api.scripted_model.served import ServedScript, served_script, write_script

CALLS = [{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]
LINES: list[dict[str, Any]] = [
    {"model": {"name": "demo"}},
    {"when": {"tool_result": True}, "reasoning": "Both are known.", "content": "18 and 12 degrees."},
    {"when": {"user": {"contains": "weather"}}, "reasoning": "Two cities.", "content": "I shall look. ", "tool_calls": CALLS},
    {
        "when": {"user": {"contains": "JSON"}},
        "reasoning": "An object.",
        "content": 'Sure! Here it is: {"city": "Oslo"} Anything else?',
    },
    {"when": {"user": {"contains": "prose"}}, "content": "The weather is fine."},
    {
        "when": {"prompt": {"equals": "<|im_start|>assistant\nBefore.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"}},
        "content": "After.",
    },
    {"content": "Hello!"},
]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
        yield write_script(folder / "answers.jsonl", LINES)


@pytest.fixture(scope="module")
def served(script: Path) -> Iterator[ServedScript]:
    with served_script(script) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: ServedScript) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def message_of(client: Any, content: str, **fields: Any) -> dict[str, Any]:
    """The message of a whole answer, asserted to be the sum of the same answer's stream, with its finish reason and without ids."""
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
    choice = client.chat.completions.create(**body).choices[0]
    message = choice.message
    whole = {
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "content": message.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or ()],
        "finish_reason": choice.finish_reason,
    }
    streamed: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish_reason": None}
    for chunk in client.chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        streamed["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        streamed["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(streamed["calls"]):
                streamed["calls"].append((call.function.name, ""))
            name, arguments = streamed["calls"][call.index]
            streamed["calls"][call.index] = name, arguments + (call.function.arguments or "")
        streamed["finish_reason"] = chunk.choices[0].finish_reason or streamed["finish_reason"]
    assert streamed == whole
    return whole


def test_a_message_is_what_the_line_says(client: Any) -> None:
    assert message_of(client, "weather", tools=[WEATHER]) == {
        "reasoning": "Two cities.",
        "content": "I shall look. ",
        "calls": [("weather", '{"city": "Zürich"}'), ("weather", '{"city": "Oslo", "days": 2}')],
        "finish_reason": "tool_calls",
    }


def test_an_agent_goes_on_with_the_results_and_reuses_its_prefix(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather"}]
    first = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "18"} for call in first.choices[0].message.tool_calls]
    second = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "18 and 12 degrees."
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert reused == first.usage.total_tokens // 16 * 16  # all but the last, partly filled block


def test_a_schema_takes_what_it_allows_of_the_answer(client: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    message = message_of(client, "JSON", response_format=response_format)
    assert message["reasoning"] == "An object."
    assert json.loads(message["content"]) == {"city": "Oslo"}


def test_a_forced_call_has_its_arguments_even_where_the_script_has_no_call(client: Any) -> None:
    message = message_of(client, "prose", tools=[WEATHER], tool_choice="required")
    [(name, arguments)] = message["calls"]
    assert name == "weather"
    assert json.loads(arguments).keys() >= {"city"}


def test_a_call_that_tool_choice_forbids_is_text(client: Any) -> None:
    message = message_of(client, "weather", tools=[WEATHER], tool_choice="none")
    assert message["calls"] == []
    assert message["content"].startswith("I shall look. ")


@pytest.mark.parametrize("max_tokens", range(1, 40, 3))
def test_an_answer_that_is_cut_at_any_token_is_the_beginning_of_it(client: Any, max_tokens: int) -> None:
    unfinished = '<tool_call>\n{"name": "weather"'  # is content until a call can be read
    whole, cut = message_of(client, "weather", tools=[WEATHER]), message_of(client, "weather", tools=[WEATHER], max_tokens=max_tokens)
    assert whole["reasoning"].startswith(cut["reasoning"])
    assert (whole["content"] + unfinished).startswith(cut["content"])
    assert cut["finish_reason"] == "length"


def test_stop_strings_and_all_choices_are_those_of_any_model(client: Any) -> None:
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], stop=["lo"], n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hel", "Hel"]


def test_a_completion_answers_its_prompt(client: Any) -> None:
    answer = client.completions.create(model="demo", prompt=["some prose", "x"], echo=True, max_tokens=40)
    assert [choice.text for choice in answer.choices] == ["some proseThe weather is fine.", "xHello!"]
    assert answer.usage.completion_tokens == len("The weather is fine.") + len("Hello!") + 2


def test_an_answer_that_begins_a_responses_input_is_a_message_of_its_own(client: Any) -> None:
    said = [{"role": "assistant", "content": "Before."}, {"role": "user", "content": "And now?"}]
    assert client.responses.create(model="demo", input=said).output_text == "After."


def test_the_library_says_the_same(script: Path) -> None:
    with LLM(f"scripted:{script}", kv_cache_memory="64MiB") as llm:
        [output] = llm.chat([{"role": "user", "content": "prose"}], SamplingParams(max_tokens=100), use_tqdm=False)
        assert output.outputs[0].text == "The weather is fine."
        [output] = llm.generate(["x"], SamplingParams(max_tokens=100), use_tqdm=False)
        assert output.outputs[0].text == "Hello!"


def test_a_scripted_model_takes_images_if_they_have_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    line = {"when": {"user": {"equals": "<image><image><image>"}}, "content": "Three tokens."}
    for number, tokens in enumerate((3, 0)):
        path = write_script(tmp_path / f"{number}.jsonl", [{"model": {"image_tokens": tokens}}, line, {"content": "Nothing."}])
        with LLM(f"scripted:{path}", kv_cache_memory="64MiB", device="cpu") as llm:
            processor = llm._model.generating.image_processor
            assert (processor is None) == (tokens == 0)
            if processor is not None:
                prompt = llm._model.generating.tokenizer.encode("<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\n")
                prepared = processor.prepare(prompt, [LoadedImage.of(Image.new("RGB", (8, 8)))])
                assert llm.generate(prepared.token_ids)[0].outputs[0].text == "Three tokens."
