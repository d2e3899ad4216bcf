"""The command lines of the server and of the subcommands: options as flags, with help. Imports nothing heavy, so that `--help` is quick."""

import argparse
import difflib
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, NoReturn, TypeVar, get_args

from penstock import __version__
from penstock.cli import COMMANDS
from penstock.engine.config import Group, Option, flattened, integer
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.engine.errors import ConfigurationError
from penstock.serving.options import API_KEY_VARIABLE, OPTIONS, Arguments
from penstock.serving.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.serving.vllm_arguments import LIKENESS, flag_of, to_our_flags

WORDS = ("serve", *COMMANDS)  # all but the first have flags of their own
KINDS = {"json": "json_schema", "regex": "regex", "lark": "lark", "gbnf": "gbnf", "choice": "choice"}  # each with its `GrammarKind`
KINDS_BY_SUFFIX = {".json": "json", ".lark": "lark", ".gbnf": "gbnf", ".ebnf": "gbnf", ".regex": "regex"}
Given = TypeVar("Given")
_EPILOG = "Only the tokenizer and the config of the model are read, not its weights. FILE may be -, which is standard input."


class CommandParser(argparse.ArgumentParser):
    """Names the nearest flag for an unknown one, before parsing, since argparse might first fail at the value that follows it.

    `near_flags` are offered beside its own. A mistake is one line, and exit code 2.
    """

    near_flags: tuple[str, ...] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        self.check_flags(words)
        return super().parse_args(words, namespace)

    def check_flags(self, words: Sequence[str]) -> None:
        for flag in (word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)):
            if flag not in self._option_string_actions:
                nearest = difflib.get_close_matches(flag, [*self._option_string_actions, *self.near_flags], n=1, cutoff=LIKENESS)
                self.error(f"unknown flag {flag}" + (f" (did you mean {nearest[0]}?)" if nearest else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_option(container: argparse._ActionsContainer, option: Option, *, default: Any, help: str = "", is_before_file: bool = True) -> None:
    """The flag of an option. Where the command's file may follow, a repeatable flag takes one value each time."""
    settings: dict[str, Any] = {"dest": option.name, "default": default, "help": (help or option.whole_help).replace("%", "%%")}
    if option.is_switch:
        settings["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
    else:
        settings |= {"type": reported(option.value_of), "metavar": option.values_help}
    if option.is_repeatable:
        settings |= {"action": "append"} if is_before_file else {"action": "extend", "nargs": "+"}
    container.add_argument(*option.flags, **settings)


def reported(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Keeps the message of a `ValueError`, which argparse would replace."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_arguments(argv: list[str] | None = None, parser: CommandParser | None = None) -> Arguments:
    """Raises `ConfigurationError` for contradictory values; argparse itself exits with code 2 for invalid ones.

    `parser` is one that `build_parser` made.
    """
    parser = parser or build_parser()
    words = to_our_flags(sys.argv[1:] if argv is None else argv, parser._option_string_actions)
    parser.check_flags(words)
    given = vars(parser.parse_intermixed_args(words))  # the model may follow the flags
    values = {name: flattened(value) if OPTIONS[name].is_repeatable else value for name, value in given.items() if name in OPTIONS}
    values["model"] = _model_of(parser, given)
    if "api_key" not in values:
        keys = (key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(","))
        values["api_key"] = tuple(key for key in keys if key)
    if any(not key.strip() for key in values["api_key"]):
        raise ConfigurationError("--api-key is empty")
    return Arguments.of(values)


def _model_of(parser: CommandParser, given: dict[str, Any]) -> str | None:
    """The model, given by its flag or as a word after `serve`."""
    command, by_word, by_flag = given["command"], given["served_model"], given.get("model")
    for word in filter(None, (command, *given.get("plugin", ()), *given.get("without", ()))):
        if word in COMMANDS:
            parser.error(f"`{word}` goes before all flags: see penstock {word} --help")
        if word != command and _is_model(word):
            parser.error(f"{word!r} is no plug-in; a model goes right after `serve`: penstock serve {word} ...")
    if command != "serve":
        near = [] if _is_model(command) else difflib.get_close_matches(command, WORDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"to serve a model: penstock serve {command}"
        parser.error(f"there is no command {command!r}; {hint}")
    if None not in (by_flag, by_word) and by_flag != by_word:
        parser.error(f"two models are given: {by_word!r}, and {by_flag!r} by --model")
    model: str | None = by_flag or by_word
    return model


def _is_model(word: str) -> bool:
    """Whether it names a model by its form: an id, a directory or a GGUF file."""
    return ("/" in word and not word.endswith(".py")) or word.endswith(".gguf")


def build_parser() -> CommandParser:
    """The parser of the server's command line. Flags that are not given are not in the namespace: `Arguments` has the defaults."""
    parser = CommandParser(
        prog="penstock",
        usage="%(prog)s [serve [MODEL]] [FLAG ...]",
        description="Serve a language model, or one that embeds, scores or classifies texts, over OpenAI's and Anthropic's HTTP APIs. "
        "Without flags: a small default model at http://127.0.0.1:8000/v1.",
        epilog="vLLM's flags that request what Penstock does anyway, such as automatic tool choice or parallel sizes of 1, are "
        "accepted; each of the others is refused with what to use instead. "
        "`penstock plugins` lists the plug-ins that are loaded, and what each registers. Without a server, `penstock parse` reads "
        "a model's output, `penstock grammar` tries schemas and grammars, and `penstock new-plugin` begins a plug-in. Each has a --help.",
        allow_abbrev=False,
    )
    parser.near_flags = tuple(flag_of(name) for name in VLLM_ARGUMENTS if "*" not in name)
    parser.add_argument("command", nargs="?", default="serve", metavar="COMMAND", help=f"{', '.join(WORDS)} (default: serve)")
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="after `serve`: the same as --model")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    for name in get_args(Group):
        group = parser.add_argument_group(name)
        for option in OPTIONS.values():
            if option.group == name:
                add_option(group, option, default=argparse.SUPPRESS, is_before_file=False)
    return parser


def add_model_choice(group: argparse._ArgumentGroup) -> None:
    """Flags of every command that needs a model's files."""
    for name in ("model", "trust_remote_code"):
        add_option(group, OPTIONS[name], default=OPTIONS[name].default)


def add_plugin_choice(group: argparse._ArgumentGroup, help: str = "", *, is_before_file: bool = True) -> None:
    add_option(group, OPTIONS["plugin"], default=[], help=help, is_before_file=is_before_file)
    add_option(group, OPTIONS["without"], default=[], is_before_file=is_before_file)


def add_parser_choice(group: argparse._ArgumentGroup) -> None:
    """Flags that select parsers; a model's files choose those that no flag names."""
    add_plugin_choice(group, is_before_file=False)
    for name in ("reasoning_parser", "tool_parser"):
        add_option(group, OPTIONS[name], default=OPTIONS[name].default)


def add_named_parser_choice(group: argparse._ArgumentGroup) -> None:
    """Flags that select parsers without a model: one that no flag names is None."""
    add_plugin_choice(group, "load a plug-in and select the parser it names, such as deepseek_r1 or hermes; repeatable")
    for name, what in (("reasoning_parser", "its reasoning"), ("tool_parser", "tool calls")):
        option = replace(OPTIONS[name], metavar="NAME|none")
        add_option(group, option, default=None, help=f"how the model writes {what} (default: the one that --plugin names, or none)")


def add_reading_choice(container: argparse._ActionsContainer, default: AdditionalProperties) -> None:
    option = OPTIONS["additional_properties"]
    add_option(container, option, default=default, help=f"{option.help} (default: {default})")


def read_arguments(parser: argparse.ArgumentParser, argv: list[str], kind: type[Given], **others: Any) -> Given:
    """What the command line said, and `others`, which it cannot say. Exits with code 2 for what cannot be read, and with 0 after help."""
    given = {OPTIONS[name].field if name in OPTIONS else name: value for name, value in vars(parser.parse_args(argv)).items()}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArguments:
    """`backend` is None for `auto`; `kind` is one of `KINDS`, for `check` only."""

    action: Literal["check", "test"]
    path: str
    kind: str
    backend: str | None
    is_strict: bool
    additional_properties: AdditionalProperties
    is_json: bool
    limit: int | None = None
    model: str | None
    trust_remote_code: bool
    plugins: tuple[str, ...]
    without: tuple[str, ...]


def parse_grammar_arguments(argv: list[str]) -> GrammarArguments:
    """Of what follows `penstock grammar`."""
    if not argv or argv[0] not in PARSERS:
        parser = build_overview_parser()
        parser.parse_args(argv)
        parser.error("say which: check or test")
    parser = PARSERS[argv[0]]()
    given = read_arguments(parser, argv[1:], GrammarArguments, action=argv[0])
    kind = given.kind or KINDS_BY_SUFFIX.get(PurePath(given.path).suffix.lower())
    if not kind:
        parser.error(f"{given.path} does not say what it holds: add --kind {'|'.join(KINDS)}")
    return replace(given, kind=kind)


def build_overview_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar",
        description="Try schemas and grammars against the grammar backends, without a server. "
        "check: which backend takes one constraint, and what in it is unsupported. "
        "test: whether backends accept and refuse what they should, on a file of schemas with instances.",
        epilog="`penstock grammar check --help` and `penstock grammar test --help` list the flags.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=tuple(PARSERS), help="what to do")
    return parser


def build_check_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar check",
        description="Prints which backend would compile the constraint by default, and for every backend whether it enforces the whole "
        "constraint, what it would leave out, or why it refuses; with compile times (medians) and sizes. "
        "Exit code: 0 accepted, 1 refused by all backends (or by the named one), 2 wrong usage or an unreadable file.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="FILE", help="the constraint: a JSON Schema, a regex, a grammar, or a JSON array of choices")
    parser.add_argument(
        "--kind",
        choices=tuple(KINDS),
        default="",
        help="kind of FILE (default: by its suffix: .json is a JSON Schema; .lark, .gbnf, .ebnf, .regex)",
    )
    _add_common_flags(parser, "closed")
    return parser


def build_test_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="penstock grammar test",
        description='Reads lines of {"schema": ..., "tests": [{"valid": true or false, "data": ...}]}; other keys are '
        "ignored. Compiles each schema, spells each instance in the model's tokens and takes it through the grammar token by token, to "
        "an allowed end. The text of an instance is that of Python's json.dumps(data, ensure_ascii=False): one blank after each comma and "
        "colon, no other white space, members in the file's order or, where that is refused, in the schema's. A schema is "
        "tried exactly first, leniently where that is refused; the two are counted apart. Compile times are medians of three, none from a "
        "cache; times of masks are of every one. Exit code: 0 where "
        "every exactly compiled schema accepts what is valid and refuses what is not, and no "
        "lenient one refuses what is valid; 1 otherwise, where a backend failed (reported as such; the next schema is tried) or where a "
        "line is malformed; 2 wrong usage or an unreadable file. Ctrl-C prints what has been tried so far.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.set_defaults(kind="json")
    parser.add_argument("path", metavar="FILE.jsonl", help="schemas with instances, one schema a line")
    parser.add_argument("--limit", type=reported(integer(1)), metavar="N", help="only the first N schemas (default: all)")
    _add_common_flags(parser, "open")
    return parser


def _add_common_flags(parser: argparse.ArgumentParser, reading: AdditionalProperties) -> None:
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        type=_named_backend,
        help="one backend (default: auto, as for a request that names none)",
    )
    fallback = parser.add_mutually_exclusive_group()
    fallback.add_argument(
        "--strict",
        dest="is_strict",
        action="store_true",
        help="as `strict: true`: refuse what cannot be enforced completely (default: try it leniently)",
    )
    fallback.add_argument(
        "--lenient", dest="is_strict", action="store_false", help="the default: leave out what cannot be enforced, with a warning"
    )
    add_reading_choice(parser, reading)
    parser.add_argument("--json", dest="is_json", action="store_true", help="print one JSON object")
    add_model_choice(parser.add_argument_group("model"))
    add_plugin_choice(parser.add_argument_group("plug-ins"), "load a plug-in and ask its grammar backends too; repeatable")
    parser.set_defaults(is_strict=False)


def _named_backend(name: str) -> str | None:
    return None if name == "auto" else name


PARSERS = {"check": build_check_parser, "test": build_test_parser}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseArguments:
    """`prompt_tail` is None for the usual one of the reasoning parser's family.

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
        description="Prints the message that the server would return for this model output. With --jsonl each line is an "
        'object {"text", "reasoning_parser", "tool_parser", "tools", "prompt_tail", "special_tokens", "chunk_sizes"}, of which only the '
        "text is required: flags replace missing keys, and other keys are ignored. For each a line is printed: "
        '{"reasoning_content", "content", "tool_calls": [{"id", "name", "arguments"}]}, or {"error": {"line", "message"}} where the line '
        "cannot be read. Exit code: 0; 1 where a line cannot be read; 2 wrong usage or an unreadable file.",
        allow_abbrev=False,
    )
    parser.add_argument("path", nargs="?", default="-", metavar="FILE", help="the text, exactly as written (default: standard input)")
    parser.add_argument(
        "--tools", dest="tools_path", metavar="FILE.json", help="an array of tools as in a request: types of arguments come from it"
    )
    parser.add_argument(
        "--prompt-tail",
        metavar="TEXT",
        help="the end of the rendered prompt, after the last assistant header (default: what templates of this reasoning parser write)",
    )
    parser.add_argument(
        "--response-template",
        dest="response_template_path",
        metavar="FILE.json",
        help="for the parser response_template: the template, or a tokenizer_config.json that holds one",
    )
    parser.add_argument(
        "--special-token",
        dest="special_tokens",
        action="append",
        default=[],
        metavar="TEXT",
        help="a marker that is a special token in the text; repeatable (default: none, all markers are plain text)",
    )
    parser.add_argument(
        "--chunks", dest="chunk_size", type=reported(integer(1)), metavar="N", help="feed N characters at a time (default: all at once)"
    )
    parser.add_argument("--json", dest="is_json", action="store_true", help="print one JSON object")
    parser.add_argument("--jsonl", dest="is_jsonl", action="store_true", help="read one JSON object a line, and print one for each")
    group = parser.add_argument_group("plug-ins")
    add_named_parser_choice(group)
    return parser


def parse_parse_arguments(argv: list[str]) -> ParseArguments:
    """Of what follows `penstock parse`."""
    parser = build_parse_parser()
    given = read_arguments(parser, argv, ParseArguments)
    if "auto" in (given.reasoning_parser, given.tool_parser, *given.plugins):
        parser.error("auto needs a model's files: name the parsers")
    return replace(given, reasoning_parser=given.reasoning_parser or "auto", tool_parser=given.tool_parser or "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsArguments:
    plugins: tuple[str, ...]
    without: tuple[str, ...]
    reasoning_parser: str
    tool_parser: str
    is_markdown: bool


def build_plugins_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock plugins",
        description="Lists the loaded plug-ins and where they come from; a star marks the selected ones. The server's startup line "
        "names those that it chose from the model's files.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--markdown", dest="is_markdown", action="store_true", help="print the page docs/parsers.md: every parser with what it reads"
    )
    group = parser.add_argument_group("plug-ins")
    add_parser_choice(group)
    return parser


def parse_plugins_arguments(argv: list[str]) -> PluginsArguments:
    """Of what follows `penstock plugins`."""
    return read_arguments(build_plugins_parser(), argv, PluginsArguments)


PLUGIN_KINDS = ("reasoning", "tool", "logits", "grammar", "proposer")
RESERVED = ("auto", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPluginArguments:
    """`name` is an identifier in lower case, `kinds` are different. Without a `directory`, it is named after the package."""

    name: str
    kinds: tuple[str, ...]
    directory: Path | None


def build_new_plugin_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock new-plugin",
        description="Writes a package with a working plug-in, its test and a README, to start from. Install it with pip into the "
        "environment of penstock, and the server finds it by its entry point. Existing files are not overwritten.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=plugin_name, metavar="NAME", help="its name for --plugin and requests, such as my_format")
    parser.add_argument(
        "--kind",
        dest="kinds",
        choices=PLUGIN_KINDS,
        action="append",
        required=True,
        help="which hook it implements; repeatable: --kind reasoning --kind tool for a format that has both, under one name",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="D",
        help="where to write it: a folder that does not exist or is empty (default: penstock-plugin-NAME)",
    )
    return parser


def parse_new_plugin_arguments(argv: list[str]) -> NewPluginArguments:
    """Of what follows `penstock new-plugin`."""
    given = read_arguments(build_new_plugin_parser(), argv, NewPluginArguments)
    return replace(given, kinds=tuple(dict.fromkeys(given.kinds)))


def plugin_name(text: str) -> str:
    """It becomes part of a module's name. Hyphens are taken as underscores."""
    name = text.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in RESERVED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name such as my_format: lower-case letters, digits and underscores")
    return name


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """`-` is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
        yield file
