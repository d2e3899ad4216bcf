"""Options as flags, and the command line of the server. Imports nothing heavy, so that `--help` answers at once."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_args

from penstock import __version__
from penstock.cli import COMMANDS
from penstock.engine.config import Group, Option, flattened
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.engine.errors import ConfigurationError
from penstock.serving.options import API_KEY_VARIABLE, OPTIONS, Arguments
from penstock.serving.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.serving.vllm_arguments import LIKENESS, flag_of, to_our_flags

WORDS = ("serve", *COMMANDS)  # all but the first have flags of their own


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
