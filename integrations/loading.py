"""A model for another program's process: by the flags of `penstock serve`, and without its socket."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.engine.system.process import raise_descriptor_limit
from penstock.plugins.manager import Plugins
from penstock.server import load_model
from penstock.serving.options import Arguments

if TYPE_CHECKING:
    from penstock.assembly import AnyAssembled

# What one of several servers would have for itself alone, or listen to by itself.
REFUSED = {
    "admin": "it listens to no socket of its own",
    "api_servers": "it is one process, and there may be several of it",
    "distributed_address": "ranks meet where they have been placed",
    "files_dir": "files and batches would be those of one replica: run a server of their own",
    "response_store": "stored responses would be those of one replica",
}


def read_flags(flags: Sequence[str]) -> Arguments:
    """Those of `penstock serve`. Raises `ConfigurationError`, also for flags that only a server with a socket of its own can have."""
    arguments = parse_arguments(list(flags))
    for option, value in arguments.values():
        if option.name in REFUSED and value != option.default:
            raise ConfigurationError(f"{option.shown(value)}: {REFUSED[option.name]}")
    # Clients come through another server, which decides where it listens. --allowed-hosts still says by what names they may come.
    return replace(arguments, host="0.0.0.0")


def load(arguments: Arguments) -> "AnyAssembled":
    """Takes seconds. The engine is to be started, in the event loop that it is to run in. Raises `ConfigurationError`."""
    raise_descriptor_limit()
    plugins = Plugins.asked_for(arguments)
    return load_model(arguments, plugins)
