from pathlib import Path

import pytest

from tests import encoders


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.embedding_directory(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.cross_encoder_directory(tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.classifier_directory(tmp_path_factory.mktemp("classifier"))
