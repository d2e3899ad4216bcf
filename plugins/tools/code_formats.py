"""Tool calls written as code: named parameters in markup, `<function=f><parameter=x>1</parameter></function>`, elements, lists of Python
calls, `[f(x=1)]`, and Gemma's notation, `call:f{x:1}`.
"""

import re
from dataclasses import replace

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import ToolParser, Turn
from penstock.plugins.calls.elements import ElementFormat
from penstock.plugins.calls.expression_formats import NotationFormat, PythonFormat
from penstock.plugins.calls.json_format import JsonFormat
from penstock.plugins.calls.markup_format import MarkupFormat
from penstock.plugins.calls.markup_reader import Tag
from penstock.plugins.calls.schema_values import SCALARS
from penstock.plugins.calls.section_stream import SectionStream
from penstock.plugins.calls.stream import ParsersInTurn
from penstock.plugins.markers import marker_suffix

QWEN3_CODER = MarkupFormat(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen3.5, Qwen3.6, MiMo, Nemotron 3, Step 3.5, MiniCPM-V",
    call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    parameter="<parameter={name}>\n{value}\n</parameter>\n",
    separator="\n",
    may_lack_section=True,
    may_lack_value_end=True,
    quirks="One line break at either end of a value belongs to the markup. A missing `<tool_call>` is accepted at the beginning of a line, "
    "unless a tool is strict, and so is a missing `</parameter>`.",
    aliases=("qwen3_xml", "qwen3-coder", "qwen3_5", "mimo", "nemotron_v3", "nemotron_3", "step3p5", "step5", "minicpmv"),
    signs=("<tool_call>", "<function=", "<parameter="),
)
MINIMAX_M2 = MarkupFormat(
    name="minimax_m2",
    models="MiniMax-M2",
    call='\n<invoke name="{name}">\n{parameters}</invoke>',
    parameter='<parameter name="{name}">{value}</parameter>\n',
    block="<minimax:tool_call>{calls}\n</minimax:tool_call>",
    quirks="XML entities stay as they are written, and so does white space around a string.",
    aliases=("minimax-m2",),
    signs=("<minimax:tool_call>",),
)
TAGS = (
    QWEN3_CODER,
    MarkupFormat(
        name="dots",
        models="dots",
        call='<invoke name="{name}">{parameters}</invoke>',
        parameter='<parameter name="{name}">{value}</parameter>',
        block="<dots_function_call>{calls}</dots_function_call>",
        quirks="As MiniMax-M2.",
        signs=("<dots_function_call>",),
    ),
    MarkupFormat(
        name="minicpm5",
        models="MiniCPM5",
        call='<function name="{name}">{parameters}</function>',
        parameter='<param name="{name}">{value}</param>',
        separator="\n",
        literal="<![CDATA[",
        literal_end="]]>",
        is_offered_only=True,
        quirks="CDATA is optional. What calls a tool that is not offered is content.",
        aliases=("minicpm5_xml",),
        signs=("<function name=", "<param name="),
    ),
    MINIMAX_M2,
    MarkupFormat(
        name="muse_glimmer",
        models="Muse Glimmer, Muse Spark",
        call='\n<atem:invoke name="{name}">\n{parameters}</atem:invoke>',
        parameter='<atem:parameter name="{name}">{value}</atem:parameter>\n',
        block="<atem:function_calls>{calls}\n</atem:function_calls>",
        reads_untyped_json=True,
        quirks="Values without a type in the schema are read as JSON if they parse, else as strings. The reasoning parser of the "
        "same name takes the headers of messages out.",
        aliases=("muse", "muse-glimmer"),
        signs=("<atem:function_calls>",),
    ),
    MarkupFormat(
        name="seed_oss",
        models="Seed-OSS",
        call="<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        parameter="<parameter={name}>{value}</parameter>\n",
        separator="\n",
        may_lack_section=True,
        may_lack_value_end=True,
        quirks="As Qwen3-Coder, but that line breaks at the ends of a value belong to it.",
        aliases=("seed-oss",),
        signs=("<seed:tool_call>",),
    ),
    MarkupFormat(
        name="step3",
        models="Step 3",
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters}</steptml:invoke><｜tool_call_end｜>',
        parameter='<steptml:parameter name="{name}">{value}</steptml:parameter>',
        block="<｜tool_calls_begin｜>{calls}<｜tool_calls_end｜>",
        call_start="<｜tool_call_begin｜>",
        lead="<steptml:invoke name=",
        call_end="</steptml:invoke>",
        skipped=("<｜tool_call_end｜>", "<｜tool_sep｜>"),
        quirks="The text between `<｜tool_call_begin｜>` and `<steptml:invoke` is ignored.",
        aliases=("step-3",),
        signs=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    ),
)

_GLM_QUIRKS = "Values without a type in the schema are read as JSON if they parse, else as strings. Line breaks are optional on reading."
LINES = (
    MarkupFormat(
        name="glm45",
        models="GLM-4.5, GLM-4.6",
        call="<tool_call>{name}\n{parameters}</tool_call>",
        parameter="<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n",
        separator="\n",
        reads_untyped_json=True,
        quirks=_GLM_QUIRKS,
        aliases=("glm", "glm4_moe", "glm46", "poolside_v1"),
        signs=("<arg_key>", "<arg_value>"),
        counter_signs=("<tool_sep>",),
    ),
    MarkupFormat(
        name="glm47",
        models="GLM-4.7, GLM-5",
        call="<tool_call>{name}{parameters}</tool_call>",
        parameter="<arg_key>{name}</arg_key><arg_value>{value}</arg_value>",
        reads_untyped_json=True,
        quirks=_GLM_QUIRKS,
        aliases=("glm47_moe", "glm5", "ling3"),
        signs=("<arg_key>", "<arg_value>", "{function-name}<arg_key>"),
        counter_signs=("<tool_sep>",),
    ),
)


def _hunyuan(suffix: str) -> MarkupFormat:
    """GLM's markup with a `<tool_sep>` after the tool's name, and markers with the suffix that the checkpoint's own template chooses."""
    return MarkupFormat(
        name="hy_v3",
        models="Tencent Hunyuan 3 and 4",
        call=f"\n<tool_call{suffix}>{{name}}<tool_sep{suffix}>\n{{parameters}}</tool_call{suffix}>",
        parameter=f"<arg_key{suffix}>{{name}}</arg_key{suffix}>\n<arg_value{suffix}>{{value}}</arg_value{suffix}>\n",
        block=f"<tool_calls{suffix}>{{calls}}\n</tool_calls{suffix}>",
        reads_untyped_json=True,
        quirks="As GLM. Checkpoints may add a suffix to their markers, `<tool_calls:x>`: that of the prompt or of the vocabulary is read.",
        aliases=("hy_v4", "hunyuan_v3", "hunyuan"),
        signs=("toolsep_token", "argkey_begin_token", "argvalue_begin_token"),
    )


HUNYUAN = _hunyuan("")


def hy_v3(turn: Turn) -> SectionStream:
    suffix = marker_suffix(turn)
    return (_hunyuan(suffix) if suffix else HUNYUAN)(turn)


K2_HORIZON = MarkupFormat(
    name="k2_horizon",
    models="K2-Horizon",
    call="<ifm|tool_call>{name}{parameters}</ifm|tool_call>",
    parameter="<ifm|arg_key>{name}</ifm|arg_key><ifm|arg_value>{value}</ifm|arg_value>",
    block="<ifm|tool_calls>{calls}</ifm|tool_calls>",
    separator="\n",
    type_start="<ifm|arg_type>",
    type_end="</ifm|arg_type>",
    quirks="As GLM, with a type in `<ifm|arg_type>` where `tool_call_format` is `xml_typed`; with `json`, calls are objects with a "
    "name and arguments. All three are read.",
    aliases=("k2-horizon",),
    signs=("<ifm|tool_calls>", "<ifm|tool_call>"),
)
K2_HORIZON_JSON = JsonFormat(
    call="<ifm|tool_call>{object}</ifm|tool_call>", block="<ifm|tool_calls>{calls}</ifm|tool_calls>", separator="\n"
)


def k2_horizon(turn: Turn) -> ToolParser:
    """All forms are read; the request's `tool_call_format` says which one its prompt asks for."""
    written = K2_HORIZON_JSON if turn.chat_template_kwargs.get("tool_call_format") == "json" else K2_HORIZON
    return ParsersInTurn(K2_HORIZON_JSON(turn), lambda: K2_HORIZON(turn), written.tool_format)


LONGCAT = JsonFormat(
    name="longcat",
    models="LongCat-Flash",
    call="<longcat_tool_call>\n{object}\n</longcat_tool_call>",
    separator="\n",
    markers=(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
    quirks="A block holds an object or, as LongCat-2.0 writes it, a name and pairs of `<longcat_arg_key>` and `<longcat_arg_value>`.",
    signs=("<longcat_tool_call>",),
)
LONGCAT_20 = MarkupFormat(
    call="<longcat_tool_call>{name}{parameters}</longcat_tool_call>",
    parameter="<longcat_arg_key>{name}</longcat_arg_key><longcat_arg_value>{value}</longcat_arg_value>",
    reads_untyped_json=True,
)


def longcat(turn: Turn) -> ToolParser:
    """Every block is one call, written in either way."""
    return ParsersInTurn(LONGCAT(turn), lambda: LONGCAT_20(turn), LONGCAT.tool_format)


_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read_kimi_tag(text: str) -> Tag | None:
    """The attributes of a call or of an argument, in which two characters are escaped."""
    attributes = {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(text)}
    name = attributes.get("tool") or attributes.get("key")
    return None if name is None else Tag(name, attributes.get("type", "string") == "string" if "key" in attributes else None)


KIMI_K3 = MarkupFormat(
    name="kimi_k3",
    models="Kimi-K3",
    call='<|open|>call tool="{name}" index="1"<|sep|>{parameters}<|close|>call<|sep|>',
    parameter='<|open|>argument key="{name}" type="{json_type}"<|sep|>{value}<|close|>argument<|sep|>',
    block="<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>",
    call_start="<|open|>call ",
    parameter_start="<|open|>argument ",
    tag_end="<|sep|>",
    read_tag=_read_kimi_tag,
    may_lack_value_end=True,
    markers=(
        "<|open|>tools<|sep|>",
        "<|open|>call ",
        "<|open|>argument ",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
        "<|sep|>",
    ),
    quirks="A `type` of `string` is a string where the schema allows one, any other is JSON. The index is ignored, and forced "
    "calls all have 1. Arguments in one block of JSON are content.",
    aliases=("kimi-k3",),
    signs=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
)

# DSML of DeepSeek, in which each parameter says itself whether it is a string.
DSML_TOKEN = "｜DSML｜"


def _dsml(name: str, section: str, space: str = "") -> MarkupFormat:
    return MarkupFormat(
        name=name,
        call=f'\n<{DSML_TOKEN}{space}invoke name="{{name}}">\n{{parameters}}</{DSML_TOKEN}{space}invoke>',
        parameter=f'<{DSML_TOKEN}{space}parameter name="{{name}}" string="{{is_string}}">{{value}}</{DSML_TOKEN}{space}parameter>\n',
        block=f"<{DSML_TOKEN}{section}>{{calls}}\n</{DSML_TOKEN}{section}>",
        may_lack_section=True,
        may_lack_value_end=True,
        wrappers=("arguments", "input"),
        quirks='`string="true"` is a string where the schema allows one, `string="false"` is JSON. A parameter `arguments` or `input` '
        "that the tool does not have holds the arguments. The section may be missing at the beginning of a line, unless a tool "
        "is strict.",
    )


DEEPSEEK_V32 = replace(
    _dsml("deepseek_v32", "function_calls"), models="DeepSeek-V3.2", aliases=("deepseekv32", "deepseek-v32"), signs=(DSML_TOKEN,)
)
DEEPSEEK_V32_SECTION = replace(DEEPSEEK_V32, may_lack_section=False)
DEEPSEEK_V41 = replace(
    _dsml("deepseek_v41", " calls", space=" "),
    models="DeepSeek-V4.1",
    aliases=("deepseekv41", "deepseek-v41"),
    signs=(DSML_TOKEN, f"<{DSML_TOKEN} calls>", f"<{DSML_TOKEN} invoke name="),
)
_V4 = _dsml("deepseek_v4", "tool_calls")
DEEPSEEK_V4 = replace(
    _V4,
    models="DeepSeek-V4",
    markers=(*_V4.all_markers, DEEPSEEK_V32.markup.section, DEEPSEEK_V32.markup.section_end),
    quirks=f"{_V4.quirks} V3.2's section is read as well.",
    aliases=("deepseekv4", "deepseek-v4"),
    signs=(DSML_TOKEN, "<｜latest_reminder｜>"),
    other_signs=((DSML_TOKEN, "tool_calls>"),),
)


def deepseek_v4(turn: Turn) -> ToolParser:
    """Reads V3.2's section too, which the model writes now and then. A grammar allows its own alone."""
    in_v32_section = DEEPSEEK_V32_SECTION(replace(turn, tool_choice="none") if turn.is_constrained else turn)
    return ParsersInTurn(in_v32_section, lambda: DEEPSEEK_V4(turn), DEEPSEEK_V4.tool_format)


MINIMAX_M3 = ElementFormat(
    name="minimax_m3",
    models="MiniMax-M3",
    mark="]<]minimax[>[",
    section="tool_call",
    quirks="An array's elements are called `item`, and a repeated name in an object makes an array. An element that was not closed "
    "ends with the one around it.",
    aliases=("minimax-m3",),
    signs=("]<]minimax[>[", "<tool_call>", "<invoke name="),
)


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
    for row in (*PYTHON, *NOTATION, *TAGS, *LINES, KIMI_K3, DEEPSEEK_V32, DEEPSEEK_V41, MINIMAX_M3):
        register(row.name, row, row.info)
    register(LFM2.name, lfm2, LFM2.info)
    register(HUNYUAN.name, hy_v3, HUNYUAN.info)
    register(K2_HORIZON.name, k2_horizon, K2_HORIZON.info)
    register(LONGCAT.name, longcat, LONGCAT.info)
    register(DEEPSEEK_V4.name, deepseek_v4, DEEPSEEK_V4.info)
