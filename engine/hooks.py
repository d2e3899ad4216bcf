"""The four hooks through which formats reach the engine. Hooks run at start; nothing in the token loop goes through pluggy."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from penstock.engine.format_info import FormatInfo
from penstock.engine.grammar import GrammarBackend, Vocabulary
from penstock.engine.parsing import Parser, ReasoningParser
from penstock.engine.turn import Turn

if TYPE_CHECKING:
    from torch import Tensor

hookspec = pluggy.HookspecMarker("penstock")
hookimpl = pluggy.HookimplMarker("penstock")


class LogitsProcessor(Protocol):
    """`process(token_ids, logits) -> logits` for one sequence: prompt and output ids so far, float32 [V] logits of the next token."""

    def __call__(self, token_ids: list[int], logits: "Tensor") -> "Tensor": ...


ReasoningParserFactory = Callable[[Turn], ReasoningParser]
ToolParserFactory = Callable[[Turn], Parser]
LogitsProcessorFactory = Callable[..., LogitsProcessor]
GrammarBackendFactory = Callable[[Vocabulary], GrammarBackend]


class Register(Protocol):
    """What a hook calls for each thing that it offers. Parsers may say what their format is known by."""

    def __call__(self, name: str, factory: Any, info: FormatInfo | None = None) -> None: ...


@hookspec
def register_reasoning_parsers(register: Register) -> None:
    """register(name, factory, info=None): factory(turn) returns a ReasoningParser for one answer."""


@hookspec
def register_tool_parsers(register: Register) -> None:
    """register(name, factory, info=None): factory(turn) returns a ToolParser for one answer."""


@hookspec
def register_logits_processors(register: Register) -> None:
    """register(name, factory): factory(**arguments) returns process(token_ids, logits) -> logits."""


@hookspec
def register_grammar_backends(register: Register) -> None:
    """register(name, factory): factory(vocabulary) returns a GrammarBackend."""
