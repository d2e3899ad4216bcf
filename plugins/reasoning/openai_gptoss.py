"""gpt-oss: reasoning in messages of the channel `analysis`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.harmony import ANALYSIS, CHANNEL, ENDS, FINAL, MESSAGE, ROLE, Harmony

INFO = FormatInfo(
    models="gpt-oss",
    markers=(ANALYSIS, *ENDS, ROLE, FINAL),
    quirks=(
        "there may be several blocks; the final message and commentary without recipient are content, calls are left to the tool parser, "
        "and what goes to other recipients is reasoning; always on"
    ),
    aliases=("openai-gptoss", "gpt_oss", "gpt-oss", "gptoss"),
    signs=(CHANNEL, MESSAGE, "analysis"),
    prompt_tail=ROLE,
    example=f"{ANALYSIS}why<|end|>{ROLE}{FINAL}because",
)


def openai_gptoss(turn: Turn) -> Harmony:
    """Reasons from the start, unless the prompt has opened another message."""
    return Harmony(turn, reads_calls=False)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("openai_gptoss", openai_gptoss, INFO)
