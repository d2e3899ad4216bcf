"""Agents keep their prefix: a turn that comes back from a client renders as the model wrote it, so that the next one reuses all of it."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from penstock.engine.contracts.parsing import Turn
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Evidence, Plugins
from penstock.serving.templates.rendering import ChatTemplate, common_prefix
from tests.api.responses.server import Api
from tests.api.scripted import CUT, MODEL, byte_tokenizer, scripted_server
from tests.api.semantics.families import real_template
from tests.serving.test_transcripts import merging_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array", "items": {"type": "string"}}},
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
USER = {"role": "user", "content": "What is the weather?"}
ARGUMENTS = ('{"units": ["°C", "a/b"], "city": "Zürich \\"Nord\\"\\n<b>"}', '{"days": 2, "city": "Oslo"}')
COMPACT = '{"days":2,"city":"Oslo"}'
RESULTS = ("18", "12")


@dataclass(frozen=True, slots=True)
class Model:
    """A real chat template; `end` is what ends an assistant's turn. `drops`: it begins the reasoning, and drops that of earlier answers."""

    name: str
    end: str
    drops: bool = False


IM_END = "<|im_end|>"
SENTENCE_END = "<｜end▁of▁sentence｜>"
MODELS = [
    Model("qwen-3", IM_END),
    Model("qwen-3.5", IM_END),
    Model("qwen-3.6", IM_END),
    Model("glm-4.5v", "<|observation|>"),
    Model("glm-4.6v", "<|observation|>"),
    Model("glm-4.7-flash", "<|observation|>"),
    Model("glm-5", "<|observation|>"),
    Model("minimax", "[e~["),
    Model("minimax-m3", "[e~["),
    Model("deepseek-v3.1", SENTENCE_END),
    Model("qwq-32b", IM_END, drops=True),
    Model("deepseek-r1", SENTENCE_END, drops=True),
]


def assistant(arguments: Sequence[str]) -> dict[str, Any]:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for number, text in enumerate(arguments)
    ]
    return {"role": "assistant", "reasoning_content": "A tool knows.", "content": "Let me see.", "tool_calls": calls}


def written_by(template: ChatTemplate, model: Model, arguments: Sequence[str]) -> str:
    """An answer as the model was trained to write it: as its template writes it, after the prompt."""
    message = assistant(arguments)
    results = [{"role": "tool", "tool_call_id": f"call_{number}", "content": "18"} for number, _ in enumerate(arguments)]
    tools = [{"type": "function", "function": FUNCTION}]
    prompt = template.render([USER], tools).text
    history = template.render([USER, message, *results], tools).text
    answer = history[common_prefix(history, prompt) :]
    thought = "A tool knows.\n</think>\n\n" if model.drops else ""  # which the prompt has begun
    return thought + answer[: answer.index(model.end)]


async def by_chat(api: Api) -> list[str]:
    body: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}], "messages": [USER]}
    status, answer = await api.call("POST", "/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(message["tool_calls"], RESULTS, strict=False)
    ]
    status, answer = await api.call("POST", "/chat/completions", body | {"messages": [USER, message, *results]})
    assert status == 200, answer
    return arguments


async def by_responses(api: Api) -> list[str]:
    body: dict[str, Any] = {"tools": [{"type": "function", **FUNCTION, "strict": False}], "store": False}
    output = (await api.create(**body, input=[USER]))["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": result} for call, result in zip(calls, RESULTS, strict=False)
    ]
    await api.create(**body, input=[USER, *output, *results])
    return [call["arguments"] for call in calls]


async def by_messages(api: Api) -> list[str]:
    tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "tools": [tool], "messages": [USER]}
    status, answer = await api.call("POST", "/messages", body)
    assert status == 200, answer
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call, result in zip(calls, RESULTS, strict=False)]
    said = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    status, answer = await api.call("POST", "/messages", body | {"messages": said})
    assert status == 200, answer
    return [json.dumps(call["input"], ensure_ascii=False) for call in calls]


def prompts(model: Model, ask: Callable[[Api], Any], arguments: Sequence[str]) -> tuple[str, str, str]:
    """The first prompt, the answer to it, and the prompt of the turn after it."""
    tokenizer = byte_tokenizer({})
    first, said, second = turns(model, ask, arguments, tokenizer)
    return tokenizer.decode(first), said.replace(CUT, ""), tokenizer.decode(second)


def turns(
    model: Model, ask: Callable[[Api], Any], arguments: Sequence[str], tokenizer: Tokenizer, rng: random.Random | None = None
) -> tuple[list[int], str, list[int]]:
    """The tokens of the first prompt, the answer to it, and the tokens of the prompt of the turn after it.

    With `rng`, the answer is cut at random: no token lies across a cut.
    """
    source = real_template(model.name)
    template = ChatTemplate(source)
    answer = written_by(template, model, arguments)
    said = answer if rng is None else "".join(rng.choice([each, each + CUT]) for each in answer)
    plugins = Plugins.start(())
    plugins.recognize(Evidence((source,), frozenset(), frozenset()), Turn())

    async def scenario() -> tuple[list[int], str, list[int]]:
        settings: dict[str, Any] = {"chat_template": template, "max_model_len": 20_000}
        parsers: dict[str, Any] = {"reasoning_parser": plugins.reasoning_parser, "tool_parser": plugins.tool_parser}
        engine = {"tokenizer": tokenizer, "answers": [said], "tokens_per_step": 7}
        async with scripted_server(engine, **settings, **parsers) as server, aiohttp.ClientSession() as http:
            api = Api(server, http)
            parsed = await ask(api)
            assert [json.loads(text) for text in parsed] == [json.loads(text) for text in arguments], answer
            first, second = (request.prompt_token_ids for request in server.engine.requests)
            return first, said, second

    return asyncio.run(scenario())


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_next_turn_begins_with_all_of_the_one_before(model: Model, ask: Callable[[Api], Any]) -> None:
    first, answer, second = prompts(model, ask, ARGUMENTS)
    if model.drops:
        assert "A tool knows." in answer
        assert "A tool knows." not in second
        # All is reused up to where the dropped reasoning began, and the rest of the answer is as it was.
        before, kept = first.removesuffix("<think>\n"), answer.partition("</think>\n\n")[2]
        assert second.startswith(before)
        assert kept in second
    else:
        assert second.startswith(first + answer), second[common_prefix(second, first + answer) :][:100]


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("model", [model for model in MODELS if not model.drops], ids=lambda model: model.name)
def test_the_next_turn_begins_with_the_tokens_that_the_model_said(model: Model, ask: Callable[[Api], Any]) -> None:
    tokenizer = merging_tokenizer(model.end)
    first, said, second = turns(model, ask, ARGUMENTS, tokenizer, random.Random(7))
    spelled = [token_id for part in said.split(CUT) for token_id in tokenizer.encode(part, add_special_tokens=False)]
    text = tokenizer.decode(second, skip_special_tokens=False)
    assert spelled != tokenizer.encode(said.replace(CUT, ""), add_special_tokens=False)
    assert second[: len(first) + len(spelled)] == first + spelled
    assert text.startswith(tokenizer.decode(first + spelled, skip_special_tokens=False) + model.end)


@pytest.mark.parametrize("ask", [by_chat, by_responses])
@pytest.mark.parametrize("name", ["qwen-3", "qwq-32b", "deepseek-v3.1"])
def test_arguments_stay_as_the_model_spelled_them(name: str, ask: Callable[[Api], Any]) -> None:
    [model] = [model for model in MODELS if model.name == name]
    _, answer, second = prompts(model, ask, [COMPACT])
    assert COMPACT in answer
    assert answer.removeprefix("A tool knows.\n</think>\n\n") in second
