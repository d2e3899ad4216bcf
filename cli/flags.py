"""The command lines of the server and of the subcommands: options as flags, with help. Imports nothing heavy, so that `--help` is quick."""

import argparse
import difflib
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, get_args

from penstock import __version__
from penstock.cli import COMMANDS
from penstock.cli.settings import CONFIG_VARIABLE, Setting, check_secrets, read_environment, read_file
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.engine.errors import ConfigurationError
from penstock.engine.options import Group, Option, flattened, host_and_port, integer
from penstock.serving.options import OPTIONS, AdminAddress, Arguments
from penstock.serving.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.serving.vllm_arguments import LIKENESS, flag_of, to_our_flags

WORDS = ("serve", *COMMANDS)  # all but the first have flags of their own
COMMAND_LINE = "command line"  # the source of what it sets
Given = TypeVar("Given")


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
                known = [*self._option_string_actions, *self.near_flags]
                nearest = difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=LIKENESS)
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


@dataclass(frozen=True, slots=True)
class Configuration:
    """All options, the settings of those that are not at their defaults, by name, and the configuration file."""

    arguments: Arguments
    settings: Mapping[str, Setting]
    path: Path | None


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    """As `parse_configuration`."""
    return parse_configuration(sys.argv[1:] if argv is None else argv).arguments


def parse_configuration(argv: list[str]) -> Configuration:
    """Of the server. Raises as `configured`; argparse itself exits with code 2 for words that it cannot take."""
    parser = build_parser()
    return configured(parser, given_flags(parser, argv))


def given_flags(parser: CommandParser, argv: list[str]) -> dict[str, Any]:
    words = to_our_flags(argv, parser._option_string_actions)
    parser.check_flags(words)
    return vars(parser.parse_intermixed_args(words))  # the model may follow the flags


def configured(parser: CommandParser, given: dict[str, Any], environ: Mapping[str, str] = os.environ) -> Configuration:
    """The options that the command line sets, as it has been `given`; of the others those that the environment sets, then the file.

    Raises `ConfigurationError` for contradictory values, and for what a file or the environment cannot set.
    """
    values = {name: flattened(value) if OPTIONS[name].is_repeatable else value for name, value in given.items() if name in OPTIONS}
    if (model := _model_of(parser, given)) is not None:
        values["model"] = model
    name = given.get("config") or environ.get(CONFIG_VARIABLE)
    path = Path(name).expanduser() if name else None
    settings = {
        **(read_file(path) if path is not None else {}),
        **read_environment(environ),
        **{name: Setting(value, COMMAND_LINE) for name, value in values.items()},
    }
    check_secrets(settings)
    if "api_key" in settings and not (settings["api_key"].value and all(key.strip() for key in settings["api_key"].value)):
        raise ConfigurationError("--api-key is empty")  # an empty list would be a server that asks for no key
    arguments = Arguments.of({name: setting.value for name, setting in settings.items()})
    check_admin(arguments.admin, arguments.admin_key)
    return Configuration(arguments, settings, path)


def check_admin(address: AdminAddress | None, key: str | None) -> None:
    """Raises `ConfigurationError` for an admin interface that others could use."""
    if key is not None and not key.strip():
        raise ConfigurationError("--admin-key is empty")
    if address is not None and not address.is_own and key is None:
        raise ConfigurationError(f"--admin {address}: other machines can reach it, which takes --admin-key")


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
        epilog="A flag on the command line overrides its environment variable, which overrides the file of --config. The file's keys are "
        "flags without their leading dashes; `penstock config` prints the values in force. "
        "vLLM's flags that request what Penstock does anyway, such as automatic tool choice or parallel sizes of 1, are "
        "accepted; each of the others is refused with what to use instead. "
        "`penstock plugins` lists the loaded plug-ins with their registrations. Without a server, `penstock parse` parses "
        "a model's output, `penstock grammar` tries schemas and grammars, and `penstock new-plugin` writes a plug-in. Each has a --help.",
        allow_abbrev=False,
    )
    add_server_flags(parser)
    return parser


def add_server_flags(parser: CommandParser) -> None:
    parser.near_flags = tuple(flag_of(name) for name in VLLM_ARGUMENTS if "*" not in name)
    parser.add_argument("command", nargs="?", default="serve", metavar="COMMAND", help=f"{', '.join(WORDS)} (default: serve)")
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="after `serve`: the same as --model")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.add_argument("--config", metavar="FILE", help=f"read flags from this TOML or YAML file [env: {CONFIG_VARIABLE}]")
    for name in get_args(Group):
        group = parser.add_argument_group(name)
        for option in OPTIONS.values():
            if option.group == name:
                help = f"{option.whole_help} [env: {option.variable}]"
                add_option(group, option, default=argparse.SUPPRESS, help=help, is_before_file=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigArguments:
    configuration: Configuration
    is_toml: bool
    is_changed: bool


def build_config_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock config",
        usage="%(prog)s [--toml] [--changed] [serve [MODEL]] [FLAG ...]",
        description="Prints every option of a server that is started with these flags in this environment, with its value and its source. "
        "Secrets are not shown. No model is loaded. Exit code: 0; 2 if a flag, a variable or the configuration file is invalid.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--toml", dest="is_toml", action="store_true", help="print a configuration file, in which options at their defaults are comments"
    )
    parser.add_argument("--changed", dest="is_changed", action="store_true", help="print only the options that are set")
    add_server_flags(parser)
    return parser


def parse_config_arguments(argv: list[str]) -> ConfigArguments:
    """Of what follows `penstock config`."""
    parser = build_config_parser()
    given = given_flags(parser, argv)
    return ConfigArguments(configuration=configured(parser, given), is_toml=given["is_toml"], is_changed=given["is_changed"])


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
        add_option(group, option, default=None, help=f"the format of {what} (default: the one that --plugin names, or none)")


def add_reading_choice(container: argparse._ActionsContainer, default: AdditionalProperties) -> None:
    option = OPTIONS["additional_properties"]
    add_option(container, option, default=default, help=f"{option.help} (default: {default})")


def read_arguments(parser: argparse.ArgumentParser, argv: list[str], kind: type[Given], **others: Any) -> Given:
    """What the command line said, and `others`, which it cannot say. Exits with code 2 for what cannot be read, and with 0 after help."""
    given = {OPTIONS[name].field if name in OPTIONS else name: value for name, value in vars(parser.parse_args(argv)).items()}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, **others)


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
        "--tools", dest="tools_path", metavar="FILE.json", help="an array of tools as in a request, which has the types of arguments"
    )
    parser.add_argument(
        "--prompt-tail",
        metavar="TEXT",
        help="the end of the rendered prompt, after the last assistant header (default: as templates for this reasoning parser write it)",
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
        "--markdown", dest="is_markdown", action="store_true", help="print the page docs/parsers.md: every parser with its formats"
    )
    group = parser.add_argument_group("plug-ins")
    add_parser_choice(group)
    return parser


def parse_plugins_arguments(argv: list[str]) -> PluginsArguments:
    """Of what follows `penstock plugins`."""
    return read_arguments(build_plugins_parser(), argv, PluginsArguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysArguments:
    """Either a `name` for a new key, or a file to `check`."""

    name: str | None
    append_to: Path | None
    reads_key: bool
    check: Path | None


def build_keys_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock keys",
        description="Makes an API key for --keys FILE.toml, and prints the key and the table for the file, which has the key's hash. The "
        "key itself is stored nowhere. Exit code: 0; 2 wrong usage, or a file that cannot be used.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name in the file, in the log and in metrics")
    parser.add_argument(
        "--append", dest="append_to", type=Path, metavar="FILE.toml", help="add the table to this file, and print the key alone"
    )
    parser.add_argument(
        "--stdin", dest="reads_key", action="store_true", help="read a key from standard input, of 24 characters or more, and make none"
    )
    parser.add_argument("--check", type=Path, metavar="FILE.toml", help="list the keys of a file with their limits, or report its error")
    return parser


def parse_keys_arguments(argv: list[str]) -> KeysArguments:
    """Of what follows `penstock keys`."""
    parser = build_keys_parser()
    given = read_arguments(parser, argv, KeysArguments)
    if (given.name is None) == (given.check is None) or (given.check is not None and (given.append_to or given.reads_key)):
        parser.error("give a NAME for a new key, or --check FILE.toml alone")
    return given


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
        help="the hook to implement; repeatable: --kind reasoning --kind tool for a format that has both, under one name",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="D",
        help="the folder to write, which must be new or empty (default: penstock-plugin-NAME)",
    )
    return parser


def parse_new_plugin_arguments(argv: list[str]) -> NewPluginArguments:
    """Of what follows `penstock new-plugin`."""
    given = read_arguments(build_new_plugin_parser(), argv, NewPluginArguments)
    return replace(given, kinds=tuple(dict.fromkeys(given.kinds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """`model` is None where it is called here what rank 0 calls it, and `num_threads` where there are as many as rank 0 says."""

    join: str
    rank: int
    model: str | None
    num_threads: int | None
    local_rank: int


def build_worker_parser() -> CommandParser:
    parser = CommandParser(
        prog="penstock worker",
        description="Computes one rank of a model that a server shares among processes with --tensor-parallel-size and "
        "--distributed-address. All options but these are the server's. Ends with the server.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--join", type=reported(host_and_port), required=True, metavar="HOST:PORT", help="the server's --distributed-address"
    )
    parser.add_argument("--rank", type=reported(integer(1)), required=True, metavar="R", help="from 1 to N - 1; the server is rank 0")
    parser.add_argument(
        "--model", metavar="ID|DIR|GGUF", help="the same model, if it has another name on this machine (default: the server's)"
    )
    parser.add_argument(
        "--threads", dest="num_threads", type=reported(integer(1)), metavar="N", help="CPU threads (default: the server's number)"
    )
    parser.add_argument(
        "--local-rank",
        type=reported(integer(0)),
        default=int(os.environ.get("LOCAL_RANK", "0")),
        metavar="N",
        help="which of this machine's GPUs (default: $LOCAL_RANK, else 0)",
    )
    return parser


def parse_worker_arguments(argv: list[str]) -> WorkerArguments:
    """Of what follows `penstock worker`."""
    given = vars(build_worker_parser().parse_args(argv))
    return WorkerArguments(**given)


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
