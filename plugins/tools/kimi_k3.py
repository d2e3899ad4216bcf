"""Kimi-K3: calls and arguments in tags of their own tokens, `<|open|>call tool="NAME" index="1"<|sep|>` … `<|close|>call<|sep|>`."""

import re

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markup_calls.call_sections import CallSections
from penstock.plugins.markup_calls.parameter_calls import parameter_calls
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, Tag
from penstock.plugins.markup_calls.parameter_tool_format import ParameterToolFormat

SEPARATOR = "<|sep|>"
CALL, PARAMETER = "<|open|>call ", "<|open|>argument "
CALL_END, VALUE_END = f"<|close|>call{SEPARATOR}", f"<|close|>argument{SEPARATOR}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read_tag(text: str) -> Tag | None:
    """The attributes of a call or of an argument, in which two characters are escaped."""
    attributes = {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(text)}
    name = attributes.get("tool") or attributes.get("key")
    return None if name is None else Tag(name, attributes.get("type", "string") == "string" if "key" in attributes else None)


MARKUP = ParameterMarkup(
    section=f"<|open|>tools{SEPARATOR}",
    section_end=f"<|close|>tools{SEPARATOR}",
    call=CALL,
    call_end=CALL_END,
    parameter=PARAMETER,
    value_end=VALUE_END,
    tag_end=SEPARATOR,
    read_tag=_read_tag,
    implied_ends=(PARAMETER, CALL_END),
)
TOOL_FORMAT = ParameterToolFormat(
    markup=MARKUP,
    opening=MARKUP.section,
    call=f'{CALL}tool="NAME" index="1"{SEPARATOR}',
    parameter=f'{PARAMETER}key="NAME" type="JSON_TYPE"{SEPARATOR}',
    call_end=CALL_END,
    closing=MARKUP.section_end,
)


def kimi_k3(turn: Turn) -> CallSections:
    return parameter_calls(turn, MARKUP, TOOL_FORMAT)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Kimi-K3",
        markers=(*MARKUP.markers, SEPARATOR),
        quirks="A `type` of `string` is a string where the schema allows one, any other is JSON. The index is ignored, and forced "
        "calls all have 1. Arguments in one block of JSON are content.",
        aliases=("kimi-k3",),
        signs=("<|open|>", "<|close|>", SEPARATOR, "<|end_of_msg|>"),
        example=f'{MARKUP.section}{CALL}tool="weather" index="1"{SEPARATOR}{PARAMETER}key="city" type="string"{SEPARATOR}Oslo{VALUE_END}'
        f"{CALL_END}{MARKUP.section_end}",
    )
    register("kimi_k3", kimi_k3, info)
