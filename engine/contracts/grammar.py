"""Constrained decoding: the contract between the engine and its grammar backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

# Part of the contract, and defined beside the structures that a spec may hold.
from penstock.engine.contracts.structure import AdditionalProperties as AdditionalProperties
from penstock.engine.contracts.structure import GrammarKind as GrammarKind
from penstock.engine.contracts.structure import GrammarSpec as GrammarSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer as a grammar backend needs it: bytes, not strings.

    `token_bytes[i]` are the bytes of token i in the text, or None for an added or special token, which is never matched as text.
    `size` is the width of the logits, which may exceed len(token_bytes). Any of `stop_token_ids` may end a constrained answer.
    `fingerprint` is equal for equal vocabularies only: the key of a backend's caches between runs.
    `added_token_ids` are the added tokens by their text, the special ones among them. `encode` is the tokenizer itself, for ordinary text:
    it defines the canonical tokenization. Without it no tokens are forced.
    """

    token_bytes: tuple[bytes | None, ...]
    size: int
    stop_token_ids: frozenset[int]
    fingerprint: str
    added_token_ids: Mapping[str, int] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)


class GrammarMatcher(ABC):
    """The state of one sequence in a grammar.

    Used by one thread at a time, not always the same: `fill_bitmask` and `forced_tokens` run off the event loop, where 10 ms for one
    sequence delay no other; `advance`, `rollback` and `finished` run on either and must be quick. An error ends the sequence,
    with a 400 if it is `UnsupportedGrammar`, except at draft tokens: these are rolled back, and the matcher must
    then be in the state before them.
    """

    @abstractmethod
    def fill_bitmask(self, row: "Tensor") -> None:
        """Writes int32 [ceil(V / 32)] on the CPU: bit i of the row is set where token i may come next."""

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Takes a token; False, with the state unchanged, if the grammar forbids it. After a stop token nothing is allowed."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens, including a stop token."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether only a stop token may follow."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next: before each of them the bitmask allows only that one. Never stop tokens."""
        return []

    @property
    def has_choice(self) -> bool:
        """Whether more than one token may follow, a stop token among them. It may be False where that takes long to find out.

        Asked after each token of a grammar that has quick masks, on the event loop. Where it is False, `finished` and `forced_tokens` are.
        """
        return not self.finished and not self.forced_tokens()

    def fork(self) -> "GrammarMatcher | None":
        """An independent copy in the same state. If it is None, beam search replays all tokens on a new matcher."""
        return None

    @property
    def is_quick(self) -> bool:
        """For grammars that have quick masks: False while the next mask would take longer.

        If it is false after `advance`, the matcher may not have checked the token: it is rolled back and sampled again under a mask.
        """
        return True


class CompiledGrammar(ABC):
    """Shared by all sequences with the same constraint; immutable.

    `num_bytes` estimates its memory, for the cache's bound. `warnings` are the keywords of a lenient spec that are not enforced, each with
    its JSON path; empty if the grammar is exact. `schema` is the JSON Schema that it was compiled from, or None if it was not or white
    space was requested. It is used to draft short answers, verified by the masks, and to bound the remaining length. With
    `has_quick_masks`, each mask takes well under a millisecond for any output: the engine then calls its matchers on the
    event loop after each token, without a worker thread.
    """

    num_bytes: int = 0
    warnings: tuple[str, ...] = ()
    schema: str | None = None
    has_quick_masks: bool = False

    @abstractmethod
    def matcher(self) -> GrammarMatcher: ...


class GrammarBackend(ABC):
    """Compiles specs, off the event loop.

    Every backend is constructed at startup, so its constructor must be quick: slow work belongs in a thread or in `compile`. If a request
    names no backend, those that list its kind of constraint in `preferred_kinds` are tried first. `preferred_kinds` is read from the
    class: a factory that is a function has no preferred kinds.
    """

    preferred_kinds: frozenset[GrammarKind] = frozenset()

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises `UnsupportedGrammar` naming the keyword and its path, or the position in a regex or grammar, and `UnsupportedKind` for a
        kind of constraint that it does not support.
        """
