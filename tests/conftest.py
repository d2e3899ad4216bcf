import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler.loadfile import LoadFileScheduling  # type: ignore[import-untyped]

# The models of most tests are tiny, and threads only wait for one another: minutes of it where the machine has other work.
# Set before torch is imported, and for servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from penstock.cli.settings import CONFIG_VARIABLE
from penstock.engine.model.store import resolve_model
from penstock.serving.options import OPTIONS
from tests.helpers.example_plugin import install_example_plugins

KERNELS = "tests/engine/kernels/"

for variable in (CONFIG_VARIABLE, *(option.variable for option in OPTIONS.values())):  # those of the user's own server
    os.environ.pop(variable, None)

# The same examples in each run, whatever else the machine does; `--hypothesis-profile=random` looks for new ones. A property's own
# settings take from the profile what they leave open.
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutated-bodies", type=int, default=200, help="how many bodies with mistakes to send, over all routes")


# What takes longest begins first, so that no process is left with half a minute of work when the other has ended.
DEAREST = (
    "tests/security/requests/test_grammar_memory.py",
    KERNELS,
    "tests/engine/test_equivalence.py",
    "tests/project/test_examples.py",
    "tests/plugins/test_every_parser.py",
    "tests/plugins/test_examples.py",
    "tests/server/test_process.py",
    "tests/server/test_api_servers.py",
    "tests/server/test_end_to_end.py",
    "tests/gpu/test_on_a_gpu.py",
    "tests/cli/",
    "tests/faults/",
    "tests/engine/native/",
    "tests/engine/model/",
    "tests/api/admin/",
    "tests/api/models/test_several_models.py",
    "tests/server/test_several_models.py",
    "tests/benchmarks/",
)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Tests of one file run in one process, and so do all that share Triton's interpreter, which takes seconds to start."""

    def _split_scope(self, nodeid: str) -> str:
        return KERNELS if nodeid.startswith(KERNELS) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests in a file, which says little of their time
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without collections of garbage: there is hardly any, and each would walk through all modules that have been imported so far."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((rank for rank, path in enumerate(DEAREST) if item.nodeid.startswith(path)), len(DEAREST)))


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, by the code that a user runs: fetched and converted on the first run on a machine, cached from then on."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2, the packaged model that makes embeddings."""
    return resolve_model("minilm")


@pytest.fixture(scope="session")
def example_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of the distributions of `examples/`, which are installed in its folder `site`, for `PYTHONPATH`."""
    base = tmp_path_factory.getbasetemp()
    build = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "examples"  # for all processes of this run: pip takes seconds
    with FileLock(f"{build}.lock"):
        if not build.exists():
            install_example_plugins(build / "site", build)
    return build


@pytest.fixture(autouse=True)
def loggers_as_imported() -> None:
    """Commands that other tests and their fixtures run in this process set them up for the process."""
    logging.getLogger("penstock").setLevel(logging.NOTSET)
    logging.getLogger("penstock.access").disabled = False


@pytest.fixture(autouse=True, scope="module")
def settled_heap() -> None:
    """Ten thousand tests and what they import are a million objects; a collection that walks through all of them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def unmeasured_heap() -> Iterator[None]:
    """Measuring what a grammar has allocated walks through the C heap: twice 5 ms for each grammar in the process of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.plugins.grammars.llguidance.backend.heap_bytes", lambda: 0)
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What transformers asks on the terminal: whether to run code beside a model."""
    questions: list[str] = []

    def agree(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return questions
