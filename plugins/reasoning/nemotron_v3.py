"""Nemotron 3: `<think>` … `</think>`, and an answer even where the model never closes its reasoning."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase, ReasoningParser
from penstock.engine.turn import Turn
from penstock.plugins.nonempty_content import NonemptyContent
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags


def nemotron_v3(turn: Turn) -> ReasoningParser:
    """Reasoning that no content follows becomes content, where thinking is off or the request wants content in any case."""
    parser = ThinkTags(
        start_phase(turn),
        implicit_ends=("<tool_call>",),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )
    return with_content(turn, parser)


def with_content(turn: Turn, parser: ReasoningParser) -> ReasoningParser:
    """The parser, made to give content where the request asks for that and the prompt has not closed the reasoning already."""
    wants_content = is_switched_off(turn, "enable_thinking") or turn.chat_template_kwargs.get("force_nonempty_content") is True
    return NonemptyContent(parser) if wants_content and parser.phase is not Phase.CONTENT else parser


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "nemotron_v3",
        nemotron_v3,
        FormatInfo(
            models="Nemotron 3",
            markers=("<think>", "</think>"),
            quirks=(
                "On unless `enable_thinking` is false. `<tool_call>` ends the reasoning. With thinking off or `force_nonempty_content`, "
                "reasoning that no content follows is content; it is known only at the end, so the reasoning does not stream."
            ),
            aliases=("nemotron-v3", "nemotron_3", "nemotron-3"),
            signs=("<think>", "</think>", "<|im_start|>", "<tool_call>", "truncate_history_thinking"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\nOslo.",
        ),
    )
