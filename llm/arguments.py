"""Keyword arguments of the library: the options, by the names of their flags in snake case or of their fields, and vLLM's."""

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from penstock.engine.errors import ConfigurationError
from penstock.engine.options import Option, flattened
from penstock.serving.options import OPTIONS_BY_ANY_NAME, Arguments
from penstock.serving.vllm_arguments import ENGINE, LIKENESS, SERVER, find, to_our_keywords

# A batch is submitted as a whole: all of it may wait, and its priorities do not change with time.
DEFAULTS = {"max_waiting_requests": 2**31, "max_waiting_tokens": 2**31, "priority_aging": 0}


def engine_arguments(model: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Arguments:
    """The options that keyword arguments set, as the command line would. None means the default.

    Sizes may be given in bytes or as the command line takes them, lists where a flag is repeatable, and torch's own types for `dtype`.
    Raises `TypeError` for an unknown argument, with the nearest name, and `ConfigurationError` for one that is refused or for an invalid
    value.
    """
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"`model` must be a path or a name, got {model!r:.100}")
    values: dict[str, Any] = {"model": None if model is None else os.fspath(model), "trust_request_chat_template": True}
    for name, value in {**DEFAULTS, **given}.items():
        for option, setting in _settings(name, value):
            if setting is not None:
                values[option.name] = converted(option, name, setting)
    return Arguments.of(values)


def known_arguments() -> list[str]:
    """Every name that may be given, without vLLM's that stand for others."""
    return sorted(name for name, option in OPTIONS_BY_ANY_NAME.items() if not option.is_server_only)


def _settings(name: str, value: Any) -> list[tuple[Option, Any]]:
    """The options that an argument sets."""
    option = OPTIONS_BY_ANY_NAME.get(name)
    if option is not None and not option.is_server_only:
        return [(option, value)]
    if option is not None or find(name, SERVER) is not None:
        raise ConfigurationError(f"`{name}` is an option of the server, which is not running here")
    if find(name, ENGINE) is not None:
        return [(OPTIONS_BY_ANY_NAME[ours], setting) for ours, setting in to_our_keywords(name, value)]
    nearest = difflib.get_close_matches(name, [*known_arguments(), *ENGINE], n=1, cutoff=LIKENESS)
    raise TypeError(f"there is no argument `{name}`" + (f": did you mean `{nearest[0]}`?" if nearest else ""))


def converted(option: Option, name: str, value: Any) -> Any:
    """A value as the command line would have read it. Raises `ConfigurationError`."""
    if option.is_switch:
        if not isinstance(value, bool):
            raise ConfigurationError(f"`{name}`: expected True or False, got {value!r}")
        return value
    is_list = isinstance(value, list | tuple)
    if is_list and not option.is_repeatable:
        raise ConfigurationError(f"`{name}`: expected one value, got {value!r}")
    try:
        if option.is_repeatable:
            return flattened([option.value_of(str(item)) for item in (value if is_list else [value])])
        return option.value_of(_spelled(value))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"`{name}`: {error}") from error


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
