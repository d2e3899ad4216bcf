"""The lists of models in docs/models.md are those of the code and of the tests that compare them with transformers."""

import re
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest
from transformers import AutoConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import check_servable
from penstock.engine.multimodal import vision
from penstock.engine.recurrent import layout
from tests import tiny_encoders, tiny_models, tiny_multimodal
from tests.engine.model.test_native import OF_THIS_FORM
from tests.llm.prompts import test_language_model_only

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the first table of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = section[section.index("\n|---|") + 1 :].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(lambda line: line.startswith("|"), lines)]


def model_types(table: Iterable[list[str]]) -> list[str]:
    return [name for row in table for name in re.findall(r"`([\w-]+)`", row[0])]


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Text", tiny_models.ARCHITECTURES),
        ("Recurrent layers", layout.FAMILIES),
        ("Recurrent layers", tiny_models.RECURRENT_ARCHITECTURES),
        ("Images", vision.FAMILIES),
        ("Language models alone", test_language_model_only.KINDS),
        ("Embeddings, scores and classes", [*tiny_encoders.ENCODERS, *tiny_encoders.DECODERS]),
    ],
)
def test_a_table_has_the_model_types_that_are_compared_with_transformers(title: str, names: Iterable[str]) -> None:
    assert sorted(model_types(rows(title))) == sorted(names)


def test_every_family_with_images_is_compared_with_transformers() -> None:
    compared = {tiny_multimodal.model_type(family) for family in tiny_multimodal.FAMILIES}
    assert compared == set(vision.FAMILIES)


def test_the_models_with_a_native_decoder_are_those_that_are_marked() -> None:
    assert {name for row in rows("Text") if row[2] for name in model_types([row])} == set(OF_THIS_FORM)


def test_files_of_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(("name", "reason"), [(name, row[2]) for row in rows("Refused") for name in model_types([row])])
def test_a_model_that_is_said_to_be_refused_is_refused_for_that_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_servable(AutoConfig.for_model(name))
