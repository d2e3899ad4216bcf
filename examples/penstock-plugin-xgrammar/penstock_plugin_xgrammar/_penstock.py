"""All that this package takes from Penstock."""

# These modules are deeper than what Penstock promises to keep; what it makes public is to be imported from `penstock` itself.
from penstock import InvalidRequest, hookimpl
from penstock.engine import structure
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.hooks import Register
from penstock.engine.sandbox import Limits, Sandbox

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarSpec",
    "InvalidRequest",
    "Limits",
    "Register",
    "Sandbox",
    "UnsupportedGrammar",
    "Vocabulary",
    "hookimpl",
    "structure",
]
