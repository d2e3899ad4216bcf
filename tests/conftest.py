from pathlib import Path

import pytest

from penstock.engine.model_store import resolve_model


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, by the code that a user runs: fetched and converted on the first run on a machine, cached from then on."""
    return resolve_model(None)
