"""Qwen3: `<think>` … `</think>`, written by the template or by the model, and switched off by `enable_thinking`."""

from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.think_tags import ThinkTags

TURN_BOUNDARIES = ("<|im_start|>", "<|im_end|>")


def qwen3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, `enable_thinking: false` starts in content.

    A tool call ends the reasoning, and so does the turn itself. One end marker too many is taken out: the model repeats it at times.
    """
    return ThinkTags(_start_phase(turn), implicit_ends=("<tool_call>", *TURN_BOUNDARIES), num_stray_ends=1, added_tokens=turn.added_tokens)


def _start_phase(turn: Turn) -> Phase:
    phase = turn.phase("<think>", "</think>", TURN_BOUNDARIES)
    is_off = turn.chat_template_kwargs.get("enable_thinking") is False
    return Phase.CONTENT if is_off and phase is Phase.UNDECIDED else phase


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("qwen3", qwen3)
