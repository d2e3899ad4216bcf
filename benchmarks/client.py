"""One streamed request: written down as it arrives, read when nothing is being measured any more."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
GREEDY: Mapping[str, Any] = {"temperature": 0}

Message = dict[str, str]


class BadAnswer(Exception):
    """The server did not answer as asked; the message says what it said instead. `status` is 200 where it broke off later."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status


@dataclass(slots=True)
class Recording:
    """What arrived, and when by `time.perf_counter()`. The client shares cores with the server, so nothing is decoded meanwhile."""

    started: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def events(self) -> Iterator[tuple[float, Any]]:
        """Decoded server-sent events, each with the time at which its last byte came. Comments are left out."""
        rest = b""
        for arrived, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield arrived, json.loads(data)

    @property
    def text(self) -> str:
        """What the answer says, its reasoning left out."""
        choices = (choice for _, event in self.events() for choice in event.get("choices", ()))
        return "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)

    @property
    def has_text(self) -> bool:
        """Whether the answer has begun."""
        return any(has_text(choice) for _, event in self.events() for choice in event.get("choices", ()))


def has_text(choice: dict[str, Any]) -> bool:
    """Whether this choice of an event adds to the answer."""
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in TEXT_FIELDS)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to. Times are in seconds."""

    started: float
    ended: float
    time_to_first_token: float
    generation: float  # from the first token to the last
    output_tokens: int
    prompt_tokens: int | None  # None where the server does not say
    is_counted_by_server: bool  # else `output_tokens` is the number of chunks with text

    @property
    def time_per_output_token(self) -> float | None:
        return self.generation / (self.output_tokens - 1) if self.output_tokens > 1 else None


def read_answer(recording: Recording) -> Answer:
    """Raises BadAnswer on an error in the stream, and on a stream without an end or without any output."""
    usage: dict[str, Any] | None = None
    text_times: list[float] = []
    finished: float | None = None
    for arrived, event in recording.events():
        if "error" in event:
            raise BadAnswer(200, json.dumps(event))
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if has_text(choice):
                text_times.append(arrived)
            if choice.get("finish_reason"):
                finished = arrived
    if finished is None:
        raise BadAnswer(200, "the stream broke off without a finish_reason")
    output_tokens = usage["completion_tokens"] if usage else len(text_times)
    if output_tokens < 1:
        raise BadAnswer(200, "the answer is empty")
    # A token without text, such as the end of the turn, is only seen by what ends the stream.
    first = text_times[0] if text_times else finished
    return Answer(
        started=recording.started,
        ended=finished,
        time_to_first_token=first - recording.started,
        generation=finished - first,
        output_tokens=output_tokens,
        prompt_tokens=usage["prompt_tokens"] if usage else None,
        is_counted_by_server=usage is not None,
    )


@dataclass(slots=True)
class Client:
    """Talks to one server. `extensions` are those of the fields below that it has not refused."""

    session: aiohttp.ClientSession
    url: str  # up to and including /v1
    model: str = ""
    extra_body: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True, "stream_options": {"include_usage": True}})

    def body(self, prompt: str | Sequence[Message], output_tokens: int, fields: Mapping[str, Any] = GREEDY) -> bytes:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = {"model": self.model, "messages": messages, "max_tokens": output_tokens, "stream": True}
        return json.dumps({**asked, **fields, **self.extensions, **self.extra_body}).encode()

    async def stream(self, body: bytes, has_begun: asyncio.Event | None = None) -> Recording:
        """Raises BadAnswer for any status but 200. Sets the event at the first token."""
        recording = Recording(time.perf_counter())
        async with self.session.post(f"{self.url}/chat/completions", data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise BadAnswer(response.status, await response.text())
            async for piece in response.content.iter_any():
                recording.pieces.append((time.perf_counter(), piece))
                if has_begun is not None and not has_begun.is_set() and recording.has_text:
                    has_begun.set()
        return recording

    async def first_model(self) -> str:
        async with self.session.get(f"{self.url}/models") as response:
            if response.status != 200:
                raise BadAnswer(response.status, await response.text())
            models = (await response.json())["data"]
        if not models:
            raise BadAnswer(200, "/models names none; say which with --model")
        return str(models[0]["id"])

    async def agree(self) -> list[str]:
        """Asks for a few tokens and leaves out what the server refuses. Returns the names of those fields."""
        refused: list[str] = []
        while True:
            try:
                read_answer(await self.stream(self.body("Say a word.", 4)))
            except BadAnswer as error:
                name = next((name for name in self.extensions if name in str(error)), None)
                if error.status not in (400, 422) or name is None:
                    raise
                del self.extensions[name]
                refused.append(name)
            else:
                return refused

    async def version(self) -> str | None:
        """As the server tells it at /version, which not all have."""
        async with self.session.get(self.url.removesuffix("/v1") + "/version") as response:
            if response.status != 200:
                return None
            return str((await response.json()).get("version"))
