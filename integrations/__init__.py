"""Penstock inside other programs' processes: behind Ray Serve, or behind whatever else calls Python in place of HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these take seconds
    from penstock.integrations.embedded import load as load
    from penstock.integrations.embedded import read_flags as read_flags
    from penstock.serving.endpoints.handlers import Handlers as Handlers
    from penstock.serving.endpoints.handlers import Reply as Reply

_MODULE_OF = {
    "Handlers": "penstock.serving.endpoints.handlers",
    "Reply": "penstock.serving.endpoints.handlers",
    "load": "penstock.integrations.embedded",
    "read_flags": "penstock.integrations.embedded",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
