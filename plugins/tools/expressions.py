"""Tool calls that are expressions: lists of Python calls, `[f(x=1)]`, and Gemma's notation, `call:f{x:1}`."""

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import ToolParser, Turn
from penstock.plugins.calls.expression_formats import NotationFormat, PythonFormat
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.calls.schema_values import SCALARS
from penstock.plugins.calls.stream import ParsersInTurn

PYTHON = (
    PythonFormat(
        name="llama4_pythonic",
        models="Llama 4",
        block="<|python_start|>[{calls}]<|python_end|>",
        is_bare=True,
        quirks="the markers may be missing where the answer begins with the list",
        aliases=("llama4-pythonic", "llama4"),
        signs=("<|python_start|>", "<|python_end|>"),
    ),
    PythonFormat(
        name="olmo3",
        models="OLMo 3",
        block="<function_calls>{calls}</function_calls>",
        separator="\n",
        quirks="JSON's `true`, `false` and `null` are read too",
        aliases=("olmo-3",),
        signs=("<function_calls>", "</function_calls>"),
        example='<function_calls>weather(city="Oslo")</function_calls>',
    ),
    PythonFormat(
        name="pythonic",
        models="Llama 3.2 (1B, 3B), ToolACE, Gemma 3",
        block="[{calls}]",
        is_bare=True,
        markers=("[", "]"),
        quirks="only where the answer begins with the list; literals only, each by a keyword; the last bracket of a call may be missing",
        signs=("[func_name1(params_name1=params_value1, ",),
    ),
)
NOTATION = (
    NotationFormat(
        name="functiongemma",
        models="FunctionGemma",
        start="<start_function_call>",
        end="<end_function_call>",
        delimiter="<escape>",
        types_of_strings=SCALARS,
        quirks="all values are enclosed in delimiters: without a schema, what looks like a number or a constant is one",
        aliases=("function_gemma", "function-gemma"),
        signs=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    NotationFormat(
        name="gemma4",
        models="Gemma 4",
        start="<|tool_call>",
        end="<tool_call|>",
        delimiter='<|"|>',
        quirks="values are coerced by the tool's schema; strings in quotation marks, `None` and several calls between one pair of markers "
        "are read",
        aliases=("gemma-4",),
        signs=("<|tool_call>", "<tool_call|>", '<|"|>'),
        prompt_tail="<|turn>model\n",
    ),
)

LFM2 = PythonFormat(
    name="lfm2",
    models="LFM2, LFM2.5",
    block="<|tool_call_start|>[{calls}]<|tool_call_end|>",
    may_lack_brackets=True,
    quirks="the brackets of the list may be missing; quotation marks inside strings of their own kind, line breaks in strings and numbers "
    "like `07` are read; so are calls in JSON",
    aliases=("lfm2.5",),
    signs=("<|tool_call_start|>", "<|tool_call_end|>"),
    other_signs=(("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking")),
)
LFM2_JSON = JsonFormat(call="<|tool_call_start|>{object}<|tool_call_end|>", may_be_array=True)


def lfm2(turn: Turn) -> ToolParser:
    """A list of Python calls, or JSON where the prompt asks for it."""
    return ParsersInTurn(LFM2_JSON(turn), lambda: LFM2(turn), LFM2.tool_format)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    for row in (*PYTHON, *NOTATION):
        register(row.name, row, row.info)
    register(LFM2.name, lfm2, LFM2.info)
