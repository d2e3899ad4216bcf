"""/v1/score: cosines of an encoder's vectors, and a cross-encoder's own scores of pairs."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.api.pooling.server import PoolingServer, Reference, serve_pooling
from tests.encoders import MAX_LEN, byte_backend

PATH = "/v1/score"
QUERY, DOCUMENTS = "Where is Paris?", ["In France.", "In Texas, where the nights are bright", "No"]


def cross_scores(directory: Path, pairs: list[tuple[str, str]], **cut: Any) -> list[float]:
    """transformers' own: its tokenizer encodes the pairs, its model scores them, a sigmoid follows as in sentence-transformers."""
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=byte_backend())  # type: ignore[no-untyped-call]
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return [model(**tokenizer(*pair, return_tensors="pt", **cut)).logits.sigmoid().item() for pair in pairs]


def scores(answer: Any) -> list[float]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["score"] for entry in answer["data"]]


def test_a_cross_encoder_reads_both_texts_at_once(cross_encoder: Path) -> None:
    expected = cross_scores(cross_encoder, [(QUERY, document) for document in DOCUMENTS])

    async def scenario(server: PoolingServer) -> None:
        for path, names in product((PATH, "/score"), (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))):
            status, answer = await server.post(path, dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
            assert status == 200
            assert scores(answer) == pytest.approx(expected, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == sum(len(QUERY) + len(document) + 3 for document in DOCUMENTS)

    serve_pooling(cross_encoder, scenario)


def test_texts_are_paired_one_with_one_one_with_all_and_each_with_its_own(cross_encoder: Path, embedder: Path) -> None:
    first = ["ab", "cd", "ef"]

    async def scenario(server: PoolingServer) -> None:
        _, one = await server.post(PATH, {"text_1": first[0], "text_2": DOCUMENTS[0]})
        _, all_of_it = await server.post(PATH, {"text_1": first, "text_2": DOCUMENTS})
        _, each = await server.post(PATH, {"text_1": [first[0]], "text_2": DOCUMENTS})
        assert scores(one) == pytest.approx(scores(all_of_it)[:1], abs=1e-5)
        assert scores(one) == pytest.approx(scores(each)[:1], abs=1e-5)
        assert len(scores(all_of_it)) == len(scores(each)) == 3

    serve_pooling(cross_encoder, scenario)
    serve_pooling(embedder, scenario)


def test_an_encoders_score_is_the_cosine_of_two_vectors(embedder: Path) -> None:
    reference = Reference.of(embedder)
    expected = [float(reference.embedding(QUERY) @ reference.embedding(document)) for document in DOCUMENTS]

    async def scenario(server: PoolingServer) -> None:
        _, answer = await server.post(PATH, {"text_1": QUERY, "text_2": DOCUMENTS})
        assert scores(answer) == pytest.approx(expected, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == len(QUERY) + sum(map(len, DOCUMENTS)) + 8  # the query was computed once

    serve_pooling(embedder, scenario)


@pytest.mark.parametrize(("asked", "kept"), [(20, 20), (-1, MAX_LEN)])
def test_a_pair_is_cut_as_transformers_cuts_it(cross_encoder: Path, asked: int, kept: int) -> None:
    pairs = [(one * 7, two * 9) for one, two in product(("a", "bcdef", "ghijklmnop"), repeat=2)]
    expected = cross_scores(cross_encoder, pairs, truncation="longest_first", max_length=kept)

    async def scenario(server: PoolingServer) -> None:
        body = {"text_1": [one for one, _ in pairs], "text_2": [two for _, two in pairs], "truncate_prompt_tokens": asked}
        _, answer = await server.post(PATH, body)
        assert scores(answer) == pytest.approx(expected, abs=1e-5)

    serve_pooling(cross_encoder, scenario)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"text_1": "a"}, "text_2"),
    ({"documents": ["a"]}, "queries"),
    ({}, "text_1"),
    ({"text_1": "a", "text_2": "b", "queries": "c"}, "documents"),
    ({"text_1": "a", "text_2": []}, "text_2"),
    ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
    ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ({"queries": "", "documents": ["b"]}, "queries"),
    ({"text_1": "a", "text_2": ["b", "x" * MAX_LEN]}, "text_2[1]"),
    ({"text_1": "x" * MAX_LEN, "text_2": ["b", "c"]}, "text_1"),
    ({"text_1": "a", "text_2": ["b", 5]}, "text_2[1]"),
    ({"text_1": "a", "text_2": ["b"], "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ({"text_1": "x" * 10_000, "text_2": ["b"] * 2048, "truncate_prompt_tokens": -1}, "text_1"),
    ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
]


def test_what_is_wrong_is_named_before_anything_runs(cross_encoder: Path, embedder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        named = [(await server.refusal(PATH, given))[:2] for given, _ in MISTAKES]
        assert named == [(400, param) for _, param in MISTAKES]
        assert server.engine.stats().num_steps == 0

    serve_pooling(cross_encoder, scenario)
    serve_pooling(embedder, scenario)


def test_an_activation_that_is_used_anyway_may_be_asked_for(cross_encoder: Path) -> None:
    async def scenario(server: PoolingServer) -> None:
        assert (await server.post(PATH, {"text_1": "a", "text_2": "b", "use_activation": True}))[0] == 200

    serve_pooling(cross_encoder, scenario)
