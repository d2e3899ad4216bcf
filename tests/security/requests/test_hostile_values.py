"""Values out of range, of another type, or of refused fields: a 400 that reveals nothing, and the engine never sees them."""

import asyncio
import io
import json
import tracemalloc
import zlib
from itertools import product
from typing import Any

import pytest

from benchmarks.attacker import INTERNALS
from benchmarks.hostile_attacks import MODEL_NAMES, NUMBERS, NUMERIC_FIELDS
from penstock.engine.errors import InvalidRequest
from penstock.serving.endpoints.bodies import REFUSED, decode
from penstock.serving.options import ServerOptions
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest
from tests.api.running_server import CHAT, Running, serve

HUGE: list[dict[str, Any]] = [
    *({"n": 10**9}, {"best_of": 10**9}, {"logprobs": True, "top_logprobs": 10**9}, {"max_tokens": 2**63}, {"n": 1.5}, {"n": "5"}),
    *({"stop": ["x" * 10**6]}, {"logit_bias": {str(number): 1 for number in range(10**5)}}, {"stop_token_ids": [5] * 10**6}),
]
OF_EACH_TYPE: tuple[Any, ...] = (True, 7, 1.5, "text", ["text"], {"a": 1}, [])


def test_numbers_out_of_range_are_refused_by_field_and_reach_no_engine() -> None:
    async def scenario(server: Running) -> None:
        for fields in HUGE:
            sent = io.BytesIO(json.dumps(CHAT | fields).encode())
            async with server.http.post("/v1/chat/completions", data=sent, headers={"Content-Type": "application/json"}) as response:
                error = (await response.json())["error"]
            assert response.status == 400, fields.keys()
            assert error["param"] is None or error["param"].split("[")[0] in fields, error
        assert server.engine.requests == []

    serve(scenario)


def test_no_number_is_a_failure_of_the_server() -> None:
    """Every numeric field, with whatever number or other type another program may write there."""

    async def scenario(server: Running) -> None:
        for name, value in product(NUMERIC_FIELDS, NUMBERS):
            async with server.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2, name: value}) as response:
                text = await response.read()
            assert response.status in (200, 400) or (name, response.status) == ("timeout", 504), (name, value, text)
            assert response.status == 200 or not INTERNALS.search(text), text

    serve(scenario)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_number_of_json_is_refused(number: str) -> None:
    for name in ("temperature", "top_p", "presence_penalty", "timeout"):
        body = json.dumps(CHAT).removesuffix("}") + f', "{name}": {number}}}'
        with pytest.raises(InvalidRequest):
            decode(body.encode(), ChatCompletionRequest)


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_a_refused_field_is_refused_whatever_type_it_has(name: str, kind: Any) -> None:
    if name in kind.__struct_fields__:
        pytest.skip("this endpoint has the field")
    whole = CHAT if kind is ChatCompletionRequest else {"prompt": "Hi"}
    _, neutral = REFUSED[name]
    for value in OF_EACH_TYPE:
        body = json.dumps(whole | {name: value}).encode()
        if value in neutral:
            decode(body, kind)
            continue
        with pytest.raises(InvalidRequest) as refusal:
            decode(body, kind)
        assert refusal.value.param == name


def test_a_model_that_names_a_path_is_not_found() -> None:
    async def scenario(server: Running) -> None:
        for name in (*MODEL_NAMES, "/etc/passwd", "scripted/../scripted"):
            status, body = await server.post("/v1/chat/completions", CHAT | {"model": name})
            assert (status, body["error"]["code"]) == (404, "model_not_found"), body
            assert (await server.get("/v1/models/" + name.replace("/", "%2f").replace("%s%n", "x").replace("\n", "%0a")))[0] == 404
        status, body = await server.post("/v1/chat/completions", CHAT | {"lora_path": "../../etc"})
        assert (status, body["error"]["param"]) == (400, "lora_path")

    serve(scenario)


def test_ids_of_files_and_batches_are_no_paths(tmp_path: Any) -> None:
    async def scenario(server: Running) -> None:
        (tmp_path / "secret.json").write_text("{}")
        for kind, rest in product(("files", "batches"), ("", "/content", "/cancel")):
            for name in ("..%2fsecret", "%2e%2e%2fsecret.json", "%2fetc%2fpasswd", "file-%00", "..%5csecret"):
                for method in ("GET", "POST", "DELETE"):
                    async with server.http.request(method, _encoded(server.url, f"/v1/{kind}/{name}{rest}")) as response:
                        text = await response.read()
                    assert response.status in (404, 405), text
        assert (tmp_path / "secret.json").exists()

    serve(scenario, ServerOptions(files_dir=str(tmp_path / "files")))


def _encoded(url: str, path: str) -> Any:
    from yarl import URL

    return URL(url + path, encoded=True)


@pytest.mark.parametrize("wbits", [31, 15], ids=["gzip", "deflate"])
def test_a_body_that_inflates_is_refused_at_the_limit_of_bodies(wbits: int) -> None:
    """64 MiB of zeros in 64 KiB, and a limit of 1 MiB."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, wbits)
    bomb = compressor.compress(bytes(2**26)) + compressor.flush()

    async def scenario(server: Running) -> None:
        tracemalloc.start()
        try:
            headers = {"Content-Encoding": "gzip" if wbits == 31 else "deflate", "Content-Type": "application/json"}
            async with server.http.post("/v1/chat/completions", data=bomb, headers=headers) as response:
                assert response.status == 413
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200

    serve(scenario, ServerOptions(max_body_size=2**20))


def test_labels_of_metrics_do_not_grow_with_what_clients_send() -> None:
    async def scenario(server: Running) -> None:
        async def num_lines() -> int:
            async with server.http.get("/metrics") as response:
                return len((await response.text()).splitlines())

        async def send(number: int) -> None:
            async with server.http.get(f"/p{number}") as response:
                assert response.status == 404
            for method, status in (("PURGE", 405), (f"FOO{number}", 400)):
                async with server.http.request(method, "/v1/models") as response:
                    assert response.status == status
            status, _ = await server.post("/v1/chat/completions", CHAT | {"model": f"m{number}"}, headers={"x-request-id": f"r{number}"})
            assert status == 404

        await send(0)
        await server.post("/v1/chat/completions", CHAT)
        await num_lines()  # which is counted as well
        before = await num_lines()
        await asyncio.gather(*(send(number) for number in range(1, 200)))
        assert await num_lines() == before

    serve(scenario)
