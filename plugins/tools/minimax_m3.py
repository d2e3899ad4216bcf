"""MiniMax-M3: arguments as elements, nested where objects and arrays are, with the token `]<]minimax[>[` before each tag."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.markers import MarkerBuffer
from penstock.plugins.markup_calls.call_reader import Surroundings
from penstock.plugins.markup_calls.call_sections import CallSections, Envelope
from penstock.plugins.markup_calls.element_reader import ElementReader
from penstock.plugins.markup_calls.element_tool_format import ElementToolFormat
from penstock.plugins.schema_types import ToolSchemas

MARK = "]<]minimax[>["
SECTION = "tool_call"
ENVELOPE = Envelope(section=f"{MARK}<{SECTION}>", section_end=f"{MARK}</{SECTION}>", call=f"{MARK}<invoke name=")
TOOL_FORMAT = ElementToolFormat(MARK, SECTION)
INFO = FormatInfo(
    models="MiniMax-M3",
    markers=(MARK, "<tool_call>", "<invoke name=", "</invoke>", "</tool_call>"),
    quirks="An array's elements are called `item`, and a name that comes again in an object makes an array. An element that was not closed "
    "ends with the one around it.",
    aliases=("minimax-m3",),
    signs=(MARK, "<tool_call>", "<invoke name="),
    example=f'{MARK}<tool_call>\n{MARK}<invoke name="weather">{MARK}<city>Oslo{MARK}</city>{MARK}</invoke>\n{MARK}</tool_call>',
)


def minimax_m3(turn: Turn) -> CallSections:
    return CallSections(turn, ENVELOPE, _new_reader, TOOL_FORMAT)


def _new_reader(buffer: MarkerBuffer, schemas: ToolSchemas, around: Surroundings) -> ElementReader:
    return ElementReader(buffer, MARK, SECTION, schemas, around)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("minimax_m3", minimax_m3, INFO)
