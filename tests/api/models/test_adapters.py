"""Adapters over HTTP: chosen by `model` on every endpoint, listed, loaded and unloaded while the server runs."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.api.app import build_app
from penstock.assembly import Assembled, assemble
from penstock.cli.api_servers import named_adapters, serve_apart
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from tests.api.remote.loopback import connected, engine_server
from tests.api.scripted import CancellingServer
from tests.llm.model_directory import write_model
from tests.tiny_adapters import adapted_model, quiet, write_adapter, write_tuned_prompt

FLAGS = "--dtype float32 --compile off --kv-cache-memory 4MiB --threads 1 --max-model-len 256 --plugin none --served-model-name base"
PROMPT = "the rain in Spain"
MAX_TOKENS = 8


@dataclass(frozen=True)
class Files:
    model: Path
    adapters: Path
    texts: dict[str, str]  # what peft says by the name of the adapter


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("adapters")
    model, texts = write_model(tmp_path_factory.mktemp("model")), {}
    adapters: list[tuple[str, Path | None]] = [("base", None)]
    adapters += [("first", write_adapter(load(model), root / "first")), ("second", write_tuned_prompt(load(model), root / "second"))]
    (root / "link").symlink_to(model)
    (root / "file").mkdir()
    (root / "file" / "adapter_config.json").symlink_to(write_adapter(load(model), model / "outside") / "adapter_config.json")
    for name, adapter in adapters:
        texts[name] = said(load(model) if adapter is None else adapted_model(load(model), adapter), model)
    assert len(set(texts.values())) == len(texts)
    return Files(model, root, texts)


def load(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def said(model: Any, directory: Path) -> str:
    tokenizer = Tokenizer.load(directory)
    input_ids = torch.tensor([tokenizer.encode(PROMPT)])
    settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    with quiet():
        output = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **settings)
    return tokenizer.decode(output[0, input_ids.shape[1] :].tolist())


@dataclass(frozen=True)
class Served:
    assembled: Assembled
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await (response.json() if "json" in response.content_type else response.text())

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            return await (response.json() if "json" in response.content_type else response.text())

    async def complete(self, model: str) -> str:
        status, answer = await self.post("/v1/completions", completion(model))
        assert status == 200, answer
        assert answer["model"] == model
        return str(answer["choices"][0]["text"])


def completion(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True} | fields


@asynccontextmanager
async def served(files: Files, *flags: str) -> AsyncIterator[Served]:
    arguments = parse_arguments(["--model", str(files.model), *FLAGS.split(), *flags])
    assembled = assemble(arguments, Plugins.start(arguments.plugins, ()))
    assert isinstance(assembled, Assembled)
    await assembled.context.engine.start()
    try:
        async with CancellingServer(build_app(assembled.context)) as server, aiohttp.ClientSession(str(server.make_url("/"))) as http:
            yield Served(assembled, http)
        assembled.core.check_integrity()
    finally:
        await assembled.context.engine.stop()
        assembled.context.close()


def run(files: Files, scenario: Callable[[Served], Awaitable[None]], *flags: str) -> None:
    async def main() -> None:
        async with served(files, *flags) as server:
            await asyncio.wait_for(scenario(server), 60)

    asyncio.run(main())


def given(files: Files, *names: str) -> list[str]:
    return [word for name in names for word in ("--adapter", f"{name}={files.adapters / name}")]


def test_the_operators_adapters_are_models_beside_the_model(files: Files) -> None:
    async def scenario(server: Served) -> None:
        models = {card["id"]: (card["root"], card["parent"]) for card in (await server.get("/v1/models"))["data"]}
        assert models == {"base": ("base", None), "first": ("base", "base"), "second": ("base", "base")}
        assert (await server.get("/v1/models/first"))["parent"] == "base"
        async with server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
            assert [model["id"] for model in (await response.json())["data"]] == list(models)
        texts = await asyncio.gather(*(server.complete(name) for name in files.texts for _ in range(2)))
        assert texts == [text for text in files.texts.values() for _ in range(2)]
        assert 'penstock:lora_requests_info{max_lora="8",model_name="base"' in await server.get("/metrics")

    run(files, scenario, *given(files, "first", "second"))


def test_every_endpoint_chooses_the_adapter_by_its_name(files: Files) -> None:
    question = [{"role": "user", "content": "hi"}]
    chat = {"messages": question, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}

    async def scenario(server: Served) -> None:
        def content(answer: Any) -> str:
            return str(answer["choices"][0]["message"]["content"])

        def output(answer: Any) -> str:
            return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))

        texts: dict[str, set[str]] = {}
        for model in ("base", "first", "second"):
            _, answer = await server.post("/v1/chat/completions", {"model": model, **chat})
            _, response = await server.post(
                "/v1/responses", {"model": model, "input": "hi", "max_output_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            )
            _, message = await server.post(
                "/v1/messages", {"model": model, "messages": question, "max_tokens": MAX_TOKENS, "temperature": 0}
            )
            assert {answer["model"], response["model"], message["model"]} == {model}
            texts[model] = {content(answer), output(response)}
            assert (await server.post("/tokenize", {"model": model, "prompt": "a"}))[0] == 200
            assert (await server.post("/detokenize", {"model": model, "tokens": [1]}))[0] == 200
            body = {"model": model, "messages": question, "max_tokens": 1}
            assert (await server.post("/v1/messages/count_tokens", body))[0] == 200
        assert all(len(own) == 1 for own in texts.values())
        assert len(set.union(*texts.values())) == 3

    run(files, scenario, *given(files, "first", "second"))


def test_adapters_are_loaded_and_unloaded_while_requests_run(files: Files) -> None:
    async def scenario(server: Served) -> None:
        status, answer = await server.post("/v1/completions", completion("mine"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        for path, name in (("first", "mine"), (str(files.adapters / "second"), "other")):
            status, text = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            assert (status, text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        assert await server.complete("mine") == files.texts["first"]
        async with server.http.post("/v1/completions", json=completion("other", max_tokens=200, stream=True)) as running:
            chunks = [await running.content.readline()]
            status, _ = await server.post("/v1/unload_lora_adapter", {"lora_name": "other"})
            assert status == 200
            assert (await server.post("/v1/completions", completion("other")))[0] == 404
            status, _ = await server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "first"})
            assert status == 200
            assert await server.complete("other") == files.texts["first"]
            chunks += [line async for line in running.content]
        events = [json.loads(chunk[6:]) for chunk in chunks if chunk.startswith(b"data: {")]
        assert "".join(event["choices"][0]["text"] for event in events).startswith(files.texts["second"])
        body: dict[str, object] = {"lora_name": "mine", "lora_path": "second"}
        status, refusal = await server.post("/v1/load_lora_adapter", body)
        assert (status, "`load_inplace` (`replace` in the admin interface)" in refusal["error"]["message"]) == (400, True)
        body["load_inplace"] = True
        assert (await server.post("/v1/load_lora_adapter", body))[0] == 200
        assert await server.complete("mine") == files.texts["second"]
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "nothing"}))[0] == 404

    run(files, scenario, "--adapter-dir", str(files.adapters), "--max-loras", "1")


def test_streams_end_with_the_adapter_that_they_began_with_whatever_has_its_name_by_then(files: Files) -> None:
    write_adapter(load(files.model), files.adapters / "third", seed=3)
    chance, prompt = random.Random(0), PROMPT * 4  # of blocks that the next one with the same adapter finds

    async def text_of(response: aiohttp.ClientResponse) -> str:
        lines = [line async for line in response.content]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {"))

    async def put(server: Served, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        assert (await server.post("/v1/load_lora_adapter", body))[0] == 200

    async def scenario(server: Served) -> None:
        alone: dict[str, str] = {}
        for path in ("first", "second", "third"):
            await put(server, path, path)
            _, answer = await server.post("/v1/completions", completion(path, prompt=prompt, max_tokens=40))
            alone[path] = answer["choices"][0]["text"]
            assert (await server.post("/v1/unload_lora_adapter", {"lora_name": path}))[0] == 200
        assert len({text[:8] for text in alone.values()}) == 3
        known: dict[str, str] = {}
        wanted: list[str] = []
        streams: list[asyncio.Task[str]] = []
        num_changed = 0  # changes of adapters while streams of them ran
        for _ in range(30):
            name, operation = chance.choice("ab"), chance.choice(("load", "load", "unload", "stream", "stream"))
            num_changed += operation != "stream" and any(not stream.done() for stream in streams)
            if operation == "load":
                known[name] = chance.choice(sorted(alone.keys() - {known.get(name)}))
                await put(server, name, known[name])
            elif operation == "unload":
                status, _ = await server.post("/v1/unload_lora_adapter", {"lora_name": name})
                assert status == (404 if known.pop(name, None) is None else 200)
            else:
                names = chance.choices("ab", k=4)
                bodies = [completion(name, prompt=prompt, max_tokens=40, stream=True) for name in names]
                responses = await asyncio.gather(*(server.http.post("/v1/completions", json=body) for body in bodies))
                assert [response.status for response in responses] == [200 if name in known else 404 for name in names]
                wanted += [alone[known[name]] for name in names if name in known]
                streams += [asyncio.create_task(text_of(response)) for response in responses if response.status == 200]
        assert await asyncio.gather(*streams) == wanted
        assert num_changed > 0
        assert len(wanted) > 15

    run(files, scenario, "--adapter-dir", str(files.adapters), "--max-loras", "2", "--max-cpu-loras", "3")


def test_only_adapters_below_the_directory_are_loaded_under_free_names(files: Files) -> None:
    paths = ["..", "link", "file", str(files.model / "outside"), "nowhere", "a\0b", "x" * 5000, "first/adapter_config.json", ""]

    async def scenario(server: Served) -> None:
        for path in paths:
            status, answer = await server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            assert (status, answer["error"]["param"]) == (400, "lora_path"), path
        for name in ("base", "", "x" * 300, "a\nb"):
            status, answer = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "first"})
            assert (status, answer["error"]["param"]) == (400, "lora_name"), name
        assert (await server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "first"}))[0] == 200
        for name, reason in (("a", "unload it first"), ("b", "1 adapters are loaded")):
            status, answer = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "first"})
            assert status == 400
            assert reason in answer["error"]["message"]

    run(files, scenario, "--adapter-dir", str(files.adapters), "--max-cpu-loras", "1")


def test_without_the_flag_nothing_is_loaded(files: Files) -> None:
    async def scenario(server: Served) -> None:
        for path in ("load", "unload"):
            status, answer = await server.post(f"/v1/{path}_lora_adapter", {"lora_name": "a", "lora_path": "first"})
            assert status == 404
            assert "--adapter-dir" in answer["error"]["message"]
        assert os.fspath(files.adapters) not in str(await server.get("/v1/models"))

    run(files, scenario)


def test_api_servers_name_the_operators_adapters_and_take_no_others(files: Files) -> None:
    arguments = parse_arguments(["--model", str(files.model), *FLAGS.split(), *given(files, "first", "second")])

    async def main() -> None:
        async with served(files, *given(files, "first", "second")) as server:
            context = server.assembled.context
            async with connected(engine_server(context), context) as (remote, connection):
                remote.adapters = named_adapters(arguments)
                async with CancellingServer(build_app(remote)) as other, aiohttp.ClientSession(str(other.make_url("/"))) as http:
                    apart = Served(server.assembled, http)
                    assert [await apart.complete(name) for name in files.texts] == list(files.texts.values())
                    assert (await apart.post("/v1/completions", completion("third")))[0] == 404
                    context.adapters.remove("second")
                    assert (await apart.post("/v1/completions", completion("second")))[0] == 404
            connection.check_integrity()

    asyncio.run(main())
    arguments = parse_arguments(["--model", str(files.model), "--adapter-dir", str(files.adapters), "--api-servers", "2"])
    with pytest.raises(ConfigurationError, match="cannot be combined with --api-servers"):
        serve_apart(arguments, Plugins(), [])
