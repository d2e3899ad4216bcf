"""Every spelling of a constraint (`guided_*`, `structured_outputs`, `response_format`) as one `GrammarSpec`."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.api.common_protocol import GenerationFields, ResponseFormat, StructuredOutputs
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import GrammarKind, GrammarSpec


def grammar_spec(body: GenerationFields) -> GrammarSpec | None:
    """The request's constraint, or None where it has none.

    Raises `InvalidRequest` where there is more than one: a constraint is never ignored.
    """
    specs = [*_guided(body), *_structured(body.structured_outputs), *_response_format(body.response_format)]
    if len(specs) > 1:
        fields = " and ".join(f"`{spec.param}`" for spec in specs)
        raise InvalidRequest(f"only one constraint may be given, got {fields}", specs[1].param)
    return specs[0] if specs else None


def _guided(body: GenerationFields) -> Iterator[GrammarSpec]:
    if body.guided_json is not None:
        yield _json_schema(body.guided_json, "guided_json", body.guided_whitespace_pattern)
    if body.guided_regex is not None:
        yield GrammarSpec(GrammarKind.REGEX, body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        yield _choice(body.guided_choice, "guided_choice")


def _structured(outputs: StructuredOutputs | None) -> Iterator[GrammarSpec]:
    if outputs is None:
        return
    if outputs.json is not None:
        yield _json_schema(outputs.json, "structured_outputs.json", outputs.whitespace_pattern)
    if outputs.regex is not None:
        yield GrammarSpec(GrammarKind.REGEX, outputs.regex, "structured_outputs.regex")
    if outputs.choice is not None:
        yield _choice(outputs.choice, "structured_outputs.choice")
    if outputs.json_object:
        yield GrammarSpec(GrammarKind.JSON_OBJECT, "", "structured_outputs.json_object", outputs.whitespace_pattern)


def _response_format(response_format: ResponseFormat | None) -> Iterator[GrammarSpec]:
    if response_format is None or response_format.type == "text":
        return
    if response_format.type == "json_object":
        yield GrammarSpec(GrammarKind.JSON_OBJECT, "", "response_format")
    elif response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema is None:
            raise InvalidRequest("`response_format` of type `json_schema` needs a schema", "response_format.json_schema.schema")
        yield _json_schema(response_format.json_schema.schema, "response_format.json_schema.schema", None)
    else:
        raise InvalidRequest(
            f"`response_format.type` must be `text`, `json_object` or `json_schema`, got {response_format.type!r}", "response_format.type"
        )


def _json_schema(schema: Any, param: str, whitespace_pattern: str | None) -> GrammarSpec:
    """The schema may come as an object or as its JSON text; its keys keep their order, which the answer's fields follow."""
    try:
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        text = json.dumps(schema, ensure_ascii=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"`{param}` is not valid JSON: {error}", param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema: an object, or one as a string", param)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, param, whitespace_pattern)


def _choice(choices: list[str], param: str) -> GrammarSpec:
    if not choices or not all(choices):
        raise InvalidRequest(f"`{param}` must be a list of non-empty strings", param)
    return GrammarSpec(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False), param)
