"""Tool formats of JSON: calls as objects, and calls whose name is written before the JSON of their arguments."""

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import Event, FormatInfo, Text, ToolParser, Turn
from penstock.engine.text.answer import split_at_calls
from penstock.plugins.calls.json_call import CallKeys
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, Identity, JsonStream
from penstock.plugins.calls.schema_values import ToolSchemas, has_strict_tool
from penstock.plugins.calls.stream import ParsersInTurn, new_short_call_id
from penstock.plugins.markers import StepBuffer

HERMES = JsonFormat(
    name="hermes",
    models="Hermes 2 Pro, Hermes 3, Qwen2.5, QwQ, Qwen3, and many others",
    call="<tool_call>\n{object}\n</tool_call>",
    separator="\n",
    may_be_array=True,
    quirks="The last block may be left open, and the outer brace forgotten; a block may hold an array of calls. Text before and after "
    "blocks is content.",
    aliases=("qwen", "qwen25", "qwen3_json", "nanbeige", "trinity"),
    signs=("<tool_call>", "arguments"),
    counter_signs=("<function=", "<arg_key>", "<tool_calls>"),
)

BLOCKS = (
    HERMES,
    JsonFormat(
        name="ernie45",
        models="ERNIE-4.5-21B-A3B-Thinking",
        call="<tool_call>\n{object}\n</tool_call>",
        separator="\n",
        quirks="Read from the content: a block before `</think>` is part of the reasoning.",
        signs=("<tool_call>", "<tool_output>", "<response>"),
        prompt_tail="<think>\n",
        example='The user asks for Oslo.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n',
    ),
    JsonFormat(
        name="granite-20b-fc",
        models="Granite-20B-FunctionCalling",
        call="<function_call> {object}",
        separator=" ",
        quirks="A call ends where its object does.",
        aliases=("granite_20b_fc",),
        signs=("<function_call> ",),  # with the space: MiniMax has the marker as a token
    ),
    JsonFormat(
        name="granite4",
        models="Granite 4.0, 4.1",
        call="<tool_call>\n{object}\n</tool_call>",
        separator="\n",
        quirks="The arguments may be a string that holds an object as JSON: they are emitted as that object.",
        signs=("<tool_call>", "<|start_of_role|>"),
    ),
    JsonFormat(
        name="inkling",
        models="Inkling",
        call="<|content_invoke_tool_json|>{object}<|end_message|>",
        separator="<|message_model|>",  # each call is a message of the model
        envelope=CallEnvelope(sections=("<|message_model|>",), openings=("<|content_invoke_tool_json|>",), closings=("<|end_message|>",)),
        keys=CallKeys(arguments=("args", "arguments", "parameters")),
        may_repeat_name=True,
        markers=("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
        quirks="An offered tool's name may precede the second marker too.",
        signs=("<|content_invoke_tool_json|>",),
    ),
    JsonFormat(
        name="internlm",
        models="InternLM 2, 2.5, 3, Intern-S1",
        call="<|action_start|><|plugin|>\n{object}<|action_end|>",
        separator="\n",
        keys=CallKeys(arguments=("parameters", "arguments")),
        quirks="`parameters` or `arguments`. Intern-S1 writes a space before the second marker. Code for `<|interpreter|>` is content.",
        aliases=("internlm2", "interns1", "intern-s1"),
        signs=("<|action_start|>", "<|plugin|>"),
    ),
    JsonFormat(
        name="minimax_m1",
        models="MiniMax-M1",
        block="<tool_calls>\n{calls}\n</tool_calls>",
        separator="\n",
        aliases=("minimax", "minimax-m1"),
        signs=("<tool_calls>", "</tool_calls>", "<beginning_of_sentence>ai name=assistant"),
    ),
)

ARRAYS = (
    JsonFormat(
        name="apertus",
        models="Apertus",
        block="<|tools_prefix|>[{calls}]<|tools_suffix|>",
        separator=", ",
        keys=CallKeys(name=None),
        aliases=("apertus2509",),
        signs=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    JsonFormat(
        name="apriel",
        models="Apriel 1.5, Apriel 1.6",
        block="<tool_calls>[{calls}]</tool_calls>",
        separator=", ",
        keys=CallKeys(id="id"),
        quirks="An id that comes before the arguments is the call's.",
        signs=("<tool_calls>", "</tool_calls>", "<available_tools>"),
    ),
    JsonFormat(
        name="cohere",
        models="Command R7B, Command A, Command 4",
        call='{"tool_call_id": "{id}", "tool_name": {quoted_name}, "parameters": {arguments}}',
        block="<|START_ACTION|>[\n    {calls}\n]<|END_ACTION|>",
        separator=",\n    ",
        keys=CallKeys("tool_name", ("parameters", "arguments"), "tool_call_id"),
        quirks="Ids are the model's own, `0` and up.",
        aliases=("cohere_command", "cohere_command3", "cohere_command4"),
        signs=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    JsonFormat(
        name="command_r",
        models="Command R, Command R+",
        block="Action:\n```json\n[\n    {calls}\n]```",
        separator=",\n    ",
        keys=CallKeys("tool_name", ("parameters",)),
        envelope=CallEnvelope(openings=("Action:```json", "Action: ```json", "Action:\n```json"), closings=("```",), is_array=True),
        is_offered_only=True,
        markers=("Action:\n```json", "```"),
        quirks="What calls a tool that is not offered is content: the model writes `directly-answer` where it calls nothing.",
        aliases=("command-r", "command_r_plus"),
        signs=("Action:", "`directly-answer`"),
        example='Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Oslo"}\n    }\n]```',
    ),
    JsonFormat(
        name="granite",
        models="Granite 3.0, 3.1, 3.2, 3.3",
        block="<|tool_call|>[{calls}]",
        separator=", ",
        envelope=CallEnvelope(openings=("<|tool_call|>", "<tool_call>"), may_be_array=True),
        markers=("<|tool_call|>", "<tool_call>"),
        quirks="3.1 may write `<tool_call>`, as plain text. The arguments may come before the name. Text around the array is content.",
        signs=("<|tool_call|>", "<|start_of_role|>"),
    ),
    JsonFormat(
        name="hunyuan_a13b",
        models="Hunyuan-A13B",
        block="<tool_calls>[{calls}]</tool_calls>",
        separator=", ",
        signs=("<tool_calls>", "</tool_calls>", "<|startoftext|>"),
    ),
    JsonFormat(
        name="jamba",
        models="Jamba 1.5, 1.6, 1.7",
        block="<tool_calls>[\n    {calls}\n]</tool_calls>",
        separator=",\n    ",
        quirks="The markers are tokens of these models; where a vocabulary lacks them, plain text is read.",
        signs=("<tool_calls>", "</tool_calls>", "<tool_definitions>"),
    ),
    JsonFormat(
        name="nemotron_nano_v2",
        models="Nemotron-Nano-v2, Nemotron-H, Llama-Nemotron",
        block="<TOOLCALL>[{calls}]</TOOLCALL>",
        separator=", ",
        aliases=("nemotron_json", "nemotron-nano-v2"),
        signs=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    JsonFormat(
        name="phi4_mini_json",
        models="Phi-4-mini, Firefunction v2",
        block="functools[{calls}]",
        separator=", ",
        envelope=CallEnvelope(openings=("functools", "<|tool_call|>"), closings=("<|/tool_call|>",), may_be_array=True),
        markers=("functools[", "<|tool_call|>", "<|/tool_call|>"),
        quirks="The same array between the model's own tokens is read too. The word alone, without an array of calls after it, is content.",
        aliases=("phi4_mini",),
        signs=("functools",),
    ),
)

OPENED = '{"name": "'  # the beginning of a call that has no marker, at which grammars take over
BARE = (
    JsonFormat(
        name="llama3_json",
        models="Llama 3.1, 3.2, 3.3, 4",
        separator="; ",
        trigger=OPENED,
        keys=CallKeys(arguments=("parameters", "arguments"), is_bare=True),
        envelope=CallEnvelope(sections=("<|python_tag|>",), openings=("{",), separators=(";",), bare=("{",)),
        markers=("<|python_tag|>",),
        quirks="An object is a call where it has a name, and `parameters` or `arguments` that are an object; any other JSON is content, "
        "with all that is in it. So are text around calls and code after the tag.",
        aliases=("llama4_json", "llama3"),
        signs=("Environment: ipython", '"parameters": '),
        other_signs=(("<|header_start|>ipython<|header_end|>", '"parameters": '),),
        counter_signs=("<function=",),
    ),
    JsonFormat(
        name="xlam",
        models="xLAM 2",
        block="[{calls}]",
        separator=", ",
        trigger=f"[{OPENED}",
        keys=CallKeys(is_bare=True),
        envelope=CallEnvelope(
            openings=("[TOOL_CALLS]", "<tool_call>", "```json", "```\n"),  # those of other models
            closings=("```", "</tool_call>"),
            bare=("[{", "[ {", "[\n"),  # no more than tells an array of objects from a marker in brackets
            is_array=True,
        ),
        markers=("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "```json", "```"),
        quirks="A call has a name and arguments that are an object; any other array is content. So is text around the array.",
        signs=('[{"name": "tool_call_name"',),
    ),
)

# GigaChat 3.0 writes a message of the role `function call`, 3.1 a token. The line breaks are part of the tokens.
_GIGACHAT_END = "<|message_sep|>\n\n"
_GIGACHAT_ROLE = "function call<|role_sep|>\n"
GIGACHAT = JsonFormat(
    name="gigachat3",
    models="GigaChat 3.0, GigaChat 3.1",
    call="<|function_call|>{object}",
    envelope=CallEnvelope(openings=("<|function_call|>", _GIGACHAT_END + _GIGACHAT_ROLE, _GIGACHAT_ROLE), closings=(_GIGACHAT_END,)),
    markers=("<|function_call|>", _GIGACHAT_END, _GIGACHAT_ROLE),
    aliases=("gigachat31", "gigachat3.1"),
    signs=("<|role_sep|>", "function call"),
)
GIGACHAT_30 = replace(GIGACHAT, call=f"{_GIGACHAT_END}{_GIGACHAT_ROLE}{{object}}", trigger=_GIGACHAT_END + _GIGACHAT_ROLE)


def gigachat3(turn: Turn) -> JsonStream:
    """Both generations are read; the vocabulary decides how calls are written."""
    is_older = _GIGACHAT_END in turn.added_tokens and GIGACHAT.opening not in turn.added_tokens
    return (GIGACHAT_30 if is_older else GIGACHAT)(turn)


_FENCES = ("```json", "```\n")
# Without `<tool_call>` only an offered name tells a call from other JSON. `OPENED` counts anywhere: where calls are held to anything, it is
# what the grammar takes over at.
QWEN25 = JsonFormat(
    name="qwen25_coder",
    models="Qwen2.5, Qwen2.5-Coder",
    separator="\n",
    trigger=OPENED,
    keys=CallKeys(is_bare=True),
    envelope=CallEnvelope(
        openings=("<tools>", *_FENCES),
        closings=("</tools>", "```"),
        separators=(",",),
        bare=(OPENED,),
        first=("{", "["),
        following=("{", "["),
        may_be_array=True,
    ),
    is_offered_only=True,
    markers=("<tool_call>", "</tool_call>", "<tools>", "</tools>", "```json", "```"),
    quirks="Reads `hermes`' blocks, and what small models write in their place: the object of an offered tool in `<tools>`, in a "
    "fence, bare where the answer begins with it, after another call, or wherever it is spelled "
    f"`{OPENED}`, at which grammars take over; with a strict tool, only so. Any other JSON is content. Forced calls are written bare.",
    aliases=("qwen2.5-coder", "qwen2_5_coder"),
    signs=("<tool_call>", "arguments", "You are Qwen, created by Alibaba Cloud"),
    counter_signs=("<function=", "<arg_key>", "<tool_calls>"),
    example='```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}\n```',
)
# What begins in another way is held to nothing, which a strict tool does not allow.
QWEN25_STRICT = replace(
    QWEN25,
    envelope=CallEnvelope(
        sections=("<tool_call>", "<tools>", *_FENCES),
        openings=(OPENED,),
        closings=("</tool_call>", "</tools>", "```"),
        separators=(",",),
        bare=(OPENED,),
    ),
)


def qwen25_coder(turn: Turn) -> ToolParser:
    """Hermes' blocks, and JSON objects elsewhere that call offered tools."""
    if has_strict_tool(turn.tools):
        return QWEN25_STRICT(turn)
    return ParsersInTurn(HERMES(turn), lambda: QWEN25(turn), QWEN25.tool_format)


_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+")


def _kimi_identity(fields: Mapping[str, str]) -> Identity | None:
    # Kimi's ids hold the name: `functions.f:0`.
    found = _KIMI_ID.fullmatch(fields["id"])
    return None if found is None else (found[1], fields["id"])


FORMATS = (
    JsonFormat(
        name="deepseek_v3",
        models="DeepSeek-V2.5, V3, R1 and its distillations",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        block="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        separator="\n",
        head=CallHead({"kind": {"<｜tool▁sep｜>": "name"}, "name": {"```json": None, "{": None}}),
        plain_markers=("```json", "```"),
        quirks="The text before the separator, `function`, is ignored. The fence and the section may be missing.",
        aliases=("deepseekv3", "deepseek-v3"),
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    JsonFormat(
        name="deepseek_v31",
        models="DeepSeek-V3.1",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        block="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        quirks="A call outside of a section is read too. Text after the section is content.",
        aliases=("deepseekv31", "deepseek-v3.1"),
        signs=("<｜tool▁calls▁begin｜>", "'<｜tool▁sep｜>' + tool"),  # V3 writes the function's type before its name there
        counter_signs=("```json",),
    ),
    JsonFormat(
        name="functionary_v31",
        models="Functionary 3.1, Llama 3.1 with functions of one's own",
        call="<function={name}>{arguments}</function>",
        markers=("<function=", "</function>"),
        plain_markers=(">",),
        quirks="Code after `<|python_tag|>` is content.",
        aliases=("functionary-v3.1",),
        signs=("<function=", "</function>", "<|python_tag|>"),
    ),
    JsonFormat(
        name="kimi_k2",
        models="Kimi K2, K2-Thinking, K2.5",
        # Numbers go on from turn to turn, and the model knows those of the turns before.
        call="<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        block="<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
        envelope=CallEnvelope(
            sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),  # the second one is misspelt now and then
            openings=("<|tool_call_begin|>",),
            closings=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        ),
        head=CallHead({"id": {"<|tool_call_argument_begin|>": None}}, _kimi_identity),
        quirks="The id is the model's own, numbered on through the conversation; `functions.` may be missing and names may have dots. "
        "An id without a number is not a call. Text after the section is content.",
        aliases=("kimi-k2",),
        signs=("<|tool_calls_section_begin|>",),
    ),
    JsonFormat(
        name="plamo3",
        models="PLaMo 3",
        call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}<|plamo:end_tool_arguments:plamo|>"
        "<|plamo:end_tool_request:plamo|>",
        block="<|plamo:begin_tool_requests:plamo|>{calls}<|plamo:end_tool_requests:plamo|>",
        envelope=CallEnvelope(
            sections=("<|plamo:begin_tool_requests:plamo|>",),
            openings=("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",),
            closings=(
                "<|plamo:end_tool_arguments:plamo|>",
                "<|plamo:end_tool_request:plamo|>",
                "<|plamo:end_tool_requests:plamo|>",
            ),
        ),
        markers=(
            "<|plamo:begin_tool_requests:plamo|>",
            "<|plamo:begin_tool_request:plamo|>",
            "<|plamo:begin_tool_name:plamo|>",
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
            "<|plamo:end_tool_arguments:plamo|>",
            "<|plamo:end_tool_request:plamo|>",
            "<|plamo:end_tool_requests:plamo|>",
            "<|plamo:end_tool_name:plamo|>",
        ),
        signs=("<|plamo:begin_", "tool_request"),
    ),
    JsonFormat(
        name="solar_open",
        models="Solar Open",
        call="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
        block="<|tool_calls|>{calls}<|calls|>",
        id_pattern="[a-z0-9]{10}",
        quirks="Ids are the model's own, ten letters and digits.",
        aliases=("solar-open",),
        signs=("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"),
        example="<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather"
        '<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|><|calls|>',
    ),
)

# Up to tokenizer v7 an array, `[TOOL_CALLS] [{…}, …]`, then `[TOOL_CALLS]f{…}` and `[TOOL_CALLS]f[ARGS]{…}`.
MISTRAL = JsonFormat(
    name="mistral",
    models="Mistral, Mixtral, Ministral, Devstral, Magistral",
    call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    envelope=CallEnvelope(openings=("[TOOL_CALLS]",), is_array=True),
    head=CallHead({"name": {"[CALL_ID]": "id", "[ARGS]": None, "{": None}, "id": {"[ARGS]": None, "{": None}}),
    new_id=new_short_call_id,
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    quirks="Ids are nine letters and digits: fresh ones, or the model's own after `[CALL_ID]`. The array may lack its brackets.",
    signs=("[TOOL_CALLS]",),
)
MISTRAL_ARRAY = replace(MISTRAL, call="{object}", block="[TOOL_CALLS] [{calls}]", separator=", ")


def mistral(turn: Turn) -> JsonStream:
    """Every generation is read; the vocabulary decides how calls are written."""
    return (MISTRAL if "[ARGS]" in turn.added_tokens else MISTRAL_ARRAY)(turn)


RECIPIENT, ALL = ">>>", "all\n"


class FunctionaryMessages(ToolParser):
    """Functionary 3.2: messages, each with a line that names its recipient. The prompt has opened the first one.

    A line that names neither an offered tool nor `all` is text.
    """

    tool_format = None  # of a form that calls at the very start of an answer, which no format can say

    def __init__(self, turn: Turn) -> None:
        offered = ToolSchemas(turn.tools)
        envelope = CallEnvelope(openings=(RECIPIENT,))
        head = CallHead({"name": {"\n": None}}, lambda fields: (fields["name"], None) if fields["name"] in offered else None)
        self._is_off = turn.tool_choice == "none"
        self._calls = JsonStream(turn, envelope, head=head)
        self._buffer = StepBuffer(turn.added_tokens)
        self._names = tuple(f"{name}\n" for name in offered.names)
        self._is_at_start = True
        self._is_recipient_implied = False  # the prompt has written it, so that it is no text where no call comes of it

    @property
    def is_in_call(self) -> bool:
        return self._calls.is_in_call

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for part in split_at_calls(text):
            self._buffer.feed(part)
            events += self._buffer.run(self._step)
        return events

    def finish(self) -> list[Event]:
        rest = [event for piece in self._buffer.finish() for event in self._through(piece)]
        return [*rest, *self._without_implied(self._calls.finish())]

    def _step(self, events: list[Event]) -> None:
        if self._is_at_start:
            self._read_first_line(events)
        else:
            self._buffer.until(lambda piece: events.extend(self._through(piece)), *(() if self.is_in_call else (RECIPIENT + ALL,)))

    def _read_first_line(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(ALL, *(() if self._is_off else self._names))
        self._is_at_start = False
        for piece in space if marker != ALL else ():
            events += self._through(piece)
        if marker is not None and marker != ALL:
            self._is_recipient_implied = True
            events += self._through(RECIPIENT + marker)

    def _through(self, text: str) -> list[Event]:
        return self._without_implied(self._calls.feed(text))

    def _without_implied(self, events: list[Event]) -> list[Event]:
        if not events or not self._is_recipient_implied:
            return events
        self._is_recipient_implied = False
        first = events[0]
        return [Text(first.text.removeprefix(RECIPIENT)), *events[1:]] if isinstance(first, Text) else events


@hookimpl
def register_tool_parsers(register: Register) -> None:
    for row in (*BLOCKS, *ARRAYS, *BARE):
        register(row.name, row, row.info)
    register(GIGACHAT.name, gigachat3, GIGACHAT.info)
    register(QWEN25.name, qwen25_coder, QWEN25.info)
    for row in FORMATS:
        register(row.name, row, row.info)
    register(MISTRAL.name, mistral, MISTRAL.info)
    info = FormatInfo(
        models="Functionary 3.2",
        markers=(RECIPIENT, RECIPIENT + ALL),
        quirks="The prompt ends with `>>>`, so that an answer begins with the name of a tool or with `all`, which is removed. "
        "So a call may be the very beginning, which no grammar here can say: `required` and strict tools are refused.",
        aliases=("functionary", "functionary-v3.2"),
        signs=(">>>${recipient}", "recipient==all"),
        prompt_tail=RECIPIENT,
        example='weather\n{"city": "Oslo"}',
    )
    register("functionary_v32", FunctionaryMessages, info)
