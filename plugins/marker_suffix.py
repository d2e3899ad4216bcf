"""The suffix that a checkpoint adds to the names of all its markers: `<think:opensource>`, `<tool_calls:opensource>`."""

import re

from penstock.engine.turn import Turn

_MARKER = re.compile(r"</?(?:think|tool_calls)([^<>\s]*)>")


def marker_suffix(turn: Turn) -> str:
    """That of a marker at the end of the prompt, or else of one in the vocabulary; empty where neither has any."""
    found = _MARKER.search(turn.prompt_tail) or next(filter(None, map(_MARKER.fullmatch, sorted(turn.added_tokens))), None)
    return "" if found is None else found[1]
