"""Tasks whose answers can be checked: arithmetic, extraction, classification, calendar calls, and the function calls of BFCL.

The first four are generated from a seed. BFCL's (the Berkeley Function Calling Leaderboard: simple, multiple, live_multiple, irrelevance)
are read out of its own package, which is neither installed nor run.
"""

import ast
import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

BFCL = "bfcl-eval==2026.3.23"
BFCL_SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"  # of the wheel
BFCL_TASKS = ("simple", "multiple", "live_multiple", "irrelevance")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
JSON_NAMES = {"true": "True", "false": "False", "null": "None"}
NONE = "none"  # the name of the call where no function serves

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `free_form` and `json_form` say how to answer in text and in JSON; what precedes them is the same.

    `read` makes the value that the schema describes out of a free answer, and raises ValueError where it finds none. `is_right` judges
    a value that is valid.
    """

    task: str
    key: str
    system: str
    question: str
    free_form: str
    json_form: str
    schema: Schema
    read: Callable[[str], Any]
    is_right: Callable[[Any], bool]
    functions: Sequence[Schema] = field(default=())

    def messages(self, form: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": f"{self.question}\n\n{form}"}]


def items(task: str, number: int, seed: int, cache: Path) -> list[Item]:
    """The first `number` of a task's items in the order that the seed gives. `cache` is where BFCL's package is kept."""
    numbers = random.Random(f"{seed} {task}")
    if task in GENERATED:
        return [GENERATED[task](numbers, f"{task}-{place}") for place in range(number)]
    found = list(bfcl_items(task, cache))
    numbers.shuffle(found)
    return found[:number]


# What is generated


def arithmetic(numbers: random.Random, key: str) -> Item:
    name, thing = numbers.choice(NAMES), numbers.choice(("pencils", "apples", "stickers", "tickets", "bricks"))
    a, b, c = numbers.randint(3, 19), numbers.randint(2, 9), numbers.randint(2, 25)
    form = numbers.randrange(4)
    if form == 0:
        story = f"{name} has {b} boxes with {a} {thing} in each, and {c} {thing} besides. How many {thing} does {name} have?"
        value = a * b + c
    elif form == 1:
        story = f"{name} buys {b} bags of {a} {thing} and gives away {min(c, a)}. How many {thing} are left?"
        value = a * b - min(c, a)
    elif form == 2:
        story = f"A train has {b} coaches with {a + 20} seats each. {c} seats are taken. How many seats are free?"
        value = b * (a + 20) - c
    else:
        story = f"{name} reads {a} pages every day for {b} days, and then {c} pages more. How many pages is that?"
        value = a * b + c
    return Item(
        *("arithmetic", key, "You solve word problems.", story),
        free_form="Work it out, and end with a line `Answer: ` and the number.",
        json_form='Answer with a JSON object alone: {"answer": the number}.',
        schema=closed({"answer": {"type": "integer"}}),
        read=lambda text: {"answer": last_integer(text)},
        is_right=lambda found: found["answer"] == value,
    )


def extraction(numbers: random.Random, key: str) -> Item:
    name, city, product = numbers.choice(NAMES), numbers.choice(CITIES), numbers.choice(PRODUCTS)
    count, price = numbers.randint(2, 40), numbers.randint(3, 180)
    shipped = date(2026, 1, 1) + timedelta(numbers.randrange(360))
    texts = (
        f"Hello, this is {name} from {city}. I ordered {count} {product} on {shipped:%B} {shipped.day}, 2026, at {price} euros each.",
        f"Order of {shipped.isoformat()}: {count} {product} at EUR {price} apiece, to be sent to {name} in {city}.",
        f"{name} wrote from {city} about the {count} {product} ordered on {shipped.day} {shipped:%B} 2026. Each costs {price} euros.",
    )
    expected = {"customer": name, "city": city, "product": product, "quantity": count, "price": price, "date": shipped.isoformat()}
    text, strings = {"type": "string"}, ("customer", "city", "product")
    fields = dict.fromkeys(strings, text) | {name: {"type": "integer"} for name in ("quantity", "price")}
    fields |= {"date": {"type": "string", "format": "date"}}
    return Item(
        *("extraction", key, "You read orders. A date is written as YYYY-MM-DD; the price is that of one.", numbers.choice(texts)),
        free_form="Fill in these lines:\n" + "\n".join(f"{name}: <{name}>" for name in fields),
        json_form="Fill in this JSON object:\n" + json.dumps({name: f"<{name}>" for name in fields}),
        schema=closed(fields),
        read=lambda text: lines_of(text, fields),
        is_right=lambda found: all(plain(found[name]) == plain(value) for name, value in expected.items()),
    )


def classification(numbers: random.Random, key: str) -> Item:
    label = numbers.choice(list(MESSAGES))
    message = f"{numbers.choice(OPENINGS)} {numbers.choice(MESSAGES[label])} {numbers.choice(CLOSINGS)}"
    names = ", ".join(MESSAGES)
    return Item(
        *("classification", key, f"You sort messages of customers into: {names}.", f"Message: {message}"),
        free_form=f"Say in a sentence what it is about, and end with a line `Category: ` and one of the words {names}.",
        json_form=f'Answer with a JSON object alone: {{"category": one of the words {names}}}.',
        schema=closed({"category": {"enum": list(MESSAGES)}}),
        read=lambda text: {"category": last_of(text, list(MESSAGES))},
        is_right=lambda found: found["category"] == label,
    )


def calendar(numbers: random.Random, key: str) -> Item:
    """An executable one: the call is made on a calendar, and what that holds afterwards is compared."""
    day = date(2026, 1, 1) + timedelta(numbers.randrange(360))
    hour, minute = numbers.randint(8, 18), numbers.choice((0, 15, 30, 45))
    minutes, title = numbers.choice((15, 30, 45, 60, 90)), numbers.choice(("Budget", "Hiring", "Roadmap", "Security", "Design"))
    people = numbers.sample(NAMES, numbers.randint(1, 3))
    guests = " and ".join(people) if len(people) < 3 else f"{people[0]}, {people[1]} and {people[2]}"
    questions = (
        f"Book a meeting named {title} with {guests} on {day:%B} {day.day}, 2026 at {hour:02}:{minute:02}, for {minutes} minutes.",
        f"Put '{title}' into the calendar: {day.isoformat()}, {hour:02}:{minute:02}, {minutes} minutes long, with {guests}.",
    )
    expected = {"title": title, "date": day.isoformat(), "time": f"{hour:02}:{minute:02}", "minutes": minutes, "attendees": people}
    text: Schema = {"type": "string"}
    fields: Schema = {
        "title": text,
        "date": {"type": "string", "format": "date", "description": "YYYY-MM-DD"},
        "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$", "description": "HH:MM, of 24 hours"},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 1440},
        "attendees": {"type": "array", "items": text, "minItems": 1},
    }
    functions = [
        {"name": "create_event", "description": "Enters an event into the calendar.", "parameters": closed(fields)},
        {"name": "list_events", "description": "Lists the events of a day.", "parameters": closed({"date": fields["date"]})},
    ]

    def is_right(call: Any) -> bool:
        if call["name"] != "create_event":
            return False
        event = {**call["arguments"], "attendees": sorted(map(plain, call["arguments"]["attendees"]))}
        wanted = {**expected, "attendees": sorted(map(plain, people))}
        return all(plain(event[name]) == plain(value) for name, value in wanted.items())

    return call_item("calendar", key, functions, numbers.choice(questions), is_right)


GENERATED: dict[str, Callable[[random.Random, str], Item]] = {
    "arithmetic": arithmetic,
    "extraction": extraction,
    "classification": classification,
    "calendar": calendar,
}
NAMES = (
    "Anna",
    "Bilal",
    "Chen",
    "Dora",
    "Emeka",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kavya",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Paulo",
)
CITIES = ("Oslo", "Lisbon", "Vienna", "Krakow", "Dublin", "Ghent", "Turin", "Malmo", "Porto", "Basel")
PRODUCTS = ("lamps", "chairs", "notebooks", "keyboards", "mugs", "backpacks", "clocks", "tents")
MESSAGES = {
    "delivery": ("My parcel has not arrived yet.", "The courier left the box with somebody else.", "When will the shipment reach me?"),
    "refund": ("I want my money back.", "Please return what I paid.", "You still owe me the money for the coat that I sent back."),
    "account": ("I cannot sign in.", "How do I change my password?", "My profile shows a wrong name, and I cannot edit it."),
    "defect": ("The screen is cracked.", "It stopped working after two days.", "One of the buttons is broken."),
    "praise": ("Thank you, everything was perfect!", "Your staff was wonderful.", "I love it, the best purchase of the year."),
}
OPENINGS = ("Hello,", "Good morning.", "Hi there,", "Dear team,", "To whom it may concern:")
CLOSINGS = ("Regards, Anna", "I bought it in May.", "My number is 44812.", "Best wishes", "Sent from my phone")


# BFCL


def bfcl_items(task: str, cache: Path) -> Iterator[Item]:
    """Of the questions with one turn and one message. Those of `irrelevance` are right with the call `none`."""
    name = f"BFCL_v4_{'simple_python' if task == 'simple' else task}.json"
    with zipfile.ZipFile(bfcl_wheel(cache)) as archive:
        questions = read_lines(archive, f"bfcl_eval/data/{name}")
        answers = (
            {} if task == "irrelevance" else {item["id"]: item for item in read_lines(archive, f"bfcl_eval/data/possible_answer/{name}")}
        )
    for question in questions:
        messages = question["question"][0]
        if len(question["question"]) > 1 or len(messages) > 1:
            continue
        functions = [{**function, "parameters": bfcl_schema(function["parameters"])} for function in question["function"]]
        truth = answers[question["id"]]["ground_truth"][0] if answers else {}
        yield call_item(
            f"bfcl_{task}", question["id"], functions, messages[0]["content"], matcher(truth), may_decline=task == "irrelevance"
        )


def bfcl_wheel(cache: Path) -> Path:
    """Fetched once, and compared with its digest. Raises RuntimeError where it cannot be had."""
    found = list(cache.glob("bfcl_eval-*.whl"))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(cache), BFCL]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"{BFCL} could not be fetched: leave out the tasks bfcl_*")
        found = list(cache.glob("bfcl_eval-*.whl"))
    with found[0].open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != BFCL_SHA256:
            raise RuntimeError(f"{found[0]} is not the file that was measured: remove it")
    return found[0]


def read_lines(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(name).decode().splitlines()]


def bfcl_schema(described: Any) -> Schema:
    """JSON Schema, of the names that BFCL has for types. Defaults are not kept: they are notes to the model."""
    types = {"dict": "object", "float": "number", "tuple": "array"}
    made: Schema = {}
    kind = described.get("type", "any")
    if kind != "any":
        made["type"] = types.get(kind, kind)
    for key in ("description", "enum", "minItems", "maxItems"):
        if key in described:
            made[key] = described[key]
    if "properties" in described:
        made["properties"] = {name: bfcl_schema(value) for name, value in described["properties"].items()}
        made["required"] = [name for name in described.get("required", ()) if name in described["properties"]]
        made["additionalProperties"] = False
    if "items" in described:
        made["items"] = bfcl_schema(described["items"])
    return made


def matcher(truth: Mapping[str, Mapping[str, Sequence[Any]]]) -> Callable[[Any], bool]:
    """BFCL's rule: the name, and each argument one of those listed; "" among them means that it may be left out. No truth: no call."""

    def is_right(call: Any) -> bool:
        if not truth:
            return bool(call["name"] == NONE)
        ((name, expected),) = truth.items()
        if call["name"] != name or any(argument not in expected for argument in call["arguments"]):
            return False
        return all(
            is_one_of(call["arguments"][argument], listed) if argument in call["arguments"] else "" in listed
            for argument, listed in expected.items()
        )

    return is_right


def is_one_of(value: Any, listed: Sequence[Any]) -> bool:
    return any(is_same(value, candidate) for candidate in listed)


def is_same(value: Any, expected: Any) -> bool:
    """Texts without regard to case, blanks and punctuation. The values of an expected object are lists of those that are right."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return set(value) <= set(expected) and all(
            is_one_of(value[key], listed) if key in value else "" in listed for key, listed in expected.items()
        )
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_same, value, expected))
    if is_number(value) and is_number(expected):
        return bool(value == expected)
    return type(value) is type(expected) and bool(plain(value) == plain(expected))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Calls


def call_item(
    task: str, key: str, functions: Sequence[Schema], question: str, is_right: Callable[[Any], bool], *, may_decline: bool = False
) -> Item:
    """A question that is answered by one call. In text, it is a call in Python's syntax."""
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    calls = [
        closed({"name": {"const": function["name"]}, "arguments": {"additionalProperties": False, **function["parameters"]}})
        for function in functions
    ]
    declined = ""
    if may_decline:
        calls.append(closed({"name": {"const": NONE}, "arguments": closed({})}))
        declined = f" If no function serves, its name is {NONE}, without arguments."
    parameters = {function["name"]: list(function["parameters"].get("properties", ())) for function in functions}
    parameters |= {NONE: []} if may_decline else {}
    return Item(
        *(task, key, f"You call functions. These are known:\n{listed}", question),
        free_form=f"Answer with a call of one function in Python's syntax, with arguments by name, and nothing else.{declined}",
        json_form=f'Answer with a call of one function as a JSON object alone: {{"name": ..., "arguments": {{...}}}}.{declined}',
        schema={"anyOf": calls} if len(calls) > 1 else calls[0],
        read=lambda text: call_in(text, parameters),
        is_right=is_right,
        functions=functions,
    )


def call_in(text: str, parameters: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The first call of a known function in a text, in Python's syntax. Arguments without names are the first of its `parameters`."""
    names = sorted(parameters, key=len, reverse=True)
    for found in re.finditer("|".join(re.escape(name) + r"(?![\w.])" for name in names), text):
        for end in (place.end() for place in re.finditer(r"\)", text[found.start() :])):
            try:
                call = ast.parse(text[found.start() : found.start() + end].replace("\n", " "), mode="eval").body
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            if isinstance(call, ast.Call) and ast.unparse(call.func) == found[0] and len(call.args) <= len(parameters[found[0]]):
                given = dict(zip(parameters[found[0]], call.args, strict=False))
                given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
                return {"name": found[0], "arguments": {name: value_of(value) for name, value in given.items()}}
            break
    if NONE in parameters and re.search(rf"\b{NONE}\b", text, re.IGNORECASE):
        return {"name": NONE, "arguments": {}}
    raise ValueError("no call")


def value_of(node: ast.expr) -> Any:
    """A literal, in which JSON's names are Python's too. Raises ValueError for anything else."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in JSON_NAMES:
            inner.id = JSON_NAMES[inner.id]
    return json.loads(json.dumps(ast.literal_eval(ast.parse(ast.unparse(node), mode="eval"))))


# Reading


def closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def last_integer(text: str) -> int:
    """Of the last line with `Answer:` the result of the last equation, or the first number; without such a line, the last number."""
    marked = re.findall(r"answer\W*:(.*)", text, re.IGNORECASE)
    for part in reversed(marked):
        found = NUMBER.findall(part.rpartition("=")[2])
        if found:
            return integer(found[0])
    found = NUMBER.findall(text)
    if not found:
        raise ValueError("no number")
    return integer(found[-1])


def integer(text: str) -> int:
    value = float(text.replace(",", ""))
    if value != int(value):
        raise ValueError(f"no integer: {text}")
    return int(value)


def last_of(text: str, labels: Sequence[str]) -> str:
    """The last that is named, on the line with `Category:` where there is one."""
    marked = re.findall(r"category\W*:(.*)", text, re.IGNORECASE)
    for part in [*reversed(marked), text]:
        found = re.findall("|".join(rf"\b{label}\b" for label in labels), part, re.IGNORECASE)
        if found:
            return str(found[-1]).lower()
    raise ValueError("no label")


def lines_of(text: str, fields: Mapping[str, Schema]) -> dict[str, Any]:
    """Lines `name: value`, whatever emphasis or list marks are around the name."""
    found: dict[str, Any] = {}
    for name, schema in fields.items():
        line = re.search(rf"^\W*{name}\W*:[ \t*`]*(.+?)[ \t*`.]*$", text, re.IGNORECASE | re.MULTILINE)
        if line is None:
            raise ValueError(f"no {name}")
        found[name] = last_integer(line[1]) if schema["type"] == "integer" else line[1]
    return found


def json_in(text: str) -> Any:
    """The first JSON object in a text, between fences or not. Raises ValueError without one."""
    decoder = json.JSONDecoder()
    for place in re.finditer(r"\{", text):
        try:
            return decoder.raw_decode(text, place.start())[0]
        except ValueError:
            continue
    raise ValueError("no JSON")


def plain(value: Any) -> Any:
    """A text as it is compared, without case, blanks and punctuation; another value as it is."""
    return re.sub(r"[\s,./\-_*^'\"]", "", value).lower() if isinstance(value, str) else value
