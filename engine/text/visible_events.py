"""What of an answer's events a reader is shown."""

from collections.abc import Iterable

from penstock.engine.events import Event, Reasoning, SpecialText, Text


def visible_events(events: Iterable[Event], *, skip_special_tokens: bool) -> list[Event]:
    """Without hidden special tokens where those are skipped, every text a plain `str`, and neighbours of one kind joined."""
    visible: list[Event] = []
    for event in events:
        if not isinstance(event, Text | Reasoning):
            visible.append(event)
            continue
        if not event.text or (skip_special_tokens and isinstance(event.text, SpecialText) and event.text.is_hidden):
            continue
        last = visible[-1] if visible else None
        if isinstance(last, Text | Reasoning) and type(last) is type(event):
            visible[-1] = type(event)(last.text + event.text)
        else:
            visible.append(type(event)(str(event.text)))
    return visible
