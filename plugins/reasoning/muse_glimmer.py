"""Muse: reasoning is a message to the model itself, `to=self<|message|>` … `<|eom|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.calls.schema_values import ToolSchemas
from penstock.plugins.reasoning_blocks import ReasoningBlocks

HEADER = "<|start|>assistant"
MESSAGE = "<|message|>"
START, END, TURN_END = f"to=self{MESSAGE}", "<|eom|>", "<|eot|>"
RECIPIENTS = ("user", "commentary")


def muse_glimmer(turn: Turn) -> ReasoningBlocks:
    """The model decides: each of its messages says whom it is for. Headers of messages to the user and to offered tools are taken out."""
    tools = ToolSchemas(turn.tools).names
    recipients = (*RECIPIENTS, *tools, *(f"{name}.{name}" for name in tools))  # a tool without a namespace is its own
    headers = [f"to={recipient}{MESSAGE}" for recipient in recipients]
    return ReasoningBlocks(
        turn.phase(START, END, (HEADER,)),
        starts=[START, f"{HEADER} {START}"],
        ends=[END],
        wrappers=[*headers, *(f"{HEADER} {header}" for header in headers), HEADER + MESSAGE, TURN_END],
        trims_space=True,
        added_tokens=turn.added_tokens,
        is_constrained=turn.is_constrained,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "muse_glimmer",
        muse_glimmer,
        FormatInfo(
            models="Muse Glimmer, Muse Spark",
            markers=(START, END, HEADER, f"to=user{MESSAGE}", MESSAGE, TURN_END),
            quirks="There may be several blocks. The headers of messages to the user, to `commentary` and to offered tools are taken "
            "out of the content; other headers stay. White space around the reasoning is none of it.",
            aliases=("muse", "muse-glimmer"),
            signs=("to=self", MESSAGE, END),
            prompt_tail=HEADER,
            example=f" {START}Capitals.{END}{HEADER} to=user{MESSAGE}Oslo.{TURN_END}",
        ),
    )
