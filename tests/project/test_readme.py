"""What the README says, as far as a machine can check it."""

import ast
import os
import re
import shutil
import subprocess
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from penstock.api.app import build_app
from penstock.cli.admin import build_admin_parser
from penstock.cli.flags import (
    build_config_parser,
    build_keys_parser,
    build_new_plugin_parser,
    build_parse_parser,
    build_parser,
    build_plugins_parser,
    build_worker_parser,
    parse_arguments,
)
from penstock.cli.grammar.arguments import PARSERS as GRAMMAR_PARSERS
from penstock.cli.selftest.arguments import build_selftest_parser
from penstock.engine.config import EngineConfig
from penstock.engine.options import options_of
from penstock.plugins.manager import Plugins
from penstock.serving.context import Workers
from penstock.serving.endpoints.bodies import REFUSED
from penstock.serving.options import Arguments, ServerOptions
from penstock.testing import check_parser
from tests.api.running_server import CountingEngine
from tests.api.scripted import RecordingCompiler, byte_tokenizer, scripted_context

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
BUILDERS: list[Callable[[], ArgumentParser]] = [
    build_parser,
    build_config_parser,
    build_plugins_parser,
    build_keys_parser,
    build_parse_parser,
    build_new_plugin_parser,
    build_worker_parser,
    build_selftest_parser,
    *GRAMMAR_PARSERS.values(),
]
PARSERS = [build() for build in BUILDERS]
PARSERS += build_admin_parser().actions.values()
FLAGS = {flag for parser in PARSERS for action in parser._actions for flag in action.option_strings}
LAYERS = ("cli", "llm", "api", "serving", "plugins", "engine", "testing")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def flags_in(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)


def ignored(name: str) -> bool:
    patterns = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return name == ".git" or any(fnmatch(name, pattern.rstrip("/")) for pattern in patterns)


def entries(block: str) -> Iterator[tuple[str, str]]:
    """The paths of a tree that is drawn by indentation, each with what is said of it."""
    folders: list[str] = []
    for line in block.splitlines():
        name, _, comment = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        yield "".join(folders), comment.strip()


(TREE,) = [dict(entries(block)) for block in re.findall(r"```\n(.*?)```", section("The tree"), re.DOTALL)]
MODULES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py")) if path.read_text(encoding="utf-8").strip()]


def test_the_tree_has_every_entry_of_the_root_and_the_folders_of_every_layer() -> None:
    on_disk = {path.name + "/" * path.is_dir() for path in ROOT.iterdir() if not ignored(path.name)}
    folders = {f"{path.relative_to(ROOT)}/" for layer in LAYERS for path in (ROOT / layer).iterdir() if is_kept(path)}
    assert set(TREE) == on_disk | folders


def is_kept(path: Path) -> bool:
    """Whether it is a folder with files other than bytecode, which a renamed folder leaves behind."""
    return path.is_dir() and not ignored(path.name) and any(child.suffix != ".pyc" and child.is_file() for child in path.rglob("*"))


def test_the_page_is_short() -> None:
    assert len(README.splitlines()) <= 280


LIMITS = re.findall(r"^\| (.+?) \| ([\d.]+)(?: (MiB|s))? \| `--([a-z-]+)` \|$", section("In production"), re.MULTILINE)


@pytest.mark.parametrize(("what", "number", "unit", "flag"), LIMITS)
def test_a_limit_is_the_default_of_its_flag(what: str, number: str, unit: str, flag: str) -> None:
    defaults = {option.name: option.default for kind in (EngineConfig, ServerOptions, Arguments) for option in options_of(kind)}
    assert defaults[flag.replace("-", "_")] == int(number) * (2**20 if unit == "MiB" else 1), what


def test_most_limits_are_compared_with_their_flag() -> None:
    assert len(LIMITS) >= 4


def test_something_is_said_of_every_entry() -> None:
    assert [path for path, comment in TREE.items() if not comment] == []


def test_every_module_says_what_it_is_about() -> None:
    silent = [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_links_to_a_section_name_a_heading(page: str) -> None:
    for link, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGES[page]):
        target = ROOT / page if not link else (ROOT / page).parent / link
        assert section in anchors(target.read_text(encoding="utf-8")), f"{link}#{section}"


def anchors(page: str) -> set[str]:
    """The headings of a page as links name them."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_mentioned_exist(page: str) -> None:
    for path in re.findall(r"`((?:\w+/)+[\w-]+\.\w+)`", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_every_page_of_the_docs_is_named_in_the_tree() -> None:
    assert set(re.findall(r"[\w-]+\.md", TREE["docs/"])) == {path.name for path in (ROOT / "docs").iterdir()}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_mentioned_exists(page: str) -> None:
    others = ("benchmarks/", "examples/ray_serve/local.py", "ray start", "torchrun")  # have flags of their own
    of_other_programs = re.compile(r"^```\n[^`]*\b(?:docker|kubectl|systemctl|pip wheel) .*?^```$", re.MULTILINE | re.DOTALL)
    page_of_the_server = "\n".join(line for line in PAGES[page].splitlines() if not any(other in line for other in others))
    assert set(flags_in(of_other_programs.sub("", page_of_the_server))) <= FLAGS


def test_every_flag_of_a_measurement_exists() -> None:
    script = (ROOT / "benchmarks" / "serve.py").read_text(encoding="utf-8")
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    flags = {flag for line in page.splitlines() if line.startswith("python benchmarks/serve.py --launch") for flag in flags_in(line)}
    assert flags
    assert all(flag in FLAGS or f'"{flag}"' in script for flag in flags)


def test_every_flag_has_help() -> None:
    assert [action.dest for action in build_parser()._actions if not (action.help or "").strip()] == []


def test_programs_that_are_mentioned_exist() -> None:
    programs = {line.split()[0] for line in COMMANDS if re.match(r"(?:scripts|\.venv/bin)/", line)}
    assert programs >= {"scripts/serve", "scripts/test"}
    scripts = [program for program in programs if program.startswith("scripts/")]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    assert programs - set(scripts) <= {".venv/bin/penstock", ".venv/bin/python"}


def test_the_server_starts_as_the_script_starts_it(tmp_path: Path) -> None:
    (said,) = re.findall(r"`scripts/serve` is `python (.+?)`", README)
    assert words_of_serve(tmp_path) == f"{tmp_path}/{said}"
    assert words_of_serve(tmp_path, "--port", "0", "--plugin=qwen3") == f"{tmp_path}/{said} --port 0 --plugin=qwen3"


def words_of_serve(checkout: Path, *flags: str) -> str:
    """What a copy of `scripts/serve` hands to Python, in a checkout where everything is installed."""
    for name in ("constraints.txt", "pyproject.toml", "scripts/environment.sh", "scripts/serve"):
        (checkout / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    calls = subprocess.run([checkout / "scripts" / "serve", *flags], check=True, capture_output=True, text=True).stdout
    return calls.splitlines()[-1]  # those before install


@pytest.mark.parametrize("number", range(sum(language == "python" for language, _ in BLOCKS)))
def test_python_compiles(number: int) -> None:
    compile([block for language, block in BLOCKS if language == "python"][number], f"README.md, Python block {number}", "exec")


def test_the_plugin_of_the_page_keeps_its_promises(tmp_path: Path) -> None:
    (source,) = [block for language, block in BLOCKS if language == "python" and "@hookimpl" in block]
    (name,) = re.findall(r"--plugin \./(\w+\.py)", section("Writing a plug-in"))
    (tmp_path / name).write_text(source, encoding="utf-8")
    factory = Plugins.start([str(tmp_path / name)]).reasoning_parser
    assert factory is not None
    check_parser(factory, ["[THINK]why[/THINK]because", "no markers"], markers=["[THINK]", "[/THINK]"])


def test_builtin_plugins_are_the_ones_that_are_listed() -> None:
    plugins = Plugins()
    plugins.load_builtins()
    (line,) = re.findall(r"^- (Grammar backends.*?)(?=^\S|\Z)", section("What it serves"), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == {*plugins.grammar_backends, *plugins.logits_processors}
    (promised,) = re.findall(r"More than (\d+) parsers", README)
    assert len(plugins.reasoning_parsers) + len(plugins.tool_parsers) > int(promised)
    selected = {name for command in COMMANDS for name in re.findall(r"--plugin (\w+)", command)}
    assert selected <= {row.name for row in plugins.listing()} | {"auto"}


def test_endpoints_are_the_ones_that_are_listed() -> None:
    with Workers() as workers:
        app = build_app(scripted_context(CountingEngine(byte_tokenizer()), RecordingCompiler(), workers))
    routes = {resource.canonical for resource in app.router.resources()}
    listed = set(re.findall(r"`(/[\w/.]+)`", section("What it serves")))
    # Described in docs/requests.md and docs/playground.md; refused.
    elsewhere = ("/openai/", "/playground/", "/v1/responses/compact", "/v1/audio/speech", "/v1/images/")
    assert listed == {route for route in routes if "}" not in route and not route.startswith(elsewhere)} - {"/"}


def test_fields_that_are_said_to_be_refused_are() -> None:
    (item,) = re.findall(r"^- \*\*Decoding\.\*\* (.*?)(?=^- |\Z)", section("Not yet"), re.MULTILINE | re.DOTALL)
    fields = set(re.findall(r"`(\w+)`", item))
    assert fields
    assert fields <= set(REFUSED)


def test_the_address_is_the_default_one() -> None:
    given = parse_arguments([])
    assert set(re.findall(r"http://[^\s`\"]+(?=/v1)", README)) == {f"http://{given.host}:{given.port}"}
    assert EngineConfig().model is None  # the first command names none


def test_the_page_names_no_place_on_a_machine() -> None:
    assert not re.search(r"/(?:home|root|work|tmp|Users)/", README)
