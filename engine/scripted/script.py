"""The file of `--model scripted:FILE.jsonl`: what a scripted model says, and when. One JSON object per line."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.engine.errors import ConfigurationError

# The tokens after those of the 256 bytes, and whether they are special.
MARKERS = {
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
    "<image>": True,
}
IMAGE_MARKER = "<image>"
MARKER_IDS = {text: 256 + index for index, text in enumerate(MARKERS)}
VOCAB_SIZE = 256 + len(MARKERS)

TokenId = Annotated[int, Meta(ge=0, lt=VOCAB_SIZE)]
Count = Annotated[int, Meta(ge=0)]
Finish = Literal["stop", "length"]


class TextTest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked of a text; each of the fields that are given must hold. `matches` is a regex, found anywhere."""

    equals: str | None = None
    contains: str | None = None
    matches: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.matches or "")
        except re.error as error:
            raise ValueError(f"`matches` is not a regex: {error}") from None

    def holds(self, text: str) -> bool:
        return (
            (self.equals is None or text == self.equals)
            and (self.contains is None or self.contains in text)
            and (self.matches is None or re.search(self.matches, text) is not None)
        )


class When(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a line answers: each of the fields that are given must hold.

    `user` is the last user message, or the whole prompt of a completion; `prompt` everything before the answer. `tool_result` is the last
    message if a tool wrote it: its text, or whether there is one. `turn` is the number of assistant messages before the answer.
    `prefill` is the beginning of the answer that the client has written.
    """

    user: TextTest | None = None
    prompt: TextTest | None = None
    tool_result: bool | TextTest | None = None
    turn: Count | None = None
    prefill: str = ""


class ScriptedCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call, written in the model's tool format."""

    name: str
    arguments: dict[str, Any] = {}


class Line(Struct, forbid_unknown_fields=True, kw_only=True):
    """One answer: the parts of a message, the text as a model writes it with all its markers, or the ids of its tokens."""

    when: When = When()
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ScriptedCall] = []
    text: str | None = None
    tokens: list[TokenId] | None = None
    finish: Finish = "stop"
    delay_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0

    def __post_init__(self) -> None:
        has_message = self.reasoning is not None or self.content is not None or bool(self.tool_calls)
        if has_message + (self.text is not None) + (self.tokens is not None) != 1:
            raise ValueError("expected one of: `reasoning`, `content` and `tool_calls`; `text`; `tokens`")


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the first line may say of the model as a whole. It takes images if these have tokens: as many of `<image>` for each."""

    name: str | None = None
    context_length: Annotated[int, Meta(ge=16, le=2**24)] = 2**18
    image_tokens: Annotated[int, Meta(ge=0, le=2**12)] = 0


class Header(Struct, forbid_unknown_fields=True, kw_only=True):
    """The first line of a file, if it has settings."""

    model: ModelSettings


class Script(Struct, kw_only=True):
    """A file that has been read. Its first line whose condition holds answers."""

    lines: list[Line]
    settings: ModelSettings = ModelSettings()


def read_script(path: Path) -> Script:
    """Reads a file. Raises `ConfigurationError` with the line's number and the field's path."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the script {path} cannot be read: {error}") from error
    lines: list[Line] = []
    settings = ModelSettings()
    is_first = True
    for number, text in enumerate(source.split("\n"), 1):
        if not text.strip():
            continue
        try:
            if is_first and _is_header(text):
                settings = msgspec.json.decode(text, type=Header).model
            else:
                lines.append(msgspec.json.decode(text, type=Line))
        except msgspec.DecodeError as error:  # of which a value of another type is one kind
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
        is_first = False
    if not lines:
        raise ConfigurationError(f"{path}: the script holds no answers")
    return Script(lines=lines, settings=settings)


def _is_header(text: str) -> bool:
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and "model" in content
