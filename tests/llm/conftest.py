from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.llm.offline import LLM
from tests.llm.model_directory import SETTINGS, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, **SETTINGS) as running:
        yield running
