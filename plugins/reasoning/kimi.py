"""The first Kimi models that reason: `◁think▷` … `◁/think▷`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags

START = "◁think▷"
END = "◁/think▷"


def kimi(turn: Turn) -> ThinkTags:
    """The model opens its reasoning itself."""
    return ThinkTags(
        start_phase(turn, starts=START, ends=END),
        starts=(START,),
        ends=(END,),
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "kimi",
        kimi,
        FormatInfo(
            models="Kimi-VL-Thinking",
            markers=(START, END),
            signs=(START, END),
            example=f"{START}Capitals.{END}Oslo.",
        ),
    )
