"""Where converted models and built kernels are kept between runs."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$PENSTOCK_CACHE`, else `$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`. It may not exist yet."""
    if override := os.environ.get("PENSTOCK_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "penstock"
