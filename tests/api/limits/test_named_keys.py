"""Named API keys over HTTP: what a request is known by, and which models it may use."""

from pathlib import Path

import pytest
from aiohttp import web

from penstock.api.requests import KEYS, client_of, key_of, owner_of
from penstock.serving.limits import hash_of
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MODEL


@pytest.fixture
def options(tmp_path: Path) -> ServerOptions:
    path = tmp_path / "keys.toml"
    tables = {"alice": "", "bob": f'models = ["{MODEL[:-1]}*"]', "carol": 'models = ["other"]'}
    lines = [f'[keys.{name}]\nhash = "{hash_of(name + " key")}"\n{more}\n' for name, more in tables.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return ServerOptions(keys_file=str(path), api_keys=("plain",))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def show_key(request: web.Request) -> web.Response:
    key = key_of(request)
    return web.json_response({"name": key and key.name, "owner": owner_of(request), "client": client_of(request)})


def test_a_request_is_known_by_the_name_of_its_key(options: ServerOptions) -> None:
    async def scenario(server: Running) -> None:
        for headers, name in (
            (bearer("alice key"), "alice"),
            ({"x-api-key": "bob key"}, "bob"),
            ({"api-key": "carol key"}, "carol"),
            (bearer("plain"), "api-key"),
        ):
            status, shown = await server.get("/key", headers=headers)
            assert (status, shown["name"]) == (200, name)
            assert shown["owner"] == shown["client"] != ""
            assert "key " not in shown["owner"]
        for headers in ({}, bearer("alice"), bearer(hash_of("alice key"))):
            assert (await server.get("/key", headers=headers))[0] == 401

    serve(scenario, options, [web.get("/key", show_key)])


def test_keys_of_a_file_are_replaced_while_the_server_runs(options: ServerOptions) -> None:
    assert options.keys_file is not None
    path = Path(options.keys_file)

    def replace_alice() -> None:
        path.write_text(path.read_text(encoding="utf-8").replace(hash_of("alice key"), hash_of("new")), encoding="utf-8")

    async def scenario(server: Running) -> None:
        replace_alice()
        server.app[KEYS].reload()
        assert [(await server.get("/v1/models", headers=bearer(secret)))[0] for secret in ("alice key", "new", "plain")] == [401, 200, 200]

    serve(scenario, options)


def test_a_key_sees_and_uses_its_models_alone(options: ServerOptions) -> None:
    async def scenario(server: Running) -> None:
        for secret, names in (("alice key", [MODEL, "alias"]), ("bob key", [MODEL]), ("carol key", [])):
            for headers in ({}, {"anthropic-version": "2023-06-01"}):
                _, listed = await server.get("/v1/models", headers=bearer(secret) | headers)
                assert [card["id"] for card in listed["data"]] == names
                assert (await server.get(f"/v1/models/{MODEL}", headers=bearer(secret) | headers))[0] == (200 if names else 404)
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"})):
                status, answer = await server.post(path, body, headers=bearer(secret))
                assert (status, answer.get("error", {}).get("code")) == ((200, None) if names else (404, "model_not_found"))
        _, answer = await server.post("/v1/chat/completions", CHAT | {"model": "secret"}, headers=bearer("carol key"))
        assert MODEL not in answer["error"]["message"], "the names of other keys' models are not shown"

    serve(scenario, options)


def test_cached_prefixes_and_responses_stay_within_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    tables = {"alice": "", "bob": 'tenant = "alice"', "carol": ""}
    path.write_text("".join(f'[keys.{name}]\nhash = "{hash_of(name)}"\n{more}\n' for name, more in tables.items()), encoding="utf-8")
    body = {"model": MODEL, "input": "Hi"}

    async def scenario(server: Running) -> None:
        _, response = await server.post("/v1/responses", body, headers=bearer("alice"))
        for name, status in (("alice", 200), ("bob", 200), ("carol", 404)):
            assert (await server.get(f"/v1/responses/{response['id']}", headers=bearer(name)))[0] == status
        for name in ("bob", "carol"):
            assert (await server.post("/v1/responses", body, headers=bearer(name)))[0] == 200
        alice, bob, carol = (request.cache_salt for request in server.engine.requests)
        assert alice == bob != carol
        assert {request.prefix_key.salt for request in server.engine.requests} == {alice, carol}, "draft texts are kept apart by it too"

    serve(scenario, ServerOptions(keys_file=str(path), keep_alive_interval=0))
