"""`penstock new-plugin`: writes a plug-in package to start from."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from penstock import __version__
from penstock.cli.arguments import NewPluginArguments
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins

TEMPLATES = Path(__file__).parent / "templates"
HOOKS = {
    "reasoning": "register_reasoning_parsers",
    "tool": "register_tool_parsers",
    "logits": "register_logits_processors",
    "grammar": "register_grammar_backends",
}
USES = {
    "reasoning": "penstock --reasoning-parser {name}    # reads answers with it",
    "tool": "penstock --tool-parser {name}         # reads tool calls with it",
    "logits": 'a request names it: "logits_processors": [{{"name": "{name}", "arguments": {{}}}}]',
    "grammar": 'a request names it: "guided_decoding_backend": "{name}"',
}
FORMAT = ("reasoning", "tool")


def run_new_plugin_command(arguments: NewPluginArguments) -> int:
    """Writes the package and says what to do with it. Raises `ConfigurationError` where there is something already, or the name is taken.

    What is installed besides is not asked: a plug-in that cannot be loaded is no reason not to begin another.
    """
    plugins = Plugins()
    plugins.load_builtins()
    check_name(arguments.name, arguments.kinds, plugins)
    directory = arguments.directory
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
