"""MiniMax-M3: `<mm:think>` … `</mm:think>`, by the template's `thinking_mode`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags

START = "<mm:think>"
END = "</mm:think>"


def minimax_m3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends. An answer may begin with an end marker, as earlier turns without reasoning do in the prompt."""
    phase = start_phase(turn, starts=START, ends=END)
    return ThinkTags(
        phase, starts=(START,), ends=(END,), drops_leading_end=True, is_constrained=turn.is_constrained, added_tokens=turn.added_tokens
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "minimax_m3",
        minimax_m3,
        FormatInfo(
            models="MiniMax-M3",
            markers=(START, END),
            quirks="Switched by `thinking_mode`: `enabled`, `disabled` or `adaptive`, the default. A leading end marker is taken out.",
            aliases=("minimax-m3",),
            signs=(START, END),
            example=f"{START}Capitals.{END}Oslo.",
        ),
    )
