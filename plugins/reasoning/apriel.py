"""Apriel 1.5 and 1.6: reasoning up to `[BEGIN FINAL RESPONSE]`."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.reasoning_blocks import ReasoningBlocks
from penstock.plugins.start_phase import start_phase

START = "Here are my reasoning steps:"
END = "[BEGIN FINAL RESPONSE]"
WRAPPER_END = "[END FINAL RESPONSE]"
TOOL_CALLS = "<tool_calls>"


def apriel(turn: Turn) -> ReasoningBlocks:
    """Always on: reasons from the start, unless the content is continued."""
    phase = start_phase(turn, Phase.REASONING, START, END, ("<|assistant|>", "<|begin_assistant|>"))
    return ReasoningBlocks(
        phase,
        starts=[START],
        ends=[END],
        implicit_ends=[TOOL_CALLS],
        wrappers=[WRAPPER_END, f"\n{WRAPPER_END}"],
        trims_space=True,
        added_tokens=turn.added_tokens,
        is_constrained=turn.is_constrained,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "apriel",
        apriel,
        FormatInfo(
            models="Apriel 1.5, Apriel 1.6",
            markers=(START, END, WRAPPER_END),
            quirks=f"Always reasons: without `{END}`, everything is reasoning. `{TOOL_CALLS}` ends it. White space around it is dropped.",
            signs=(END,),
            prompt_tail=f"{START}\n",
            example=f"Capitals.\n{END}\nOslo.\n{WRAPPER_END}",
        ),
    )
