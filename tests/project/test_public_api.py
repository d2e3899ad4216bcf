"""`from penstock import ...` is all that a plug-in, a program and an example need."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

import penstock

ROOT = Path(__file__).parents[2]
TYPES = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
# `penstock.llm.executor` is the namespace of TensorRT-LLM's Executor API, some of whose names are also vLLM's.
PUBLIC = {
    "penstock",
    "penstock.grammars",
    "penstock.testing",
    "penstock.llm.executor",
    "penstock.integrations",
    "penstock.integrations.ray",
    "penstock.integrations.ray.engine",
}
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def sources() -> Iterator[tuple[str, str]]:
    """All Python that is shown to others: in documents, in examples, and in what `penstock new-plugin` writes."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, block in enumerate(PYTHON.findall(page.read_text(encoding="utf-8"))):
            yield f"{page.name}-{number}", block
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    words = dict.fromkeys(("name", "NAME", "Name", "module"), "mine") | {"imports": "", "exported": ""}
    for path in sorted((ROOT / "cli" / "templates").glob("*.py.txt")):
        yield str(path.relative_to(ROOT)), Template(path.read_text(encoding="utf-8")).substitute(words)


SOURCES = dict(sources())


def imported(source: str) -> set[str]:
    """The modules of ours that a source imports from."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {module for module in modules if module.split(".")[0] == "penstock"}


@pytest.mark.parametrize("name", [name for name in SOURCES if "penstock" in SOURCES[name]])
def test_what_is_shown_to_others_imports_public_names_only(name: str) -> None:
    assert imported(SOURCES[name]) <= PUBLIC


def test_other_programs_find_what_answers_their_requests() -> None:
    from penstock.integrations import Handlers, Reply, load, read_flags

    assert callable(load)
    assert callable(read_flags)
    assert {"answer"} <= set(dir(Handlers))
    assert {"content", "status"} <= set(Reply.__dataclass_fields__)


@pytest.mark.parametrize("name", ["README.md", "parser-plugins.md", "examples/bracket_thoughts.py", "cli/templates/tool.py.txt"])
def test_the_walk_finds_documents_examples_and_templates(name: str) -> None:
    assert any(imported(source) for found, source in SOURCES.items() if found.startswith(name))


def test_every_public_name_is_there_and_is_known_to_type_checkers() -> None:
    (block,) = (node for node in TYPES.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(penstock.__all__)
    assert all(hasattr(penstock, name) for name in penstock.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ThinkTags'"):
        penstock.ThinkTags  # noqa: B018


def test_the_names_of_a_plugin_load_no_torch() -> None:
    code = """if True:
        import sys
        import penstock
        for name in [name for names in penstock._PLUGIN_API.values() for name in names]:
            getattr(penstock, name)
        assert not {"torch", "transformers", "aiohttp", "outlines_core", "llguidance"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
