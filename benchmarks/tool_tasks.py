"""Agents' loops of three kinds, with tools in JSON Schema and results in JSON: a calendar, a help desk and a repository."""

import json
import random
from collections.abc import Iterator
from typing import Any

from benchmarks.natural import Conversation

SYSTEM = """\
You are an assistant that works with tools. In each turn, write one sentence about what you do next, then exactly one call as JSON \
between <tool_call> and </tool_call>: {{"name": ..., "arguments": {{...}}}}. The next message is its result. When the task is done, \
answer without a call.

Tools:
{tools}"""
PEOPLE = ("Amara Diallo", "Jonas Weber", "Mei Tanaka", "Luis Ortega", "Priya Nair", "Elena Petrova")
ROOMS = ("Aspen", "Birch", "Cedar", "Linden")
MEETINGS = ("budget review", "design critique", "release planning", "customer call", "hiring panel", "incident review")
PROBLEMS = ("cannot log in", "was charged twice", "gets no e-mail", "sees an empty report", "wants a refund", "finds the export too slow")
PRODUCTS = ("mobile app", "web console", "billing portal", "sync client")
TEAMS = ("identity", "payments", "messaging", "reporting")
MODULES = ("parser", "cache", "router", "scheduler", "encoder")
VERBS = ("split", "merge", "clamp", "rotate", "count")


def tool_tasks(seed: str, count: int) -> list[Conversation]:
    """Loops of the three kinds in turn, each of another content."""
    kinds = ((CALENDAR_TOOLS, _calendar), (DESK_TOOLS, _help_desk), (REPOSITORY_TOOLS, _repository))
    conversations = []
    for index in range(count):
        tools, turns = kinds[index % len(kinds)]
        system = SYSTEM.format(tools="\n".join(map(json.dumps, tools)))
        conversations.append(Conversation(tuple(turns(random.Random(f"{seed} {index}"))), system))
    return conversations


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CALENDAR_TOOLS = [
    _tool("list_events", "The events of a person on a day.", person="string", day="string"),
    _tool("find_room", "Rooms that are free at a time.", day="string", start="string", minutes="integer", seats="integer"),
    _tool("create_event", "Enters an event.", title="string", day="string", start="string", minutes="integer", room="string"),
    _tool("invite", "Invites a person to an event.", event_id="string", person="string"),
]
DESK_TOOLS = [
    _tool("search_tickets", "Tickets with these words.", query="string", status="string"),
    _tool("read_ticket", "A ticket with its messages.", ticket_id="string"),
    _tool("assign_ticket", "Gives a ticket to a team.", ticket_id="string", team="string", priority="integer"),
    _tool("reply", "Writes to the customer.", ticket_id="string", text="string"),
]
REPOSITORY_TOOLS = [
    _tool("list_files", "The files of a folder.", folder="string"),
    _tool("read_file", "The text of a file.", path="string"),
    _tool("write_file", "Replaces a file.", path="string", text="string"),
    _tool("run_tests", "Runs the tests of a folder.", folder="string"),
]


def _result(value: object) -> str:
    return f"<tool_response>\n{json.dumps(value)}\n</tool_response>"


def _calendar(rng: random.Random) -> Iterator[str]:
    first, second = rng.sample(PEOPLE, 2)
    title, day = rng.choice(MEETINGS), f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    event = f"ev_{rng.randrange(10**6):06}"
    seats = rng.randrange(3, 12)
    yield f"Set up a {title} of 45 minutes with {first} and {second} on {day}, in a room for {seats}, at a time that suits both."
    for person in (first, second):
        yield _result({"person": person, "day": day, "events": [_event(rng, day) for _ in range(rng.randrange(2, 5))]})
    yield _result({"rooms": [{"room": room, "seats": rng.randrange(4, 20), "free": True} for room in rng.sample(ROOMS, 3)]})
    yield _result({"event_id": event, "title": title, "day": day, "start": f"{rng.randrange(8, 17):02}:30", "status": "created"})
    for person in (first, second):
        yield _result({"event_id": event, "person": person, "status": "invited"})


def _event(rng: random.Random, day: str) -> dict[str, Any]:
    start = f"{rng.randrange(8, 17):02}:{rng.choice(('00', '15', '30', '45'))}"
    return {
        "event_id": f"ev_{rng.randrange(10**6):06}",
        "title": rng.choice(MEETINGS),
        "day": day,
        "start": start,
        "minutes": rng.choice((30, 45, 60)),
        "room": rng.choice(ROOMS),
    }


def _help_desk(rng: random.Random) -> Iterator[str]:
    product = rng.choice(PRODUCTS)
    tickets = [
        {
            "ticket_id": f"HD-{rng.randrange(1000, 9999)}",
            "customer": rng.choice(PEOPLE),
            "subject": f"Customer {rng.choice(PROBLEMS)}",
            "product": product,
            "status": "open",
        }
        for _ in range(3)
    ]
    teams = ", ".join(TEAMS)
    yield f"Go through the open tickets about the {product}: read each, give it to the right team ({teams}), and tell the customer."
    yield _result({"tickets": tickets})
    for ticket in tickets[:2]:
        number, team = ticket["ticket_id"], rng.choice(TEAMS)
        text = f"Hello, since version {rng.randrange(2, 9)}.{rng.randrange(20)} my account {rng.choice(PROBLEMS)}. It happens each time."
        yield _result({**ticket, "messages": [{"from": ticket["customer"], "text": text}]})
        yield _result({"ticket_id": number, "team": team, "priority": rng.randrange(1, 4), "status": "assigned"})
        yield _result({"ticket_id": number, "status": "waiting for customer", "sent": True})


def _repository(rng: random.Random) -> Iterator[str]:
    module, verb, limit = rng.choice(MODULES), rng.choice(VERBS), rng.randrange(3, 60)
    path, name = f"src/{module}.py", f"{verb}_{module}_items"
    text = (
        f"LIMIT = {limit}\n\n\ndef {name}(items, size=LIMIT):\n    if size < 0:\n        return []\n    result = []\n"
        f"    for index in range(0, len(items), size):\n        result.append(items[index : index + size])\n    return result\n"
    )
    yield f"`{name}` in {path} never ends where size is 0. Make it raise ValueError there, and see that the tests pass."
    yield _result({"folder": "src", "files": [f"src/{other}.py" for other in rng.sample(MODULES, 4)]})
    yield _result({"path": path, "text": text})
    failure = f"tests/test_{module}.py:{rng.randrange(10, 90)}: AssertionError: {name}([1, 2, 3], 0) did not raise"
    yield _result({"path": path, "bytes": len(text) + rng.randrange(40, 90), "status": "written"})
    yield _result({"passed": rng.randrange(5, 40), "failed": 1, "failures": [failure]})
    yield _result({"path": path, "bytes": len(text) + rng.randrange(90, 140), "status": "written"})
    yield _result({"passed": rng.randrange(41, 60), "failed": 0, "failures": []})
