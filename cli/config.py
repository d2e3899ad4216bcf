"""`penstock config`: every option of the server with its value and its source, as a table or as a configuration file."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from penstock import __version__
from penstock.cli.flags import COMMAND_LINE, ConfigArguments, Configuration
from penstock.cli.settings import MASK, Setting, toml
from penstock.engine.options import Group, Option
from penstock.serving.options import OPTIONS, Arguments

DEFAULT = "default"
VALUE_WIDTH = 40  # longer values move their source to the right


def run_config_command(arguments: ConfigArguments) -> int:
    lines = _toml_lines if arguments.is_toml else _table_lines
    print(*lines(arguments.configuration, is_changed=arguments.is_changed), sep="\n")
    check_surroundings(arguments.configuration.arguments)
    return 0


def check_surroundings(arguments: Arguments) -> None:
    """What options refer to, as a server checks it at its start: the files of `--keys` and `--models`, and OpenTelemetry.

    Raises `ConfigurationError`.
    """
    if arguments.server.keys_file is not None:
        from penstock.serving.limits import KeyRing

        KeyRing.of(arguments.server, counts=not arguments.api_servers)
    if arguments.models is not None:
        from penstock.serving.models.file import read_models_file  # which imports transformers

        read_models_file(arguments)
    if arguments.server.otlp_endpoint is not None:
        from penstock.serving.observability.tracing import check_tracing

        check_tracing(arguments.server.otlp_endpoint)


def _table_lines(configuration: Configuration, *, is_changed: bool) -> Iterator[str]:
    rows = [("flag", "value", "source")]
    for option in OPTIONS.values():
        setting = configuration.settings.get(option.name)
        if setting is not None:
            rows.append((option.flag, _shown(option, setting.value), setting.source))
        elif not is_changed:
            rows.append((option.flag, _default(option), DEFAULT))
    widths = [min(VALUE_WIDTH, max(len(row[column]) for row in rows)) for column in range(2)]
    for flag, value, source in rows:
        yield f"{flag:{widths[0]}}  {value:{widths[1]}}  {source}"


def _toml_lines(configuration: Configuration, *, is_changed: bool) -> Iterator[str]:
    yield f"# Options of penstock {__version__}: penstock --config FILE.toml"
    for group in get_args(Group):
        lines = [
            _toml_line(option, configuration.settings.get(option.name))
            for option in OPTIONS.values()
            if option.group == group and (option.name in configuration.settings or not is_changed)
        ]
        if lines:
            yield from ("", f"# {group[0].upper()}{group[1:]}", *lines)


def _toml_line(option: Option, setting: Setting | None) -> str:
    key = option.name.replace("_", "-")
    if setting is not None and setting.value is not None:
        return f"{key} = {_shown(option, setting.value)}  # {setting.source}"
    is_spelled = setting is None and option.default not in (None, {}) and not option.is_secret
    return f"# {key} = {toml(option.default)}" if is_spelled else f"# {key}: {_default(option)}"


def _shown(option: Option, value: Any) -> str:
    if option.is_secret:
        return toml((MASK,) * len(value)) if option.is_repeatable else toml(MASK)
    return _default(option) if value is None else toml(value)


def _default(option: Option) -> str:
    """The value, or what the help says of it."""
    if option.default_help and option.default in (None, (), {}):
        return option.default_help
    return "none" if option.default in (None, {}) else toml(option.default)


def summary(settings: Mapping[str, Setting]) -> str:
    """How many options come from where, such as `3 from penstock.toml, 1 from the environment`; empty where the command line sets all."""
    places = Counter(_place(setting.source) for setting in settings.values())
    if set(places) <= {_place(COMMAND_LINE)}:
        return ""
    return ", ".join(f"{number} from {place}" for place, number in places.items())


def _place(source: str) -> str:
    if source == COMMAND_LINE:
        return "the command line"
    path, colon, _ = source.rpartition(":")
    return path if colon else "the environment"
