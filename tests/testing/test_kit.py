from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LogitsProcessor, per_sequence
from penstock.engine.contracts.parsing import (
    Event,
    Reasoning,
    ReasoningParser,
    SpecialText,
    Text,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
    Turn,
)
from penstock.plugins.markers import MarkerBuffer
from penstock.testing import check_cost, check_logits_processor, check_parser, join_atoms, merged, read, split_atoms

SAMPLES = ["why<end>because", "no end", "<en", "<end><end>", ""]


class Sound(ToolParser):
    """Reasoning up to `<end>`: keeps every promise."""

    def __init__(self, turn: Turn) -> None:
        self.buffer = MarkerBuffer(turn.added_tokens)
        self.kind: type[Text | Reasoning] = Reasoning

    def feed(self, text: str) -> list[Event]:
        self.buffer.feed(text)
        pieces, marker = self.buffer.take_until(*(["<end>"] if self.kind is Reasoning else []))
        events: list[Event] = [self.kind(piece) for piece in pieces]
        if marker is not None:
            self.kind = Text
            events += self.feed("")
        return events

    def finish(self) -> list[Event]:
        return [self.kind(piece) for piece in self.buffer.finish()]


class MissesCutMarkers(Sound):
    def feed(self, text: str) -> list[Event]:
        before, marker, after = text.partition("<end>")
        events: list[Event] = [self.kind(before)] if before else []
        if marker:
            self.kind = Text
        return [*events, Text(after)] if after else events


class SwallowsAtTheEnd(Sound):
    def finish(self) -> list[Event]:
        return []


class SwallowsSpaces(Sound):
    def feed(self, text: str) -> list[Event]:
        return super().feed(text.replace(" ", ""))


class JoinsAddedTokens(Sound):
    def feed(self, text: str) -> list[Event]:
        return [type(event)(str(event.text)) for event in super().feed(text) if isinstance(event, Text | Reasoning)]


class Repeats(Sound):
    def finish(self) -> list[Event]:
        return [*super().finish(), Text("!")]


class GivesEmptyText(Sound):
    def feed(self, text: str) -> list[Event]:
        return [*super().feed(text), Text("")]


class LosesAPhase(Sound, ReasoningParser):
    @property
    def phase(self) -> str:  # type: ignore[override]
        return "content"


class MisnumbersCalls(Sound):
    def feed(self, text: str) -> list[Event]:
        return [ToolCallStart(1, "f", "id"), *super().feed(text)] if text == "no end" else super().feed(text)


class DeniesItsCalls(ToolParser):
    """Gives out arguments as they come, and does not say that it is inside a call."""

    is_in_call = False

    def __init__(self, turn: Turn) -> None:
        self.is_started = False

    def feed(self, text: str) -> list[Event]:
        arguments: list[Event] = [ToolCallArguments(0, character) for character in text]
        if not self.is_started and arguments:
            self.is_started = True
            arguments.insert(0, ToolCallStart(0, "f", "id"))
        return arguments

    def finish(self) -> list[Event]:
        return []


class RescansWithMethods(ToolParser):
    """Right, and quadratic: it looks at the whole text again with every piece."""

    def __init__(self, turn: Turn) -> None:
        self.text = ""
        self.num_said = 0

    def feed(self, text: str) -> Iterable[Event]:
        self.text += text
        said = self.text.find("<end>") + 1 or len(self.text)
        if said > self.num_said:
            yield Text(self.text[self.num_said :])
        self.num_said = len(self.text)

    def finish(self) -> Iterable[Event]:
        return []


class RescansWithALoop(RescansWithMethods):
    def feed(self, text: str) -> Iterable[Event]:
        self.text = "".join([self.text, text])
        for _ in self.text:
            pass
        yield Text(text)


def test_a_sound_parser_passes() -> None:
    check_parser(Sound, SAMPLES, markers=["<end>"])


@pytest.mark.parametrize(
    "parser", [MissesCutMarkers, SwallowsAtTheEnd, SwallowsSpaces, Repeats, GivesEmptyText, LosesAPhase, MisnumbersCalls, JoinsAddedTokens]
)
def test_a_broken_promise_is_found(parser: type[Sound]) -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset({"<other>"}))
    with pytest.raises(AssertionError):
        check_parser(parser, [*SAMPLES, "a<other>b"], markers=["<end>"], turn=turn)


def test_arguments_outside_of_calls_are_found() -> None:
    with pytest.raises(AssertionError, match="`is_in_call` is not true"):
        check_parser(DeniesItsCalls, ['{"x": 1}'])


@pytest.mark.parametrize("parser", [RescansWithMethods, RescansWithALoop])
def test_reading_again_what_has_been_read_is_found(parser: type[RescansWithMethods]) -> None:
    with pytest.raises(AssertionError, match="what has been read is read again"):
        check_cost(parser, "why<end>because", Turn())
    with pytest.raises(AssertionError, match="what has been read is read again"):
        check_parser(parser, ["why because"], max_examples=5)


def test_what_derives_from_no_parser_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"`str` must derive from `penstock.ReasoningParser` or `penstock.ToolParser`"):
        check_parser(lambda turn: "", SAMPLES)  # type: ignore[arg-type,return-value]


def test_no_samples_are_no_check() -> None:
    with pytest.raises(AssertionError, match="nothing to check"):
        check_parser(Sound, [])


def test_atoms_are_characters_and_whole_added_tokens() -> None:
    atoms = split_atoms("a<b><b>c", frozenset({"<b>"}))
    assert atoms == ["a", "<b>", "<b>", "c"]
    assert [isinstance(atom, SpecialText) for atom in atoms] == [False, True, True, False]
    assert join_atoms(split_atoms("ab<b>cd", frozenset({"<b>"}))) == ["ab", "<b>", "cd"]


def test_merged_events_do_not_depend_on_pieces_but_keep_added_tokens_apart() -> None:
    events = merged([Text("a"), Text("b"), Text(SpecialText("<c>")), Text("d"), Reasoning("e"), Reasoning("f")])
    assert events == [Text("ab"), Text("<c>"), Text("d"), Reasoning("ef")]


def test_read_gives_what_a_parser_holds_back() -> None:
    assert read(Sound(Turn()), ["a<e", "n"]) == [Reasoning("a<en")]


def nan(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits * float("nan")


def nothing_left(token_ids: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf)


def appends(token_ids: list[int], logits: Tensor) -> Tensor:
    token_ids.append(0)
    return logits


def raising(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("no such token")


class LooksAside(LogitsProcessor):
    def process(self, rows: object, logits: Tensor) -> Tensor:
        return logits - logits.mean()


@pytest.mark.parametrize(
    ("processor", "message"),
    [(nan, "NaN"), (nothing_left, "no token is left"), (appends, "changed"), (raising, "no such token"), (LooksAside(), "other rows")],
)
def test_a_logits_processor_that_breaks_a_promise_is_found(processor: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_logits_processor(processor if isinstance(processor, LogitsProcessor) else per_sequence(lambda: processor))
