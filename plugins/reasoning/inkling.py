"""Inkling: the model writes blocks, each with a marker that says what it is: `<|content_thinking|>` … `<|end_message|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks

START, END = "<|content_thinking|>", "<|end_message|>"
MESSAGE, TEXT, TURN_END = "<|message_model|>", "<|content_text|>", "<|content_model_end_sampling|>"
CALL = "<|content_invoke_tool_json|>"


def inkling(turn: Turn) -> ReasoningBlocks:
    """Starts as the prompt ends, which may have opened a message. A call ends the reasoning, and is left for the tool parser."""
    return ReasoningBlocks(
        turn.phase(START, (END, TEXT), (MESSAGE,)),
        starts=[START, MESSAGE + START],
        ends=[END],
        implicit_ends=[CALL],
        wrappers=[TEXT, MESSAGE + TEXT, TURN_END],
        added_tokens=turn.added_tokens,
        is_constrained=turn.is_constrained,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "inkling",
        inkling,
        FormatInfo(
            models="Inkling",
            markers=(START, END, MESSAGE, TEXT, TURN_END),
            quirks=f"There may be several blocks; markers around text are taken out. `{CALL}` ends the reasoning.",
            signs=(START, TEXT),
            prompt_tail=MESSAGE,
            example=f"{START}Capitals.{END}{MESSAGE}{TEXT}Oslo.{END}",
        ),
    )
