"""/v1/embeddings over a tiny encoder: the numbers are transformers' own, the shapes OpenAI's."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

from penstock.serving.options import ServerOptions
from tests.api.pooling.server import MODEL, PoolingServer, Reference, serve_pooling
from tests.api.scripted import client_of
from tests.encoders import MAX_LEN, embedding_directory

TEXTS = ["Paris", "The cat sat on the mat.", "é" * 20, "a"]
PATH = "/v1/embeddings"


def test_the_official_client_gets_transformers_own_vectors_in_order(embedder: Path) -> None:
    reference = Reference.of(embedder)

    async def scenario(server: PoolingServer) -> None:
        async with client_of(f"{server.url}/v1") as client:
            packed = await client.embeddings.create(model=MODEL, input=TEXTS)  # which asks for base64 of its own accord
            listed = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        assert [entry.index for entry in packed.data] == [0, 1, 2, 3]
        assert [entry.embedding for entry in packed.data] == [entry.embedding for entry in listed.data]
        for text, entry in zip(TEXTS, packed.data, strict=True):
            torch.testing.assert_close(torch.tensor(entry.embedding), reference.embedding(text), atol=1e-5, rtol=0)
        num_tokens = sum(len(text.encode()) + 2 for text in TEXTS)
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == num_tokens
        assert (packed.object, packed.data[0].object, packed.model) == ("list", "embedding", MODEL)

    serve_pooling(embedder, scenario)


def test_token_ids_are_taken_as_they_are(embedder: Path) -> None:
    reference = Reference.of(embedder)
    ids = reference.tokenizer.encode("Hi", add_special_tokens=False)

    async def scenario(server: PoolingServer) -> None:
        _, one = await server.post(PATH, {"input": ids})
        _, two = await server.post(PATH, {"input": [ids, ids + ids]})
        assert len(one["data"]) == 1
        assert len(two["data"]) == 2
        for prompt, entry in ((ids, one["data"][0]), (ids, two["data"][0]), (ids + ids, two["data"][1])):
            torch.testing.assert_close(torch.tensor(entry["embedding"]), reference.embedding(prompt), atol=1e-5, rtol=0)
        assert two["usage"] == {"prompt_tokens": 3 * len(ids), "total_tokens": 3 * len(ids)}

    serve_pooling(embedder, scenario)


def test_a_salt_is_accepted_and_changes_nothing(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        _, plain = await server.post(PATH, {"input": "Hi"})
        status, salted = await server.post(PATH, {"input": "Hi", "cache_salt": "mine"})
        assert (status, salted["data"]) == (200, plain["data"])
        assert (await server.post(PATH, {"input": "Hi", "cache_salt": ""}))[0] == 400

    serve_pooling(embedder, scenario)


def test_base64_is_of_little_endian_float32(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        _, packed = await server.post(PATH, {"input": "Hi", "encoding_format": "base64"})
        _, listed = await server.post(PATH, {"input": "Hi", "encoding_format": "float"})
        vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
        assert vector.tolist() == listed["data"][0]["embedding"]

    serve_pooling(embedder, scenario)


def test_as_many_inputs_as_openai_allows_come_back_in_order(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post(PATH, {"input": [[1 + index % 50] * (1 + index % 3) for index in range(2048)]})
        assert status == 200
        assert [entry["index"] for entry in answer["data"]] == list(range(2048))
        vectors = np.array([entry["embedding"] for entry in answer["data"]])
        assert np.allclose(vectors[:150], vectors[150:300], atol=1e-5)
        assert await server.refusal(PATH, {"input": ["a"] * 2049}) == (400, "input", "`input` must hold from 1 to 2048 prompts, got 2049")

    serve_pooling(embedder, scenario)


def test_a_batch_waits_for_places_in_a_short_queue(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post(PATH, {"input": ["text"] * 20})
        assert (status, len(answer["data"])) == (200, 20)

    serve_pooling(embedder, scenario, max_waiting_requests=2)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"input": ["a", "b", ""]}, "input[2]"),
    ({"input": ""}, "input"),
    ({"input": [""]}, "input[0]"),
    ({"input": []}, "input"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": [1, 2, 258]}, "input"),
    ({"input": [[1], [2, -1]]}, "input[1]"),
    ({"input": [1, "a"]}, "input[1]"),
    ({"input": ["a", "x" * MAX_LEN]}, "input[1]"),
    ({"input": ["a", "x" * 10**5]}, "input[1]"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a", None]}, "input[1]"),
    ({}, "input"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 16}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({"input": "a", "prompt_name": "query"}, "prompt_name"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "inputs": "a"}, "inputs"),
]


def test_what_is_wrong_is_named_before_anything_runs(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        named = [(await server.refusal(PATH, given))[:2] for given, _ in MISTAKES]
        assert named == [(400, param) for _, param in MISTAKES]
        assert server.engine.stats().num_steps == 0

    serve_pooling(embedder, scenario)


def test_a_text_that_is_too_long_has_openais_code_and_can_be_cut(embedder: Path) -> None:
    reference = Reference.of(embedder)
    text = "abcdefgh" * 20

    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post(PATH, {"input": text})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        for asked, kept in ((10, 8), (-1, MAX_LEN - 2)):
            _, answer = await server.post(PATH, {"input": text, "truncate_prompt_tokens": asked})
            assert answer["usage"]["prompt_tokens"] == kept + 2
            expected = reference.embedding(text[:kept])
            torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)
        _, answer = await server.post(PATH, {"input": list(range(20)), "truncate_prompt_tokens": 5})
        expected = reference.embedding([0, 1, 2, 3, 4])
        torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)

    serve_pooling(embedder, scenario)


def test_special_tokens_and_normalisation_can_be_left_out(embedder: Path) -> None:
    reference = Reference.of(embedder)
    ids = reference.tokenizer.encode("Hi", add_special_tokens=False)

    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post(PATH, {"input": "Hi", "add_special_tokens": False, "normalize": False})
        expected = reference.vectors(ids).mean(dim=0)
        torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)

    serve_pooling(embedder, scenario)


def test_an_instruction_of_the_models_goes_before_the_text(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find: ", "document": ""}}
    directory = embedding_directory(tmp_path, {"config_sentence_transformers": prompts})
    reference = Reference.of(directory)

    async def scenario(server: PoolingServer) -> None:
        for name, text in (("query", "find: Hi"), ("document", "Hi"), (None, "Hi")):
            _, answer = await server.post(PATH, {"input": "Hi", "prompt_name": name})
            torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), reference.embedding(text), atol=1e-5, rtol=0)

    serve_pooling(directory, scenario)


def test_the_type_of_input_chooses_the_models_instruction_for_it(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find: ", "passage": "text: ", "clustering": "group: "}}
    directory = embedding_directory(tmp_path, {"config_sentence_transformers": prompts})
    reference = Reference.of(directory)
    expected = {
        "query": "find: ",
        "search_query": "find: ",
        "document": "text: ",
        "search_document": "text: ",
        "clustering": "group: ",
        "x": "",
    }

    async def scenario(server: PoolingServer) -> None:
        for name, instruction in expected.items():
            _, answer = await server.post(PATH, {"input": "Hi", "input_type": name})
            torch.testing.assert_close(
                torch.tensor(answer["data"][0]["embedding"]), reference.embedding(instruction + "Hi"), atol=1e-5, rtol=0
            )
        _, answer = await server.post(PATH, {"input": "Hi", "input_type": "query", "prompt_name": "passage"})
        torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), reference.embedding("text: Hi"), atol=1e-5, rtol=0)

    serve_pooling(directory, scenario)


def test_azures_path_names_the_model(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post("/openai/deployments/tiny/embeddings?api-version=1", {"input": "Hi", "model": "another"})
        assert (status, answer["model"]) == (200, "tiny")
        status, answer = await server.post("/openai/deployments/another/embeddings", {"input": "Hi"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    serve_pooling(embedder, scenario)


def test_a_conversation_is_one_input(embedder: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]

    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post(PATH, {"messages": messages})
        _, same = await server.post(PATH, {"input": "user: Hi\nassistant: Ho\n", "add_special_tokens": False})
        assert answer["data"] == same["data"]

    serve_pooling(embedder, scenario)


def test_a_hostile_template_in_a_request_is_a_400_that_names_it(embedder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ ['a' * 1000000] * 2000 }}"}

    async def scenario(server: PoolingServer) -> None:
        assert (await server.refusal(PATH, body))[:2] == (400, "chat_template")

    serve_pooling(embedder, scenario, ServerOptions(trust_request_chat_template=True))


def test_a_matryoshka_model_gives_as_many_dimensions_as_are_asked(tmp_path: Path) -> None:
    directory = embedding_directory(tmp_path, is_matryoshka=True)
    reference = Reference.of(directory)

    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post(PATH, {"input": "Hi", "dimensions": 8})
        expected = torch.nn.functional.normalize(reference.embedding("Hi")[:8], dim=0)
        torch.testing.assert_close(torch.tensor(answer["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)

    serve_pooling(directory, scenario)


def test_a_client_that_goes_away_takes_its_inputs_with_it(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await server.post(PATH, {"input": [[index % 200 + 1] * 60 for index in range(2048)]}, timeout=aiohttp.ClientTimeout(0.05))
        while server.engine.stats().num_running or server.engine.stats().num_waiting:  # noqa: ASYNC110 - the engine knows no events
            await asyncio.sleep(0.001)
        assert server.engine.stats().num_inputs < 2048
        assert (await server.post(PATH, {"input": "still there"}))[0] == 200

    serve_pooling(embedder, scenario)


def test_a_full_queue_is_429_and_says_when_to_come_back(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        async def ask() -> int:
            async with server.http.post(PATH, json={"input": [5] * 60}) as response:
                if response.status == 429:
                    assert response.headers["Retry-After"] == "1"
                    assert (await response.json())["error"]["code"] == "queue_full"
                return response.status

        assert {200, 429} == set(await asyncio.gather(*(ask() for _ in range(50))))

    serve_pooling(embedder, scenario, max_waiting_requests=1, max_num_batched_tokens=60)


def test_an_unknown_model_is_404(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        async with client_of(f"{server.url}/v1") as client:
            with pytest.raises(openai.NotFoundError, match="text-embedding-3"):
                await client.embeddings.create(model="text-embedding-3-small", input="a")
        assert (await server.post(PATH, {"input": "a", "model": "alias"}))[1]["model"] == "alias"

    serve_pooling(embedder, scenario)
