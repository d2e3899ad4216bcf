"""MiniMax-M2: reasoning up to `</think>`; the prompt opens it, and the model closes it."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags

TOOL_CALL = "<minimax:tool_call>"


def minimax_m2(turn: Turn) -> ThinkTags:
    """Always on. One end marker too many is taken out: the model repeats it at times."""
    return ThinkTags(
        start_phase(turn, Phase.REASONING),
        implicit_ends=(TOOL_CALL,),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "minimax_m2",
        minimax_m2,
        FormatInfo(
            models="MiniMax-M2",
            markers=("<think>", "</think>"),
            quirks=f"Always reasons: without `</think>`, everything is reasoning. `{TOOL_CALL}` ends it.",
            aliases=("minimax-m2", "minimax"),
            signs=("<think>", "</think>", "]~b]ai", TOOL_CALL),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
