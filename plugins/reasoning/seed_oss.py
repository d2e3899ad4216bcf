"""Seed-OSS: `<seed:think>` … `</seed:think>`, which the model writes itself and a tool call may cut short."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags

START = "<seed:think>"
END = "</seed:think>"
TOOL_CALL = "<seed:tool_call>"
TURN_BOUNDARIES = ("<seed:bos>", "<seed:eos>")


def seed_oss(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends: with a budget of 0 that is a closed block."""
    return ThinkTags(
        start_phase(turn, starts=START, ends=END, boundaries=TURN_BOUNDARIES),
        starts=(START,),
        ends=(END,),
        implicit_ends=(TOOL_CALL,),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "seed_oss",
        seed_oss,
        FormatInfo(
            models="Seed-OSS",
            markers=(START, END),
            quirks=f"`{TOOL_CALL}` ends the reasoning.",
            aliases=("seed-oss",),
            signs=(START, END),
            prompt_tail=START,
            example=f"{START}Capitals.{END}Oslo.",
        ),
    )
