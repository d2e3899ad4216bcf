"""POST /v1/grammar/check, with the real grammar backends."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarSpec
from penstock.engine.errors import QueueFull
from penstock.plugins.manager import Plugins
from tests.api.pooling.server import PoolingServer, serve_pooling
from tests.api.running_server import Running
from tests.api.running_server import serve as serve_recording
from tests.api.scripted import byte_tokenizer

PATH = "/v1/grammar/check"
PATTERN = {"type": "string", "pattern": r"^(?=.*a)b$"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def response_format(schema: Any, *, strict: bool) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}}}


def serve(scenario: Callable[[Running], Awaitable[None]]) -> None:
    """With a compiler that compiles."""

    async def compiling(server: Running) -> None:
        tokenizer = byte_tokenizer()
        compiler = GrammarCompiler(Plugins.start([]).grammar_backends, tokenizer, tokenizer.vocab_size, [0])
        server.context.grammar_compiler = compiler
        try:
            await scenario(server)
        finally:
            compiler.close()

    serve_recording(compiling)


def test_the_verdict_is_what_a_request_would_get() -> None:
    async def scenario(server: Running) -> None:
        async def verdict(body: dict[str, Any]) -> tuple[str, bool, str | None]:
            status, answer = await server.post(PATH, body)
            assert (status, answer["object"]) == (200, "grammar.check")
            return answer["verdict"], bool(answer["not_enforced"]), answer["refusal"] and answer["refusal"]["path"]

        whole = {"type": "object", "properties": {"a": PATTERN}}
        assert await verdict(response_format(SCHEMA, strict=True)) == ("exact", False, None)
        assert await verdict(response_format(SCHEMA, strict=False)) == ("exact", False, None)
        assert await verdict(response_format(whole, strict=False)) == ("lenient", True, None)
        path = "response_format.json_schema.schema.properties.a.pattern"
        assert await verdict(response_format(whole, strict=True)) == ("refused", False, path)
        assert await verdict({"guided_regex": "a+"}) == ("exact", False, None)
        assert (await verdict({"guided_regex": "("}))[0] == "refused"
        assert (await verdict({"guided_json": {"type": "nonsense"}}))[0] == "refused"

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "temperature": 1}, "temperature"),
        ({"guided_json": {}, "guided_decoding_backend": "missing"}, "guided_decoding_backend"),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_path_of_its_field(body: dict[str, Any], param: str | None) -> None:
    async def scenario(server: Running) -> None:
        status, answer = await server.post(PATH, body)
        assert (status, answer["error"]["param"]) == (400, param)

    serve_recording(scenario)


def test_an_unknown_model_is_a_404() -> None:
    async def scenario(server: Running) -> None:
        assert (await server.post(PATH, {"model": "other", "guided_json": {}}))[0] == 404

    serve_recording(scenario)


def test_a_full_queue_of_constraints_is_a_429() -> None:
    class Busy:
        async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar:
            raise QueueFull("too many constraints are being compiled")

    async def scenario(server: Running) -> None:
        server.context.grammar_compiler = Busy()
        assert (await server.post(PATH, {"guided_json": {}}))[0] == 429

    serve_recording(scenario)


def test_a_pooling_model_has_no_constraints(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        assert (await server.post(PATH, {"guided_json": {}}))[0] == 400

    serve_pooling(embedder, scenario)
