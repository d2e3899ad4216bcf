"""DeepSeek-R1: reasoning up to `</think>`, with or without a `<think>` in front."""

from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.think_tags import ThinkTags


def deepseek_r1(turn: Turn) -> ThinkTags:
    """Always on: reasons from the start, unless the prompt itself has closed the reasoning."""
    phase = turn.phase("<think>", "</think>")
    return ThinkTags(Phase.CONTENT if phase is Phase.CONTENT else Phase.REASONING, added_tokens=turn.added_tokens)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("deepseek_r1", deepseek_r1)
