"""A chat request's `prediction`: what is refused, what reaches the engine, and what usage says of it."""

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.api.improvised import Improvised, improvise
from tests.api.scripted import MAX_MODEL_LEN, Scripted
from tests.api.test_chat import ask, serve


@pytest.mark.parametrize("content", ["Hello there.", [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there."}]])
def test_a_prediction_reaches_the_engine_in_tokens(content: Any) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        await ask(client, prediction={"type": "content", "content": content})
        [request] = scripted.engine.requests
        assert request.prediction is not None
        assert scripted.engine.tokenizer.decode(request.prediction.token_ids, skip_special_tokens=False) == "Hello there."

    serve(scenario)


def test_a_prediction_is_no_longer_than_the_context_and_may_be_empty() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for content in ("a" * 100_000, ""):
            await ask(client, prediction={"type": "content", "content": content})
        long, empty = (request.prediction for request in scripted.engine.requests)
        assert long is not None
        assert len(long.token_ids) == MAX_MODEL_LEN
        assert empty is None

    serve(scenario)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("Hello", "prediction"),
        ({"type": "static", "content": "Hello"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": ""}]}, "prediction.content[0].type"),
    ],
)
def test_a_prediction_of_another_form_is_refused(prediction: Any, param: str) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, prediction=prediction)
        assert refused.value.param == param

    serve(scenario)


def test_a_predicted_answer_is_the_same_and_usage_counts_what_was_right() -> None:
    """Here and not with the replayed texts: only the real engine has draft tokens."""
    text = json.dumps({"lines": [f"line {number}" for number in range(20)]})

    async def scenario(server: Improvised) -> None:
        fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": len(text), "seed": 1}
        prediction = {"type": "content", "content": text.replace("line 7", "row 7")}
        plain = await server.ask(**fields)
        ahead = await server.ask(**fields, prediction=prediction)
        assert ahead.choices[0].message.content == plain.choices[0].message.content == text
        details = ahead.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0.7 * len(text)
        assert details.rejected_prediction_tokens > 0
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
        chunks = await server.stream(**fields, prediction=prediction, stream_options={"include_usage": True})
        assert chunks[-1].usage == ahead.usage

    improvise(scenario, opening=text, rows_for_weights=1000.0)
