import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, inspect
from openai.types.chat import completion_create_params

from penstock.api.errors import ANTHROPIC_TYPES
from penstock.engine.adapters.registry import AdapterStats
from penstock.engine.kv_cache.block_files import BlockFileStats
from penstock.engine.kv_cache.persistence import PersistenceStats
from penstock.engine.sampling.params import SamplingParams, parameters_of
from penstock.engine.text.streaming import RepetitionDetection
from penstock.serving.anthropic import KINDS, MessagesRequest
from penstock.serving.endpoints.bodies import REFUSED
from penstock.serving.endpoints.models import POOLING_PATHS
from penstock.serving.endpoints.pooling import ClassificationRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from penstock.serving.observability.exposition import SAME_IN_VLLM
from penstock.serving.observability.metrics import PREFIX, HttpRequests, Metrics
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest, FieldsWithoutEffect, GenerationFields, StreamOptions
from penstock.serving.responses.requests import NOT_SUPPORTED, ResponsesRequest
from tests.api.running_server import STATS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "requests.md").read_text(encoding="utf-8")
RESPONSES_PAGE = (DOCS / "responses.md").read_text(encoding="utf-8")
MESSAGES_PAGE = (DOCS / "messages.md").read_text(encoding="utf-8")
POOLING_PAGE = (DOCS / "pooling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "fields",
    [ChatCompletionRequest.__struct_fields__, CompletionRequest.__struct_fields__, StreamOptions.__struct_fields__, tuple(REFUSED)],
)
def test_every_field_is_on_the_page(fields: tuple[str, ...]) -> None:
    assert not set(fields) - set(re.findall(r"`(\w+)`", PAGE))


def test_every_metric_is_on_the_page() -> None:
    metrics = Metrics(lambda: replace(STATS, adapters=AdapterStats((), (), 1)), "m")
    metrics.registry.register(HttpRequests())
    names = {family.name.removeprefix(PREFIX).removesuffix("_total") for family in metrics.registry.collect()}
    section = (DOCS / "observability.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n### ")[0]
    documented = {name.removesuffix("_total") for name in re.findall(r"`(\w+)`", section)}
    assert names
    assert not names - documented
    in_vllm = {name.removesuffix("_total") for name in SAME_IN_VLLM}
    by_proposer = {name for name in documented if name.endswith("_by_proposer")}
    assert (
        names - in_vllm
        == {"forced_tokens", "constraint_pressure_nats", "constraint_closed", "event_loop_tasks", "http_requests"} | by_proposer
    )


def test_every_field_of_openais_chat_is_known_or_refused_by_name() -> None:
    fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert {"model", "messages", "verbosity"} <= fields
    assert not fields - set(ChatCompletionRequest.__struct_fields__) - set(REFUSED)


def test_every_metric_of_a_directory_of_blocks_is_on_its_page() -> None:
    persistent = replace(STATS, persistence=PersistenceStats(BlockFileStats(), num_hits=0, num_dropped=0))
    prefix = f"{PREFIX}kv_cache_dir_"
    names = [family.name for family in Metrics(lambda: persistent, "m").registry.collect() if family.name.startswith(prefix)]
    section = (DOCS / "kv-cache.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1]
    assert {name.removeprefix(prefix) for name in names} == {name.removesuffix("_total") for name in re.findall(r"`(\w+_total)`", section)}


@pytest.mark.parametrize(
    ("title", "fields"),
    [("Accepted without effect", FieldsWithoutEffect.__struct_fields__), ("Refused by name", tuple(REFUSED))],
)
def test_fields_without_effect_and_refused_ones_are_in_their_sections(title: str, fields: tuple[str, ...]) -> None:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    assert not set(fields) - set(re.findall(r"`(\w+)`", section))


WIRE_KINDS: dict[Any, type[inspect.Type]] = {
    bool: inspect.BoolType,
    int: inspect.IntType,
    float: inspect.FloatType,
    Sequence[str]: inspect.ListType,
    Sequence[int]: inspect.ListType,
    Mapping[int, float]: inspect.DictType,
    RepetitionDetection: inspect.StructType,
}


def test_a_request_may_hold_every_value_that_is_declared() -> None:
    struct = inspect.type_info(ChatCompletionRequest)
    assert isinstance(struct, inspect.StructType)
    fields = {field.name: field.type for field in struct.fields}
    given_apart = {"logprobs"}  # true or false in chat, where `top_logprobs` has the number
    for name, declared in parameters_of(SamplingParams).items():
        if name in given_apart:
            continue
        assert name in fields, "a sampling parameter is missing in the request"
        either = fields[name]
        assert isinstance(either, inspect.UnionType)
        assert inspect.NoneType() in either.types
        (wire,) = [kind for kind in either.types if isinstance(kind, WIRE_KINDS[declared.kind])]
        if isinstance(wire, inspect.IntType):
            assert wire.ge is not None
            assert wire.le is not None
            assert wire.ge <= (declared.low if declared.low is not None else wire.ge)
            assert wire.le >= (declared.high if declared.high is not None else wire.le)


def test_every_field_of_responses_is_on_its_page_or_those_it_refers_to() -> None:
    own = set(ResponsesRequest.__struct_fields__) - set(GenerationFields.__struct_fields__)
    assert not own - set(re.findall(r"`(\w+)`", RESPONSES_PAGE))
    shared = set(ResponsesRequest.__struct_fields__) - own
    assert not shared - set(re.findall(r"`(\w+)`", RESPONSES_PAGE + PAGE))
    assert not set(NOT_SUPPORTED) - set(re.findall(r"`(\w+)(?:: [^`]*)?`", RESPONSES_PAGE.split("Refused by name")[1].split("\n\n")[0]))


def test_every_field_and_block_of_the_messages_api_is_on_its_page() -> None:
    fields = set(MessagesRequest.__struct_fields__) - set(FieldsWithoutEffect.__struct_fields__)
    assert not (fields | set().union(*KINDS.values())) - set(re.findall(r"`(\w+)`", MESSAGES_PAGE))
    assert set(ANTHROPIC_TYPES.values()) <= set(re.findall(r"`(\w+)`", MESSAGES_PAGE))


@pytest.mark.parametrize("kind", [EmbeddingRequest, PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest])
def test_every_field_of_pooling_is_on_its_page(kind: type[Struct]) -> None:
    fields = set(kind.__struct_fields__) - set(FieldsWithoutEffect.__struct_fields__)
    assert not fields - set(re.findall(r"`(\w+)`", POOLING_PAGE))


def test_every_route_of_pooling_is_on_its_page() -> None:
    assert set(POOLING_PATHS) <= set(re.findall(r"`(/[\w/]+)`", POOLING_PAGE))
