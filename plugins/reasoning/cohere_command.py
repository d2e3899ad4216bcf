"""Command A and R7B: everything that the model writes stands between markers that say what it is."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, END = "<|START_THINKING|>", "<|END_THINKING|>"
WRAPPERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
ACTION = "<|START_ACTION|>"

INFO = FormatInfo(
    models="Command R7B, Command A and its reasoning, translation and vision models, North",
    markers=(START, END, *WRAPPERS),
    quirks="what wraps content is taken out, with the white space before it; white space at both ends of the reasoning too",
    aliases=("cohere-command", "cohere_command3", "cohere_command4"),
    signs=(START, END),
    prompt_tail=f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{START}",
    example=f"why{END}<|START_TEXT|>because<|END_TEXT|>",
)


def cohere_command(turn: Turn) -> ReasoningBlocks:
    """Starts as the prompt ends; calls are left for the tool parser."""
    return ReasoningBlocks(
        turn.phase(START, END, ("<|CHATBOT_TOKEN|>",)),
        starts=[START],
        ends=[END],
        implicit_ends=[ACTION],
        wrappers=WRAPPERS,
        trims_space=True,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("cohere_command", cohere_command, INFO)
