"""DeepSeek-V3.1 and V3.2: `<think>` … `</think>`, only where the request asks for it."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def deepseek_v3(turn: Turn) -> ThinkTags:
    """Where the prompt does not tell, as after a tool's result, the model may reason only with `thinking` or `enable_thinking`."""
    is_on = any(turn.chat_template_kwargs.get(name) for name in ("thinking", "enable_thinking"))
    return ThinkTags(
        start_phase(turn, Phase.UNDECIDED if is_on else Phase.CONTENT), is_constrained=turn.is_constrained, added_tokens=turn.added_tokens
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "deepseek_v3",
        deepseek_v3,
        FormatInfo(
            models="DeepSeek-V3.1, DeepSeek-V3.2",
            markers=("<think>", "</think>"),
            quirks="Off unless `thinking` or `enable_thinking` is true; then all is content, markers too.",
            aliases=("deepseek-v3", "deepseek_v31", "deepseek-v31", "deepseek_v32", "deepseek-v32"),
            signs=("<think>", "</think>", "<｜Assistant｜>", "thinking"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
