"""The grammar backend `xgrammar`: the plug-in that the entry point names."""

from penstock import Register, hookimpl
from penstock_plugin_xgrammar.backend import XgrammarBackend

__all__ = ["XgrammarBackend", "register_grammar_backends"]


@hookimpl
def register_grammar_backends(register: Register) -> None:
    register("xgrammar", XgrammarBackend)
