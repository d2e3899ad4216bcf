"""Step-3: reasoning up to `</think>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.reasoning.deepseek_r1 import deepseek_r1


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "step3",
        deepseek_r1,
        FormatInfo(
            models="Step-3",
            markers=("<think>", "</think>"),
            quirks="Always reasons: without `</think>`, everything is reasoning.",
            signs=("<think>", "</think>", "<｜tool_calls_begin｜>", "<steptml:invoke"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
