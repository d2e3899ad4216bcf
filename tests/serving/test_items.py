"""The items of the Responses API: which of them may be dropped together where a conversation is too long."""

import random
from typing import Any

from penstock.serving.responses.items import located, turns_to_drop

USER: dict[str, Any] = {"role": "user", "content": "x"}
SYSTEM: dict[str, Any] = {"type": "message", "role": "system", "content": "x"}
SAID: dict[str, Any] = {"role": "assistant", "content": "x"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": []}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def result(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": "x"}


def dropped(*items: dict[str, Any]) -> list[list[int]]:
    return turns_to_drop(located(list(items)))


def test_turns_of_the_user_are_dropped_before_the_steps_of_the_last_answer() -> None:
    assert dropped(SYSTEM, USER, SAID, USER, THOUGHT, call(1), result(1), SAID, USER) == [[1, 2], [3, 4, 5, 6, 7]]
    assert dropped(USER, THOUGHT, call(1), call(2), result(1), result(2), SAID, call(3), result(3)) == [[1, 2, 3, 4, 5]]
    assert dropped(USER, USER, SAID, USER) == [[0, 1, 2]]
    assert dropped(USER) == dropped(SYSTEM) == dropped() == dropped(USER, call(1), result(1)) == []


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Calls have their results anywhere after them."""
    items: list[dict[str, Any]] = []
    calls: list[int] = []
    for number in range(rng.randrange(30)):
        kind = rng.choice(["user", "said", "thought", "call", "call", "result", "result", "system"])
        if kind == "result" and calls:
            items.append(result(calls.pop(rng.randrange(len(calls)))))
        elif kind == "call":
            items.append(call(number))
            calls.append(number)
        elif kind != "result":
            items.append({"user": USER, "said": SAID, "thought": THOUGHT, "system": SYSTEM}[kind])
    rng.shuffle(calls)
    return items + [result(number) for number in calls]


def test_no_call_loses_its_result_and_no_instruction_and_no_last_question_is_dropped() -> None:
    rng = random.Random(5)
    num_dropped = 0
    for _ in range(500):
        items = conversation(rng)
        turns = turns_to_drop(located(items))
        num_dropped += len(turns)
        gone = [index for turn in turns for index in turn]
        assert len(set(gone)) == len(gone)
        for number in range(len(turns) + 1):
            rest = [item for index, item in enumerate(items) if index not in {index for turn in turns[:number] for index in turn}]
            ids = [[item["call_id"] for item in rest if item.get("type") == kind] for kind in ("function_call", "function_call_output")]
            assert sorted(ids[0]) == sorted(ids[1])
            assert rest.count(SYSTEM) == items.count(SYSTEM)
            assert (USER in rest) == (USER in items)
            assert not items or rest[-1] == items[-1]
    assert num_dropped > 300
