import re
from pathlib import Path

import pytest
from msgspec import Struct

from penstock.api.app import POOLED
from penstock.api.bodies import REFUSED
from penstock.api.pooling import ClassificationRequest, EmbeddingRequest, PoolingRequest
from penstock.api.scoring import RerankRequest, ScoreRequest
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest, FieldsWithoutEffect, StreamOptions

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "requests.md").read_text(encoding="utf-8")
POOLING_PAGE = (DOCS / "pooling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "fields",
    [ChatCompletionRequest.__struct_fields__, CompletionRequest.__struct_fields__, StreamOptions.__struct_fields__, tuple(REFUSED)],
)
def test_every_field_is_on_the_page(fields: tuple[str, ...]) -> None:
    assert not set(fields) - set(re.findall(r"`(\w+)`", PAGE))


@pytest.mark.parametrize(
    ("title", "fields"),
    [("Accepted without effect", FieldsWithoutEffect.__struct_fields__), ("Refused by name", tuple(REFUSED))],
)
def test_fields_without_effect_and_refused_ones_are_in_their_sections(title: str, fields: tuple[str, ...]) -> None:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    assert not set(fields) - set(re.findall(r"`(\w+)`", section))


@pytest.mark.parametrize("kind", [EmbeddingRequest, PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest])
def test_every_field_of_pooling_is_on_its_page(kind: type[Struct]) -> None:
    fields = set(kind.__struct_fields__) - set(FieldsWithoutEffect.__struct_fields__)
    assert not fields - set(re.findall(r"`(\w+)`", POOLING_PAGE))


def test_every_route_of_pooling_is_on_its_page() -> None:
    assert POOLED.keys() <= set(re.findall(r"`(/[\w/]+)`", POOLING_PAGE))
