"""Answers cut into pieces, and what a parser says to them in a form that can be compared."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from penstock.engine.events import Event, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.parsing import Parser


def read(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """Everything a parser says to these pieces and to their end, in the one form that does not depend on how they were cut."""
    events: list[Event] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish())
    return merged(events)


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind joined, added tokens left apart; ids of tool calls blank, because they are fresh each time."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ToolCallStart):
            assert event.id, f"{event} has no id"
            result.append(replace(event, id=""))
        elif isinstance(event, ToolCallArguments):
            assert event.fragment, f"{event} is empty"
            if isinstance(last, ToolCallArguments) and last.index == event.index:
                result[-1] = replace(last, fragment=last.fragment + str(event.fragment))
            else:
                result.append(replace(event, fragment=str(event.fragment)))
        else:
            assert event.text, f"{event} is empty"
            joins = type(last) is type(event) and not isinstance(event.text, SpecialText)
            if joins and isinstance(last, Text | Reasoning) and not isinstance(last.text, SpecialText):
                result[-1] = type(event)(last.text + event.text)
            else:
                result.append(event)
    return result


def split_atoms(text: str, added_tokens: frozenset[str]) -> list[str]:
    """The smallest pieces in which text can arrive: single characters, and each added token whole."""
    if not added_tokens:
        return list(text)
    longest_first = sorted(added_tokens, key=len, reverse=True)
    atoms: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        atoms.extend([SpecialText(part)] if part in added_tokens else part)
    return atoms


def join_atoms(atoms: Iterable[str]) -> list[str]:
    """The largest pieces in which they can arrive."""
    pieces: list[str] = []
    for is_special, run in groupby(atoms, key=lambda atom: isinstance(atom, SpecialText)):
        parts = list(run)
        pieces.extend(parts if is_special else ["".join(parts)])
    return pieces
