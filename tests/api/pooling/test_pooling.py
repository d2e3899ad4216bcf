"""/pooling and /classify, what models are told apart by, and what surrounds every pooling handler."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForSequenceClassification

from penstock.api.app import GENERATION
from penstock.api.pooling import POOLING_ROUTES
from penstock.api.routes import azure_path
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.endpoints.errors import ErrorBody
from penstock.serving.endpoints.models import POOLING_PATHS
from penstock.serving.options import ServerOptions
from tests.api.bodies.mutations import mutated_bodies
from tests.api.pooling.server import MODEL, PoolingServer, Reference, serve_pooling
from tests.api.running_server import CHAT, Running, serve
from tests.encoders import LABELS, token_classifier_directory

TEXTS = ["Hi", "It rains.", "What a day"]


def test_pooling_gives_the_models_own_first_task_or_the_one_asked_for(embedder: Path) -> None:
    reference = Reference.of(embedder)

    async def scenario(server: PoolingServer) -> None:
        _, own = await server.post("/pooling", {"input": TEXTS})
        _, embedded = await server.post("/v1/embeddings", {"input": TEXTS})
        assert [entry["data"] for entry in own["data"]] == [entry["embedding"] for entry in embedded["data"]]
        _, tokens = await server.post("/pooling", {"input": TEXTS[:1], "task": "token_embed", "normalize": False})
        ids = reference.tokenizer.encode(TEXTS[0], add_special_tokens=True)
        torch.testing.assert_close(torch.tensor(tokens["data"][0]["data"]), reference.vectors(ids), atol=1e-5, rtol=0)
        assert {entry["object"] for entry in own["data"]} == {"pooling"}

    serve_pooling(embedder, scenario)


def test_classes_have_their_labels_and_transformers_own_probabilities(classifier: Path) -> None:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(classifier).eval(), Tokenizer.load(classifier)
    with torch.no_grad():
        inputs = [torch.tensor([tokenizer.encode(text, add_special_tokens=True)]) for text in TEXTS]
        expected = [model(ids).logits.softmax(dim=-1)[0] for ids in inputs]

    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post("/classify", {"model": MODEL, "input": TEXTS})
        assert status == 200
        for index, (entry, probs) in enumerate(zip(answer["data"], expected, strict=True)):
            assert (entry["index"], entry["num_classes"], entry["label"]) == (index, 3, LABELS[int(probs.argmax())])
            torch.testing.assert_close(torch.tensor(entry["probs"]), probs, atol=1e-5, rtol=0)
        assert answer["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in TEXTS)
        assert (await server.refusal("/classify", {"input": ["a", ""]}))[:2] == (400, "input[1]")

    serve_pooling(classifier, scenario)


def test_classes_of_tokens_come_from_pooling(tmp_path: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post("/pooling", {"input": "Hi"})
        probs = torch.tensor(answer["data"][0]["data"])
        assert probs.shape == (4, 3)
        assert torch.allclose(probs.sum(dim=-1), torch.ones(4))
        status, param, message = await server.refusal("/classify", {"input": "Hi"})
        assert (status, param) == (400, "model")
        assert "a classifier of tokens with 3 labels; it is served by /pooling" in message

    serve_pooling(token_classifier_directory(tmp_path), scenario)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
}


@pytest.mark.parametrize(
    ("model", "unserved", "says"),
    [
        ("embedder", {"/classify"}, "an embedding model; it is served by /v1/embeddings, /v1/score, /v1/rerank, /pooling"),
        ("cross_encoder", {"/v1/embeddings"}, "a cross-encoder, which scores pairs of texts; it is served by /v1/score, /v1/rerank"),
        ("classifier", BODIES.keys() - {"/classify", "/pooling"}, "a classifier with 3 labels; it is served by /classify, /pooling"),
    ],
)
def test_other_routes_say_what_the_model_is_and_what_serves_it(
    request: pytest.FixtureRequest, model: str, unserved: set[str], says: str
) -> None:
    async def scenario(server: PoolingServer) -> None:
        for path, body in BODIES.items():
            if path not in unserved:
                assert (await server.post(path, body))[0] == 200
        generating = [route.path for route in GENERATION if ErrorBody in route.errors and route.request is not None]
        for path in (*unserved, *generating):
            status, param, message = await server.refusal(path, BODIES.get(path, CHAT))
            assert (status, param) == (400, "model")
            assert f"`{MODEL}` is {says}" in message

    serve_pooling(request.getfixturevalue(model), scenario)


def test_a_model_that_generates_says_so_on_every_route_of_the_others() -> None:
    ours = {path for route in POOLING_ROUTES for path in route.paths} - {azure_path("/v1/embeddings")}
    assert BODIES.keys() == ours == set(POOLING_PATHS)

    async def scenario(server: Running) -> None:
        for path, body in BODIES.items():
            status, answer = await server.post(path, body)
            assert (status, answer["error"]["param"]) == (400, "model")
            assert "generates text; it is served by /v1/chat/completions, /v1/completions" in answer["error"]["message"]

    serve(scenario)


def test_what_both_kinds_have_in_common_is_there(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/version"))[0] == 200
        _, models = await server.get("/v1/models")
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [(MODEL, 64), ("alias", 64)]
        assert models["data"][0]["tasks"] == ["embed", "token_embed"]
        _, tokenized = await server.post("/tokenize", {"prompt": "Hi"})
        assert await server.post("/detokenize", {"tokens": tokenized["tokens"]}) == (200, {"prompt": "[CLS]Hi[SEP]"})

    serve_pooling(embedder, scenario)


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", {"input": "a"}), ("/v1/score", {"text_1": "a", "text_2": "b"})])
def test_a_request_ends_at_its_time_limit(embedder: Path, path: str, body: dict[str, Any]) -> None:
    async def scenario(server: PoolingServer) -> None:
        status, answer = await server.post(path, body | {"timeout": 1e-9})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert (await server.post(path, body | {"timeout": 600}))[0] == 200

    serve_pooling(embedder, scenario)


def test_a_key_and_a_limit_hold_here_too(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        assert (await server.post("/v1/embeddings", {"input": "a"}))[0] == 401
        headers = {"Authorization": "Bearer k", "x-request-id": "mine"}
        async with server.http.post("/v1/embeddings", json={"input": "a"}, headers=headers) as response:
            assert (response.status, response.headers["x-request-id"]) == (200, "mine")
        assert (await server.post("/pooling", {"input": "a" * 1000}, headers=headers))[0] == 413

    serve_pooling(embedder, scenario, ServerOptions(api_keys=("k",), max_body_size=500))


def test_inputs_are_counted(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        await server.post("/v1/embeddings", {"input": ["ab", "cd"]})
        await server.post("/v1/score", {"text_1": "a", "text_2": ["b", "c"]})
        await server.post("/v1/embeddings", {"input": ""})
        shown = {
            sample.name: sample.value
            for family in text_string_to_metric_families(await server.text("/metrics"))
            for sample in family.samples
            if not set(sample.labels) - {"model_name", "finished_reason"} and sample.labels.get("finished_reason", "stop") == "stop"
        }
        expected = {
            "penstock:num_requests_running": 0,
            "penstock:num_requests_waiting": 0,
            "penstock:prompt_tokens_total": 8 + 9,
            "penstock:request_success_total": 5,
            "penstock:request_prompt_tokens_count": 5,
            "penstock:request_prompt_tokens_sum": 17,
            "penstock:e2e_request_latency_seconds_count": 5,
        }
        assert shown.items() >= expected.items()

    serve_pooling(embedder, scenario)


def test_health_and_requests_follow_the_engine(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        await server.engine.stop()
        assert (await server.get("/health"))[0] == 503
        status, _, message = await server.refusal("/v1/embeddings", {"input": "a"})
        assert (status, message) == (503, "the server is shutting down")

    serve_pooling(embedder, scenario)


def test_many_clients_share_batches(embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        answers = await asyncio.gather(*(server.post("/v1/embeddings", {"input": "a" * (1 + index % 9)}) for index in range(40)))
        assert {status for status, _ in answers} == {200}
        assert server.engine.stats().num_steps < 40

    serve_pooling(embedder, scenario)


def numbers_of(answer: Any) -> list[float]:
    """What the model has computed, in the order of the inputs."""
    if "results" in answer:
        return [result["relevance_score"] for result in sorted(answer["results"], key=lambda result: result["index"])]
    return [number for entry in answer["data"] for number in (entry.get("embedding") or [entry["score"]])]


def test_one_request_id_for_all_mixes_no_answers(embedder: Path, cross_encoder: Path) -> None:
    async def ask(server: PoolingServer, requests: list[tuple[str, dict[str, Any]]]) -> None:
        alone = [await server.post(path, body) for path, body in requests]
        together = await asyncio.gather(
            *(server.post(path, body, headers={"X-Request-Id": "the-same"}) for path, body in requests for _ in range(4))
        )
        for number, (status, answer) in enumerate(together):
            assert status == 200
            assert numbers_of(answer) == pytest.approx(numbers_of(alone[number // 4][1]), abs=1e-4)

    texts = ["b" * number for number in range(1, 7)]
    embeddings = [("/v1/embeddings", {"input": text}) for text in texts]
    scores = [("/v1/score", {"text_1": "a", "text_2": [text, "c"]}) for text in texts]
    rankings = [("/v1/rerank", {"query": "a", "documents": [text, "c"]}) for text in texts]
    serve_pooling(embedder, lambda server: ask(server, embeddings))
    serve_pooling(cross_encoder, lambda server: ask(server, [*scores, *rankings]))


WHOLE: list[tuple[str, str, dict[str, Any]]] = [
    (
        "embedder",
        "/v1/embeddings",
        {
            "model": MODEL,
            "input": ["a", "b"],
            "encoding_format": "base64",
            "normalize": True,
            "truncate_prompt_tokens": 9,
            "priority": 1,
            "prompt_name": None,
            "user": "u",
        },
    ),
    ("embedder", "/pooling", {"input": [[1, 2], [3]], "task": "token_embed", "add_special_tokens": False, "dimensions": 32}),
    ("embedder", "/pooling", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True, "chat_template_kwargs": {}}),
    ("cross_encoder", "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d"], "truncate_prompt_tokens": -1}),
    ("cross_encoder", "/v2/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "max_tokens_per_doc": 5}),
    ("classifier", "/classify", {"input": "a", "model": MODEL, "add_special_tokens": True}),
]


@pytest.mark.parametrize(("model", "path", "whole"), WHOLE)
def test_a_mutated_body_is_answered_or_refused(request: pytest.FixtureRequest, model: str, path: str, whole: dict[str, Any]) -> None:
    async def scenario(server: PoolingServer) -> None:
        statuses = Counter[int]()
        assert (await server.post(path, whole))[0] == 200
        for data in mutated_bodies(whole, 100, seed=1):
            async with server.http.post(path, data=data) as response:
                statuses[response.status] += 1
                if response.status != 200:
                    assert (await response.json())["error"]["message"]
        assert statuses.keys() <= {200, 400, 404}
        assert statuses[200] > 5
        assert statuses[400] > 50

    serve_pooling(request.getfixturevalue(model), scenario)
