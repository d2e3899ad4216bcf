"""An OpenAI-compatible inference server for open-weight language models. Public names load on first use: importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.hooks import hookimpl
    from penstock.engine.sampling_params import SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "SamplingParams": "penstock.engine.sampling_params",
    "hookimpl": "penstock.engine.hooks",
}

__all__ = ["SamplingParams", "__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
