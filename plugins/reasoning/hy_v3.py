"""Hunyuan 3 and 4: `<think…>` … `</think…>`, with a suffix that the checkpoint's own template chooses."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.marker_suffix import marker_suffix
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags


def hy_v3(turn: Turn) -> ThinkTags:
    """Starts as the prompt ends. The suffix is that of the prompt's own marker, or of the vocabulary's."""
    suffix = marker_suffix(turn)
    start, end = f"<think{suffix}>", f"</think{suffix}>"
    return ThinkTags(
        start_phase(turn, starts=start, ends=end),
        starts=(start,),
        ends=(end,),
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "hy_v3",
        hy_v3,
        FormatInfo(
            models="Hunyuan 3, Hunyuan 4",
            markers=("<think>", "</think>"),
            quirks="`reasoning_effort` switches it: not with `no_think`. Checkpoints may add a suffix to their markers, `<think:x>`.",
            aliases=("hy-v3", "hy_v4", "hy-v4"),
            signs=("think_begin_token", "reasoning_effort", "no_think"),
            prompt_tail="<think>",
            example="Capitals.</think>Oslo.",
        ),
    )
