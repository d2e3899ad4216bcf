"""K2-Horizon: a pair of markers for each reasoning effort."""

from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase
from penstock.plugins.think_tags import ThinkTags

NAMES = {"high": "think", "medium": "think_fast", "low": "think_faster"}
TOOL_CALLS = "<ifm|tool_calls>"


def k2_horizon(turn: Turn) -> ThinkTags:
    """Reads all markers, and closes the reasoning with the one that belongs to what the prompt or the request has opened."""
    efforts = sorted(NAMES, key=lambda effort: not _is_used(turn, effort))  # the one in use first, then by falling effort
    starts = [f"<ifm|{NAMES[effort]}>" for effort in efforts]
    ends = [f"</ifm|{NAMES[effort]}>" for effort in efforts]
    phase = start_phase(turn, starts=starts, ends=ends)
    return ThinkTags(
        phase,
        starts=starts,
        ends=ends,
        implicit_ends=(TOOL_CALLS,),
        num_stray_ends=1,
        is_constrained=turn.is_constrained,
        added_tokens=turn.added_tokens,
    )


def _is_used(turn: Turn, effort: str) -> bool:
    return f"ifm|{NAMES[effort]}>" in turn.prompt_tail or turn.chat_template_kwargs.get("reasoning_effort") == effort


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "k2_horizon",
        k2_horizon,
        FormatInfo(
            models="K2-Horizon",
            markers=tuple(f"<{slash}ifm|{name}>" for name in NAMES.values() for slash in ("", "/")),
            quirks=f"`reasoning_effort` high, medium or low chooses the markers. `{TOOL_CALLS}` ends the reasoning.",
            aliases=("k2-horizon",),
            signs=("<ifm|think>", "</ifm|think>"),
            prompt_tail="<ifm|think>",
            example="Capitals.</ifm|think>Oslo.",
        ),
    )
