"""How a JSON answer that has begun goes on, as its schema and the free text before it say: what is proposed of it as draft tokens."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.engine.contracts.proposer import SequenceProposer, moved
from penstock.engine.speculation.copies import (
    MAX_DEPTH,
    MAX_DRAFT_CHARACTERS,
    OPTION_COST,
    UNKNOWN,
    UNKNOWN_TEXT,
    VALUE_COST,
    DraftReader,
    SequenceCopy,
)
from penstock.engine.speculation.proposers import LayeredProposer

FIRST_KNOWN = 0.9  # the accuracy of keys, and of values that the draft has by their names
FIRST_GUESSED = 0.5
FIRST_COPIED = 0.5  # of the parts of the draft that follow on what has been written, where nothing is known of a value
DATE_CHARACTERS = 10
# How most dates go on, of which the texts say nothing: in this century, and early in the year.
_USUAL_DATES = ((re.compile("2"), "02"), (re.compile("20"), "2"), (re.compile(r"\d{4}-?"), "0"))
MAX_CANDIDATES = 2  # words that begin alike
MAX_QUESTION_TOKENS = 256  # of the prompt's end
MAX_COPIED_TOKENS = 4096  # of the draft's end: all of them are looked at when the answer begins, on the event loop
MAX_ANSWER_CHARACTERS = 4000  # of one that is still read: no more than a fraction of a millisecond in each step
MAX_SCHEMA_CHARACTERS = 2**15  # of one that is read at all
MAX_PROPOSED_CHARACTERS = 256  # at a time: encoding all of an answer anew behind each token that was another one takes milliseconds
_WORD = re.compile(r"[\w'-]+(?:[.:/@]\w+)*")
_COMPACT_COLON, _COMPACT_COMMA = re.compile(r'":\S'), re.compile(r'[\]}"\d],"')
_LITERALS = ("true", "false", "null")
# What schemas that are not plain raise, and texts that are no JSON.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, RecursionError)


@dataclass(frozen=True, slots=True)
class Completion:
    """Text that may come next. Behind `num_known` characters it is a guess."""

    text: str = ""
    num_known: int = 0


@dataclass(slots=True)
class _Frame:
    """An object or list that is open. `region` is the part of the draft that its values are looked for in."""

    is_object: bool
    schema: Any
    region: str
    members: dict[str, str] = field(default_factory=dict)  # those that are whole, as texts
    key: str | None = None
    value_start: int | None = None  # where the present value begins, once it does


class AnswerCompletion:
    """Reads an answer's beginning and completes it, as far as values are known.

    It is a guess, which the model checks like any draft. Single words are also looked for in the `question`.
    """

    def __init__(self, schema: str, draft: str, question: str = "") -> None:
        self._root = json.loads(schema)
        self._draft = draft[-MAX_DRAFT_CHARACTERS:]
        self._reader = DraftReader(self._root, self._draft)
        self._texts = (self._draft, question)
        self._alternatives: dict[int, list[Any]] = {}  # of each schema, by its identity
        self._whole: dict[_Writer, str] = {}  # the answer that is expected, as each writer spells it

    def after(self, answer: str) -> Completion:
        """What may follow this beginning; nothing where the schema or the beginning is of a form that this does not read."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return Completion()
        self._reader.begin()
        try:
            found = self._after(answer)
            found.text.encode()  # raises ValueError for a lone surrogate, which a draft may have as an escape, and no token is
        except UNREADABLE:
            return Completion()
        return found

    @cached_property
    def _expected_answer(self) -> Any:
        try:
            return self._reader.read()
        except UNREADABLE:  # perhaps of parts of it
            return UNKNOWN

    def _after(self, answer: str) -> Completion:
        is_compact = _COMPACT_COLON.search(answer) is not None
        has_blanks = not is_compact and answer.count(', "') >= len(_COMPACT_COMMA.findall(answer))
        writer = _Writer(", " if has_blanks else ",", ":" if is_compact else ": ")
        if writer not in self._whole:
            self._whole[writer] = writer.known(self._expected_answer)
        whole = self._whole[writer]
        if whole.startswith(answer) and len(whole) > len(answer):
            return Completion(whole[len(answer) :], len(whole) - len(answer))
        frames, rest_start = self._scan(answer)
        for level, frame in enumerate(frames):
            if frame.value_start is None:
                continue
            partial = answer[frame.value_start :]
            expected, is_whole = writer.part(self._expected(frame))
            if expected.startswith(partial) and (expected != partial or is_whole):
                text = expected[len(partial) :]
                text += self._rest(frames[: level + 1], writer) if is_whole else ""
                return Completion(text, len(text))
        if not frames:
            return Completion()
        partial, innermost = answer[rest_start:], frames[-1]
        if innermost.value_start is not None:
            return self._within(partial, frames, writer)
        return self._at_key(answer, partial, frames, writer) if innermost.is_object else Completion()

    def _at_key(self, answer: str, partial: str, frames: list[_Frame], writer: "_Writer") -> Completion:
        """Behind a member, or within a key."""
        frame = frames[-1]
        is_behind = bool(frame.members) and not answer[: len(answer) - len(partial)].rstrip().endswith(",")
        rest = self._rest(frames, writer) if is_behind else self._rest(frames, writer).removeprefix(writer.comma)
        if partial.startswith('"'):
            names = [name for name in self._properties(frame) if name not in frame.members]
            if frame.key is not None:  # the colon is to come
                start = f'"{frame.key}"'
                text = writer.colon + self._value_text(frame, frame.key, writer, frames)
                return Completion(text, len(text)) if partial == start else Completion()
            if not rest.startswith(partial):
                fitting = [name for name in names if json.dumps(name).startswith(partial)]
                if not fitting:
                    return Completion()
                rest = json.dumps(fitting[0]) + writer.colon + self._value_text(frame, fitting[0], writer, frames)
            text = rest[len(partial) :]
            return Completion(text, len(text))
        if not is_behind and frame.members and rest.startswith("}"):  # a comma that only an optional member explains
            names = [name for name in self._properties(frame) if name not in frame.members]
            rest = json.dumps(names[0]) + writer.colon + self._value_text(frame, names[0], writer, frames) if names else ""
        if answer.endswith(","):
            rest = writer.comma.removeprefix(",") + rest
        return Completion(rest, len(rest))

    def _within(self, partial: str, frames: list[_Frame], writer: "_Writer") -> Completion:
        """Within a value that the draft does not have by its name, or has otherwise."""
        frame = frames[-1]
        schema = self._schema_of(frame)
        if not partial:
            return Completion('"', 1) if _is_string(schema) else Completion()
        behind = self._rest(frames, writer) if frame.is_object else ""
        listed = self._listed(frame)
        if listed:
            fitting = [text for value in listed if (text := json.dumps(value, ensure_ascii=False)).startswith(partial)]
            if not fitting:
                return Completion()
            lower = self._draft.lower()
            chosen = next((text for text in fitting if text.strip('"').lower() in lower), fitting[0])
            if frame.is_object and frame.key is not None:
                frames = [*frames[:-1], replace(frame, members={**frame.members, frame.key: chosen}, key=None)]
                behind = self._rest(frames, writer)
            text = chosen[len(partial) :]
            return Completion(text + behind, len(text + behind) if len(fitting) == 1 else 0)
        if partial.startswith('"'):
            return self._within_string(partial[1:], schema, behind)
        literal = next((literal for literal in _LITERALS if literal.startswith(partial)), None)
        if literal is not None:
            text = literal[len(partial) :] + behind
            return Completion(text, len(text))
        number = self._word(partial, re.compile(r"-?\d+(?:\.\d+)?"))
        return Completion((number or partial)[len(partial) :] + behind)

    def _within_string(self, partial: str, schema: Any, behind: str) -> Completion:
        if isinstance(schema, dict) and schema.get("format") == "date":
            found = next((day for day in dates(" ".join(self._texts)) if day.startswith(partial)), None)
            if found is not None:
                return Completion(f'{found[len(partial) :]}"{behind}')
            text = f'"{behind}' if len(partial) == DATE_CHARACTERS else "-" if len(partial) in (4, 7) else ""
            return Completion(text + next((end for begun, end in _USUAL_DATES if begun.fullmatch(partial)), ""), len(text))
        if not partial:
            return Completion()
        beginning = re.split(r"\s", partial)[-1]
        word = self._word(beginning, _WORD)
        return Completion() if word is None else Completion(f'{word[len(beginning) :]}"{behind}')

    def _word(self, beginning: str, pattern: re.Pattern[str]) -> str | None:
        """The first word of the draft, or else of the question, that begins so; None where many do."""
        found = (
            dict.fromkeys(word for text in self._texts for word in pattern.findall(text) if word.startswith(beginning)) if beginning else {}
        )
        return next(iter(found)) if 0 < len(found) <= MAX_CANDIDATES else None

    # Reading

    def _scan(self, answer: str) -> tuple[list[_Frame], int]:
        """The open objects and lists, and where what is not whole begins. Raises ValueError for what is no JSON."""
        frames: list[_Frame] = []
        decoder = json.JSONDecoder()
        place, size = 0, len(answer)
        while place < size:
            start = place
            character = answer[place]
            frame = frames[-1] if frames else None
            if character in " \n":
                place += 1
            elif character in "]}":
                if frame is None:
                    raise ValueError("closed too early")
                frames.pop()
                place += 1
                self._end_value(frames, answer, place)
            elif character == ",":
                place += 1
                if frame is not None and not frame.is_object:
                    frame.value_start = self._next(answer, place)
            elif character == ":":
                place += 1
                if frame is None:
                    raise ValueError("a colon")
                frame.value_start = self._next(answer, place)
            elif character in "{[":
                frames.append(self._open(frame, is_object=character == "{"))
                place += 1
                if character == "[":
                    frames[-1].value_start = self._next(answer, place)
            else:
                try:
                    value, place = decoder.raw_decode(answer, place)
                except ValueError:
                    return frames, start
                if place == size and not isinstance(value, str):
                    return frames, start  # more digits may follow
                if frame is not None and frame.is_object and frame.value_start is None:
                    frame.key = value
                    if not answer[place:].strip():
                        return frames, start
                else:
                    self._end_value(frames, answer, place)
        return frames, size

    @staticmethod
    def _next(answer: str, place: int) -> int:
        """Where a value begins behind a colon or comma: behind the blank, if there is one."""
        return place + (answer[place : place + 1] == " ")

    @staticmethod
    def _end_value(frames: list[_Frame], answer: str, place: int) -> None:
        if not frames:
            return
        frame = frames[-1]
        if frame.is_object:
            if frame.key is None or frame.value_start is None:
                raise ValueError("a value without a key")
            frame.members[frame.key] = answer[frame.value_start : place].strip()
            frame.key = None
        frame.value_start = None

    def _open(self, parent: _Frame | None, *, is_object: bool) -> _Frame:
        if parent is None:
            return _Frame(is_object, self._root, self._draft)
        region = parent.region
        if parent.key is not None:
            place = self._reader.place_after(parent.key, region)
            region = region if place is None else region[place:]
            region = self._reader.arguments(self._chosen(parent), parent.key, self._draft) or region
        return _Frame(is_object, self._schema_of(parent), region)

    def _schema_of(self, frame: _Frame) -> Any:
        """That of the value that is being written."""
        chosen = self._chosen(frame)
        if not isinstance(chosen, dict):
            return None
        found = chosen.get("properties", {}).get(frame.key) if frame.is_object else chosen.get("items")
        return next(iter(self._options(found)), None)

    def _listed(self, frame: _Frame) -> list[Any]:
        """The values that the present one is one of, if they are listed."""
        found: list[Any] = []
        for option in self._options(frame.schema):
            if not _fits(option, frame):
                continue
            for schema in self._options(option.get("properties", {}).get(frame.key) if frame.is_object else option.get("items")):
                if not isinstance(schema, dict) or not ("const" in schema or isinstance(schema.get("enum"), list)):
                    return []
                found += [schema["const"]] if "const" in schema else schema["enum"]
        self._reader.spend(len(found) * (VALUE_COST + len(self._draft) // VALUE_COST))
        return found

    def _chosen(self, frame: _Frame) -> Any:
        """The first of the frame's alternatives that its members fit."""
        options = self._options(frame.schema)
        return next((option for option in options if _fits(option, frame)), options[0] if options else None)

    def _properties(self, frame: _Frame) -> dict[str, Any]:
        chosen = self._chosen(frame)
        found = chosen.get("properties") if isinstance(chosen, dict) else None
        return found if isinstance(found, dict) else {}

    def _options(self, schema: Any) -> list[Any]:
        """A schema's alternatives, without references."""
        if not isinstance(schema, dict):
            return [schema]
        found = self._alternatives.get(id(schema))
        if found is None:
            found = self._alternatives[id(schema)] = list(self._resolved(schema, 0))
        self._reader.spend(len(found) * OPTION_COST)
        return found

    def _resolved(self, schema: Any, depth: int) -> Iterator[Any]:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._reader.spend(OPTION_COST)
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            yield from self._resolved(self._reader.target(schema["$ref"]), depth + 1)
        elif isinstance(schema, dict) and (inner := schema.get("anyOf") or schema.get("oneOf")):
            for option in inner:
                yield from self._resolved(option, depth + 1)
        else:
            yield schema

    # Writing

    def _expected(self, frame: _Frame) -> Any:
        """The value that is being written, as the draft has it."""
        if not frame.is_object or frame.key is None:
            return UNKNOWN
        properties = self._properties(frame)
        if frame.key not in properties:
            return UNKNOWN
        return self._reader.members(self._chosen(frame), [frame.key], frame.region).get(frame.key, UNKNOWN)

    def _value_text(self, frame: _Frame, name: str, writer: "_Writer", frames: list[_Frame]) -> str:
        value = self._reader.members(self._chosen(frame), [name], frame.region).get(name, UNKNOWN)
        text, is_whole = writer.part(value)
        if not is_whole:
            schema = self._properties(frame).get(name)
            return text or ('"' if _is_string(next(iter(self._options(schema)), None)) else "")
        inner = _Frame(True, frame.schema, frame.region, {**frame.members, name: text})
        return text + self._rest([*frames[:-1], inner], writer)

    def _rest(self, frames: list[_Frame], writer: "_Writer") -> str:
        """What follows a value in the innermost frame: its other members, and what closes it, and the same of those around it."""
        text = ""
        for frame in reversed(frames):
            if not frame.is_object:
                return text
            names = list(self._properties(frame))
            written = [*frame.members, *([frame.key] if frame.key is not None else [])]
            done = [names.index(name) for name in written if name in names]
            left = names[max(done, default=-1) + 1 :]
            for name, value in self._reader.members(self._chosen(frame), left, frame.region).items():
                part, is_whole = writer.part(value)
                text += f"{writer.comma}{json.dumps(name, ensure_ascii=False)}{writer.colon}{part}"
                if not is_whole:
                    schema = next(iter(self._options(self._properties(frame).get(name))), None)
                    return text + ('"' if not part and _is_string(schema) else "")
            text += "}"
        return text


@dataclass(frozen=True, slots=True)
class _Writer:
    """Spells values with the separators of the answer."""

    comma: str
    colon: str

    def part(self, value: Any) -> tuple[str, bool]:
        """A value's text up to the first unknown one, and whether it is whole."""
        text = json.dumps(value, ensure_ascii=False, separators=(self.comma, self.colon))
        known = re.split(f'"{UNKNOWN}"|{UNKNOWN_TEXT}', text, maxsplit=1)[0]
        return known, len(known) == len(text)

    def known(self, value: Any) -> str:
        return self.part(value)[0]


def _fits(schema: Any, frame: _Frame) -> bool:
    if not isinstance(schema, dict) or (schema.get("type", "object") == "object") != frame.is_object:
        return False
    properties = schema.get("properties", {})
    for name, text in frame.members.items():
        if name not in properties:
            return False
        constant = properties[name].get("const", UNKNOWN) if isinstance(properties[name], dict) else UNKNOWN
        if constant is not UNKNOWN and json.loads(text) != constant:
            return False
    return frame.key is None or frame.key in properties or not frame.is_object


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return schema.get("type") == "string" or (bool(values) and all(isinstance(value, str) for value in values))


_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november", "december")
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)|(\d{1,2})(?:st|nd|rd|th)?\.? (?:of )?([A-Za-z]{3,9})\.?,? (\d{4})"
    r"|([A-Za-z]{3,9})\.? (\d{1,2})(?:st|nd|rd|th)?,? (\d{4})"
)


def dates(text: str) -> Iterator[str]:
    """Those of a text, as JSON Schema's format has them."""
    for found in _DATE.finditer(text):
        if found[1]:
            yield found[0]
            continue
        day, name, year = (found[4], found[5], found[6]) if found[4] else (found[8], found[7], found[9])
        month = next((number for number, month in enumerate(_MONTHS, 1) if month.startswith(name.lower())), None)
        if month is not None:
            yield f"{year}-{month:02}-{int(day):02}"


class SequenceCompletion(LayeredProposer):
    """Proposes how a JSON answer goes on, anew after each token that was not as proposed; where nothing is known of it, `other` does."""

    def __init__(
        self,
        token_ids: list[int],
        completion: AnswerCompletion,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        other: SequenceProposer,
    ) -> None:
        super().__init__(other)
        self._token_ids = token_ids
        self._start = self._num_read = len(token_ids)
        self._completion = completion
        self._encode, self._decode = encode, decode
        self._draft: list[int] = []
        self._source = 0
        self._num_known = 0  # tokens of the draft before the first that is guessed
        self._accuracies = {True: FIRST_KNOWN, False: FIRST_GUESSED}
        self._is_complete = False  # whether the present draft is of all tokens that were read

    @property
    def has_guess(self) -> bool:
        return self._source < len(self._draft) or self.other.has_guess

    @property
    def _leaves_it_to_other(self) -> bool:
        """Also where it could only guess, and that is surer."""
        if self._source >= len(self._draft):
            return True
        is_guess = self._source == self._num_known
        return is_guess and self.other.has_guess and self.other.accuracy > max(FIRST_KNOWN, self._accuracies[False])

    def propose(self, num_tokens: int) -> list[int]:
        if self._leaves_it_to_other:
            return self.other.propose(num_tokens)
        return self._draft[self._source : self._source + num_tokens]

    def accuracy_after(self, num_right: int) -> float:
        if self._leaves_it_to_other:
            return self.other.accuracy_after(num_right)
        place = self._source + num_right
        # Behind a value that was guessed right, all is as sure as elsewhere.
        return self._accuracies[place != self._num_known]

    def read(self) -> bool:
        if not self.other.read():
            return False
        for token_id in self._token_ids[self._num_read :]:
            if self._source < len(self._draft):
                is_right = self._draft[self._source] == token_id
                kind = self._source != self._num_known
                self._accuracies[kind] = moved(self._accuracies[kind], is_right=is_right)
                self._source = self._source + 1 if is_right else len(self._draft)
            self._is_complete = False
        self._num_read = len(self._token_ids)
        if self._source >= len(self._draft) and not self._is_complete:
            self._complete()
        self.accuracy = self.other.accuracy if self._leaves_it_to_other else self.accuracy_after(0)
        return True

    def _complete(self) -> None:
        """Proposes the beginning of what follows: where all of it is right, the rest is found behind it."""
        token_ids = self._token_ids[self._start :]
        found = self._completion.after(self._decode(token_ids)) if len(token_ids) <= MAX_ANSWER_CHARACTERS else Completion()
        text = found.text
        if len(text) > MAX_PROPOSED_CHARACTERS:  # at a blank if there is one, where a token begins
            text = text[: max(text.rfind(" ", 0, MAX_PROPOSED_CHARACTERS), 0) or MAX_PROPOSED_CHARACTERS]
        self._draft, self._source, self._is_complete = self._encode(text) if text else [], 0, True
        self._num_known = -1 if found.num_known >= len(text) else len(self._encode(text[: found.num_known]))


def proposer_of_copies(
    token_ids: list[int],
    copied: list[int],
    schema: str | None,
    *,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    other: SequenceProposer,
    num_prompt_tokens: int,
) -> SequenceProposer:
    """Of an answer that begins after `token_ids` and copies from `copied`; `schema` is the one that it is held to."""
    copied = copied[-MAX_COPIED_TOKENS:]
    if schema is None or len(schema) > MAX_SCHEMA_CHARACTERS:
        return SequenceCopy(token_ids, copied, other)
    copy = SequenceCopy(token_ids, copied, other, FIRST_COPIED)
    question = decode(token_ids[max(0, num_prompt_tokens - MAX_QUESTION_TOKENS) : num_prompt_tokens])
    return SequenceCompletion(token_ids, AnswerCompletion(schema, decode(copied), question), encode, decode, copy)
