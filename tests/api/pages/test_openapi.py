"""The OpenAPI document: what it says is what is served."""

import hashlib
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from penstock.api.app import COMMON, DOCS, GENERATION
from penstock.api.batches import BATCH_ROUTES, FILE_ROUTES
from penstock.api.models import ADAPTER_ROUTES
from penstock.api.pages.openapi import ASSETS, PAGE, document
from penstock.api.pooling import POOLING_ROUTES
from penstock.api.routes import azure_path, path_template
from penstock.serving.endpoints.models import NOT_SERVED, POOLING_PATHS, SPOKEN
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MODEL

ROUTES = (*COMMON, *DOCS, *GENERATION, *ADAPTER_ROUTES, *POOLING_ROUTES, *FILE_ROUTES, *BATCH_ROUTES)

VENDORED = {
    "favicon-32x32.png": "3ed612f41e050ca5e7000cad6f1cbe7e7da39f65fca99c02e99e6591056e5837",
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
}


def validator(written: dict[str, Any], name: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": written["components"]})


def test_every_route_of_the_application_is_in_the_document_and_no_other(tmp_path: Path) -> None:
    async def scenario(server: Running) -> None:
        routes = [route for route in server.app.router.routes() if route.resource is not None and route.method != "HEAD"]
        served = {(route.method.lower(), route.resource.canonical) for route in routes if route.resource is not None}
        _, written = await server.get("/openapi.json")
        documented = {(method, path) for path, item in written["paths"].items() for method in item}
        refused = (*POOLING_PATHS, azure_path("/v1/embeddings"), *SPOKEN, *(path for paths in NOT_SERVED.values() for path in paths))
        assert documented == served - {("post", path_template(path)) for path in refused}

    serve(scenario, ServerOptions(files_dir=str(tmp_path), adapter_dir=str(tmp_path)))


def test_every_reference_is_resolved_and_every_schema_is_valid() -> None:
    written = document(ROUTES, ServerOptions())
    schemas = written["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {value["$ref"]} if "$ref" in value else {each for item in value.values() for each in references(item)}
        return {each for item in value for each in references(item)} if isinstance(value, list) else set()

    assert references(written) == {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_operation_is_described_and_has_an_id_of_its_own() -> None:
    operations = [operation for item in document(ROUTES, ServerOptions())["paths"].values() for operation in item.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


@pytest.mark.parametrize("options", [ServerOptions(), ServerOptions(api_keys=("secret",))], ids=["no key", "key"])
def test_it_asks_for_a_key_where_the_server_does(options: ServerOptions) -> None:
    written = document(ROUTES, options)
    assert ("security" in written) == bool(options.api_keys)
    is_open = {path for path, item in written["paths"].items() if all(operation.get("security") == [] for operation in item.values())}
    assert is_open == ({"/health", "/ping", "/ready", "/openapi.json", "/docs", "/docs/{file}"} if options.api_keys else set())


def test_answers_and_errors_match_their_schemas() -> None:
    async def scenario(server: Running) -> None:
        _, written = await server.get("/openapi.json")
        _, answer = await server.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1})
        validator(written, "ChatCompletion").validate(answer)
        assert not validator(written, "ChatCompletion").is_valid(
            {name: value for name, value in answer.items() if name != "system_fingerprint"}
        )
        _, answer = await server.post("/v1/completions", {"prompt": "a", "logprobs": 1})
        validator(written, "Completion").validate(answer)
        for body in (CHAT, {}):
            validator(written, "ErrorBody").validate((await server.post("/v1/completions", body))[1])
        validator(written, "ModelCard").validate((await server.get(f"/v1/models/{MODEL}"))[1])
        validator(written, "ChatCompletionRequest").validate(CHAT)
        assert not validator(written, "ChatCompletionRequest").is_valid(CHAT | {"temprature": 1})

    serve(scenario)


def test_parameters_of_sampling_are_described() -> None:
    properties = document(ROUTES, ServerOptions())["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "divides the logits" in properties["temperature"]["description"]


def test_the_page_and_its_files_come_from_this_server_alone() -> None:
    async def scenario(server: Running) -> None:
        async with server.http.get("/docs") as response:
            page = await response.text()
            assert response.content_type == "text/html"
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"unsafe|https?:|\*", policy)
        named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
        assert named == {f"docs/{name}" for name in ASSETS}
        for name in named:
            async with server.http.get(f"/{name}") as response:
                assert response.status == 200
                assert await response.read() == (PAGE / name.removeprefix("docs/")).read_bytes()
        for other in ("README.md", "..%2Fapp.py", "%2Fetc%2Fpasswd"):
            assert (await server.get(f"/docs/{other}"))[0] == 404

    serve(scenario, ServerOptions(api_keys=("secret",)))


def test_the_files_of_others_are_as_they_were_published() -> None:
    assert {name: hashlib.sha256((PAGE / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED


def test_page_and_document_can_be_turned_off() -> None:
    async def scenario(server: Running) -> None:
        for path in ("/docs", "/docs/start.js", "/openapi.json"):
            assert (await server.get(path))[0] == 404

    serve(scenario, ServerOptions(docs=False))
