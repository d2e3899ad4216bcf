"""Qwen3: `<think>` … `</think>`, written by the template or by the model, and switched off by `enable_thinking`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

TURN_BOUNDARIES = ("<|im_start|>", "<|im_end|>")


def qwen3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, `enable_thinking: false` starts in content.

    A tool call ends the reasoning, and so does the turn itself. One end marker too many is taken out: the model repeats it at times.
    """
    untold = Phase.CONTENT if is_switched_off(turn, "enable_thinking") else Phase.UNDECIDED
    return ThinkTags(
        start_phase(turn, untold, boundaries=TURN_BOUNDARIES),
        implicit_ends=("<tool_call>", *TURN_BOUNDARIES),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "qwen3",
        qwen3,
        FormatInfo(
            models="Qwen3, Qwen3.5, Qwen3-Thinking, QwQ, MiniCPM-V",
            markers=("<think>", "</think>"),
            quirks="On unless `enable_thinking` is false. `<tool_call>` ends the reasoning; a second `</think>` is taken out.",
            aliases=("qwen3-thinking", "qwen3_thinking", "minicpmv"),
            signs=("<think>", "</think>", "<|im_start|>", "<tool_call>"),
            counter_signs=("<｜Assistant｜>",),  # a distillation of DeepSeek-R1 has the vocabulary
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
