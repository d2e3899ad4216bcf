"""Questions to the scripted server, made a family's own. Each is asked whole and streamed, and the official client adds up the stream."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from penstock.plugins.manager import Plugins
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.scripted import MODEL, Scripted, client_of, scripted_server
from tests.api.semantics.families import Family

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


@dataclass(frozen=True, slots=True)
class Said:
    """One answer. `calls` are names and arguments; `logprobs` the tokens that have some, in the content and in the reasoning."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, str]]
    ids: list[str]
    finish_reason: str
    stop_reason: str | None
    num_tokens: int
    num_reasoning_tokens: int
    logprobs: tuple[str, str]

    @property
    def stripped_reasoning(self) -> str:
        return (self.reasoning or "").strip()

    @property
    def cities(self) -> list[str]:
        assert all(name == "weather" for name, _ in self.calls)
        return [json.loads(arguments)["city"] for _, arguments in self.calls]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A server of one family, and its client."""

    family: Family
    client: AsyncOpenAI
    server: Scripted

    async def ask(self, answer: str | None = None, **fields: Any) -> Said:
        """What comes back where the model says `answer`. Asserts that the stream adds up to the whole, and calls parse as JSON unless cut.

        Thinking is on, unless the fields say otherwise.
        """
        if answer is not None:
            self.server.engine.answers = [answer]
        extra = {"chat_template_kwargs": dict(self.family.on)} | fields.pop("extra_body", {})
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "extra_body": extra} | fields
        whole: Any = await self.client.chat.completions.create(**asked)
        state, parts, stops = ChatCompletionStreamState(), [], []
        async for chunk in await self.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
            state.handle_chunk(chunk)
            parts += [tokens_of(choice) for choice in chunk.choices]
            stops += [getattr(choice, "stop_reason", None) for choice in chunk.choices]
        said, summed = read(whole), read(state.current_completion_snapshot)
        for name in ("content", "reasoning", "calls", "finish_reason", "num_tokens", "num_reasoning_tokens"):
            assert (getattr(summed, name) or None) == (getattr(said, name) or None), name
        assert stops[-1] == said.stop_reason
        assert tuple(map("".join, zip(*parts, strict=True))) == said.logprobs
        if said.finish_reason == "tool_calls":
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in said.calls)
            assert len(set(said.ids)) == len(said.calls) > 0
        return said

    def num_tokens(self, text: str) -> int:
        return len(self.server.engine.tokenizer.encode(text, add_special_tokens=False))

    @property
    def prompt(self) -> str:
        """The last request's prompt."""
        token_ids = self.server.engine.requests[-1].prompt_token_ids
        tokenizer = self.server.engine.tokenizer
        return b"".join(tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode() for token_id in token_ids).decode()


def read(completion: Any) -> Said:
    [choice] = completion.choices
    message: Any = choice.message
    calls = message.tool_calls or []
    usage: Any = completion.usage
    return Said(
        message.content,
        getattr(message, "reasoning_content", None),
        [(call.function.name, call.function.arguments) for call in calls],
        [call.id for call in calls],
        choice.finish_reason,
        getattr(choice, "stop_reason", None),
        usage.completion_tokens,
        usage.completion_tokens_details.reasoning_tokens,
        tokens_of(choice),
    )


def tokens_of(choice: Any) -> tuple[str, str]:
    """The tokens that a choice, or a chunk's, has log probabilities of: those of the content, and those of the reasoning."""
    if choice.logprobs is None:
        return "", ""
    reasoning: Sequence[Mapping[str, Any]] = getattr(choice.logprobs, "reasoning_content", ())
    return "".join(token.token for token in choice.logprobs.content), "".join(token["token"] for token in reasoning)


@cache
def plugins_of(reasoning: str, tools: str) -> Plugins:
    return Plugins.start(reasoning_parser=reasoning, tool_parser=tools)


def converse(
    family: Family, scenario: Callable[[Conversation], Coroutine[Any, Any, None]], *, has_markers: bool = True, tokens_per_step: int = 4
) -> None:
    """Runs a scenario against a fresh server with the family's parsers, template and vocabulary."""
    plugins = plugins_of(family.reasoning, family.tools)

    async def run() -> None:
        async with (
            scripted_server(
                {"tokenizer": family.tokenizer(has_markers=has_markers), "tokens_per_step": tokens_per_step},
                chat_template=ChatTemplate(family.source),
                max_model_len=20_000,
                reasoning_parser=plugins.reasoning_parser,
                tool_parser=plugins.tool_parser,
            ) as server,
            client_of(server.base_url) as client,
        ):
            await asyncio.wait_for(scenario(Conversation(family, client, server)), 20)

    asyncio.run(run())
