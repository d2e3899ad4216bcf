"""The check that a tool parser reads what its `tool_format` writes: `penstock.testing.check_tool_format`."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarKind, GrammarSpec
from penstock.engine.contracts.hooks import GrammarBackendFactory, ToolParserFactory
from penstock.engine.contracts.parsing import CallableTool, Event, Text, ToolCallArguments, ToolCallStart, ToolFormat, Turn
from penstock.engine.contracts.structure import FreeText, Marker, Repeat, Structure, TextUntil
from penstock.engine.contracts.structure import Sequence as Parts
from penstock.testing.decoding import accepts, allowed_tokens, byte_vocabulary, pieces_of, random_answer, tokens_of

Tools = Mapping[str, Mapping[str, Any]]
SAMPLE_TOOLS: Tools = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_weather-2": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["晴れ", 'a "quoted" \\ tag', "<b>\n"]}, "minItems": 1, "maxItems": 2},
            "exact": {"type": ["boolean", "null"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"], "additionalProperties": False},
        },
        "required": ["tags", "exact"],
        "additionalProperties": False,
    },
    "ping": {"type": "object", "properties": {}, "additionalProperties": False},
}
_OTHER_ARGUMENTS = {
    "type": "object",
    "properties": {"zzz_other": {"const": "zzz_other"}},
    "required": ["zzz_other"],
    "additionalProperties": False,
}
_BEFORE = "Let me see: "
_AFTER = " That is all"


class ToolFormatCheck:
    """One parser with one vocabulary: `added_tokens` are single tokens of it, and may also be written out as text."""

    def __init__(
        self,
        factory: ToolParserFactory,
        added_tokens: Sequence[str],
        markers: Sequence[str],
        tools: Tools,
        backend: GrammarBackendFactory,
    ) -> None:
        self._factory = factory
        self._tools = tools
        # Markers as ordinary text, whole and in halves: a walk that takes bytes at random would hardly ever write one.
        parts = [part for marker in markers for part in (marker, marker[: len(marker) // 2], marker[len(marker) // 2 :])]
        self._vocabulary = byte_vocabulary(added_tokens, parts)
        self._backend = backend(self._vocabulary)
        offered = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
        self._turn = Turn(added_tokens=frozenset(added_tokens), tools=offered, tool_choice="auto")

    def run(self, num_walks: int) -> None:
        """Raises `AssertionError`, with the text that shows the fault."""
        single = self._check_walks(is_single=True, num_walks=num_walks)
        longer: list[list[str]] = []
        for patience in (40, 400):  # few walks have a second call where its opening is long and the walk soon leans towards an end
            several = self._check_walks(is_single=False, num_walks=8 * num_walks, patience=patience)
            longer += [pieces for pieces in several if len(_calls(self._read(pieces))) > 1]
            if longer:
                break
        assert longer, f"none of {16 * num_walks} answers with `is_single=False` has a second call"
        only_one = self._compiled(self._forced(self._tools, is_single=True))
        for pieces in longer:
            assert not self._accepts(only_one, pieces), f"{pieces} has a second call, and is allowed with `is_single=True`"
        for pieces in single:
            self._check_refusals(pieces)
            self._check_in_text(pieces)
        self._check_text()

    def _check_walks(self, *, is_single: bool, num_walks: int, patience: int = 40) -> list[list[str]]:
        rng = random.Random(num_walks)
        grammar = self._compiled(self._forced(self._tools, is_single=is_single))
        answers = [random_answer(grammar.matcher(), self._vocabulary, rng, patience) for _ in range(num_walks)]
        for pieces in answers:
            events = self._read(pieces)
            self._check_calls(pieces, events, is_single=is_single)
            left = [event.text for event in events if isinstance(event, Text) and not event.text.isspace()]
            assert not left, f"{pieces} is allowed where only calls are, and {left} is left as text"
        return answers

    def _check_refusals(self, pieces: Sequence[str]) -> None:
        """With one call in `pieces`."""
        ((name, _),) = _calls(self._read(pieces))
        others = {other: schema for other, schema in self._tools.items() if other != name}
        assert not self._accepts(self._compiled(self._forced(others)), pieces), (
            f"{pieces} calls `{name}`, and is allowed with {set(others)}"
        )
        misfits = {**self._tools, name: _OTHER_ARGUMENTS}
        assert not self._accepts(self._compiled(self._forced(misfits)), pieces), f"{pieces} is allowed with other arguments for `{name}`"
        matcher = self._compiled(self._forced(self._tools)).matcher()
        written: list[int] = []
        for token_id in tokens_of(pieces, self._vocabulary):
            if not self._vocabulary.stop_token_ids.isdisjoint(allowed_tokens(matcher, self._vocabulary)):
                cut = pieces_of(written, self._vocabulary)
                self._check_calls(cut, self._read(cut), is_single=False)
            assert matcher.advance(token_id)
            written.append(token_id)

    def _check_in_text(self, pieces: list[str]) -> None:
        answer = [_BEFORE, *pieces, _AFTER]
        assert self._accepts(self._free, answer), f"{answer} is not allowed, though {pieces} is"
        events = self._read(answer)
        assert _calls(events) == _calls(self._read(pieces)), f"{answer} is read as other calls than {pieces}"
        text = "".join(event.text for event in events if isinstance(event, Text))
        assert text.split() == (_BEFORE + _AFTER).split(), f"{answer} leaves {text!r} as text"

    def _check_text(self) -> None:
        opening = self._format.opening
        for pieces in ([], [_BEFORE]):
            assert self._accepts(self._free, pieces), f"{pieces} is not allowed as an answer without calls"
        is_token = any(token in opening for token in self._turn.added_tokens)
        quotation = [f"{_BEFORE}{opening}{_AFTER}"]
        if is_token:
            assert self._accepts(self._free, quotation), f"{quotation} only quotes the opening, and is not allowed"
            assert not _calls(self._read(quotation)), f"{quotation} only quotes the opening, and is read as a call"
        else:
            assert not self._accepts(self._free, quotation), f"{quotation} opens a call that is none, and is allowed"
        rng = random.Random(0)
        for _ in range(4):
            pieces = random_answer(self._free.matcher(), self._vocabulary, rng)
            self._check_calls(pieces, self._read(pieces), is_single=None)

    def _check_calls(self, pieces: Sequence[str], events: Iterable[Event], *, is_single: bool | None) -> None:
        from jsonschema import ValidationError  # type: ignore[import-untyped]

        calls = _calls(events)
        assert calls or is_single is None, f"{pieces} is allowed, and is no call"
        assert len(calls) == 1 or not is_single, f"{pieces} is allowed with `is_single=True`, and is {len(calls)} calls"
        for name, arguments in calls:
            assert name in self._tools, f"{pieces} is allowed, and calls `{name}`, which is not offered"
            try:
                self._validators[name].validate(json.loads(arguments))
            except (ValueError, ValidationError) as error:
                raise AssertionError(f"{pieces} is allowed, and calls `{name}` with {arguments}, which does not fit") from error

    @cached_property
    def _validators(self) -> dict[str, Any]:
        """One for each tool's arguments. Made once: to check the schemas themselves takes longer than any arguments do."""
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]

        classes = {name: validator_for(schema) for name, schema in self._tools.items()}
        for name, validator in classes.items():
            validator.check_schema(self._tools[name])
        return {name: validator(self._tools[name]) for name, validator in classes.items()}

    @cached_property
    def _format(self) -> ToolFormat:
        found = self._factory(self._turn).tool_format
        assert found is not None, "the parser has no `tool_format`"
        return found

    @cached_property
    def _free(self) -> CompiledGrammar:
        """Text and calls as the model likes, the shape of an answer under `auto`."""
        opening = self._format.opening
        calls = self._format.calls(_callable(self._tools), is_single=False)
        return self._compiled(Parts((Repeat(Parts((TextUntil(opening), calls))), FreeText((opening,)))))

    def _forced(self, tools: Tools, *, is_single: bool = False) -> Structure:
        return Parts((Marker(self._format.opening), self._format.calls(_callable(tools), is_single=is_single)))

    def _compiled(self, structure: Structure) -> CompiledGrammar:
        return self._backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=structure))

    def _accepts(self, grammar: CompiledGrammar, pieces: Sequence[str]) -> bool:
        return accepts(grammar.matcher(), self._vocabulary, pieces)

    def _read(self, pieces: Iterable[str]) -> list[Event]:
        parser = self._factory(self._turn)
        return [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]


def _callable(tools: Tools) -> list[CallableTool]:
    return [CallableTool(name, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), f"tools.{name}")) for name, schema in tools.items()]


def _calls(events: Iterable[Event]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, arguments = calls[event.index]
            calls[event.index] = (name, arguments + event.fragment)
    return calls


def check_tool_format(
    factory: ToolParserFactory,
    *,
    markers: Sequence[str] = (),
    tools: Tools = SAMPLE_TOOLS,
    num_walks: int = 12,
    backend: GrammarBackendFactory | None = None,
) -> None:
    """Raises `AssertionError` if a tool parser's `tool_format` and the parser itself disagree about calls.

    - The parser reads every text of the grammar as calls of the offered tools, one if one is requested, with arguments that are valid
      by their schemas, and with no text but white space left over. The same applies with text around the calls.
    - The grammar does not allow a call of another tool or with invalid arguments, a cut call, or a second call if one is requested.
    - Text that opens no call is allowed if the model chooses; so is a quoted opening that the vocabulary has as a token.

    `markers` are the format's markers: everything is checked with a vocabulary that has them as plain text, and with one
    that has each as a single token. `tools` are the schemas of at least two tools' arguments by their names, `num_walks` is the number of
    answers made by walking at random through each grammar, `backend` compiles them, by default `llguidance`.
    """
    assert len(tools) > 1, "to tell one tool from another takes two"
    for added_tokens in [(), tuple(markers)] if markers else [()]:
        ToolFormatCheck(factory, added_tokens, markers, tools, backend or _default_backend()).run(num_walks)


def _default_backend() -> GrammarBackendFactory:
    from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend

    return LlguidanceBackend
