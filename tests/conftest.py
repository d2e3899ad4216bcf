import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

# The models of most tests are tiny, and threads only wait for one another: minutes of it where the machine has other work.
# Set before torch is imported, and for servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PENSTOCK_API_KEY", None)  # a key of whoever runs the tests would be asked of their clients

from penstock.engine.model.store import resolve_model

# The same examples in each run, whatever else the machine does; `--hypothesis-profile=random` looks for new ones. A property's own
# settings take from the profile what they leave open.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutated-bodies", type=int, default=400, help="how many bodies with mistakes to send, over all routes")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, by the code that a user runs: fetched and converted on the first run on a machine, cached from then on."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, the packaged model that makes embeddings."""
    return resolve_model("minilm")


@pytest.fixture(autouse=True)
def loggers_as_imported() -> None:
    """Commands that other tests and their fixtures run in this process set them up for the process."""
    logging.getLogger("penstock").setLevel(logging.NOTSET)
    logging.getLogger("penstock.access").disabled = False
