"""GLM-4.5 and later, Ling 3: `<think>` … `</think>`, which a tool call may cut short."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags


def glm45(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, the request may have switched reasoning off.

    Models that always think say so in their prompts, whatever the request.
    """
    is_off = is_switched_off(turn, "enable_thinking", "thinking")
    return ThinkTags(
        start_phase(turn, Phase.CONTENT if is_off else Phase.UNDECIDED),
        implicit_ends=("<tool_call>",),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    quirks = "On unless `enable_thinking` or `thinking` is false. `<tool_call>` ends the reasoning."
    register(
        "glm45",
        glm45,
        FormatInfo(
            models="GLM-4.5, GLM-4.6",
            markers=("<think>", "</think>"),
            quirks=quirks,
            signs=("<think>", "</think>", "<|assistant|>", "<tool_call>", "<arg_key>"),
            example="<think>Capitals.</think>\nOslo.",
        ),
    )
    register(
        "glm47",
        glm45,
        FormatInfo(
            models="GLM-4.7, GLM-5, Ling 3",
            markers=("<think>", "</think>"),
            quirks=f"{quirks} The same parser as `glm45`; these models' prompts open the reasoning.",
            aliases=("ling3",),
            signs=("<think>", "</think>", "<role>ASSISTANT</role>"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
