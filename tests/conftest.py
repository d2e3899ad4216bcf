import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The models of most tests are tiny, and threads only wait for one another: minutes of it where the machine has other work.
# Set before torch is imported, and for servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PENSTOCK_API_KEY", None)  # a key of whoever runs the tests would be asked of their clients

from penstock.engine.model_store import resolve_model


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, by the code that a user runs: fetched and converted on the first run on a machine, cached from then on."""
    return resolve_model(None)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Commands that tests run in this process set them up for the process."""
    ours, access = logging.getLogger("penstock"), logging.getLogger("penstock.access")
    level, is_disabled = ours.level, access.disabled
    yield
    ours.setLevel(level)
    access.disabled = is_disabled
