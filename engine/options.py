"""How options are declared: for each its flag, range, default and help; and how their values are read from text."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

Group = Literal[
    "model",
    "formats and plug-ins",
    "HTTP",
    "connections and their limits",
    "stored responses",
    "files and batches",
    "administration",
    "observability",
    "engine",
]
_METADATA = "option"
_TOKEN_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of the operator.

    `name` is the flag and the keyword argument in snake case, `field` the dataclass field; `aliases` are further names, most of them
    vLLM's or SGLang's, and `synonyms` other spellings of values. `kind` is the annotation without None: bool is a switch, a Literal has
    choices, a tuple takes several values. `read` makes a value, or one of several, from text, and raises `ValueError`.
    `default_help` says what the default is where the value does not.
    A secret is not printed. A server option has no meaning in the library. One that `needs_generation` is refused where a pooling model is
    asked for more than the default or a value in `neutral`.
    """

    help: str
    group: Group
    name: str = ""
    field: str = ""
    kind: Any = str
    default: Any = None
    default_help: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] = str
    aliases: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_server_only: bool = False
    needs_generation: bool = False
    neutral: tuple[Any, ...] = ()
    is_secret: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Of the environment."""
        return f"PENSTOCK_{self.name.upper()}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *(f"--{alias.replace('_', '-')}" for alias in self.aliases))

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def is_repeatable(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def takes_table(self) -> bool:
        """Whether a value, or one of several, may be a JSON object."""
        kind = get_args(self.kind)[0] if self.is_repeatable else self.kind
        return dataclasses.is_dataclass(kind) or get_origin(kind) in (dict, Mapping)

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def values_help(self) -> str | None:
        """What stands for a value in help."""
        return f"{{{','.join(self.choices)}}}" if self.choices else self.metavar

    @property
    def whole_help(self) -> str:
        """With the default."""
        shown = self.default_help
        if not shown and not self.is_switch and isinstance(self.default, str | int | float):
            shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{self.help} (default: {shown})".strip() if shown else self.help

    def value_of(self, text: str) -> Any:
        """What a word of the command line means: one item where several may be given. Raises `ValueError`."""
        text = self.synonyms.get(text, text)
        if self.choices and text not in self.choices:
            raise ValueError(f"invalid choice: {text!r} (choose from {', '.join(self.choices)})")
        return self.read(text)

    def asks_for_generation(self, value: Any) -> bool:
        """Whether this value asks for what only a model that generates text can do."""
        if not self.needs_generation:
            return False
        return any(item not in self.neutral for item in value) if self.is_repeatable else value not in (self.default, *self.neutral)

    def shown(self, value: Any) -> str:
        """As the command line says it; the value only where it is one of a few."""
        return f"{self.flag} {value}" if self.choices else self.flag


def option(
    default: Any,
    help: str,
    group: Group,
    *,
    name: str = "",
    default_help: str = "",
    metavar: str | None = None,
    read: Callable[[str], Any] = str,
    aliases: tuple[str, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    is_server_only: bool = False,
    needs_generation: bool = False,
    neutral: tuple[Any, ...] = (),
    is_secret: bool = False,
) -> Any:
    """A dataclass field that is an `Option`. Its flag is named after the field, but for `name`."""
    declared = Option(
        help=help,
        group=group,
        name=name,
        default=default,
        default_help=default_help,
        metavar=metavar,
        read=read,
        aliases=aliases,
        synonyms=synonyms or {},
        is_server_only=is_server_only,
        needs_generation=needs_generation,
        neutral=neutral,
        is_secret=is_secret,
    )
    metadata = {_METADATA: declared}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in its order."""
    types, options = get_type_hints(kind), []
    for each in dataclasses.fields(kind):
        if _METADATA in each.metadata:
            declared: Option = each.metadata[_METADATA]
            options.append(replace(declared, name=declared.name or each.name, field=each.name, kind=without_none(types[each.name])))
    return tuple(options)


def without_none(annotation: Any) -> Any:
    """`T` of `T | None`; any other annotation is itself."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(annotation) and len(kinds) == 1 else annotation


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    bounds = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"

    def convert(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(f"{text!r} is not {bounds}")
        return int(text)

    return convert


def number_of_tokens(text: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(_TOKEN_UNITS)}]?)", text)
    num_tokens = float(match[1]) * _TOKEN_UNITS[match[2]] if match else 0.0
    if num_tokens < 1 or not num_tokens.is_integer():
        raise ValueError(f"{text!r} is not a number of tokens of 1 or more, such as 8192 or 8K")
    return int(num_tokens)


def context_length(text: str) -> int | None:
    """Tokens; None is the model's own length."""
    return None if text in ("auto", "-1") else number_of_tokens(text)


def size(text: str) -> int:
    """Bytes from `2GiB`, `512M`, `1.5gb` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size such as 2GiB, 512MB or a number of bytes")
    num_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return text


def address_of(text: str) -> tuple[str, int]:
    """Of `HOST:PORT`, where the host may be an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f"{text!r} is not a number of seconds")
    return float(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def origins(text: str) -> list[str]:
    """One origin, or a JSON list of them, which is vLLM's spelling."""
    if not text.startswith("["):
        return [text]
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(origin, str) for origin in listed):
        raise ValueError(f'{text!r} is no JSON list of strings, such as ["https://example.com"]')
    return listed


def flattened(values: Sequence[Any]) -> tuple[Any, ...]:
    """The items of a repeatable option, of which a word may hold several."""
    return tuple(item for value in values for item in (value if isinstance(value, list) else [value]))
