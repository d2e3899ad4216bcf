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
    from penstock.cli.grammar.arguments import parse_grammar_arguments

    arguments = parse_grammar_arguments(words)
    from penstock.cli.grammar.command import run_grammar_command
    from penstock.plugins.manager import Plugins

    return run_grammar_command(arguments, Plugins.start(arguments.plugins, arguments.without))


def run_config(words: list[str]) -> int:
    from penstock.cli.config import run_config_command
    from penstock.cli.flags import parse_config_arguments

    return run_config_command(parse_config_arguments(words))


def run_new_plugin(words: list[str]) -> int:
    from penstock.cli.flags import parse_new_plugin_arguments

    arguments = parse_new_plugin_arguments(words)
    from penstock.cli.plugins import run_new_plugin_command

    return run_new_plugin_command(arguments)


def run_admin(words: list[str]) -> int:
    from penstock.cli.admin import parse_admin_arguments, run_admin_command

    return run_admin_command(parse_admin_arguments(words))


def run_worker(words: list[str]) -> int:
    from penstock.cli.flags import parse_worker_arguments

    arguments = parse_worker_arguments(words)
    from penstock.cli.worker import run_worker_command

    return run_worker_command(arguments)


def set_up_libraries(num_threads: int | None) -> None:
    """Before torch is loaded, which reads these variables then."""
    import os

    from penstock.engine.system.cpus import SPIN_COUNT, limit_libraries

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    limit_libraries(num_threads, os.environ)


def run_selftest(words: list[str]) -> int:
    from penstock.cli.selftest.arguments import parse_selftest_arguments

    arguments = parse_selftest_arguments(words)
    set_up_libraries(arguments.options.get("threads"))
    from penstock.cli.selftest.command import run_selftest_command

    return run_selftest_command(arguments)


def run_keys(words: list[str]) -> int:
    from penstock.cli.flags import parse_keys_arguments

    arguments = parse_keys_arguments(words)
    from penstock.cli.keys import run_keys_command

    return run_keys_command(arguments)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "plugins": run_plugins,
    "parse": run_parse,
    "grammar": run_grammar,
    "config": run_config,
    "new-plugin": run_new_plugin,
    "admin": run_admin,
    "worker": run_worker,
    "keys": run_keys,
    "selftest": run_selftest,
}
"""Each returns the exit code, and may raise `ConfigurationError`."""
