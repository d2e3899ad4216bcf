"""Keyword arguments of the library as what the command line would have said: the names are its flags', in snake case."""

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from penstock.arguments import LIKENESS, Arguments, CommandParser, build_parser, parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.vllm_arguments import ENGINE, SERVER, find, to_our_keywords

# A batch is handed over as a whole, all of it waits for its turn, and its priorities hold to the end.
DEFAULTS = {"max_waiting_requests": 2**31, "max_waiting_tokens": 2**31, "priority_aging": 0}
# Of the command line, and without meaning where there is no server.
OF_THE_SERVER = frozenset(
    {
        "access_log",
        "allow_unknown_fields",
        "allowed_hosts",
        "allowed_origins",
        "api_key",
        "drain_timeout",
        "host",
        "keep_alive_interval",
        "keep_alive_timeout",
        "log_level",
        "max_body_size",
        "max_connections",
        "metrics_without_key",
        "min_priority",
        "port",
        "read_timeout",
        "reasoning_field",
        "share_prefix_cache",
        "trust_request_chat_template",
        "write_timeout",
    }
)
ALIASES = {"num_threads": "threads", "plugins": "plugin"}


class _Reader(CommandParser):
    """Says what is wrong to whoever calls from Python: no usage, no exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(re.sub(r"^argument --([\w-]+)(?:/--[\w-]+)*:", lambda found: f"`{found[1].replace('-', '_')}`:", message))


def engine_arguments(model: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Arguments:
    """What the command line would have made of them. None is the default of every one of them.

    Sizes may be given in bytes or as the command line takes them, lists where a flag is repeatable, and torch's own types for `dtype`.
    Raises `TypeError` for an argument that there is not, with the nearest one, and `ConfigurationError` for one that is refused or for a
    value that cannot be.
    """
    parser = build_parser(_Reader)
    flags = _flags(parser)
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"`model` must be a path or a name, got {model!r:.100}")
    words = [] if model is None else [f"--model={os.fspath(model)}"]
    for name, value in {**DEFAULTS, **given}.items():
        dest: str = ALIASES.get(name, name)
        flag = flags.get(dest)
        if flag is not None and flag.dest not in OF_THE_SERVER:
            words += () if value is None else spelled(flag, name, value)
        elif flag is not None or find(name, SERVER) is not None:
            raise ConfigurationError(f"`{name}` is the server's, and there is none here")
        elif find(name, ENGINE) is not None:
            for ours, setting in to_our_keywords(name, value):
                words += spelled(flags[ours], name, setting)
        else:
            nearest = difflib.get_close_matches(name, [*known_arguments(), *ENGINE], n=1, cutoff=LIKENESS)
            raise TypeError(f"there is no argument `{name}`" + (f": did you mean `{nearest[0]}`?" if nearest else ""))
    return parse_arguments([*words, "--trust-request-chat-template"], parser)


def known_arguments() -> list[str]:
    """Every name that may be given, without vLLM's that stand for others."""
    flags = _flags(build_parser())
    return sorted({"model", *ALIASES, *(name for name, flag in flags.items() if flag.dest not in OF_THE_SERVER)})


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """By the names of their fields and by all of their spellings in snake case, without those that are negated."""
    flags = [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]
    options = {option: flag for flag in flags for option in flag.option_strings if not option.startswith("--no-")}
    spellings = {option.removeprefix("--").replace("-", "_"): flag for option, flag in options.items()}
    return {**spellings, **{flag.dest: flag for flag in flags}}


def spelled(flag: argparse.Action, name: str, value: Any) -> Iterator[str]:
    """A value as the words of the command line."""
    long = flag.option_strings[0]
    if flag.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ConfigurationError(f"`{name}`: expected True or False, got {value!r}")
        if value:
            yield long
        elif isinstance(flag, argparse.BooleanOptionalAction):
            yield next(spelling for spelling in flag.option_strings if spelling.startswith("--no-"))
        return
    is_list = isinstance(value, list | tuple)
    if is_list and flag.default != []:
        raise ConfigurationError(f"`{name}`: expected one value, got {value!r}")
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"`{name}`: {error}") from error
    for item in value if is_list else [value]:
        yield f"{long}={str(item).removeprefix('torch.') if isinstance(item, torch.dtype) else item}"
