"""How much a request's constraint holds: what is long is read in a worker, and what is too long not at all."""

import time
from typing import Any

from msgspec import Struct

from penstock.api.common_protocol import GenerationFields
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammars.grammar_limits import MAX_TEXT

FIELDS = ("structured_outputs", "response_format", "guided_json", "guided_choice", "json_schema", "structural_tag")
LONG = 2**14  # characters; looking at as many takes a millisecond at most
_PARTS_BETWEEN_PAUSES = 10_000
_PAUSE_SECONDS = 0.0005


def is_large(body: GenerationFields) -> bool:
    """Whether to read the constraint takes longer than the event loop can wait."""
    return exceeds([getattr(body, field) for field in FIELDS], LONG)


def check_text(value: Any, param: str) -> None:
    """Raises `InvalidRequest` where the value's JSON is certainly too long for a constraint. For a worker where it may be long."""
    if exceeds(value, MAX_TEXT):
        raise InvalidRequest(f"a constraint of more than {MAX_TEXT} characters is refused", param)


def exceeds(value: Any, limit: int) -> bool:
    """Whether the value is certainly longer than `limit` characters as JSON. No more of it is looked at than this takes.

    Writing it out would hold the interpreter's lock to the end, as every call into C does; this here pauses.
    """
    pending = [value]
    num_characters = num_parts = 0
    while pending:
        part = pending.pop()
        num_parts += 1
        num_characters += 3  # a digit, a comma and a space
        if isinstance(part, str):
            num_characters += len(part)
        elif isinstance(part, dict | list):
            if 3 * len(part) > limit:
                return True
            pending += part if isinstance(part, list) else [*part, *part.values()]
        elif isinstance(part, Struct):
            pending += [getattr(part, field) for field in part.__struct_fields__]
        if num_characters > limit:
            return True
        if num_parts % _PARTS_BETWEEN_PAUSES == 0:
            time.sleep(_PAUSE_SECONDS)
    return False
