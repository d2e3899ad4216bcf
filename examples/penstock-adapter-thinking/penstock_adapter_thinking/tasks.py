"""Generated tasks with short reasoning: arithmetic, comparisons, dates, and calls of tools."""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

HELD_OUT_SHARE = 8  # one problem of so many is held out
MOST_DRAWS = 10_000
MONTHS = {"January": 31, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31, "September": 30, "October": 31}
MONTHS |= {"November": 30, "December": 31}  # without February, whose length depends on the year
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBER, WEEKDAY, DATE = r"\d+(?:\.\d+)?", "|".join(WEEKDAYS), rf"(?:{'|'.join(MONTHS)}) \d+"


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its reasoning and its answer. `problem` is the same in all wordings of the question.

    `expected` is what the answer has to say: the first or last match of `pattern` in it, or with `tools`, the call as (name, arguments).
    """

    problem: str
    question: str
    reasoning: str
    answer: str
    expected: Any
    pattern: str = NUMBER
    is_first: bool = False
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.problem.encode()) % HELD_OUT_SHARE == 0

    def is_right(self, content: str) -> bool:
        """Whether an answer without calls is right."""
        found = re.findall(self.pattern, content.replace(",", ""))
        return bool(found) and found[0 if self.is_first else -1] == self.expected


def arithmetic(chance: random.Random) -> Task:
    return chance.choice((addition, addition, subtraction, subtraction, multiplication))(chance)


def addition(chance: random.Random) -> Task:
    a, b = _number(chance), _number(chance)
    wordings = (
        f"What is {a} + {b}?",
        f"Calculate {a} plus {b}.",
        f"Add {a} and {b}.",
        f"Anna has {a} apples and buys {b} more. How many apples does she have now?",
        f"A train carries {a} people. At the next stop {b} people get on. How many people are on the train?",
    )
    reasoning = f"{a}+{b}: {' '.join(_addition_steps(a, b))} So {a + b}."
    return _calculation(f"{min(a, b)}+{max(a, b)}", chance.choice(wordings), reasoning, a + b)


def _addition_steps(a: int, b: int) -> Iterator[str]:
    size, carry = max(len(str(a)), len(str(b))), 0
    for place in range(size):
        digits = [n // 10**place % 10 for n in (a, b) if n >= 10**place] + [1] * carry
        total = sum(digits)
        carry = total // 10
        is_carried = carry and place + 1 < size
        yield f"{'+'.join(map(str, digits))}={total}{f', write {total % 10}, carry 1' if is_carried else ''}."


def subtraction(chance: random.Random) -> Task:
    b, a = sorted((_number(chance), _number(chance)))
    wordings = (
        f"What is {a} - {b}?",
        f"Calculate {a} minus {b}.",
        f"Subtract {b} from {a}.",
        f"Tom has {a} coins and spends {b} of them. How many coins does he have left?",
        f"A shop has {a} books and sells {b}. How many books are left?",
    )
    reasoning = f"{a}-{b}: {' '.join(_subtraction_steps(a, b))} So {a - b}."
    return _calculation(f"{a}-{b}", chance.choice(wordings), reasoning, a - b)


def _subtraction_steps(a: int, b: int) -> Iterator[str]:
    borrow = 0
    for place in range(len(str(a))):
        digit, taken = a // 10**place % 10, [1] * borrow + ([b // 10**place % 10] if b >= 10**place else [])
        borrow = int(digit < sum(taken))
        digit += 10 * borrow
        left = "-".join(map(str, [digit, *taken]))
        yield f"{left}={digit - sum(taken)}{', borrow 1' if borrow else ''}."


def multiplication(chance: random.Random) -> Task:
    a, b = chance.randrange(11, 100), chance.randrange(2, 10)
    wordings = (
        f"What is {a} x {b}?",
        f"What is {a} times {b}?",
        f"Multiply {a} by {b}.",
        f"One box holds {a} pens. How many pens are in {b} boxes?",
    )
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens}*{b}={tens * b}"
    if ones:
        steps += f", {ones}*{b}={ones * b}, {tens * b}+{ones * b}={a * b}"
    return _calculation(f"{a}*{b}", chance.choice(wordings), f"{a}*{b}: {steps}. So {a * b}.", a * b)


def _number(chance: random.Random) -> int:
    return chance.randrange(10, 10 ** chance.choice((2, 3)))


def _calculation(problem: str, question: str, reasoning: str, result: int) -> Task:
    return Task(problem, question, reasoning, f"The answer is {result}.", str(result))


def comparison(chance: random.Random) -> Task:
    a, b, steps = chance.choice((_two_integers, _two_decimals))(chance)
    asked, winner = chance.choice((("larger", max(a, b, key=float)), ("smaller", min(a, b, key=float))))
    wordings = (
        f"Which number is {asked}, {a} or {b}?",
        f"Which is {asked}: {a} or {b}?",
        f"Is {a} or {b} the {asked} number?",
    )
    answer = f"{winner} is {asked}."
    problem = f"{asked} {min(a, b)} {max(a, b)}"
    return Task(problem, chance.choice(wordings), f"{steps} So {answer}", answer, winner, is_first=True)


def _two_integers(chance: random.Random) -> tuple[str, str, str]:
    a = b = str(chance.randrange(100, 10 ** chance.randrange(3, 6)))
    while b == a:
        if chance.random() < 0.3:
            b = str(chance.randrange(100, 10 ** chance.randrange(3, 6)))
        else:
            same = chance.randrange(len(a))
            b = a[:same] + "".join(chance.choice("0123456789" if place else "123456789") for place in range(same, len(a)))
    if len(a) != len(b):
        return a, b, f"{a} has {len(a)} digits and {b} has {len(b)}."
    return a, b, f"Both have {len(a)} digits: {_digit_steps(a, b)}."


def _two_decimals(chance: random.Random) -> tuple[str, str, str]:
    whole = chance.randrange(100)
    others = (whole, whole, whole, chance.randrange(100))
    a = b = (whole, "")
    while a == b:
        a, b = (whole, _fraction(chance)), (chance.choice(others), _fraction(chance))
    texts = [f"{number}.{fraction}" for number, fraction in (a, b)]
    if a[0] != b[0]:
        return texts[0], texts[1], f"Before the point: {a[0]}{'<' if a[0] < b[0] else '>'}{b[0]}."
    size = max(len(a[1]), len(b[1]))
    return texts[0], texts[1], f"{a[0]}={b[0]}. After the point: {_digit_steps(a[1].ljust(size, '0'), b[1].ljust(size, '0'))}."


def _fraction(chance: random.Random) -> str:
    """Does not end in a zero."""
    return "".join(chance.choice("0123456789") for _ in range(chance.randrange(3))) + chance.choice("123456789")


def _digit_steps(a: str, b: str) -> str:
    """From the left up to the first digits that differ."""
    same = next(place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    equal = [f"{digit}={digit}" for digit in a[:same]]
    return ", ".join([*equal, f"{a[same]}{'<' if a[same] < b[same] else '>'}{b[same]}"])


def date(chance: random.Random) -> Task:
    return chance.choice((weekday, day_of_month))(chance)


def weekday(chance: random.Random) -> Task:
    start, days, is_later = chance.randrange(7), chance.randrange(2, 41), chance.random() < 0.6
    day = WEEKDAYS[start]
    if is_later:
        wordings = (f"What day of the week is {days} days after {day}?", f"Today is {day}. What day is it in {days} days?")
    else:
        wordings = (f"What day of the week is {days} days before {day}?", f"Today is {day}. What day was it {days} days ago?")
    weeks, rest = divmod(days, 7)
    passed = [WEEKDAYS[(start + (step if is_later else -step)) % 7] for step in range(rest + 1)]
    steps = [f"{days} days are {weeks} {'week' if weeks == 1 else 'weeks'} and {rest} {'day' if rest == 1 else 'days'}."] * (weeks > 0)
    steps.append(f"{rest} {'after' if is_later else 'before'} {day}: {', '.join(passed[1:])}." if rest else f"So {day}.")
    problem = f"{days} {'after' if is_later else 'before'} {day}"
    return Task(problem, chance.choice(wordings), " ".join(steps), f"It is {passed[-1]}.", passed[-1], WEEKDAY)


def day_of_month(chance: random.Random) -> Task:
    month = chance.choice([month for month in MONTHS if month != "December"])
    size, following = MONTHS[month], list(MONTHS)[list(MONTHS).index(month) + 1]
    if month == "January":
        day, days = chance.randrange(1, 21), chance.randrange(2, 11)  # not into February
    else:
        day, days = chance.randrange(1, size + 1), chance.randrange(2, 28)
    end = day + days
    wordings = (
        f"What date is {days} days after {month} {day}?",
        f"Today is {month} {day}. What is the date in {days} days?",
        f"A trip starts on {month} {day} and ends {days} days later. On which date does it end?",
    )
    result = f"{month} {end}" if end <= size else f"{following} {end - size}"
    steps = f"{day}+{days}={end}. {month} has {size} days"
    steps += f". So {result}." if end <= size else f", {end}-{size}={end - size}. So {result}."
    return Task(f"{days} after {month} {day}", chance.choice(wordings), steps, f"It is {result}.", result, DATE)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, questions that ask for it, and what they are about."""

    name: str
    parameter: str
    about: str
    wordings: tuple[str, ...]
    values: tuple[Any, ...]

    def described(self) -> dict[str, Any]:
        """As a request describes it."""
        kind = "integer" if isinstance(self.values[0], int) else "string"
        parameters = {"type": "object", "properties": {self.parameter: {"type": kind}}, "required": [self.parameter]}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


CITIES = (
    *("Oslo", "Paris", "London", "Rome", "Madrid", "Berlin", "Tokyo", "Cairo", "Lima", "Delhi", "Dublin", "Vienna", "Prague", "Athens"),
    *("Lisbon", "Warsaw", "Boston", "Chicago", "Denver", "Seattle", "Toronto", "Sydney", "Nairobi", "Moscow", "Seoul", "Beijing", "Zurich"),
)
ARTISTS = ("Mozart", "Bach", "Madonna", "Elvis Presley", "The Beatles", "Queen", "Adele", "Bob Dylan", "David Bowie", "Nina Simone", "ABBA")
DISHES = ("pizza", "pancakes", "tomato soup", "fried rice", "apple pie", "lasagna", "bread", "curry", "pea soup", "an omelette", "noodles")
TOPICS = (
    "football",
    "the election",
    "space travel",
    "the stock market",
    "electric cars",
    "whales",
    "chess",
    "robots",
    "tennis",
    "volcanoes",
)
TOOLS = (
    Tool(
        "get_weather",
        "city",
        "the weather in {}",
        ("What is the weather in {}?", "Will it rain in {} today?", "Do I need an umbrella in {}?", "How warm is it in {}?"),
        CITIES,
    ),
    Tool(
        "get_time", "city", "the time in {}", ("What time is it in {}?", "Tell me the local time in {}.", "How late is it in {}?"), CITIES
    ),
    Tool("book_hotel", "city", "a hotel in {}", ("Book me a hotel in {}.", "I need a room in {}.", "Find a place to sleep in {}."), CITIES),
    Tool(
        "set_timer",
        "minutes",
        "a timer of {} minutes",
        ("Set a timer for {} minutes.", "Wake me up in {} minutes.", "Tell me when {} minutes are over."),
        tuple(range(2, 91)),
    ),
    Tool("play_music", "artist", "music by {}", ("Play something by {}.", "I want to hear {}.", "Put on some songs by {}."), ARTISTS),
    Tool("find_recipe", "dish", "a recipe for {}", ("How do I cook {}?", "Give me a recipe for {}.", "I want to make {}."), DISHES),
    Tool("search_news", "topic", "news about {}", ("What is new about {}?", "Find news about {}.", "What happened in {} lately?"), TOPICS),
)


def tool_choice(chance: random.Random) -> Task:
    """One of two tools is to be called."""
    tool = chance.choice(TOOLS)
    other = chance.choice([other for other in TOOLS if other is not tool])
    value = chance.choice(tool.values)
    arguments = {tool.parameter: value}
    call = f"<tool_call>\n{json.dumps({'name': tool.name, 'arguments': arguments})}\n</tool_call>"
    return Task(
        problem=f"{tool.name} {value}",
        question=chance.choice(tool.wordings).format(value),
        reasoning=f"The user asks for {tool.about.format(value)}. The tool for it is {tool.name}, with the {tool.parameter} {value}.",
        answer=call,
        expected=(tool.name, arguments),
        tools=tuple(each.described() for each in chance.sample((tool, other), 2)),
    )


KINDS: dict[str, Callable[[random.Random], Task]] = {
    "arithmetic": arithmetic,
    "comparison": comparison,
    "date": date,
    "tool": tool_choice,
}


def training_task(chance: random.Random, kind: str) -> Task:
    while True:
        task = KINDS[kind](chance)
        if not task.is_held_out:
            return task


def held_out_tasks(kind: str, number: int, seed: int = 0) -> list[Task]:
    """Of problems of which no training task is one; each once, and fewer where there are no more."""
    chance = random.Random(f"held out {kind} {seed}")
    tasks: dict[str, Task] = {}
    for _ in range(MOST_DRAWS):
        task = KINDS[kind](chance)
        if task.is_held_out:
            tasks.setdefault(task.problem, task)
        if len(tasks) == number:
            break
    return list(tasks.values())
