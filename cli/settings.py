"""Options from configuration files and the environment: read, checked, and each with its source."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigurationError
from penstock.engine.options import Option, flattened
from penstock.engine.system.cache import TRUST
from penstock.serving.options import OPTIONS, OPTIONS_BY_ANY_NAME, parse_toml
from penstock.serving.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.serving.vllm_arguments import LIKENESS, find, flag_shown, to_our_keywords

CONFIG_VARIABLE = "PENSTOCK_CONFIG"  # the file, where --config does not name one
PREFIX = "PENSTOCK_"
# Variables that are no flags: they hold for the library as well, or for one machine.
OTHER_VARIABLES = (CONFIG_VARIABLE, "PENSTOCK_CACHE", "PENSTOCK_MARCH", "PENSTOCK_TILES", TRUST, "PENSTOCK_PARSER_EXAMPLES")
# What Kubernetes sets in every pod for a Service whose name begins with penstock, PENSTOCK_PORT=tcp://... among them.
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
MAX_VALUES = 10_000  # of a YAML file
OVERWRITTEN = re.compile(r"Cannot overwrite a value \(at line (\d+), ")  # as tomllib says it
BARE_KEY = re.compile(r"""\s*(["']?)([\w-]+)\1\s*=""")
MASK = "********"  # in place of a secret


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option, and its source, such as `penstock.toml:3`, `PENSTOCK_PORT` or `command line`."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value in a file, and its text as the command line would have it."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a file: its value is a `Scalar`, a list, or a table, which is as JSON would have it."""

    key: str
    value: Any
    line: int


def check_secrets(settings: Mapping[str, Setting]) -> None:
    """Raises `ConfigurationError` where a secret is what `penstock config` prints in its place."""
    for name, setting in settings.items():
        if OPTIONS[name].is_secret and MASK in (setting.value if OPTIONS[name].is_repeatable else (setting.value,)):
            key = name.replace("_", "-")
            raise ConfigurationError(f"{setting.source}: {key}: {MASK} is what `penstock config` prints in place of a secret")


def read_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The options that variables set. An empty one sets nothing. Raises `ConfigurationError`, also for a variable that resembles one."""
    settings = {}
    variables = {option.variable: option for option in OPTIONS.values()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _is_service_link(variable, text):
            continue
        if variable not in variables:
            _refuse_misspelt(variable, variables)
        elif text:
            option = variables[variable]
            try:
                settings[option.name] = Setting(_from_text(option, text), variable)
            except ValueError as error:
                raise ConfigurationError(f"{variable}: {error}") from error
    return settings


def _is_service_link(variable: str, text: str) -> bool:
    return bool(SERVICE_LINK.search(variable) or (variable.endswith("_PORT") and SERVICE_ADDRESS.match(text)))


def _refuse_misspelt(variable: str, known: Mapping[str, Option]) -> None:
    # Only near misses are refused: other variables with this prefix may belong to other programs.
    names = [name.removeprefix(PREFIX) for name in (*known, *OTHER_VARIABLES)]
    if nearest := difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1, cutoff=LIKENESS):
        raise ConfigurationError(f"unknown environment variable {variable} (did you mean {PREFIX}{nearest[0]}?)")


def _from_text(option: Option, text: str) -> Any:
    """The value of a variable: several are separated by commas, or are a JSON list."""
    if option.is_switch:
        return boolean(text)
    if not option.is_repeatable:
        return option.value_of(text)
    return flattened([option.value_of(word) for word in _words(text)])


def _words(text: str) -> list[str]:
    """Raises `ValueError`, also for an empty list: an option that was to be set, such as a key, would not be. The text may be a secret."""
    if not text.startswith("["):
        words = [word for word in map(str.strip, text.split(",")) if word]
        if not words:
            raise ValueError("it holds no value")
        return words
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not a JSON list: {error}") from error
    if not items or None in items:
        raise ValueError("it holds no value")
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


def boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError(f"{text!r} is not true or false")
    return BOOLEANS[text.lower()]


def read_file(path: Path) -> dict[str, Setting]:
    """The options that a TOML or YAML file sets: flags without their dashes in front, vLLM's included, at the top level.

    Raises `ConfigurationError` with the file and the line of what cannot be taken.
    """
    readers = {".toml": _toml_entries, ".yaml": _yaml_entries, ".yml": _yaml_entries}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(f"--config {path}: the name of a configuration file ends in {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    settings: dict[str, Setting] = {}
    for entry in reader(path, text):
        place = f"{path}:{entry.line}"
        try:
            for option, value in _options_of(entry):
                if option.name in settings:
                    raise ValueError(f"it is set already: {settings[option.name].source}")
                settings[option.name] = Setting(value, place)
        except (ValueError, ConfigurationError) as error:
            raise ConfigurationError(f"{place}: {entry.key}: {error}") from error
    return settings


def _options_of(entry: Entry) -> Iterator[tuple[Option, Any]]:
    """What an entry sets. Raises `ValueError`, and `ConfigurationError` for an argument of vLLM's that is not supported."""
    name = entry.key.replace("-", "_")
    if (option := OPTIONS_BY_ANY_NAME.get(name)) is not None:
        yield option, _from_file(option, entry.value)
    elif find(name, VLLM_ARGUMENTS) is not None:
        for ours, value in to_our_keywords(name, _plain(entry.value), VLLM_ARGUMENTS, flag_shown):
            option = OPTIONS_BY_ANY_NAME[ours]
            yield option, value if option.is_switch else option.value_of(str(value))
    else:
        raise ValueError(f"there is no such flag{_hint(name, entry.value)}")


def _hint(name: str, value: Any) -> str:
    positive = OPTIONS_BY_ANY_NAME.get(name.removeprefix("no_"))
    if positive is not None and positive.is_switch:
        return f" (for --{name.replace('_', '-')}, write {positive.name.replace('_', '-')} with the value false)"
    nearest = difflib.get_close_matches(name, [*OPTIONS_BY_ANY_NAME, *VLLM_ARGUMENTS], n=1, cutoff=LIKENESS)
    if nearest:
        return f" (did you mean {nearest[0].replace('_', '-')}?)"
    return "; flags are at the top level of the file, not in tables" if isinstance(value, dict) else ""


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Scalar) else value


def _from_file(option: Option, value: Any) -> Any:
    if not isinstance(value, list):
        single = _single(option, value)
        return flattened([single]) if option.is_repeatable else single
    if not option.is_repeatable:
        raise ValueError("it takes one value, not a list")
    items = []
    for place, item in enumerate(value):
        try:
            items.append(_single(option, item))
        except ValueError as error:
            raise ValueError(f"[{place}]: {error}") from error
    return flattened(items)


def _single(option: Option, value: Any) -> Any:
    """One item, where an option takes several."""
    if isinstance(value, list):
        raise ValueError("it takes no lists in a list")
    if isinstance(value, dict):
        if not option.takes_table:
            raise ValueError(f"it takes {option.values_help or 'true or false'}, not a table")
        return option.value_of(json.dumps(value, default=str))  # a date of TOML's is a text in JSON
    if option.is_switch:
        if not isinstance(value.value, bool):
            raise ValueError(f"{value.text!r} is not true or false")
        return value.value
    if value.value is None:
        raise ValueError("it has no value; leave it out for the default")
    if isinstance(value.value, bool) and value.text not in option.choices:  # YAML takes `off` for false
        raise ValueError(f"it takes {option.values_help}, not {value.text}")
    return option.value_of(value.text)


def _toml_entries(path: Path, text: str) -> Iterator[Entry]:
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigurationError(_set_twice(path, text, str(error)) or f"{path} is not TOML: {error}") from error
    for key, value in table.items():
        yield Entry(key, _toml_value(value), _line_of(key, text))


def _set_twice(path: Path, text: str, message: str) -> str:
    """Which key, where that is the parser's message, which has the line alone; else empty."""
    found = OVERWRITTEN.match(message)
    key = BARE_KEY.match(text.splitlines()[int(found[1]) - 1]) if found else None
    return f"{path}:{found[1]}: {key[2]}: it is set already: {path}:{_line_of(key[2], text)}" if found and key else ""


def _toml_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_toml_value(item) for item in value]
    if isinstance(value, dict):
        return value
    return Scalar(value, json.dumps(value) if isinstance(value, bool | int | float) else str(value))


def _line_of(key: str, text: str) -> int:
    """Where a key of the top level is, which its parser does not say."""
    start = re.compile(rf"""\s*\[*\s*(?P<quote>["']?){re.escape(key)}(?P=quote)\s*[].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)


def _yaml_entries(path: Path, text: str) -> Iterator[Entry]:
    import yaml  # type: ignore[import-untyped]

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:  # nothing but comments
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigurationError(f"{path}:{root.start_mark.line + 1}: a configuration file is a mapping of flags to values")
        if _num_values(root, {}) > MAX_VALUES:
            raise ConfigurationError(f"{path}: with its aliases written out, it has more than {MAX_VALUES} values")
        loader = yaml.SafeLoader("")
        lines: dict[str, int] = {}
        for key, value in root.value:
            line = key.start_mark.line + 1
            if lines.setdefault(str(key.value), line) != line:
                raise ConfigurationError(f"{path}:{line}: {key.value}: it is set already: {path}:{lines[key.value]}")
            yield Entry(str(key.value), _yaml_value(loader, value, f"{path}:{line}: {key.value}"), line)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{path}:{line}: it is not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _num_values(node: Any, known: dict[Any, int]) -> int:
    """With aliases written out, of which a few lines can stand for billions. `known` are those of nodes that were counted."""
    if node not in known:
        children = node.value if node.id == "sequence" else [each for pair in node.value for each in pair] if node.id == "mapping" else ()
        known[node] = 1 + sum(_num_values(child, known) for child in children)
    return known[node]


def _yaml_value(loader: Any, node: Any, place: str) -> Any:
    """Of a node, of which YAML says less than its text: `off` is false, and `010` is 8."""
    if node.id == "sequence":
        return [_yaml_value(loader, item, place) for item in node.value]
    try:
        value = loader.construct_object(node, deep=True)
    except ValueError as error:  # of a date, or a number, that is none
        raise ConfigurationError(f"{place}: {error}") from error
    if isinstance(node.value, str):
        return Scalar(value, node.value)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: a table can hold what JSON can: {error}") from error


def toml(value: Any) -> str:
    """The value of an option as a TOML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    if '"' in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
