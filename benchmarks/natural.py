"""What people and their programs ask of a model, made up from a seed: no two seeds, and no two conversations of one, ask the same."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.passages import PASSAGES


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one client says: its turns, each sent with all that was said before it, the model's answers included."""

    turns: tuple[str, ...]
    system: str | None = None


Writer = Callable[[str, int], list[Conversation]]  # of a seed and a number of conversations

FORMS = (
    "a short story about",
    "a letter to a friend about",
    "a newspaper article about",
    "a plain explanation of",
    "an argument for and against",
    "advice to a beginner in",
    "a diary entry about",
    "a speech of two minutes about",
    "a review of a book about",
    "five questions and answers on",
    "a dialogue between two neighbours about",
    "a description, to readers new to it, of",
)
TOPICS = (
    "keeping bees on a roof in the city",
    "the first snow of the year",
    "repairing an old wooden boat",
    "why bread rises",
    "a night train through the mountains",
    "learning the violin at sixty",
    "the history of the lighthouse",
    "moving to a country whose language one does not speak",
    "how vaccines work",
    "a garden that lies in the shade",
    "the price of coffee",
    "losing a chess game to a child",
    "working from home",
    "a volcano that has slept for a century",
    "the rules of cricket",
    "an island without cars",
    "saving money on a small income",
    "how a bill becomes a law",
    "the migration of storks",
    "a power cut in a hospital",
    "choosing a first camera",
    "the invention of paper",
    "a quarrel over an apple tree",
    "what happens in the brain during sleep",
    "crossing a desert on foot",
    "the last day of school",
    "making cheese in the Alps",
    "the risks of social media for teenagers",
    "a museum of broken things",
    "how tides come about",
)
MANNERS = (
    "Keep it light.",
    "Use short sentences.",
    "Begin with a question.",
    "Mention a name.",
    "Write for readers of twelve.",
    "End with something unexpected.",
    "Be precise, and avoid adjectives.",
    "Write in the first person.",
)


def chosen(rng: random.Random, *choices: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(rng.choice, choices))


def prose(seed: str, count: int) -> list[Conversation]:
    """Requests for text, each for another."""
    asked: dict[str, None] = {}
    rng = random.Random(seed)
    while len(asked) < count:
        form, topic, manner = chosen(rng, FORMS, TOPICS, MANNERS)
        asked[f"Write {form} {topic}. {manner} Let the number {rng.randrange(10**6):,} come up."] = None
    return [Conversation((prompt,)) for prompt in asked]


TOOLS = """\
You are the assistant of a warehouse. You work with these tools, one call at a time:

find_item(name: string, aisle?: integer) -> where an item lies, and how many there are
order_item(sku: string, quantity: integer, urgent?: boolean) -> the number of the order and the day it arrives
list_orders(supplier?: string, since?: date) -> the orders that are under way
move_item(sku: string, from_aisle: integer, to_aisle: integer, quantity: integer) -> what lies there afterwards
weigh_parcel(parcel: string) -> its weight in kilograms
book_carrier(parcel: string, carrier: string, day: date) -> the tracking number and the price

Say in one sentence what you are about to do, then write the call as JSON on a line of its own: {"tool": ..., "arguments": {...}}. You are \
given its result, and go on with the next step. Quantities are never guessed: they are looked up first. Say "done" when nothing is left."""
ITEMS = ("copper pipe", "oak board", "garden hose", "steel bolt", "desk lamp", "paint roller", "door hinge", "canvas sheet", "bike chain")
SUPPLIERS = ("Nordholm", "Atlas & Sons", "Ferreira", "Kite Trading", "Blue Harbor", "Lindqvist")


def tool_loops(seed: str, count: int) -> list[Conversation]:
    """An agent's loop of tool calls: each turn brings a call's result, after a history that grows."""
    return [Conversation(tuple(_tool_turns(random.Random(f"{seed} {index}"))), TOOLS) for index in range(count)]


def _tool_turns(rng: random.Random) -> Iterator[str]:
    item, supplier = chosen(rng, ITEMS, SUPPLIERS)
    sku, wanted = f"{item[:2].upper()}-{rng.randrange(1000, 9999)}", rng.randrange(12, 400)
    aisle, other_aisle = rng.sample(range(1, 60), 2)
    stock = rng.randrange(0, wanted)
    parcel, order = f"P{rng.randrange(10**6):06}", rng.randrange(20_000, 90_000)
    yield f"A customer wants {wanted} of our {item}s by Friday. See what we have, order the rest from {supplier}, and ship what is here."
    yield _result(sku=sku, aisle=aisle, quantity=stock, reserved=stock // 5, last_counted=f"2026-{rng.randrange(1, 12):02}-11")
    yield _result(order=order, supplier=supplier, quantity=wanted - stock, arrives="Thursday", price=rng.randrange(90, 900) + 0.5)
    yield _result(aisle=other_aisle, sku=sku, quantity=stock, parcel=parcel)
    yield _result(parcel=parcel, kilograms=rng.randrange(30, 900) / 10, fragile=rng.random() < 0.5)
    tracking = _result(tracking=f"TR{rng.randrange(10**9):09}", price=rng.randrange(8, 60) + 0.9)
    yield f"{tracking}\nSum up for the customer what was done."


def _result(**fields: object) -> str:
    return f"Result: {json.dumps(fields)}"


NUM_DOCUMENTS = 4
FACTS = (
    ("Whose signature is on the report?", "It was signed by {person}."),
    ("In which town was the archive found?", "The archive was found in {town}."),
    ("How many pages were lost, and why?", "{number} pages were lost in a fire in {year}."),
    ("When was the first edition printed?", "The first edition was printed in {year}."),
    ("What did the binding cost?", "The binding cost {number} crowns."),
    ("Where is the second copy kept?", "A second copy is kept by {person} in {town}."),
)
PEOPLE = ("Ada Lindgren", "Tomas Reyes", "Ilse Brandt", "Kofi Mensah", "Maria Duarte", "Jun Watanabe")
TOWNS = ("Tampere", "Coimbra", "Utrecht", "Gdansk", "Bergen", "Ljubljana")


def questions_on_documents(seed: str, count: int) -> list[Conversation]:
    """Questions on a few long documents, each of which comes first in several prompts."""
    documents = [_document(f"{seed} {number}") for number in range(NUM_DOCUMENTS)]
    rng = random.Random(seed)
    turns = []
    for index in range(count):
        question = FACTS[index // NUM_DOCUMENTS % len(FACTS)][0]
        turns.append(
            f"{documents[index % NUM_DOCUMENTS]}\n\n{question} Answer in one sentence, from the text above. ({rng.randrange(10**6)})"
        )
    return [Conversation((turn,)) for turn in turns]


def _document(seed: str) -> str:
    """About 1,600 tokens of prose, with the facts that are asked for between its paragraphs."""
    rng = random.Random(seed)
    paragraphs = [paragraph for passage in PASSAGES for paragraph in passage.strip().split("\n\n")]
    rng.shuffle(paragraphs)
    for _, fact in FACTS:
        (person, town), number, year = chosen(rng, PEOPLE, TOWNS), rng.randrange(20, 900), rng.randrange(1700, 1990)
        paragraphs.insert(rng.randrange(len(paragraphs)), fact.format(person=person, town=town, number=number, year=year))
    return f"Report {rng.randrange(10**8):08}\n\n" + "\n\n".join(paragraphs)


FUNCTIONS = (
    """\
def {name}({first}, {second}):
    if {second} == 0:
        raise ValueError("{second} must not be zero")
    return {first} / {second} * {number}
""",
    """\
def {name}({first}):
    result = []
    for index, value in enumerate({first}):
        if index % {number} == 0:
            result.append(value)
    return result
""",
    """\
def {name}({first}, {second}=None):
    {second} = {second} or {{}}
    for key in sorted({first}):
        {second}.setdefault(key, []).append({first}[key])
    return {second}
""",
    """\
def {name}(path):
    with open(path) as {first}:
        lines = [line.strip() for line in {first}]
    return [line for line in lines if len(line) > {number}]
""",
)
VERBS = ("load", "merge", "scale", "count", "split", "group", "check", "render", "parse", "store", "fetch", "clean")
NOUNS = ("orders", "users", "prices", "events", "tokens", "images", "routes", "scores", "tables", "errors", "files", "dates")
EDITS = (
    "Rename `{name}` to `{new}` everywhere",
    "Give every function a docstring of one line",
    "Add type annotations to `{name}`",
    "Make `{name}` return None where its argument is empty",
)
NUM_FUNCTIONS = 10


def code_edits(seed: str, count: int) -> list[Conversation]:
    """Files to be changed in a few places and written out again: most of the answer is in the prompt."""
    return [Conversation((_code_edit(random.Random(f"{seed} {index}")),)) for index in range(count)]


def _code_edit(rng: random.Random) -> str:
    names = [f"{verb}_{noun}" for verb, noun in zip(rng.sample(VERBS, NUM_FUNCTIONS), rng.sample(NOUNS, NUM_FUNCTIONS), strict=True)]
    functions = []
    for name in names:
        first, second = rng.sample(NOUNS, 2)
        functions.append(rng.choice(FUNCTIONS).format(name=name, first=first, second=second, number=rng.randrange(2, 80)))
    edit = rng.choice(EDITS).format(name=rng.choice(names), new=f"{rng.choice(VERBS)}_all_{rng.choice(NOUNS)}")
    file = "\n\n".join(functions)
    return f"```python\n{file}```\n\n{edit}, and write the whole file out again. Change nothing else."
