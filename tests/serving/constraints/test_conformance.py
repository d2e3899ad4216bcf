import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from msgspec import UNSET

from penstock.engine.system.sandbox import Limits
from penstock.serving.messages import MAX_MESSAGE, Conformance, ConformanceChecker, conformance

HANGING = {"pattern": "^(a+)+$"}
HANGING_TEXT = json.dumps("a" * 50 + "!")


def judged(schema: Any, text: str) -> Conformance:
    return conformance(json.dumps(schema), text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, "1"),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ({"not": {"const": 1}}, "2"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, '{"type": "string"}'),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, "2"),
        ({"format": "date"}, '"2024-02-29"'),
        ({"format": "date-time"}, '"2024-02-29T12:00:00Z"'),
        ({"format": "of my own"}, '"x"'),
        ({"format": "date"}, "1"),
    ],
)
def test_what_keeps_to_the_schema_is_valid(schema: Any, text: str) -> None:
    assert judged(schema, text) == Conformance(True)


@pytest.mark.parametrize(
    ("schema", "text", "path"),
    [
        (False, "1", "$"),
        ({"properties": {"a": {"items": {"type": "integer"}}}}, '{"a": [1, "x"]}', "$.a[1]"),
        ({"uniqueItems": True}, "[1, 1]", "$"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, "3", "$"),
        ({"items": {"format": "date"}}, '["2023-02-29"]', "$[0]"),
        ({"items": {"format": "uuid"}}, '["1"]', "$[0]"),
        (True, '{"a": ', "$"),
        (True, "NaN", "$"),
        (True, "", "$"),
    ],
)
def test_a_mistake_has_its_place_and_a_reason(schema: Any, text: str, path: str) -> None:
    found = judged(schema, text)
    assert (found.valid, found.path) == (False, path)
    assert found.error


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "1"),
        ({"$ref": "#/nowhere"}, "1"),
        ({"$ref": "#"}, "1"),
        ({"type": "strin"}, "1"),
        ({"pattern": "("}, '"a"'),
        ({"$schema": 5}, "1"),
        (True, "[" * 100_000),
    ],
)
def test_what_cannot_be_decided_says_why(schema: Any, text: str) -> None:
    found = judged(schema, text)
    assert (found.valid, found.path) == (None, UNSET)
    assert str(found.error).startswith("not checked: ")


def test_what_is_said_is_bounded_and_can_be_sent() -> None:
    found = judged({"additionalProperties": {"type": "integer"}}, json.dumps({"\ud800" * 5000: "\udfff" * 5000}))
    assert len(str(found.error)) == MAX_MESSAGE
    assert len(str(found.path).encode(errors="strict")) <= 3 * MAX_MESSAGE


def test_a_schema_that_hangs_costs_its_own_answer_only() -> None:
    async def scenario() -> None:
        checker = ConformanceChecker(Limits(cpu_seconds=0.5))
        hanging = asyncio.create_task(checker.check(json.dumps(HANGING), HANGING_TEXT))
        others = [checker.check('{"type": "integer"}', text) for text in ("1", '"x"')]
        assert [found.valid for found in await asyncio.gather(hanging, *others)] == [None, True, False]
        checker.close()

    asyncio.run(scenario())


def test_a_caller_that_gives_up_leaves_the_next_one_an_answer_of_its_own() -> None:
    async def scenario() -> None:
        checker = ConformanceChecker(Limits(cpu_seconds=60))
        assert (await checker.check("true", "1")).valid
        hanging = asyncio.create_task(checker.check(json.dumps(HANGING), HANGING_TEXT))
        await asyncio.sleep(0.05)
        hanging.cancel()
        assert (await checker.check('{"type": "integer"}', '"x"')).valid is False
        checker.close()

    asyncio.run(scenario())


def test_a_check_whose_process_is_killed_says_so_and_blames_neither_schema_nor_answer() -> None:
    async def scenario() -> None:
        checker = ConformanceChecker(Limits(cpu_seconds=600))
        hanging = asyncio.create_task(checker.check(json.dumps(HANGING), HANGING_TEXT))
        while not hanging.done():
            for pid in checker._sandbox.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        found = await hanging
        assert (found.valid, found.path) == (None, UNSET)
        assert str(found.error).startswith("not checked: the process for checking the answer")
        checker.close()

    asyncio.run(scenario())
