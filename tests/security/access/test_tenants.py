"""Keys with limits of their own reach nothing of each other's: no model, no file, no response, and no more than their share."""

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock.serving.limits import hash_of
from penstock.serving.options import ServerOptions
from tests.api.models.server import ModelsServer, models_server, spec
from tests.api.running_server import CHAT, Running, serve
from tests.api.scripted import MODEL

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/v1/grammar/check": {"guided_regex": "a"},
}


def keys_file(tmp_path: Path, **tables: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nhash = "{hash_of(secret_of(name))}"\n{table}\n' for name, table in tables.items()))
    path.chmod(0o600)
    return str(path)


def secret_of(name: str) -> str:
    return f"the key of {name}"


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret_of(name)}"}


def test_no_route_uses_a_model_that_a_key_may_not_use(tmp_path: Path) -> None:
    options = ServerOptions(keep_alive_interval=0, keys_file=keys_file(tmp_path, alice='models = ["a"]', bob='models = ["b"]'))

    async def attack(server: ModelsServer) -> None:
        for path, body in BODIES.items():
            status, answer = await server.post(path, body | {"model": "b"}, headers=key("alice"))
            assert status == 404, (path, answer)
            assert answer["error"]["message"].endswith("It may use: a."), "the names of other keys' models are not shown"
        status, _ = await server.post("/openai/deployments/b/chat/completions", {"messages": MESSAGES, "model": "a"}, headers=key("alice"))
        assert status == 404
        assert (await server.get("/v1/models/b", headers=key("alice")))[0] == 404
        assert server.loader.loads == []
        assert (await server.post("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"model": "b"}, headers=key("bob")))[0] == 200

    asyncio.run(run_models(attack, options))


async def run_models(attack: Any, options: ServerOptions) -> None:
    async with models_server([spec("a"), spec("b"), spec("c")], options=options) as server:
        await asyncio.wait_for(attack(server), 120)


def test_a_key_beyond_its_limits_has_no_model_loaded(tmp_path: Path) -> None:
    """Loading one may unload another's."""
    options = ServerOptions(keep_alive_interval=0, keys_file=keys_file(tmp_path, alice="requests_per_minute = 1"))

    async def attack(server: ModelsServer) -> None:
        body = {"messages": MESSAGES}
        assert (await server.post("/v1/chat/completions", body | {"model": "a"}, headers=key("alice")))[0] == 200
        for name, more in product("bca", ({}, {"stream": True})):
            status, answer = await server.post("/v1/chat/completions", body | more | {"model": name}, headers=key("alice"))
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert server.loader.loads == ["a"]

    asyncio.run(run_models(attack, options))


@pytest.mark.parametrize("stored", ["file", "response"])
def test_what_one_key_has_stored_does_not_exist_for_another_however_it_is_asked_for(tmp_path: Path, stored: str) -> None:
    file = keys_file(tmp_path, alice="", bob="", carol='tenant = "alice"')

    async def scenario(server: Running) -> None:
        if stored == "response":
            _, made = await server.post("/v1/responses", {"model": MODEL, "input": "Hi"}, headers=key("alice"))
            asked = [("GET", f"/v1/responses/{made['id']}"), ("GET", f"/v1/responses/{made['id']}/input_items")]
            asked += [("POST", f"/v1/responses/{made['id']}/cancel"), ("DELETE", f"/v1/responses/{made['id']}")]
            body = {"model": MODEL, "input": "Hi", "previous_response_id": made["id"]}
            assert (await server.post("/v1/responses", body, headers=key("bob")))[0] in (400, 404)
        else:
            form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
            form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nsecret\r\n--b--\r\n'
            headers = key("alice") | {"Content-Type": "multipart/form-data; boundary=b"}
            async with server.http.post("/v1/files", data=form, headers=headers) as response:
                made = await response.json()
            asked = [("GET", f"/v1/files/{made['id']}"), ("GET", f"/v1/files/{made['id']}/content"), ("DELETE", f"/v1/files/{made['id']}")]
            body = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            assert (await server.post("/v1/batches", body, headers=key("bob")))[0] in (400, 404)
        for method, path in asked:
            for headers in (key("bob"), key("bob") | {"OpenAI-Organization": "alice", "X-Tenant": "alice"}):
                async with server.http.request(method, path, headers=headers) as response:
                    assert response.status == 404, (method, path)
                    assert b"secret" not in await response.read()
        assert (await server.get(asked[0][1], headers=key("carol")))[0] == 200, "a key of the same tenant"
        assert (await server.post("/v1/chat/completions", CHAT, headers=key("alice")))[0] == 200

    serve(scenario, ServerOptions(keys_file=file, files_dir=str(tmp_path / "files")))


def test_no_request_asks_its_way_past_the_cap_of_its_key(tmp_path: Path) -> None:
    """By another name of the field, another endpoint, by `n`, or by asking for nothing."""
    file = keys_file(tmp_path, alice="max_tokens = 5")

    async def scenario(server: Running) -> None:
        for path, name in (
            ("/v1/chat/completions", "max_tokens"),
            ("/v1/chat/completions", "max_completion_tokens"),
            ("/v1/completions", "max_tokens"),
            ("/v1/responses", "max_output_tokens"),
        ):
            status, answer = await server.post(path, {"model": MODEL} | BODIES[path] | {name: 6}, headers=key("alice"))
            assert (status, answer["error"]["param"]) == (400, name)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            body = {"model": MODEL} | BODIES[path] | ({"max_tokens": 400} if path == "/v1/messages" else {})
            assert (await server.post(path, body, headers=key("alice")))[0] == 200
            assert server.engine.requests[-1].params.max_tokens == 5, path
        many = {"model": MODEL, "messages": MESSAGES, "n": 3, "use_beam_search": True, "best_of": 3, "temperature": 0}
        assert (await server.post("/v1/chat/completions", many, headers=key("alice")))[0] in (200, 400)
        assert {request.params.max_tokens for request in server.engine.requests} == {5}

    serve(scenario, ServerOptions(keys_file=file))
