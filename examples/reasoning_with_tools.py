"""Reasoning and tools together, streamed: the model thinks, calls, gets the tool's result and answers. Needs `pip install openai`.

`python examples/reasoning_with_tools.py "What is the weather in Oslo?"`
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
MAX_TURNS = 4  # a small model may call for as long as it is allowed to


def get_weather(city: str) -> str:
    return f"It is 18 degrees and cloudy in {city}."


def result_of(name: str, arguments: str) -> str:
    """The call's result. Errors go back to the model, so that it can try again."""
    try:
        return get_weather(**json.loads(arguments)) if name == "get_weather" else f"there is no tool {name!r}"
    except (ValueError, TypeError) as error:
        return f"wrong arguments: {error}"


def assistant_message(chunks: Iterable[Any]) -> dict[str, Any]:
    """Prints one answer as it arrives, and returns it as the message that the next request has to hold."""
    texts = {"reasoning_content": "", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    shown = None
    for chunk in chunks:
        delta = chunk.choices[0].delta
        # OpenAI's client has no field for reasoning and keeps it with what it does not know.
        for kind, text in (("reasoning_content", (delta.model_extra or {}).get("reasoning_content")), ("content", delta.content)):
            if text:
                print("" if kind == shown else f"\n[{kind.removesuffix('_content')}]\n", text, sep="", end="", flush=True)
                shown = kind
                texts[kind] += text
        for part in delta.tool_calls or ():  # the first part of a call has its id and its name, all have more of its arguments
            call = calls.setdefault(
                part.index, {"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}}
            )
            call["function"]["arguments"] += part.function.arguments or ""
    print()
    # Reasoning that led to a call belongs to the turn: the chat template decides whether the model sees it again.
    return {"role": "assistant", **texts} | ({"tool_calls": list(calls.values())} if calls else {})


def tool_messages(calls: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        result = result_of(name, arguments)
        print(f"\n[call]\n{name}({arguments})\n[result]\n{result}")
        yield {"role": "tool", "tool_call_id": call["id"], "content": result}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Stream a conversation in which the model reasons and calls a tool.")
    parser.add_argument("question", nargs="?", default="What is the weather in Oslo?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was started with; any text where it asks for none")
    parser.add_argument(
        "--force", action="store_true", help="have the first answer call, whatever the model thinks, and the next one answer"
    )
    parser.add_argument("--thinking-token-budget", type=int, default=256, help="tokens of reasoning in each answer")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of each answer, reasoning included")
    arguments = parser.parse_args(argv)

    with OpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": arguments.question}]
        for turn in range(MAX_TURNS):
            tool_choice: Any = ("none" if turn else FORCED) if arguments.force else "auto"
            if turn == MAX_TURNS - 1:
                print("\n[no more tools]\nThe model has called as often as it may, and has to answer now.")
                tool_choice = "none"
            answer = assistant_message(
                client.chat.completions.create(
                    model=model,
                    messages=messages,
                    tools=TOOLS,
                    tool_choice=tool_choice,
                    temperature=0,
                    max_tokens=arguments.max_tokens,
                    stream=True,
                    extra_body={"thinking_token_budget": arguments.thinking_token_budget},
                )
            )
            if "tool_calls" not in answer:
                break
            messages += [answer, *tool_messages(answer["tool_calls"])]
        if not answer["content"].strip():
            print("\n[no answer]\nThe model said nothing after its reasoning: more --max-tokens may help.")


if __name__ == "__main__":
    main()
