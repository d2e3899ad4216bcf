"""Tool calls that are named before their arguments, and only these are JSON: `<call>weather<args>{"city": "Oslo"}`."""

import re
from collections.abc import Mapping
from dataclasses import replace

from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, Identity, JsonStream
from penstock.plugins.calls.stream import new_short_call_id

_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+")


def _kimi_identity(fields: Mapping[str, str]) -> Identity | None:
    """Kimi's ids hold the name: `functions.f:0`."""
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
        "An id without a number is no call. Text after the section is content.",
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


@hookimpl
def register_tool_parsers(register: Register) -> None:
    for row in FORMATS:
        register(row.name, row, row.info)
    register(MISTRAL.name, mistral, MISTRAL.info)
