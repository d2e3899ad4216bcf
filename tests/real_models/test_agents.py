"""Agents with a real model that calls tools: `scripts/test -m real_model`, which fetches 475 MB once and takes minutes.

Qwen2.5-Coder of half a billion parameters calls for as long as it is offered tools, so that agents end by a tool that takes the answer.
PENSTOCK_QWEN_CODER names the model's GGUF file where it has been fetched already. LangChain's agent is tried where its packages are.
"""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest

from tests.server.test_process import server

pytestmark = pytest.mark.real_model
FLAGS = ("--max-model-len", "4096")
RESULT = "It is 18 degrees and cloudy in Oslo."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "extra_body": {"repetition_penalty": 1.0}}


def tool(name: str, description: str, **types: str) -> Any:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool("get_weather", "Get the current weather of a city.", city="string")
MULTIPLY = tool("multiply", "Multiply two integers.", a="integer", b="integer")
SEARCH = tool("search", "Search the web.", query="string", limit="integer")
ANSWER = tool("answer", "The answer to the user, once the other tools have given their results.", answer="string")
QUESTIONS = {
    "What is the weather in Paris?": ("get_weather", {"city": "Paris"}),
    "What is 12 times 13? Use the tool.": ("multiply", {"a": 12, "b": 13}),
    "Search for llamas and give me 3 results.": ("search", {"query": "llamas", "limit": 3}),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server("--model", os.environ.get("PENSTOCK_QWEN_CODER", "qwen-coder"), "--served-model-name", "qwen-coder", *FLAGS) as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="qwen-coder", messages=messages, **GREEDY, **fields).choices[0]


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_a_tool_answers_is_a_call(client: Any, question: str, tool_choice: str) -> None:
    choice = ask(client, [{"role": "user", "content": question}], tools=[WEATHER, MULTIPLY, SEARCH], tool_choice=tool_choice)
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == QUESTIONS[question]


def test_a_question_that_no_tool_answers_is_not(client: Any) -> None:
    choice = ask(client, [{"role": "user", "content": "Hi, who are you?"}], tools=[WEATHER, MULTIPLY])
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert "Alibaba" in choice.message.content


def test_an_agent_calls_and_answers_by_the_result(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called: list[tuple[str, dict[str, Any]]] = []
    for _ in range(3):
        message = ask(client, messages, tools=[WEATHER, ANSWER], tool_choice="required").message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            called.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        if called[-1][0] == "answer":
            break
    assert called[0] == ("get_weather", {"city": "Oslo"})
    assert called[-1] == ("answer", {"answer": RESULT})


@pytest.mark.skipif(
    find_spec("langchain") is None or find_spec("langchain_openai") is None, reason="needs `pip install langchain langchain-openai`"
)
@pytest.mark.filterwarnings("default")  # of LangChain itself
def test_langchains_agents_call_and_answer(url: str) -> None:
    from langchain.agents import create_agent  # type: ignore[import-not-found]
    from langchain.agents.structured_output import ToolStrategy  # type: ignore[import-not-found]
    from langchain.tools import tool as langchain_tool  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
    from pydantic import BaseModel, Field

    @langchain_tool(return_direct=True)  # type: ignore[untyped-decorator]
    def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        return a * b

    @langchain_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        return RESULT.replace("Oslo", city)

    class Answer(BaseModel):
        """The answer to the user, once the other tools have given their results."""

        answer: str = Field(description="the answer to the user's question")

    model = ChatOpenAI(model="qwen-coder", base_url=url, api_key="none", **GREEDY)

    def run(agent: Any, question: str) -> Any:
        return agent.invoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 8})

    assert run(create_agent(model, [multiply]), "What is 12 times 13?")["messages"][-1].content == "156"
    answered = run(create_agent(model, [get_weather], response_format=ToolStrategy(Answer)), "What is the weather in Oslo?")
    assert answered["structured_response"] == Answer(answer=RESULT)
