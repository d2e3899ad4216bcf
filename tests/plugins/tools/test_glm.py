from typing import Any

import pytest

from penstock.plugins.tools.glm import glm45, glm47
from penstock.plugins.tools.hy_v3 import hy_v3
from tests.plugins.tools.parameter_samples import calls, content


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("<tool_call>weather\n</tool_call>", "weather", {}),
        ("<tool_call>weather</tool_call>", "weather", {}),
        ("<tool_call>\nweather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", "weather", {"city": "Oslo"}),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value> 3\n</arg_value></tool_call>", "weather", {"days": 3}),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> New\nYork </arg_value></tool_call>", "weather", {"city": " New\nYork "}),
        ("<tool_call>weather<arg_key>city\n<arg_value>Oslo</arg_value></tool_call>", "weather", {"city": "Oslo"}),
        ("<tool_call>f<arg_key>x</arg_key>\n<arg_key>y</arg_key><arg_value>1</arg_value></tool_call>", "f", {"y": 1}),
        ("<tool_call>a.b/c<arg_key>x</arg_key><arg_value>42</arg_value></tool_call>", "a.b/c", {"x": 42}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>2025-08-01</arg_value></tool_call>", "f", {"x": "2025-08-01"}),
        ('<tool_call>f<arg_key>x</arg_key><arg_value>{"a": [1]}</arg_value></tool_call>', "f", {"x": {"a": [1]}}),
        ("<tool_call>f<arg_key>x</arg_key><arg_value></arg_value></tool_call>", "f", {"x": ""}),
    ],
)
def test_names_and_values_are_read_with_and_without_line_breaks(text: str, name: str, expected: dict[str, Any]) -> None:
    for factory in (glm45, glm47):
        assert calls(factory, text) == [(name, expected)]
        assert content(factory, text) == ""


@pytest.mark.parametrize(
    "text", ["<tool_call>   ", "<tool_call>weather", '<tool_call>{"name": "f"}</tool_call>', "<tool_call>what is it</tool_call>"]
)
def test_what_has_no_name_is_content(text: str) -> None:
    assert calls(glm45, text) == []
    assert content(glm45, text) == text


def test_hunyuan_has_a_separator_after_the_name_and_a_section() -> None:
    inner = "<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
    text = f"Checking.<tool_calls>\n{inner}<tool_call>weather<tool_sep></tool_call></tool_calls>"
    assert calls(hy_v3, text) == [("weather", {"city": "Oslo"}), ("weather", {})]
    assert content(hy_v3, text) == "Checking."
