"""The five hooks of plug-ins. They run at startup; nothing in the token loop goes through pluggy."""

from collections.abc import Callable
from typing import Any, Protocol

import pluggy

from penstock.engine.contracts.grammar import GrammarBackend, Vocabulary
from penstock.engine.contracts.logits_processor import LogitsProcessor
from penstock.engine.contracts.parsing import FormatInfo, ReasoningParser, ToolParser, Turn
from penstock.engine.contracts.proposer import Proposer

hookspec = pluggy.HookspecMarker("penstock")
hookimpl = pluggy.HookimplMarker("penstock")


ReasoningParserFactory = Callable[[Turn], ReasoningParser]
ToolParserFactory = Callable[[Turn], ToolParser]
RegisteredLogitsProcessor = LogitsProcessor | type[LogitsProcessor]
GrammarBackendFactory = Callable[[Vocabulary], GrammarBackend]
ProposerFactory = Callable[[], Proposer]


class Register(Protocol):
    """Registers one factory under a name. A parser's factory may come with a description; a `Format` has its own."""

    def __call__(self, name: str, factory: Any, info: FormatInfo | None = None) -> None: ...


@hookspec
def register_reasoning_parsers(register: Register) -> None:
    """register(name, factory, info=None): factory(turn) returns a ReasoningParser for one answer; a ThinkFormat is such a factory."""


@hookspec
def register_tool_parsers(register: Register) -> None:
    """register(name, factory, info=None): factory(turn) returns a ToolParser for one answer."""


@hookspec
def register_logits_processors(register: Register) -> None:
    """register(name, processor): a LogitsProcessor or its class; per_sequence(factory) and per_row(function) make one of a function."""


@hookspec
def register_grammar_backends(register: Register) -> None:
    """register(name, factory): factory(vocabulary) returns a GrammarBackend."""


@hookspec
def register_proposers(register: Register) -> None:
    """register(name, factory): factory() returns a Proposer of draft tokens, which `--speculation NAME` selects."""
