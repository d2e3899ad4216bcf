"""The subcommands of `penstock`, by name. Each parses its own arguments before heavy imports: help and wrong flags cost nothing."""

from collections.abc import Callable, Mapping


def run_plugins(words: list[str]) -> int:
    from penstock.cli.flags import parse_plugins_arguments

    arguments = parse_plugins_arguments(words)
    from penstock.cli.plugins import run_plugins_command

    return run_plugins_command(arguments)


def run_parse(words: list[str]) -> int:
    from penstock.cli.flags import parse_parse_arguments

    arguments = parse_parse_arguments(words)
    from penstock.cli.parse import run_parse_command

    return run_parse_command(arguments)


def run_grammar(words: list[str]) -> int:
    from penstock.cli.flags import parse_grammar_arguments

    arguments = parse_grammar_arguments(words)
    from penstock.cli.grammar import run_grammar_command
    from penstock.plugins.manager import Plugins

    return run_grammar_command(arguments, Plugins.start(arguments.plugins, arguments.without))


def run_new_plugin(words: list[str]) -> int:
    from penstock.cli.flags import parse_new_plugin_arguments

    arguments = parse_new_plugin_arguments(words)
    from penstock.cli.plugins import run_new_plugin_command

    return run_new_plugin_command(arguments)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "plugins": run_plugins,
    "parse": run_parse,
    "grammar": run_grammar,
    "new-plugin": run_new_plugin,
}
"""Each returns the exit code, and may raise `ConfigurationError`."""
