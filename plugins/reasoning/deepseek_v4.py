"""DeepSeek-V4: `<think>` … `</think>`, which a tool call may cut short."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

TOOL_CALLS = ("<｜DSML｜tool_calls>", "<｜DSML｜ calls>", "<｜DSML｜function_calls>")  # V4, V4.1, and V3.2's at times


def deepseek_v4(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, the request may have switched reasoning off."""
    is_off = is_switched_off(turn, "thinking", "enable_thinking") or turn.chat_template_kwargs.get("reasoning_effort") == "none"
    return ThinkTags(
        start_phase(turn, Phase.CONTENT if is_off else Phase.UNDECIDED),
        implicit_ends=TOOL_CALLS,
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "deepseek_v4",
        deepseek_v4,
        FormatInfo(
            models="DeepSeek-V4, DeepSeek-V4.1",
            markers=("<think>", "</think>"),
            quirks="On unless `thinking` or `enable_thinking` is false or `reasoning_effort` is `none`. Tool calls end the reasoning.",
            aliases=("deepseek-v4", "deepseek_v41", "deepseek-v41"),
            signs=("<think>", "</think>", "<｜Assistant｜>", "thinking", "｜DSML｜", "tool_calls>"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
