from typing import Any

import pytest

from tests.helpers.tool_parsers import tool_parser
from tests.plugins.tools.parameter_samples import calls, content

minicpm5 = tool_parser("minicpm5")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Oslo", "Oslo"),
        (" Oslo\n", " Oslo\n"),
        ("<![CDATA[a </param> b\n]]>", "a </param> b\n"),
        ("\n<![CDATA[]]>\n", ""),
        ("&lt;&xxe;", "&lt;&xxe;"),
    ],
)
def test_a_string_stands_in_cdata_or_by_itself(value: str, expected: str) -> None:
    text = f'See.\n<function name="weather"><param name="city">{value}</param><param name="days">3</param></function>\nDone.'
    arguments: dict[str, Any] = {"city": expected, "days": 3}
    assert calls(minicpm5, text) == [("weather", arguments)]
    assert content(minicpm5, text) == "See.\n\nDone."


def test_what_calls_a_tool_that_is_not_offered_is_content() -> None:
    text = 'Write <function name="other"><param name="x">1</param></function>.'
    assert calls(minicpm5, text) == []
    assert content(minicpm5, text) == text
