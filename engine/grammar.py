"""Constrained decoding: the contract between the engine and its grammar backends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

# Part of the contract, and defined beside the structures that a spec may hold.
from penstock.engine.structure import AdditionalProperties as AdditionalProperties
from penstock.engine.structure import GrammarKind as GrammarKind
from penstock.engine.structure import GrammarSpec as GrammarSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer as a grammar backend needs it: bytes, not strings.

    `token_bytes[i]` is what token i adds to the text, or None where it is an added or special token and may never be matched as text.
    `size` is the width of the logits, which may exceed len(token_bytes). `stop_token_ids` may end a constrained answer.
    `fingerprint` is the same for equal vocabularies and for no others: the key for what a backend keeps between runs.
    `added_token_ids` are the added tokens by their text, the special ones among them. `encode` is the tokenizer itself, for ordinary text:
    what makes a tokenization the canonical one. Without it nothing is ever forced.
    """

    token_bytes: tuple[bytes | None, ...]
    size: int
    stop_token_ids: frozenset[int]
    fingerprint: str
    added_token_ids: Mapping[str, int] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)


class GrammarMatcher(Protocol):
    """The state of one sequence in a grammar.

    Used by one thread at a time, not always the same: `fill_bitmask` and `forced_tokens` run beside the event loop, where 10 ms for one
    sequence are noticed by nobody else; `advance`, `rollback` and `finished` run on either and must be quick. An error ends the sequence,
    with a 400 where it is `UnsupportedGrammar`, except at tokens that were only guessed: these are rolled back, and the matcher must
    then be what it was before them.

    One with a method `fork`, which gives another in the same place that goes on by itself, spares beam search taking all tokens anew.
    One of a grammar that `has_quick_masks` may have an attribute `is_quick`, false while its next mask would take longer all the same. If
    it is false after `advance`, the matcher may not have looked at the token: that is rolled back, and sampled again under a mask.
    """

    def fill_bitmask(self, row: "Tensor") -> None:
        """Writes int32 [ceil(V / 32)] on the CPU: bit i of the row is set where token i may come next."""
        ...

    def advance(self, token_id: int) -> bool:
        """Takes a token; False, with the state unchanged, where the grammar forbids it. After a stop token nothing is allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens, a stop token included."""
        ...

    def forced_tokens(self) -> list[int]:
        """Token ids that can only come next: before each of them the bitmask allows it and nothing else. Never stop tokens."""
        ...

    @property
    def finished(self) -> bool:
        """True where nothing but a stop token may follow."""
        ...


class CompiledGrammar(Protocol):
    """Shared by all sequences with the same constraint; immutable.

    It may have an attribute `has_quick_masks`, true where each mask takes well under a millisecond whatever the model says: the engine then
    asks its matchers on the event loop, as soon as a token is there, so that nothing waits for another thread.
    """

    @property
    def num_bytes(self) -> int:
        """About how much memory it holds, for the cache's bound."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of a lenient spec is not enforced: each a keyword with its JSON path. Empty where the grammar is exact."""
        ...

    def matcher(self) -> GrammarMatcher: ...


class GrammarBackend(Protocol):
    """Compiles specs, off the event loop.

    Servers make every backend before they take requests, so making one is quick: what takes long is left to a thread or to `compile`.

    Raises `UnsupportedGrammar` naming the keyword and its path, or the position in a regex or grammar, and `UnsupportedKind` for a kind of
    constraint that it does not know. What is registered as a backend may have an attribute `preferred_kinds`, the `GrammarKind`s for which
    it is tried before the others where a request names no backend.
    """

    def compile(self, spec: GrammarSpec) -> CompiledGrammar: ...
