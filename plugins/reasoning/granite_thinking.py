"""Granite 4.2: `<think>` … `</think>`, with line breaks before the content that are none of it."""

import sys

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import ReasoningParser
from penstock.engine.turn import Turn
from penstock.plugins.reasoning.nemotron_v3 import with_content
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def granite_thinking(turn: Turn) -> ReasoningParser:
    """As Nemotron 3, but for the line breaks."""
    parser = ThinkTags(
        start_phase(turn),
        implicit_ends=("<tool_call>",),
        num_stray_ends=1,
        newlines_after_end=sys.maxsize,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )
    return with_content(turn, parser)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "granite_thinking",
        granite_thinking,
        FormatInfo(
            models="Granite 4.2",
            markers=("<think>", "</think>"),
            quirks="As `nemotron_v3`; line breaks after `</think>` belong to it.",
            aliases=("granite-thinking", "granite_thinking_parser"),
            signs=("<think>", "</think>", "<|start_of_role|>"),
            counter_signs=("<response>",),  # Granite 3.3 writes another format
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\nOslo.",
        ),
    )
