"""The command line of `penstock parse`. Imports nothing heavy."""

from dataclasses import dataclass

from penstock.arguments import CommandParser, add_parser_choice, integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseArguments:
    """What the command line said. `prompt_tail` is None for the usual one of the reasoning parser's family.

    A parser that is not named is `auto`, which is the one that `--plugin` names, as there is no model to decide.
    """

    path: str
    plugins: tuple[str, ...]
    without: tuple[str, ...]
    reasoning_parser: str
    tool_parser: str
    tools_path: str | None
    prompt_tail: str | None
    response_template_path: str | None
    special_tokens: tuple[str, ...]
    chunk_size: int | None
    is_json: bool
    is_jsonl: bool


def build_parse_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock parse",
        description="Prints the message that the server would answer where a model has written this text. With --jsonl each line is an "
        'object {"text", "reasoning_parser", "tool_parser", "tools", "prompt_tail", "special_tokens", "chunk_sizes"}, of which only the '
        "text has to be there: the flags stand for what is not, and other keys are ignored. For each a line is printed: "
        '{"reasoning_content", "content", "tool_calls": [{"id", "name", "arguments"}]}, or {"error": {"line", "message"}} where the line '
        "cannot be read. Exit code: 0; 1 where a line cannot be read; 2 wrong usage or an unreadable file.",
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the text, exactly as written (default: standard input)")
    parser.add_argument("--tools", metavar="FILE.json", help="an array of tools as in a request: types of arguments come from it")
    parser.add_argument(
        "--prompt-tail",
        metavar="TEXT",
        help="what the template wrote after the last assistant header (default: what is usual where this reasoning parser is used)",
    )
    parser.add_argument(
        "--response-template",
        metavar="FILE.json",
        help="what the parser response_template goes by: the template, or a tokenizer_config.json that holds one",
    )
    parser.add_argument(
        "--special-token",
        action="append",
        default=[],
        metavar="TEXT",
        help="a marker that is a special token in the text; repeatable (default: none, all markers are plain text)",
    )
    parser.add_argument("--chunks", type=integer(1), metavar="N", help="feed N characters at a time (default: all at once)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--jsonl", action="store_true", help="read one JSON object a line, and print one for each")
    group = parser.add_argument_group("plug-ins")
    add_parser_choice(group, has_model=False)
    return parser


def parse_parse_arguments(argv: list[str]) -> ParseArguments:
    """Of what follows `penstock parse`. Exits with code 2 for what cannot be read, and with 0 after help."""
    parser = build_parse_parser()
    given = parser.parse_args(argv)
    if "auto" in (given.reasoning_parser, given.tool_parser, *given.plugin):
        parser.error("auto needs a model's files: name the parsers")
    return ParseArguments(
        path=given.file,
        plugins=tuple(given.plugin),
        without=tuple(given.without),
        reasoning_parser=given.reasoning_parser or "auto",
        tool_parser=given.tool_parser or "auto",
        tools_path=given.tools,
        prompt_tail=given.prompt_tail,
        response_template_path=given.response_template,
        special_tokens=tuple(given.special_token),
        chunk_size=given.chunks,
        is_json=given.json,
        is_jsonl=given.jsonl,
    )
