"""Constrained decoding: the contract between the engine and its grammar backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


class GrammarMatcher(ABC):
    """The state of one sequence in a grammar.

    Used by one thread at a time, not always the same: `fill_bitmask` and `forced_tokens` run beside the event loop, where 10 ms for one
    sequence delay no other; `advance`, `rollback` and `finished` run on either and must be quick. An error ends the sequence,
    with a 400 where it is `UnsupportedGrammar`, except at tokens that were only guessed: these are rolled back, and the matcher must
    then be what it was before them.
    """

    @abstractmethod
    def fill_bitmask(self, row: "Tensor") -> None:
        """Writes int32 [ceil(V / 32)] on the CPU: bit i of the row is set where token i may come next."""

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Takes a token; False, with the state unchanged, where the grammar forbids it. After a stop token nothing is allowed."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens, a stop token included."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True where nothing but a stop token may follow."""

    def forced_tokens(self) -> list[int]:
        """Token ids that can only come next: before each of them the bitmask allows it and nothing else. Never stop tokens."""
        return []

    def fork(self) -> "GrammarMatcher | None":
        """Another matcher in the same place, which goes on by itself. Without it, beam search has a fresh one take all tokens anew."""
        return None

    @property
    def is_quick(self) -> bool:
        """For grammars that have quick masks: False while the next one would take longer all the same.

        Where it is false after `advance`, the matcher may not have looked at the token: that is rolled back, and sampled under a mask.
        """
        return True


class CompiledGrammar(ABC):
    """Shared by all sequences with the same constraint; immutable.

    `num_bytes` is about how much memory it holds, for the cache's bound. `warnings` are what of a lenient spec is not enforced, each a
    keyword with its JSON path; empty where the grammar is exact. Where it `has_quick_masks`, each mask takes well under a millisecond
    whatever the model says: the engine then asks its matchers on the event loop, as soon as a token is there, without a worker thread.
    """

    num_bytes: int
    warnings: tuple[str, ...] = ()
    has_quick_masks: bool = False

    @abstractmethod
    def matcher(self) -> GrammarMatcher: ...


class GrammarBackend(ABC):
    """Compiles specs, off the event loop.

    Servers make every backend before they take requests, so making one is quick: what takes long is left to a thread or to `compile`.
    A backend is tried before the others for its `preferred_kinds`, where a request names no backend. They are the class's: a backend
    that a function makes has none.
    """

    preferred_kinds: frozenset[GrammarKind] = frozenset()

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises `UnsupportedGrammar` naming the keyword and its path, or the position in a regex or grammar, and `UnsupportedKind` for a
        kind of constraint that it does not know.
        """
