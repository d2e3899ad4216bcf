"""The schema of a tool's arguments, for formats that take it apart."""

import json
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.tool_format import CallableTool


def arguments_document(tool: CallableTool) -> dict[str, Any]:
    """The schema as JSON. Raises `UnsupportedGrammar` where it is none: keywords have the types then that they should have."""
    import jsonschema  # type: ignore[import-untyped]

    document: dict[str, Any] = json.loads(tool.arguments.text)
    try:
        jsonschema.Draft202012Validator.check_schema(document)
    except (jsonschema.SchemaError, RecursionError) as error:
        message = error.message if isinstance(error, jsonschema.SchemaError) else "it is nested too deep"
        raise UnsupportedGrammar(f"the schema of `{tool.name}` is wrong: {message}", tool.arguments.param) from error
    return document
