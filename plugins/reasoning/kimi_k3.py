"""Kimi-K3: reasoning, response and calls in tags of three tokens each, `<|open|>think<|sep|>` … `<|close|>think<|sep|>`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks


def _tags(name: str) -> tuple[str, str]:
    return f"<|open|>{name}<|sep|>", f"<|close|>{name}<|sep|>"


START, END = _tags("think")
RESPONSE, RESPONSE_END = _tags("response")
TOOLS, _ = _tags("tools")
MESSAGE_END = "<|close|>message<|sep|>"


def kimi_k3(turn: Turn) -> ReasoningBlocks:
    """Starts as the prompt ends, which opens either the reasoning or the response."""
    return ReasoningBlocks(
        turn.phase(START, (END, RESPONSE)),
        starts=[START],
        ends=[END],
        implicit_ends=[TOOLS],
        wrappers=[RESPONSE, RESPONSE_END, MESSAGE_END, "<|end_of_msg|>"],
        added_tokens=turn.added_tokens,
        is_constrained=turn.is_constrained,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "kimi_k3",
        kimi_k3,
        FormatInfo(
            models="Kimi-K3",
            markers=(START, END, RESPONSE, RESPONSE_END, MESSAGE_END),
            quirks=f"On unless `thinking` is false. The tags around the response are taken out. `{TOOLS}` ends the reasoning.",
            aliases=("kimi-k3",),
            signs=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
            prompt_tail=START,
            example=f"Capitals.{END}{RESPONSE}Oslo.{RESPONSE_END}{MESSAGE_END}",
        ),
    )
