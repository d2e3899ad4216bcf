"""The file of `--model scripted:FILE.jsonl`: what a scripted model says, and when, one JSON object per line.

It becomes a model directory (config, weights, tokenizer and chat template), which the rest of the program treats as any other.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.engine.errors import ConfigurationError
from penstock.engine.system.cache import build_once, cache_directory
from penstock.engine.text.tokenizer import byte_of_character

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


PREFIX = "scripted:"
FORMAT_VERSION = 2  # of the directories: another one for whatever would make other files of the same script

MIN_MAX_NEW_TOKENS = 4096  # a grammar may ask for more than any script has, without end

# An answer is rendered in a later turn as the model wrote it: `answer_text` and this template write the same.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>tools
Tools may be called by JSON objects with "name" and "arguments" in <tool_call></tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- macro text_of(content) -%}
{%- if content is string -%}
{{ content }}
{%- else -%}
{%- for part in content or [] -%}
{{ "<image>" if part.type == "image" else part.text }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" -%}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ text_of(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{- "" if loop.first else "\\n" -}}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- else -%}
{{ text_of(message.content) }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think></think>
{%- endif -%}
{%- endif -%}
"""


def is_scripted(model: str | None) -> bool:
    return model is not None and model.startswith(PREFIX)


def script_path(model: str) -> Path:
    return Path(model.removeprefix(PREFIX)).expanduser()


def scripted_name(model: str) -> str:
    """The model's name for clients: the one in the file, else the file's own. Raises `ConfigurationError` as `read_script`."""
    path = script_path(model)
    return read_script(path).settings.name or path.stem


def scripted_directory(model: str, *, verify: bool = False) -> Path:
    """The model directory of a script, in the cache. Raises `ConfigurationError` as `read_script` and `build_once`."""
    path = script_path(model)
    script = read_script(path)
    identity = hashlib.sha256(repr((FORMAT_VERSION, script)).encode()).hexdigest()[:16]
    return build_once(cache_directory() / "models" / f"scripted-{identity}", lambda scratch: write_files(script, scratch), verify=verify)


def write_files(script: Script, directory: Path) -> None:
    """Writes what a model directory holds."""
    from penstock.engine.scripted.model import write_weights  # imports torch

    backend = byte_tokenizer()
    lines = [written(line, backend) for line in script.lines]
    max_new_tokens = max(MIN_MAX_NEW_TOKENS, 2 * max(len(line["tokens"]) for line in lines))
    backend.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write(directory / "generation_config.json", {"eos_token_id": MARKER_IDS["<|im_end|>"], "max_new_tokens": max_new_tokens})
    write_weights(directory, lines, VOCAB_SIZE, script.settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer() -> Backend:
    """A token for each byte, whose id is the byte, and one for each marker. A prompt of text gets the marker that begins an answer."""
    vocab = byte_of_character()
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=is_special, normalized=False) for text, is_special in MARKERS.items()])
    start = "<|im_start|>"
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", start], pair=["$A", "$B", start], special_tokens=[(start, MARKER_IDS[start])]
    )
    return backend


def written(line: Line, backend: Backend) -> dict[str, Any]:
    """The line as the model's config holds it: when it answers, and by which tokens."""
    token_ids = backend.encode(answer_text(line), add_special_tokens=False).ids if line.tokens is None else line.tokens
    fields: dict[str, Any] = msgspec.to_builtins(line)
    return {name: fields[name] for name in ("when", "finish", "delay_ms")} | {"tokens": token_ids}


def answer_text(line: Line) -> str:
    """What the model writes for a message."""
    if line.text is not None:
        return line.text
    reasoning = "" if line.reasoning is None else f"<think>{line.reasoning}</think>"
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in line.tool_calls]
    return reasoning + (line.content or "") + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
