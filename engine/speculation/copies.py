"""What an answer under a constraint copies from the free text before it, as draft tokens: its parts, or the whole of a JSON answer."""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate, islice
from typing import Any

from penstock.engine.contracts.proposer import DraftedSequence, SequenceProposer
from penstock.engine.speculation.proposers import Prediction, SequencePrediction

MAX_DRAFT_CHARACTERS = 16_000  # that are read: the end, where the answer is
MAX_VALUES = 64
MAX_DEPTH = 8
MAX_ENDS = 16  # brackets that may be the end of a list or call
SEPARATORS = ((", ", ": "), (",", ":"))  # what grammars allow, the usual one first
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
UNKNOWN, UNKNOWN_TEXT = "\ue000", "\ue001"  # stand for a value, and for that of a string
Schema = Mapping[str, Any]


class SequenceCopy(SequencePrediction):
    """Proposes what the sequence has written before in free text, of which its constrained answer copies parts.

    A copy seldom begins at the text's beginning, and often with another token than in the text, such as one without the blank before a
    word. So it begins at a single token that the text has, and not before the answer has said one.
    """

    def __init__(self, token_ids: list[int], copied: list[int], other: SequenceProposer) -> None:
        super().__init__(DraftedSequence(token_ids=token_ids, num_prompt_tokens=len(token_ids)), Prediction(copied), other)
        self._num_read = len(token_ids)
        self._places: dict[int, list[int]] = {}  # what follows each token of the text
        for place, token_id in enumerate(copied[:-1], start=1):
            self._places.setdefault(token_id, []).append(place)

    @property
    def is_predicted(self) -> bool:  # type: ignore[override]
        return False  # by the client

    def _find(self, position: int) -> int | None:
        place = super()._find(position)
        if place is not None:
            return place
        places = self._places.get(self._token_ids[position])
        return None if places is None else places[min(bisect_left(places, self._place), len(places) - 1)]


class SequenceRewrite(SequencePrediction):
    """Proposes a whole answer that was predicted, in one of several spellings; `other` where the answer is another.

    Each spelling is in pieces, with an unknown value between two of them: nothing is proposed across it. The first spelling, which is the
    usual one, is proposed until the answer differs from it.
    """

    def __init__(self, token_ids: list[int], spellings: list[list[list[int]]], other: SequenceProposer) -> None:
        self._spellings = [[token_id for piece in pieces for token_id in piece] for pieces in spellings]
        self._ends = [list(accumulate(map(len, pieces))) for pieces in spellings]
        super().__init__(DraftedSequence(token_ids=token_ids, num_prompt_tokens=len(token_ids)), Prediction(self._spellings[0]), other)
        self._start = len(token_ids)

    @property
    def is_predicted(self) -> bool:  # type: ignore[override]
        return False  # by the client

    def propose(self, num_tokens: int) -> list[int]:
        if self._source is None:
            return super().propose(num_tokens)
        end = next(end for end in self._ends[0] if end > self._source)
        return super().propose(min(num_tokens, end - self._source))

    def _read_token(self, position: int) -> None:
        answer = self._token_ids[self._start : position + 1]
        fitting = [place for place, spelling in enumerate(self._spellings) if spelling[: len(answer)] == answer]
        if len(self._spellings) > 1 and len(fitting) < len(self._spellings):
            is_fitting = bool(fitting)
            fitting = fitting[:1] or [0]
            self._spellings, self._ends = [self._spellings[fitting[0]]], [self._ends[fitting[0]]]
            self._prediction = Prediction(self._spellings[0])
            if is_fitting:
                self._go_to(len(answer))
                return
        super()._read_token(position)
        if self._source is not None:
            self._go_to(self._source)

    def _go_to(self, place: int) -> None:
        """An unknown value is not guessed at."""
        self._place = place
        self._source = None if place in self._ends[0] else place


def proposer_of_copies(
    token_ids: list[int], copied: list[int], text: str, schema: str | None, encode: Callable[[str], list[int]], other: SequenceProposer
) -> SequenceProposer:
    """Of an answer that begins after `token_ids` and copies from `copied`, whose text is `text`; `schema` is the one it is held to."""
    copy = SequenceCopy(token_ids, copied, other)
    answers = [] if schema is None else predicted_answers(schema, text)
    return SequenceRewrite(token_ids, [list(map(encode, pieces)) for pieces in answers], copy) if answers else copy


def predicted_answers(schema: str, draft: str) -> list[list[str]]:
    """The JSON that a draft says in other words, as far as its values can be found by their names, in each spelling; maybe none.

    It is a guess, which the model checks like any draft. A spelling is the pieces between the values of which nothing is found.
    """
    try:
        value = _Reader(json.loads(schema), draft[-MAX_DRAFT_CHARACTERS:]).read()
        spelled = dict.fromkeys(json.dumps(value, ensure_ascii=False, separators=separators) for separators in SEPARATORS)
        split = (list(filter(None, re.split(f'"{UNKNOWN}"|{UNKNOWN_TEXT}', text))) for text in spelled)
        return [pieces for pieces in split if pieces]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):  # schemas take forms of which this reads the plain ones
        return []


class _Reader:
    """Finds the value of each property of a schema in a draft, by its name."""

    def __init__(self, schema: Any, draft: str) -> None:
        self._root = schema
        self._draft = draft
        self._num_values = 0

    def read(self) -> Any:
        return self._value(self._root, self._draft, 0)

    def _value(self, schema: Any, text: str, depth: int) -> Any:
        """Of text that begins with the value, or has it somewhere."""
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise ValueError("more than is worth predicting")
        if not isinstance(schema, dict):
            return None
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(self._target(reference), text, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return named(schema["enum"], text)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(max(options, key=lambda option: self._num_consts(option, text)), text, depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = kind[0]
        if kind == "object":
            return self._object(schema, text, depth)
        return _READERS[kind](text)

    def _object(self, schema: Schema, text: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        properties, required = schema.get("properties", {}), schema.get("required", ())
        callee = next((part["const"] for part in properties.values() if isinstance(part, dict) and isinstance(part.get("const"), str)), "")
        for name, inner in properties.items():
            place = place_after(name, text)
            if place is None and name not in required:
                continue
            within = f"\n{text}" if place is None else text[place:]  # which begins with the value, or does not
            if callee and isinstance(inner, dict) and "properties" in inner:
                within = with_names(callee, list(inner["properties"]), text) or within
            elif place is None and not _needs_no_name(inner, is_alone=len(properties) == 1):
                within = ""
            found[name] = self._value(inner, within, depth + 1)
        return found

    def _target(self, reference: str) -> Any:
        target = self._root
        for key in reference.removeprefix("#/").split("/"):
            target = target[key]
        return target

    def _num_consts(self, schema: Any, text: str) -> int:
        """How many of the constants that an object would have the text names."""
        inner = schema.get("properties", {}).values() if isinstance(schema, dict) else ()
        return sum(isinstance(part, dict) and isinstance(part.get("const"), str) and part["const"] in text for part in inner)


def _needs_no_name(schema: Any, *, is_alone: bool) -> bool:
    """Whether the value can be found without the name of its property, such as the only one that there is."""
    if not isinstance(schema, dict):
        return False
    is_plain = "enum" in schema or schema.get("type") in ("integer", "number")
    return any(keyword in schema for keyword in ("const", "properties", "$ref", "anyOf", "oneOf")) or (is_alone and is_plain)


def place_after(name: str, text: str) -> int | None:
    """Where the value of a name begins, such as after `name:`, `"name": ` or `name=`."""
    spelled = re.escape(name).replace("_", "[_ ]")
    found = re.search(rf"(?<![\w.]){spelled}(?!\w)[\"'`*]*\s*[:=](?!=)\s*\**\s*", text, re.IGNORECASE)
    return None if found is None else found.end()


def with_names(callee: str, names: list[str], text: str) -> str | None:
    """The arguments of a call in Python's syntax as `name=value`; None without one that has arguments by position."""
    found = re.search(rf"(?<![\w.]){re.escape(callee)}\(", text)
    if found is None:
        return None
    rest = text[found.end() :]
    for end in islice(re.finditer(r"\)", rest), MAX_ENDS):
        try:
            call = ast.parse(f"f({rest[: end.end()]}", mode="eval").body
        except (SyntaxError, ValueError, MemoryError):
            continue
        if not isinstance(call, ast.Call) or not call.args or any(isinstance(value, ast.Name | ast.Dict) for value in call.args):
            return None
        given = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        return "\n".join(f"{name}={ast.unparse(value)}" for name, value in given)
    return None


def named(values: list[Any], text: str) -> Any:
    """Which of them the value begins with, else the one that is named last."""
    plain = {value: str(value).lower() for value in values if isinstance(value, str | int | float)}
    lower = text.lower()
    starting = [value for value, spelled in plain.items() if lower.lstrip("\"'`").startswith(spelled)]
    last = max(plain, key=lambda value: lower.rfind(plain[value]), default=None)
    if starting:
        return max(starting, key=lambda value: len(plain[value]))
    return last if last is not None and plain[last] in lower else UNKNOWN


def _string(text: str) -> str:
    if text[:1] in ('"', "'", "`"):
        return text[1 : end if (end := text.find(text[0], 1)) > 0 else len(text)]
    line = text.partition("\n")[0]
    argument = re.match(r"([^,()]*)[,)]\s*(?:\w+\s*=|$)", line)
    found = argument[1] if argument else line.strip().rstrip(".,*`")
    return UNKNOWN_TEXT if found[:1] in ("", "{", "[") else found


def _number(text: str) -> int | float | str:
    at_once = NUMBER.match(text.lstrip("\"'`$€ "))
    found = at_once[0] if at_once else (NUMBER.findall(text) or [UNKNOWN])[-1]
    if found is UNKNOWN:
        return UNKNOWN
    number = float(found.replace(",", ""))
    return int(number) if number.is_integer() and "." not in found else number


def _boolean(text: str) -> bool | str:
    word = text[:5].lower()
    return UNKNOWN if not word.startswith(("true", "false")) else word.startswith("true")


def _list(text: str) -> list[Any] | str:
    for end in islice(re.finditer(r"\]", text), MAX_ENDS) if text[:1] == "[" else ():
        try:
            value = ast.literal_eval(text[: end.end()])
        except (ValueError, SyntaxError, MemoryError):
            continue
        return list(value)
    return UNKNOWN


_READERS: Mapping[str, Callable[[str], Any]] = {
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": _boolean,
    "array": _list,
    "null": lambda text: None,
}
