"""Structured output for callers without schemas: OpenAI's parsing helpers and instructor, over real HTTP and real grammars."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field

from penstock.engine.text.tokenizer import Tokenizer
from tests.api.improvised import MARKER_TOKENS, MODEL, NO_MARKER_TOKENS, Improvised, improvise
from tests.api.semantics.test_tool_calls import CALL

PROVINCES = [
    "北京市",
    "天津市",
    "河北省",
    "山西省",
    "内蒙古自治区",
    "辽宁省",
    "吉林省",
    "黑龙江省",
    "上海市",
    "江苏省",
    "浙江省",
    "安徽省",
    "福建省",
    "江西省",
    "山东省",
    "河南省",
    "湖北省",
    "湖南省",
    "广东省",
    "广西壮族自治区",
    "海南省",
    "重庆市",
    "四川省",
    "贵州省",
    "云南省",
    "西藏自治区",
    "陕西省",
    "甘肃省",
    "青海省",
    "宁夏回族自治区",
    "新疆维吾尔自治区",
]
Province = Literal[tuple(PROVINCES)]  # type: ignore[valid-type]


class Stop(BaseModel):
    province: Province  # type: ignore[valid-type]
    by: Literal["rail", "road"] | None


class Route(BaseModel):
    """What models are made of: enumerations, nested lists, nested models, and what may be null."""

    stops: list[Stop] = Field(min_length=1, max_length=2)
    grid: list[list[Literal[0, 1]]] = Field(min_length=1, max_length=2)
    note: Literal["late", "没问题"] | None
    is_return: bool


class Refund(BaseModel):
    reason: Literal["ill", '说"不"']
    stops: list[Stop] = Field(max_length=1)


class Order(BaseModel):
    """A union of models, which JSON Schema keeps in `$defs`."""

    task: Route | Refund


class Capital(BaseModel):
    province: Province  # type: ignore[valid-type]


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


MODELS: tuple[type[BaseModel], ...] = (Route, Refund, Order)
BOTH_SPELLINGS = pytest.mark.parametrize("tokenizer", [MARKER_TOKENS, NO_MARKER_TOKENS], ids=["added token", "plain text"])


def asking(seed: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": str(seed)}], "max_tokens": 1500, "temperature": 0} | fields


def test_the_models_here_are_what_is_promised() -> None:
    assert len(PROVINCES) == len(set(PROVINCES)) == 31
    assert {"Route", "Refund", "Stop"} <= set(Order.model_json_schema()["$defs"])


def test_a_response_format_is_parsed_into_its_model_whole_and_streamed() -> None:
    async def scenario(server: Improvised) -> None:
        seen: set[object] = set()
        for seed, model in enumerate(MODELS * 2):
            fields = asking(seed, response_format=model)
            whole = await server.client.chat.completions.parse(**fields)
            async with server.client.chat.completions.stream(**fields) as stream:
                events = [event async for event in stream]
                streamed = await stream.get_final_completion()
            parsed = whole.choices[0].message.parsed
            assert isinstance(parsed, model)
            assert streamed.choices[0].message.parsed == parsed
            assert [event.parsed for event in events if event.type == "content.done"] == [parsed]
            seen.add(json.dumps(parsed.model_dump(), ensure_ascii=False))
        assert len(seen) > len(MODELS)

    improvise(scenario)


def test_every_value_of_an_enumeration_can_be_said() -> None:
    """None of these characters is a token of the model's: each is spelled in bytes."""

    schema = Capital.model_json_schema()
    format_: Any = {"type": "json_schema", "json_schema": {"name": "capital", "strict": True, "schema": schema}}

    async def scenario(server: Improvised) -> None:
        missing = set(PROVINCES)
        for seed in range(100):
            answer = await server.ask(seed, response_format=format_, n=8, temperature=1.0)
            missing -= {Capital.model_validate_json(choice.message.content).province for choice in answer.choices}
            if not missing:
                return
        pytest.fail(f"never said: {missing}")

    improvise(scenario)


@BOTH_SPELLINGS
def test_a_strict_function_is_parsed_into_its_model_under_auto_and_streamed(tokenizer: Tokenizer) -> None:
    async def scenario(server: Improvised) -> None:
        for seed in range(3):
            fields = asking(seed, tools=[openai.pydantic_function_tool(model) for model in MODELS], parallel_tool_calls=False)
            whole = await server.client.chat.completions.parse(**fields)
            async with server.client.chat.completions.stream(**fields) as stream:
                streamed = await stream.get_final_completion()
            for message in (whole.choices[0].message, streamed.choices[0].message):
                [call] = message.tool_calls or []
                assert isinstance(call.function.parsed_arguments, MODELS)
            said = [[call.function.arguments for call in answer.choices[0].message.tool_calls or []] for answer in (streamed, whole)]
            assert said[0] == said[1]

    improvise(scenario, tokenizer=tokenizer, opening=CALL)


@pytest.mark.filterwarnings("ignore:Mode.TOOLS_STRICT is deprecated")
@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_instructor_gets_its_model_at_the_first_try(mode: Mode) -> None:
    async def scenario(server: Improvised) -> None:
        client: Any = instructor.from_openai(server.client, mode=mode)
        for seed, model in enumerate(MODELS * 2):
            answer = await client.create(response_model=model, max_retries=0, **asking(seed))
            message = answer._raw_response.choices[0].message
            said = message.tool_calls[0].function.arguments if message.tool_calls else message.content
            assert isinstance(answer, model)
            assert json.loads(said) == answer.model_dump()  # nothing that the model does not name

    improvise(scenario)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_instructor_gets_parts_of_its_model_from_a_stream(mode: Mode) -> None:
    async def scenario(server: Improvised) -> None:
        client: Any = instructor.from_openai(server.client, mode=mode)
        parts = [part async for part in client.create_partial(response_model=Route, max_retries=0, **asking(0))]
        assert len(parts) > 2
        Route.model_validate(parts[-1].model_dump())

    improvise(scenario)


def test_instructor_takes_any_object_in_json_mode() -> None:
    """The schema is only in its prompt: what is promised is an object."""

    async def scenario(server: Improvised) -> None:
        client: Any = instructor.from_openai(server.client, mode=Mode.JSON)
        for seed in range(3):
            assert isinstance(await client.create(response_model=Anything, max_retries=0, **asking(seed)), Anything)

    improvise(scenario)


def test_instructor_reads_a_model_that_the_answer_keeps_to_in_json_mode() -> None:
    route = Route(stops=[Stop(province=PROVINCES[4], by=None)], grid=[[1, 0], []], note="没问题", is_return=True)

    async def scenario(server: Improvised) -> None:
        client: Any = instructor.from_openai(server.client, mode=Mode.JSON)
        answer = await client.create(response_model=Route, max_retries=0, **asking(0, max_tokens=400))
        assert answer.model_dump() == route.model_dump()

    improvise(scenario, opening=route.model_dump_json())


@BOTH_SPELLINGS
def test_instructor_reads_parallel_calls_of_either_model(tokenizer: Tokenizer) -> None:
    """It asks under `auto` and without `strict`: here the model opens a call, and its own arguments are what they are."""
    refund = Refund(reason="ill", stops=[])
    route = Route(stops=[Stop(province=PROVINCES[0], by="rail")], grid=[[]], note=None, is_return=False)
    calls = [f'{CALL}{{"name": "{type(one).__name__}", "arguments": {one.model_dump_json()}}}</tool_call>' for one in (refund, route)]

    async def scenario(server: Improvised) -> None:
        client: Any = instructor.from_openai(server.client, mode=Mode.PARALLEL_TOOLS)
        given = client.create(response_model=Iterable[Route | Refund], max_retries=0, **asking(0, stop=["\n\n"], max_tokens=600))
        assert list(await given) == [refund, route]

    improvise(scenario, tokenizer=tokenizer, opening="".join(calls) + "\n\n")
