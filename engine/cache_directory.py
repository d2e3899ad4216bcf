"""Where converted models and built kernels are kept between runs."""

import os
from pathlib import Path

from penstock.engine.errors import ConfigurationError


def cache_directory() -> Path:
    """`$PENSTOCK_CACHE`, else `$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`. It may not exist yet.

    Raises `ConfigurationError` where a home directory is needed and there is none, as of a user whom the system does not know.
    """
    try:
        if override := os.environ.get("PENSTOCK_CACHE"):
            return Path(override).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "penstock"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no home directory to keep models in ({error}): set PENSTOCK_CACHE to a directory") from error
