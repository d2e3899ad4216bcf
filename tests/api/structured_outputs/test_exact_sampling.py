"""`structured_outputs.sampling`: "exact" over HTTP, with real grammars and an engine that really draws."""

import json
from typing import Any

import openai
import pytest

from tests.api.improvised import MODEL, Improvised, improvise

WORDS = ["yes", "no", "yet", "never"]


def exactly(**constraint: Any) -> dict[str, Any]:
    return {"temperature": 1, "seed": 1, "max_tokens": 20, "extra_body": {"structured_outputs": constraint | {"sampling": "exact"}}}


def test_whole_and_streamed_answers_are_the_same_and_say_how_they_came() -> None:
    async def scenario(server: Improvised) -> None:
        fields = exactly(choice=WORDS) | {"n": 4}
        whole = await server.ask(**fields)
        assert {choice.message.content for choice in whole.choices} <= set(WORDS)
        assert {choice.finish_reason for choice in whole.choices} == {"stop"}
        for choice in whole.choices:
            assert choice.exact_sampling["exact"] is True
            assert choice.exact_sampling["draws"] >= 1
            assert set(choice.exact_sampling) == {"exact", "draws"}
        assert (await server.ask(**fields)).choices == whole.choices
        chunks = await server.stream(**fields)
        texts, draws = [""] * 4, {}
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason is not None:
                    draws[choice.index] = choice.exact_sampling
        assert texts == [choice.message.content for choice in whole.choices]
        assert draws == {choice.index: choice.exact_sampling for choice in whole.choices}

    improvise(scenario, max_num_seqs=8)


def test_completions_and_json_schemas_take_it_too() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}

    async def scenario(server: Improvised) -> None:
        fields = exactly(json=schema, disable_any_whitespace=True)
        completion = await server.client.completions.create(model=MODEL, prompt="\x01", **fields)
        assert json.loads(completion.choices[0].text)["a"] in ("x", "y")
        assert completion.choices[0].exact_sampling["draws"] >= 1
        response = await server.client.responses.create(
            model=MODEL, input="", temperature=1, store=False, max_output_tokens=40, extra_body=fields["extra_body"]
        )
        assert json.loads(response.output_text)["a"] in ("x", "y")
        assert response.exact_sampling["draws"] >= 1  # type: ignore[attr-defined]

    improvise(scenario)


def test_an_answer_that_is_masked_after_all_has_a_header_and_a_reason() -> None:
    async def scenario(server: Improvised) -> None:
        fields = exactly(choice=["several", "letters"]) | {"max_tokens": 3}
        got = await server.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}], **fields
        )
        [choice] = got.parse().choices
        assert choice.finish_reason == "length"
        assert choice.exact_sampling["exact"] is False
        assert "no valid answer" in choice.exact_sampling["reason"]
        assert "not sampled exactly: no valid answer" in got.headers["x-structured-output-warning"]
        assert (await server.ask(**exactly(choice=WORDS))).choices[0].exact_sampling["exact"] is True

    improvise(scenario)


def test_modes_and_pressure_are_refused_beside_it() -> None:
    async def scenario(server: Improvised) -> None:
        for more, param in (({"mode": "draft"}, "sampling"), ({"pressure": True}, "pressure")):
            with pytest.raises(openai.BadRequestError) as refused:
                await server.ask(extra_body={"structured_outputs": {"choice": WORDS, "sampling": "exact", **more}})
            assert refused.value.param == f"structured_outputs.{param}"

    improvise(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 0, "extra_body": exactly(choice=WORDS)["extra_body"] | {"use_beam_search": True}}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_with_its_name(fields: dict[str, Any], param: str) -> None:
    async def scenario(server: Improvised) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await server.ask(**exactly(choice=WORDS) | fields)
        assert refused.value.param == param
        with pytest.raises(openai.BadRequestError):
            await server.stream(**exactly(choice=WORDS) | fields)

    improvise(scenario)
