"""/v1/rerank and /v2/rerank: the scores of /v1/score, best first, in Jina's and in Cohere's shape."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.pooling.server import MODEL, PoolingServer, serve_pooling
from tests.encoders import MAX_LEN

QUERY, DOCUMENTS = "Where is Paris?", ["In France.", "In Texas.", "It rains", "No"]
BODY = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}


async def scored(server: PoolingServer) -> list[tuple[int, float]]:
    """(index, score), best first."""
    _, answer = await server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    return sorted(((entry["index"], entry["score"]) for entry in answer["data"]), key=lambda entry: -entry[1])


def ranked(answer: Any) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in answer["results"]]


def test_documents_come_back_best_first_in_jinas_shape(cross_encoder: Path, embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        expected = await scored(server)
        for path in ("/v1/rerank", "/rerank"):
            status, answer = await server.post(path, BODY)
            assert status == 200
            assert answer.keys() == {"id", "model", "object", "results", "usage"}
            assert [index for index, _ in ranked(answer)] == [index for index, _ in expected]
            assert [score for _, score in ranked(answer)] == pytest.approx([score for _, score in expected], abs=1e-5)
            assert [result["document"] for result in answer["results"]] == [{"text": DOCUMENTS[index]} for index, _ in expected]
            assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0

    serve_pooling(cross_encoder, scenario)
    serve_pooling(embedder, scenario)


def test_coheres_second_version_leaves_the_documents_away_and_has_meta(cross_encoder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post("/v2/rerank", BODY)
        assert ranked(answer) == ranked((await server.post("/v1/rerank", BODY))[1])
        assert all(result.keys() == {"index", "relevance_score"} for result in answer["results"])
        assert answer["meta"]["api_version"] == {"version": "2"}
        assert answer["meta"]["tokens"] == {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": 0}

    serve_pooling(cross_encoder, scenario)


@pytest.mark.parametrize(("top_n", "count"), [(0, 4), (1, 1), (3, 3), (9, 4), (None, 4)])
def test_top_n_is_how_many_come_back(cross_encoder: Path, top_n: int | None, count: int) -> None:
    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post("/v1/rerank", BODY | {"top_n": top_n, "return_documents": False})
        assert ranked(answer) == ranked((await server.post("/v1/rerank", BODY))[1])[:count]
        assert all("document" not in result for result in answer["results"])

    serve_pooling(cross_encoder, scenario)


def test_documents_may_be_objects_with_a_text(cross_encoder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        body = BODY | {"query": {"text": QUERY}, "documents": [{"text": document} for document in DOCUMENTS]}
        _, answer = await server.post("/v2/rerank", body | {"return_documents": True})
        assert answer["results"] == (await server.post("/v1/rerank", BODY))[1]["results"]

    serve_pooling(cross_encoder, scenario)


def test_long_documents_are_cut_where_that_is_asked_for(cross_encoder: Path, embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        long = BODY | {"documents": ["x" * 2 * MAX_LEN, "b"]}
        assert (await server.refusal("/v1/rerank", long))[:2] == (400, "documents[0]")
        for asked in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 20}):
            status, answer = await server.post("/v1/rerank", long | asked)
            assert (status, len(answer["results"])) == (200, 2)

    serve_pooling(cross_encoder, scenario)
    serve_pooling(embedder, scenario)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"documents": []}, "documents"),
    ({"documents": ["a", "b", "c", ""]}, "documents[3]"),
    ({"documents": ["a", {"text": ""}]}, "documents[1]"),
    ({"documents": ["a", {"title": "b"}]}, "documents[1].title"),
    ({"documents": "a"}, "documents"),
    ({"query": ""}, "query"),
    ({"top_n": -1}, "top_n"),
    ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ({"rank_fields": ["title"]}, "rank_fields"),
    ({"max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ({"return_document": True}, "return_document"),
]


def test_what_is_wrong_is_named_before_anything_runs(cross_encoder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        named = [(await server.refusal("/v1/rerank", BODY | given))[:2] for given, _ in MISTAKES]
        assert named == [(400, param) for _, param in MISTAKES]
        assert server.engine.stats().num_steps == 0

    serve_pooling(cross_encoder, scenario)
