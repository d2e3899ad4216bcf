"""What an answer under a constraint copies from the free text before it, as draft tokens: its parts, or the whole of a JSON answer."""

import ast
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from penstock.engine.contracts.proposer import DraftedSequence, SequenceProposer
from penstock.engine.speculation.proposers import FIRST_PREDICTION_ACCURACY, Prediction, SequencePrediction

MAX_DRAFT_CHARACTERS = 16_000  # that are read: the end, where the answer is
MAX_VALUES = 64
MAX_DEPTH = 8
MAX_PLACES = 256  # that are remembered
MAX_ENDS = 16  # brackets that may be the end of a list or call
# Characters that are searched for one completion, of which each name, value and alternative counts as so many beside its text: schemas with
# thousands of them would block the event loop for seconds.
MAX_SEARCHED = 2**17
NAME_COST, VALUE_COST, OPTION_COST = 2**11, 64, 64
PARSED_COST = 4  # of each character of Python's syntax
SEPARATORS = ((", ", ": "), (",", ":"))  # what grammars allow, the usual one first
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
UNKNOWN, UNKNOWN_TEXT = "\ue000", "\ue001"  # stand for a value, and for that of a string
Schema = Mapping[str, Any]


class SequenceCopy(SequencePrediction):
    """Proposes what the sequence has written before in free text, of which its constrained answer copies parts.

    A copy seldom begins at the text's beginning, and often with another token than in the text, such as one without the blank before a
    word. So it begins at a single token that the text has, and not before the answer has said one.
    """

    def __init__(
        self, token_ids: list[int], copied: list[int], other: SequenceProposer, first_accuracy: float = FIRST_PREDICTION_ACCURACY
    ) -> None:
        super().__init__(DraftedSequence(token_ids=token_ids, num_prompt_tokens=len(token_ids)), Prediction(copied), other)
        self._own_accuracy = first_accuracy
        self._num_read = len(token_ids)
        self._places: dict[int, list[int]] = {}  # what follows each token of the text
        for place, token_id in enumerate(copied[:-1], start=1):
            self._places.setdefault(token_id, []).append(place)

    @property
    def is_predicted(self) -> bool:  # type: ignore[override]
        return False  # by the client

    @property
    def _leaves_it_to_other(self) -> bool:
        """Also where that is surer, as behind a text that repeats itself."""
        return self._source is None or (self.other.has_guess and self.other.accuracy > self._own_accuracy)

    def propose(self, num_tokens: int) -> list[int]:
        return self.other.propose(num_tokens) if self._leaves_it_to_other else super().propose(num_tokens)

    def accuracy_after(self, num_right: int) -> float:
        return self.other.accuracy_after(num_right) if self._leaves_it_to_other else self._own_accuracy

    def read(self) -> bool:
        if not super().read():
            return False
        self.accuracy = self.other.accuracy if self._leaves_it_to_other else self._own_accuracy
        return True

    def _find(self, position: int) -> int | None:
        place = super()._find(position)
        if place is not None:
            return place
        places = self._places.get(self._token_ids[position])
        return None if places is None else places[min(bisect_left(places, self._place), len(places) - 1)]


class DraftReader:
    """Finds the value of each property of a schema in a draft, by its name."""

    def __init__(self, schema: Any, draft: str) -> None:
        self._root = schema
        self._draft = draft
        self._num_values = 0
        self._num_left = MAX_SEARCHED
        self._arguments: dict[tuple[str, str], str | None] = {}  # that have been looked for, by the callee and text
        self._places: dict[tuple[str, str], int | None] = {}

    def begin(self) -> None:
        """Another completion begins, with a bound of its own."""
        self._num_left = MAX_SEARCHED

    def spend(self, num_characters: int) -> None:
        """Raises ValueError where more has been searched than is worth it."""
        self._num_left -= num_characters
        if self._num_left < 0:
            raise ValueError("more than is worth predicting")

    def place_after(self, name: str, text: str) -> int | None:
        """As the function, which is asked once: at each token of an answer the same names are looked for."""
        key = name, text
        if key not in self._places:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            self._places[key] = place_after(name, text)
        return self._places[key]

    def read(self) -> Any:
        self._num_values = 0
        return self._value(self._root, self._draft, 0)

    def _value(self, schema: Any, text: str, depth: int) -> Any:
        """Of text that begins with the value, or has it somewhere."""
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise ValueError("more than is worth predicting")
        if not isinstance(schema, dict):
            return None
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(self.target(reference), text, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            self.spend(len(schema["enum"]) * (VALUE_COST + len(text) // VALUE_COST))
            found = named(schema["enum"], text)
            return UNKNOWN_TEXT if found is UNKNOWN and all(isinstance(value, str) for value in schema["enum"]) else found
        if options := schema.get("anyOf") or schema.get("oneOf"):
            self.spend(len(options) * OPTION_COST)
            return self._value(max(options, key=lambda option: self._num_consts(option, text)), text, depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = kind[0]
        if kind == "object":
            return self._object(schema, text, depth)
        return self._list(text) if kind == "array" else _READERS[kind](text)

    def members(self, schema: Any, names: list[str], text: str) -> dict[str, Any]:
        """These members of an object, but for optional ones that the text does not have."""
        self._num_values = 0
        return self._object(schema, text, 0, names) if isinstance(schema, dict) else {}

    def arguments(self, schema: Any, name: str, text: str) -> str | None:
        """Where this member is the arguments of a call that the text has in Python's syntax, these with their names."""
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        inner, callee = properties.get(name), _callee(properties)
        if not callee or not isinstance(inner, dict) or "properties" not in inner:
            return None
        place = callee, text
        if place not in self._arguments:
            self.spend(PARSED_COST * len(text))
            self._arguments[place] = with_names(callee, list(inner["properties"]), text)
        return self._arguments[place]

    def _object(self, schema: Schema, text: str, depth: int, names: list[str] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        properties, required = schema.get("properties", {}), schema.get("required", ())
        for name in properties if names is None else names:
            self.spend(NAME_COST + len(text))
            inner, place = properties[name], self.place_after(name, text)
            if place is None and name not in required:
                continue
            within = f"\n{text}" if place is None else text[place:]  # which begins with the value, or does not
            arguments = self.arguments(schema, name, text)
            if place is None and arguments is None and not _needs_no_name(inner, is_alone=len(properties) == 1):
                within = text if _names_one(inner, text) else ""
            found[name] = self._value(inner, arguments or within, depth + 1)
        return found

    def target(self, reference: str) -> Any:
        """The schema that a reference is to. Raises LookupError."""
        target = self._root
        for key in reference.removeprefix("#/").split("/"):
            target = target[key]
        return target

    def _num_consts(self, schema: Any, text: str) -> int:
        """How many of the constants that an object would have the text names."""
        inner = schema.get("properties", {}).values() if isinstance(schema, dict) else ()
        self.spend(len(inner) * (VALUE_COST + len(text) // VALUE_COST))
        return sum(isinstance(part, dict) and isinstance(part.get("const"), str) and part["const"] in text for part in inner)

    def _list(self, text: str) -> list[Any] | str:
        for end in islice(re.finditer(r"\]", text), MAX_ENDS) if text[:1] == "[" else ():
            self.spend(PARSED_COST * end.end())
            try:
                value = ast.literal_eval(text[: end.end()])
            except (ValueError, SyntaxError, MemoryError):
                continue
            return list(value)
        return UNKNOWN


def _callee(properties: Schema) -> str:
    """What is called where one member of an object is the name, and another the arguments."""
    constants = (part.get("const") for part in properties.values() if isinstance(part, dict))
    return next((constant for constant in constants if isinstance(constant, str)), "")


def _needs_no_name(schema: Any, *, is_alone: bool) -> bool:
    """Whether the value can be found without the name of its property, such as the only one that there is."""
    if not isinstance(schema, dict):
        return False
    is_plain = "enum" in schema or schema.get("type") in ("integer", "number")
    return any(keyword in schema for keyword in ("const", "properties", "$ref", "anyOf", "oneOf")) or (is_alone and is_plain)


def _names_one(schema: Any, text: str) -> bool:
    """Whether a text has one of the words that are listed, and no other."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    words = [value.lower() for value in values if isinstance(value, str) and len(value) > 1] if isinstance(values, list) else []
    lower = text.lower()
    return sum(word in lower for word in words) == 1


def place_after(name: str, text: str) -> int | None:
    """Where the value of a name begins, such as after `name:`, `"name": ` or `name=`."""
    spelled = re.escape(name).replace("_", "[_ ]")
    # Bounded: a text of marks or blanks alone would take its square.
    found = re.search(rf"(?<![\w.]){spelled}(?!\w)[\"'`*]{{0,8}}\s{{0,8}}[:=](?!=)\s*\**\s*", text, re.IGNORECASE)
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


_READERS: Mapping[str, Callable[[str], Any]] = {
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": _boolean,
    "null": lambda text: None,
}
