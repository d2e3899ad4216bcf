"""How a request has JSON Schemas read: as closed or as written, with what white space in what they describe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.api.common_protocol import GenerationFields, StructuredOutputs
from penstock.api.constraints.backend_choice import CLOSED, COMPACT, named_backend
from penstock.api.constraints.closed_schema import closed
from penstock.api.constraints.constraint_size import check_text
from penstock.api.constraints.json_source import read_json, write_json
from penstock.api.constraints.json_whitespace import whitespace_regex
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import AdditionalProperties, GrammarKind, GrammarSpec


@dataclass(frozen=True, slots=True)
class JsonReading:
    """`whitespace_pattern` is as in `GrammarSpec`. Where the request itself `is_asking` for the closed reading, there is no other."""

    whitespace_pattern: str | None = None
    additional_properties: AdditionalProperties = "open"
    is_asking: bool = False


AS_WRITTEN = JsonReading()
Spec = TypeVar("Spec", GrammarSpec, GrammarSpec | None)


def json_reading(body: GenerationFields, default: AdditionalProperties) -> JsonReading:
    """What the request says, or else the server's `default`. Raises `InvalidRequest` where two fields differ."""
    outputs, backend = body.structured_outputs or StructuredOutputs(), named_backend(body)
    whitespace = {
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": "" if outputs.disable_any_whitespace else None,
    }
    properties: dict[str, AdditionalProperties | None] = {
        "guided_additional_properties": body.guided_additional_properties,
        "structured_outputs.additional_properties": outputs.additional_properties,
        "structured_outputs.disable_additional_properties": "closed" if outputs.disable_additional_properties else None,
    }
    if backend is not None and COMPACT in backend.options:
        whitespace[backend.param] = ""
    if backend is not None and CLOSED in backend.options:
        properties[backend.param] = "closed"
    asking, spacing = _agreed(properties, "additional properties"), _agreed(whitespace, "whitespace")
    pattern = None if spacing is None else whitespace_regex(whitespace[spacing] or "", spacing)
    return JsonReading(pattern, (properties[asking] if asking else None) or default, is_asking=asking is not None)


def _agreed(fields: Mapping[str, str | None], subject: str) -> str | None:
    """The first of the fields that say anything; all of them say the same."""
    given = {param: value for param, value in fields.items() if value is not None}
    if len(set(given.values())) > 1:
        names = " and ".join(f"`{param}`" for param in given)
        raise InvalidRequest(f"{names} say different things of {subject}", [*given][-1])
    return next(iter(given), None)


def in_reading(reading: JsonReading, spec: Callable[[JsonReading], Spec]) -> Spec:
    """The constraint in this reading. Where the closed one was not asked for, it comes with the constraint as it is written."""
    chosen = spec(reading)
    if reading.additional_properties == "open" or reading.is_asking or chosen is None:
        return chosen
    written = spec(replace(reading, additional_properties="open"))
    return chosen if written == chosen else replace(chosen, as_written=written)


def schema_spec(schema: Any, param: str, reading: JsonReading, *, is_lenient: bool = False) -> GrammarSpec:
    """A schema as an object or as its JSON text; its members keep their order, which the answer's follow. Raises `InvalidRequest`."""
    check_text(schema, param)
    if isinstance(schema, str):
        schema = read_json(schema, param)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema: an object, or one as a string", param)
    if reading.additional_properties == "closed":
        schema = closed(schema)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, write_json(schema, param), param, reading.whitespace_pattern, is_lenient)
