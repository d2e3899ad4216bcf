"""The command line of `penstock plugins`. Imports nothing heavy."""

from dataclasses import dataclass

from penstock.arguments import CommandParser, add_parser_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsArguments:
    """What the command line said."""

    plugins: tuple[str, ...]
    without: tuple[str, ...]
    reasoning_parser: str
    tool_parser: str
    is_markdown: bool


def build_plugins_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock plugins",
        description="Lists what is loaded and where it comes from; a star marks what is selected. What a server selects by itself, from "
        "the model's own files, is in the line that it prints when it has started.",
        allow_abbrev=False,
    )
    parser.add_argument("--markdown", action="store_true", help="print the page docs/parsers.md: every parser with what it reads")
    group = parser.add_argument_group("plug-ins")
    add_parser_choice(group, has_model=True)
    return parser


def parse_plugins_arguments(argv: list[str]) -> PluginsArguments:
    """Of what follows `penstock plugins`. Exits with code 2 for what cannot be read, and with 0 after help."""
    given = build_plugins_parser().parse_args(argv)
    return PluginsArguments(
        plugins=tuple(given.plugin),
        without=tuple(given.without),
        reasoning_parser=given.reasoning_parser,
        tool_parser=given.tool_parser,
        is_markdown=given.markdown,
    )
