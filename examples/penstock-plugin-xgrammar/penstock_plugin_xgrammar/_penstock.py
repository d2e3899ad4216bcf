"""All that this package takes from Penstock."""

# Names that are public come from `penstock` itself. Modules below it may change with any version.
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
