"""`penstock new-plugin`: a package of one's own to begin with, from the templates beside this file."""

import shlex
from pathlib import Path
from string import Template

from penstock import __version__
from penstock.commands.new_plugin_arguments import NewPluginArguments
from penstock.engine.errors import ConfigurationError

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


def run_new_plugin_command(arguments: NewPluginArguments) -> int:
    """Writes the package and says what to do with it. Raises `ConfigurationError` where there is something already."""
    directory = arguments.directory
    files = package_files(arguments.name, arguments.kind)
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigurationError(f"{directory} is there already: choose another --directory")
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error.strerror or error}") from error
    print(f"{directory}:", *files, sep="\n  ")
    print(f"\npip install -e {shlex.quote(f'{directory}[test]')} && pytest {shlex.quote(str(directory))}")
    return 0


def package_files(name: str, kind: str) -> dict[str, str]:
    """The texts of a package, by their paths in it."""
    module = f"penstock_plugin_{name}"
    values = {
        "name": name,
        "module": module,
        "distribution": module.replace("_", "-"),
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "hook": HOOKS[kind],
        "use": USES[kind].format(name=name),
        "version": __version__,
    }
    sources = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}.py": f"{kind}.py",
        f"tests/test_{name}.py": f"test_{kind}.py",
    }
    return {path: Template((TEMPLATES / f"{source}.txt").read_text("utf-8")).substitute(values) for path, source in sources.items()}
