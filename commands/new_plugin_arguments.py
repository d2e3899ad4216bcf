"""The command line of `penstock new-plugin`. Imports nothing heavy."""

import argparse
import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import CommandParser

KINDS = ("reasoning", "tool", "logits", "grammar")
RESERVED = ("auto", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPluginArguments:
    """What the command line said. `name` is an identifier in lower case, `kinds` are different; the package is made in `directory`."""

    name: str
    kinds: tuple[str, ...]
    directory: Path


def build_new_plugin_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock new-plugin",
        description="Writes a package with a plug-in that works, its test and a README, to be changed into what you need. It is installed "
        "with pip where penstock is installed already, and the server then finds it by its entry point. Nothing that exists is "
        "overwritten.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=plugin_name, metavar="NAME", help="what --plugin or a request will call it, such as my_format")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        action="append",
        required=True,
        help="which of the four hooks it implements; repeatable: --kind reasoning --kind tool for a format that has both, under one name",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="D",
        help="where to write it: a folder that does not exist or is empty (default: penstock-plugin-NAME)",
    )
    return parser


def parse_new_plugin_arguments(argv: list[str]) -> NewPluginArguments:
    """Of what follows `penstock new-plugin`. Exits with code 2 for what cannot be read, and with 0 after help."""
    given = build_new_plugin_parser().parse_args(argv)
    return NewPluginArguments(
        name=given.name,
        kinds=tuple(dict.fromkeys(given.kind)),
        directory=given.directory or Path(f"penstock-plugin-{given.name.replace('_', '-')}"),
    )


def plugin_name(text: str) -> str:
    """It becomes part of a module's name. Hyphens are taken as underscores."""
    name = text.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in RESERVED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name such as my_format: lower-case letters, digits and underscores")
    return name
