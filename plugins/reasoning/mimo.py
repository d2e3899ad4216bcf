"""MiMo: reasons as Qwen3 does."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.reasoning.qwen3 import qwen3


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "mimo",
        qwen3,
        FormatInfo(
            models="MiMo",
            markers=("<think>", "</think>"),
            quirks="As `qwen3`.",
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
