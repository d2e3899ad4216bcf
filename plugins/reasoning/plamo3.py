"""PLaMo 3: `<|plamo:begin_think:plamo|>` … `<|plamo:end_think:plamo|>`, each of several tokens."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import is_switched_off, start_phase
from penstock.plugins.think_tags import ThinkTags

START = "<|plamo:begin_think:plamo|>"
END = "<|plamo:end_think:plamo|>"
TOOL_REQUESTS = "<|plamo:begin_tool_requests:plamo|>"


def plamo3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends; where the prompt does not tell, `enable_thinking: false` starts in content."""
    untold = Phase.CONTENT if is_switched_off(turn, "enable_thinking") else Phase.UNDECIDED
    return ThinkTags(
        start_phase(turn, untold, START, END),
        starts=(START,),
        ends=(END,),
        implicit_ends=(TOOL_REQUESTS,),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "plamo3",
        plamo3,
        FormatInfo(
            models="PLaMo 3",
            markers=(START, END),
            quirks=f"On unless `enable_thinking` is false. `{TOOL_REQUESTS}` ends the reasoning.",
            signs=("<|plamo:begin_", "begin_think"),
            prompt_tail=START,
            example=f"Capitals.{END}Oslo.",
        ),
    )
