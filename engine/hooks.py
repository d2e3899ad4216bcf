"""The four hooks through which formats reach the engine. Hooks run at start; nothing in the token loop goes through pluggy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from penstock.engine.format_info import FormatInfo
from penstock.engine.grammar import GrammarBackend, Vocabulary
from penstock.engine.parsing import ReasoningParser, ToolParser
from penstock.engine.turn import Turn

if TYPE_CHECKING:
    from torch import Tensor

hookspec = pluggy.HookspecMarker("penstock")
hookimpl = pluggy.HookimplMarker("penstock")


class LogitsProcessor(Protocol):
    """`process(token_ids, logits) -> logits` for one sequence: prompt and output ids so far, float32 [V] logits of the next token."""

    def __call__(self, token_ids: list[int], logits: "Tensor") -> "Tensor": ...


class RowLogitsProcessor(Protocol):
    """The same, told whose row it is; what changes the logits in place may return None.

    Either form may have keyword-only parameters beside these where it is registered as it is: the request's arguments.
    """

    def __call__(self, request_id: str, logits: "Tensor", token_ids: list[int], client_id: int | str | None) -> "Tensor | None": ...


@dataclass(slots=True)
class LogitsRow:
    """One sequence as a batched processor sees it. `index` tells the n sequences of a request apart.

    `token_ids` are prompt and output so far, not to be changed. `state` is what `begin` returned for this sequence.
    """

    request_id: str
    index: int = 0
    client_id: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None


class BatchLogitsProcessor(Protocol):
    """One call per step with all sequences whose requests name it, on the device's current stream.

    `logits` are float32 [R, V], row r those of `rows[r]`, changed in place or returned. Where a call raises it is made again for each row
    alone, on logits as they were. With a method `begin(**arguments)`, called once per sequence, requests may give arguments; a
    `ValueError` or `TypeError` from it refuses them.
    """

    def process_batch(self, rows: Sequence[LogitsRow], logits: "Tensor") -> "Tensor | None": ...


ReasoningParserFactory = Callable[[Turn], ReasoningParser]
ToolParserFactory = Callable[[Turn], ToolParser]
# A factory, or a processor of any form; one with parameters of its own is no instance of the protocols.
RegisteredLogitsProcessor = Callable[..., Any] | BatchLogitsProcessor
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
    """register(name, factory): factory(**arguments) returns process(token_ids, logits) -> logits.

    In place of a factory also a processor itself, of this form or with (request_id, logits, token_ids, client_id), or a batched one.
    """


@hookspec
def register_grammar_backends(register: Register) -> None:
    """register(name, factory): factory(vocabulary) returns a GrammarBackend."""
