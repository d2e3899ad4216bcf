"""Solar Open: reasoning, content and calls are messages of their own, the first one in `<|think|>` … `<|end|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, END = "<|think|>", "<|end|>"
HEADER = "<|begin|>assistant"
CONTENT = "<|content|>"


def solar_open(turn: Turn) -> ReasoningBlocks:
    """The model decides: each of its messages says what it is."""
    return ReasoningBlocks(
        turn.phase(START, END, (HEADER,)),
        starts=[START, HEADER + START],
        ends=[END],
        wrappers=[HEADER, HEADER + CONTENT, CONTENT],
        added_tokens=turn.added_tokens,
        is_constrained=turn.is_constrained,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "solar_open",
        solar_open,
        FormatInfo(
            models="Solar Open",
            markers=(START, END, HEADER, CONTENT),
            quirks="Off where `reasoning_effort` is `low` or `minimal`. The headers of messages are taken out of the content.",
            aliases=("solar-open",),
            signs=(START, CONTENT, HEADER),
            prompt_tail=HEADER,
            example=f"{START}Capitals.{END}{HEADER}{CONTENT}Oslo.{END}",
        ),
    )
