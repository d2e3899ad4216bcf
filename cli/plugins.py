"""`penstock plugins`, which lists what plug-ins register, and `penstock new-plugin`, which starts one."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from penstock import __version__
from penstock.cli.flags import NewPluginArguments, PluginsArguments
from penstock.engine.contracts.parsing import FormatInfo
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins, Registry

INTRODUCTION = """\
# Parsers

`penstock plugins --markdown` prints this page from the declarations of the built-in parsers. A parser is selected by `--plugin`, or by
`--reasoning-parser` and `--tool-parser`, under its name or one of its aliases. If none is named, the server
[chooses](plugins.md#load-and-select) the parser whose signs all occur in the model's own chat template or among its added tokens. A parser
may have several sets of signs, any of which suffices; a parser without signs must be named. If no tool parser matches, it is `hermes`, and
the server [describes the format](requests.md#tools) in the prompt.

`penstock parse --reasoning-parser NAME --tool-parser NAME < output.txt` shows the parsed text. It assumes that the prompt ended as in the
column *prompt ends with*, unless `--prompt-tail` is given; the server reads the real prompt.

If servers disagree about a format, the choice made here is in its notes below; differences that concern all formats are in
[Where other servers differ](parser-plugins.md#where-other-servers-differ).
"""
UNREAD = """\
## What is not read

| format | why |
|---|---|
| GigaChat 3.5 | neither its template nor a description of its calls was found; `gigachat3` reads 3.0 and 3.1 |
| code after `<\\|python_tag\\|>`, and Functionary 3.2's messages to `python` | it is code, not a call in JSON: content |
| Kimi-K3's arguments in one tag, `<\\|open\\|>json` | its template writes that only for arguments that a client sent as text: content |
| MiniCPM-V's `\\n`, written as two characters | `minicpmv` is `qwen3` and `qwen3_coder`, which leave text as the model wrote it |
| MiniMax-M1's reasoning | its template does not mark it; name `holo2` if a checkpoint writes `<think>` |
| YAML in Apriel 1.5's calls | its template never asks for it by itself |
"""
TITLES = {"reasoning parser": "Reasoning", "tool parser": "Tool calls"}


def parser_page(plugins: Plugins) -> str:
    """Markdown: a table for each kind, then what is to be known of single formats, then an example of each."""
    return "\n".join(_lines(plugins))


def _lines(plugins: Plugins) -> Iterator[str]:
    yield INTRODUCTION
    for registry in (plugins.reasoning_parsers, plugins.tool_parsers):
        yield f"## {TITLES[registry.kind]}\n"
        yield from _table(registry)
        yield ""
        yield from _notes(registry)
    yield UNREAD.rstrip()
    yield ""


def _table(registry: Registry[Any]) -> Iterator[str]:
    is_reasoning = registry.kind == "reasoning parser"
    last = "prompt ends with" if is_reasoning else "example"
    yield f"| parser | models | markers | aliases | {last} |"
    yield "|---|---|---|---|---|"
    for name, info in sorted(registry.infos.items()):
        cells = (
            f"`{name}`",
            info.models,
            " ".join(cell(marker) for marker in info.markers),
            " ".join(f"`{alias}`" for alias in info.aliases),
            cell(info.prompt_tail if is_reasoning else info.example),
        )
        yield f"| {' | '.join(cells)} |"


def _notes(registry: Registry[Any]) -> Iterator[str]:
    for name, info in sorted(registry.infos.items()):
        if info.quirks or info.signs or info.declared_fields:
            yield f"- **`{name}`**: {_sentence(info.quirks)}{_signs(info)}"
    yield ""


def _sentence(text: str) -> str:
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:].removesuffix('.')}. "


def _signs(info: FormatInfo) -> str:
    if info.declared_fields:
        return f"Chosen if no other fits and the template declares {' or '.join(map(code, info.declared_fields))}."
    if not info.signs:
        return "Must be named."
    counter = f", and no {' or '.join(map(code, info.counter_signs))}" if info.counter_signs else ""
    signs = " or ".join(" ".join(map(code, signs)) for signs in (info.signs, *info.other_signs))
    return f"Signs: {signs}{counter}."


def cell(text: str) -> str:
    """Code in a table, where bars would end the cell."""
    return code(text).replace("|", "\\|")


def code(text: str) -> str:
    """As Markdown shows it: line breaks as in Python, and more backticks around than there are within."""
    if not text:
        return ""
    shown = text.replace("\n", "\\n")
    fence = "`" * (1 + max((len(run) for run in _runs(shown)), default=0))
    pad = " " if "`" in shown or shown[0] == shown[-1] == " " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _runs(text: str) -> list[str]:
    """The runs of backticks in a text."""
    return re.findall("`+", text)


def run_plugins_command(arguments: PluginsArguments) -> int:
    plugins = Plugins.asked_for(arguments)
    print(parser_page(plugins) if arguments.is_markdown else plugin_table(plugins), end="" if arguments.is_markdown else "\n")
    return 0


def plugin_table(plugins: Plugins) -> str:
    """Kind, name (with a star where it is selected), distribution and version, plug-in, aliases."""
    rows = [("KIND", "NAME", "FROM", "PLUG-IN", "ALIASES")]
    for row in plugins.listing():
        source = f"{row.distribution} {row.version}" if row.distribution else "-"
        rows.append((row.kind, row.name + " *" * row.is_active, source, row.plugin, ", ".join(row.aliases)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


TEMPLATES = Path(__file__).parent / "templates"
HOOKS = {
    "reasoning": "register_reasoning_parsers",
    "tool": "register_tool_parsers",
    "logits": "register_logits_processors",
    "grammar": "register_grammar_backends",
    "proposer": "register_proposers",
}
USES = {
    "reasoning": "penstock --reasoning-parser {name}    # reads answers with it",
    "tool": "penstock --tool-parser {name}         # reads tool calls with it",
    "logits": 'a request names it: "logits_processors": [{{"name": "{name}", "arguments": {{}}}}]',
    "grammar": 'a request names it: "guided_decoding_backend": "{name}"',
    "proposer": "penstock --speculation {name}         # proposes draft tokens by it",
}
FORMAT = ("reasoning", "tool")


def run_new_plugin_command(arguments: NewPluginArguments) -> int:
    """Writes the package and says what to do with it. Raises `ConfigurationError` where there is something already, or the name is taken.

    What is installed besides is not asked: a plug-in that cannot be loaded is no reason not to begin another.
    """
    plugins = Plugins()
    plugins.load_builtins()
    check_name(arguments.name, arguments.kinds, plugins)
    directory = arguments.directory or Path(f"penstock-plugin-{arguments.name.replace('_', '-')}")
    files = package_files(arguments.name, arguments.kinds)
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigurationError(f"{directory} is there already: choose another --directory")
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error.strerror or error}") from error
    print(f"{directory}:", *files, sep="\n  ")
    print("\nIn an environment where penstock is installed already, as pip may not find it elsewhere:")
    print(f"pip install -e {shlex.quote(f'{directory}[test]')} && pytest {shlex.quote(str(directory))}")
    return 0


def check_name(name: str, kinds: Sequence[str], plugins: Plugins) -> None:
    """Raises `ConfigurationError` for a name, or an alias, that a plug-in has registered for one of these kinds."""
    for registry in plugins.registries:
        known = registry.resolve(name)
        if known is not None and registry.hook in {HOOKS[kind] for kind in kinds}:
            alias = "" if known == name else f", which is {known!r}"
            reason = f"there is a {registry.kind} of that name{alias}, of plug-in {registry.origins[known]!r}"
            raise ConfigurationError(f"{name!r} is taken: {reason}; choose another name")


def package_files(name: str, kinds: Sequence[str]) -> dict[str, str]:
    """The texts of a package, by their paths in it: one module for one kind, else a package with a module for each."""
    module = f"penstock_plugin_{name}"
    is_single = len(kinds) == 1
    modules = {kind: module if is_single else f"{module}.{kind}" for kind in kinds}
    hooks = [HOOKS[kind] for kind in kinds]
    values = {
        "name": name,
        "module": module,
        "distribution": module.replace("_", "-"),
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "NAME": name.upper(),
        "contents": f"`{module}.py` implements the hook `{hooks[0]}`"
        if is_single
        else f"`{module}` implements the hooks {', '.join(f'`{hook}`' for hook in hooks)}, each in a module",
        "setuptools": f'py-modules = ["{module}"]' if is_single else f'packages = ["{module}"]',
        "imports": "\n".join(f"from {modules[kind]} import {HOOKS[kind]}" for kind in sorted(kinds)),
        "exported": ", ".join(f'"{hook}"' for hook in sorted(hooks)),
        "use": "\n".join(_uses(name, kinds)),
        "version": __version__,
    }
    files = {"pyproject.toml": _filled("pyproject.toml", values), "README.md": _filled("README.md", values)}
    if not is_single:
        files[f"{module}/__init__.py"] = _filled("package.py", values)
    for kind in kinds:
        own = {**values, "module": modules[kind]}
        files[f"{modules[kind].replace('.', '/')}.py"] = _filled(f"{kind}.py", own)
        files[f"tests/test_{name if is_single else f'{name}_{kind}'}.py"] = _filled(f"test_{kind}.py", own)
    if set(FORMAT) <= set(kinds):
        files[f"tests/test_{name}_format.py"] = _filled("test_format.py", values)
    return files


def _uses(name: str, kinds: Sequence[str]) -> list[str]:
    both = [f"penstock --plugin {name}    # reads reasoning and tool calls with it"] if set(FORMAT) <= set(kinds) else []
    return both + [USES[kind].format(name=name) for kind in kinds if not (both and kind in FORMAT)]


def _filled(template: str, values: dict[str, str]) -> str:
    return Template((TEMPLATES / f"{template}.txt").read_text("utf-8")).substitute(values)
