"""Validates an answer against its schema, for the parts that a lenient grammar left out. In a sandbox, as a schema may be hostile."""

import asyncio
import json
import re
import sys
from functools import cache
from typing import Any, NoReturn

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.errors import EngineUnavailable, JobLimitExceeded, QueueFull
from penstock.engine.sandbox import Limits, Sandbox
from penstock.plugins.grammars.json_schema.values import PATTERNS


class Conformance(Struct, omit_defaults=True):
    """Whether an answer keeps to a schema that its grammar enforced only in part; `valid` is null where that could not be decided.

    `path` is where in the answer the first mistake is, as JSONPath.
    """

    valid: bool | None
    error: str | UnsetType = UNSET
    path: str | UnsetType = UNSET


MAX_MESSAGE = 300
LIMITS = Limits(cpu_seconds=2.0, memory_bytes=2**29, niceness=10)  # the model's own threads go first
MAX_WAIT = 10.0


class ConformanceChecker:
    """Checks answers in one process, which takes one at a time. An answer that waits for longer than `MAX_WAIT` goes out unchecked."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._sandbox = Sandbox("checking the answer", limits, initializer=prepare)

    async def check(self, schema: str, answer: str) -> Conformance:
        try:
            return await asyncio.wait_for(self._sandbox.run(conformance, schema, answer), MAX_WAIT)
        except (TimeoutError, QueueFull):
            return undecided("too many others wait to be checked")
        except JobLimitExceeded as limit:
            return undecided(limit.message)
        except EngineUnavailable as failure:
            return undecided(str(failure))

    def close(self) -> None:
        self._sandbox.close()


def prepare() -> None:
    """What the first check in a process would import."""
    sys.set_int_max_str_digits(0)
    conformance("true", "1")


def conformance(schema_text: str, answer: str) -> Conformance:
    """Judges by the schema's own draft, 2020-12 where it does not say, formats included. Nothing is fetched that a schema refers to."""
    from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    try:
        instance = json.loads(answer, parse_constant=_no_constant)
    except ValueError as error:
        return _mistake(f"this is not JSON: {error}", "$")
    except RecursionError:
        return undecided("it is nested too deeply")
    try:
        mistake = best_match(_validator(schema_text).iter_errors(instance))
    except SchemaError as schema_error:
        return undecided(f"the schema is not valid at {schema_error.json_path}: {schema_error.message}")
    except Unresolvable as unresolvable:
        return undecided(f"nothing is fetched: {unresolvable}")
    except re.error as pattern_error:
        return undecided(f"a pattern cannot be read: {pattern_error}")
    except RecursionError:
        return undecided("it is nested too deeply, or the schema refers to itself without end")
    return Conformance(True) if mistake is None else _mistake(mistake.message, mistake.json_path)


def undecided(reason: str) -> Conformance:
    return Conformance(None, _bounded(f"not checked: {reason}"))


def _mistake(message: str, path: str) -> Conformance:
    return Conformance(False, _bounded(message), _bounded(path))


def _bounded(text: str) -> str:
    """It quotes answers, which may hold anything."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


@cache
def _formats() -> Any:
    """Those that jsonschema knows by itself; where the grammars know them too, they mean the same."""
    from jsonschema import FormatChecker  # type: ignore[import-untyped]

    checker = FormatChecker()
    for name, pattern in PATTERNS.items():
        whole = re.compile(pattern, re.ASCII)
        checker.checks(name)(lambda instance, whole=whole: not isinstance(instance, str) or whole.fullmatch(instance) is not None)
    return checker


def _validator(schema_text: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    schema: Any = json.loads(schema_text)
    has_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    kind = validator_for(schema, default=Draft202012Validator) if has_draft else Draft202012Validator
    kind.check_schema(schema)
    return kind(schema, registry=REGISTRY, format_checker=_formats())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
