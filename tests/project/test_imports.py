"""Imports go one way: server → api, llm → serving → plugins → engine."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("engine", "plugins", "serving", "api", "llm")  # each may import itself and those before it; cli and the top level may import all
LAYERS_WITHOUT_CIRCLES = ("engine", "serving")
PRODUCT = (*LAYERS, "cli", "integrations", "testing")
MAX_LINES, MAX_MODULES = 600, 14
WIRING = ("assembly",)  # of the top level: what the library shares with the server


def modules(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "penstock.engine":  # a package without names of its own: what is imported are its modules
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_itself_and_those_below(layer: str) -> None:
    allowed = (*LAYERS[: LAYERS.index(layer) + 1], *(WIRING if layer == "llm" else ()))
    strays = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in modules(layer)
        for line, module in imported(path)
        if module.startswith("penstock.") and module.split(".")[1] not in allowed
    ]
    assert strays == []


def test_no_import_is_relative_or_by_a_generic_name() -> None:
    paths = [*ROOT.glob("*.py"), *(path for layer in PRODUCT for path in modules(layer))]
    strays = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in paths
        for line, module in imported(path)
        if module.startswith(".") or module.split(".")[0] in (*LAYERS, "cli", "server", "testing", "tests")
    ]
    assert strays == []


def test_the_engine_knows_no_http() -> None:
    strays = [
        str(path.relative_to(ROOT)) for path in modules("engine") for _, module in imported(path) if module.split(".")[0] == "aiohttp"
    ]
    assert strays == []


def packages(layer: str) -> dict[str, set[str]]:
    """Each folder and each top-level module of a layer, with the others that it imports."""
    graph: dict[str, set[str]] = {}
    for path in modules(layer):
        package = path.relative_to(ROOT / layer).parts[0].removesuffix(".py")
        parts = (module.split(".") for _, module in imported(path))
        graph.setdefault(package, set()).update(names[2] for names in parts if names[:2] == ["penstock", layer] and len(names) > 2)
        graph[package].discard(package)
    return graph


@pytest.mark.parametrize("layer", LAYERS_WITHOUT_CIRCLES)
def test_a_layer_has_no_circle_of_packages(layer: str) -> None:
    # What is imported for types alone counts as well: two packages that need each other's types are one subject, or lack a third.
    try:
        TopologicalSorter(packages(layer)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def sources() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for folder in PRODUCT for path in modules(folder))]


def test_no_module_is_longer_than_its_subject_needs() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_folder_has_more_modules_than_one_looks_through() -> None:
    paths = [path for path in (*sources(), *modules("tests")) if path.name != "__init__.py"]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_every_layer_was_looked_at() -> None:
    assert all(len(modules(layer)) > 1 for layer in LAYERS)
    assert packages("engine")["loop"] >= {"core", "scheduling"}
    assert packages("serving")["preparing"] >= {"prompts", "structured_outputs", "tools"}
