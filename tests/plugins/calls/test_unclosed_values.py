"""Values whose end tag is missing: what closes the call, as plain text, is no part of them."""

import pytest

from penstock.engine.contracts.parsing import Text, ToolCallArguments, Turn
from penstock.plugins.manager import Plugins
from penstock.testing import check_cuts, read
from tests.plugins.tools.parameter_samples import TOOLS

VALUE_ENDS = {
    "dots": "</parameter>",
    "glm45": "</arg_value>",
    "glm47": "</arg_value>",
    "hy_v3": "</arg_value>",
    "k2_horizon": "</ifm|arg_value>",
    "minicpm5": "]]></param>",
    "minimax_m2": "</parameter>",
    "muse_glimmer": "</atem:parameter>",
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "step3": "</steptml:parameter>",
}
FORMATS = pytest.mark.parametrize("name", VALUE_ENDS)
REGISTRY = Plugins.start(["none"]).tool_parsers
TURN = Turn(tools=TOOLS, tool_choice="auto")
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'


def answer(name: str, text: str) -> tuple[list[str], str]:
    """The arguments of the calls, and the content."""
    calls: dict[int, str] = {}
    events = read(REGISTRY[name](TURN), [text])
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index] = calls.get(event.index, "") + event.fragment
    return list(calls.values()), "".join(event.text for event in events if isinstance(event, Text))


def unclosed(name: str) -> str:
    """A call whose value has a line break in the place of its end tag."""
    head, tail = REGISTRY.infos[name].example.split(VALUE_ENDS[name])
    return f"{head.rstrip()}\n{tail.lstrip()}"


@FORMATS
def test_the_end_of_the_call_ends_the_value_and_text_after_it_is_content(name: str) -> None:
    assert answer(name, f"{unclosed(name)}After") == ([OSLO], "After")


@FORMATS
def test_calls_after_it_are_read(name: str) -> None:
    text = f"{unclosed(name)}Then {unclosed(name).replace('Oslo', 'Rome')}{REGISTRY.infos[name].example}Tail"
    assert answer(name, text) == ([OSLO, ROME, OSLO], "Then Tail")


@FORMATS
def test_a_value_that_is_closed_may_quote_what_closes_the_call(name: str) -> None:
    info = REGISTRY.infos[name]
    quoted = info.markers[-1]
    text = info.example.replace("Oslo", f"Oslo{quoted} and{quoted}!")
    assert answer(name, text) == ([f'{{"city": "Oslo{quoted} and{quoted}!"}}'], "")


@FORMATS
def test_a_value_that_is_cut_stays_open(name: str) -> None:
    example = REGISTRY.infos[name].example
    assert answer(name, example[: example.index("Oslo") + 3]) == (['{"city": "Osl'], "")


ALIKE = ("glm47", "hy_v3", "k2_horizon", "muse_glimmer", "seed_oss", "step3")  # whose markers have other words than those of others


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in ALIKE)) for name in VALUE_ENDS])
def test_any_cut_gives_the_same_answer(name: str) -> None:
    info = REGISTRY.infos[name]
    samples = [f"{unclosed(name)}a {unclosed(name)}b", f"{unclosed(name)}{info.markers[0]}\n{info.example}"]
    check_cuts(REGISTRY[name], samples, markers=info.markers, turn=TURN, max_examples=5)


@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_a_parameter_without_a_value_is_left_out(name: str) -> None:
    assert answer(name, "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>After") == (["{}"], "After")
    assert answer(name, "<tool_call>weather\n<arg_key>city</arg_key><tool_call>weather\n</tool_call>") == (["{}", "{}"], "")
