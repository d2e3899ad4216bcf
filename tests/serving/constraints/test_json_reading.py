"""How schemas are read, from a request's body or the server's default to what is compiled."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession

from penstock.engine.contracts.grammar import AdditionalProperties, GrammarSpec
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.options import ServerOptions
from tests.api.scripted import MODEL, scripted_server

SCHEMA = {"type": "object", "properties": {"a": {}}}
CLOSED = '{"type": "object", "properties": {"a": {}}, "additionalProperties": false}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Hi", "guided_json": SCHEMA}),
    ("chat/completions", {"guided_json": SCHEMA}),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
    ("chat/completions", {"tools": [TOOL], "guided_json": SCHEMA}),
]


def compiled(path: str, fields: dict[str, Any], default: AdditionalProperties = "closed") -> GrammarSpec:
    options = ServerOptions(keep_alive_interval=0, additional_properties=default)

    async def run() -> GrammarSpec:
        async with scripted_server({"answers": ["{}"]}, options=options, tool_parser=HERMES) as scripted, ClientSession() as client:
            body = fields if path == "completions" else {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields
            async with client.post(f"{scripted.base_url}/{path}", json=body) as response:
                assert response.status == 200, await response.text()
            return scripted.compiler.specs[0][0]

    return asyncio.run(run())


def is_closed(spec: GrammarSpec) -> bool:
    """Everywhere. A structure is written out, its schemas as they are compiled."""
    text = repr(spec.structure) if spec.structure is not None else spec.text
    return text.count(CLOSED) == text.count(json.dumps(SCHEMA)[:-1]) > 0


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
def test_schemas_are_closed_by_default_and_open_where_the_request_or_the_server_says_so(path: str, fields: dict[str, Any]) -> None:
    spec = compiled(path, fields)
    written = compiled(path, fields, "open")
    assert is_closed(spec)
    assert not is_closed(written)
    assert spec.as_written == written
    assert compiled(path, fields | {"guided_additional_properties": "open"}) == written
    asked = compiled(path, fields | {"guided_additional_properties": "closed"}, "open")
    assert is_closed(asked)
    assert asked.as_written is None
