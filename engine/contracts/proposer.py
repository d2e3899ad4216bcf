"""The contract of proposers, which guess at the next tokens of sequences for speculative decoding."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_DRAFT = 16  # tokens
FIRST_ACCURACY = 0.4
MEMORY = 0.8  # the weight of the accuracy so far, in its moving average


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedSequence:
    """One sequence as a proposer sees it.

    `token_ids` are prompt and output so far: they grow, and are not to be changed. Texts may be proposed only to sequences with an equal
    `key`, which stands for the adapter and the `cache_salt`. `grammar` is the same object for all sequences with the same constraint, and
    None without one. `placeholders` are the positions of the prompt with vectors, such as of images, in place of tokens: their
    ids have no meaning, and must not be proposed.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    key: Hashable = ""
    grammar: object = None
    placeholders: frozenset[int] = frozenset()


class SequenceProposer(ABC):
    """Guesses at the next tokens of one sequence. Called on the event loop, several times in each step: must be quick.

    `accuracy` is the probability that the next guess is right, measured over recent ones. It decides how many draft tokens the
    sequence gets, if any: a proposer should keep measuring it while its guesses are not used.
    """

    accuracy: float = FIRST_ACCURACY
    min_accuracy: float = 0.3  # for any drafts: of so few guesses as `MEMORY` remembers, less may be chance
    is_predicted = False  # whether it would propose the request's prediction

    @abstractmethod
    def read(self) -> bool:
        """Reads new tokens of the sequence. False while more are left, so that a long prompt takes several calls."""

    @property
    @abstractmethod
    def has_guess(self) -> bool:
        """Whether it has something to propose after all tokens that were read."""

    @abstractmethod
    def propose(self, num_tokens: int) -> list[int]:
        """At most so many draft tokens. All tokens have been read, and `has_guess`."""

    def accuracy_after(self, num_right: int) -> float:
        """The probability that a draft's next token is right if this many before it are. `accuracy` is the first token's."""
        return self.accuracy

    def end(self, num_known_tokens: int) -> None:
        """The sequence has ended, and may be learnt from. An earlier one with the same key had as many of its first tokens."""
        return


class Proposer(ABC):
    """Proposes draft tokens for all sequences of an engine. What belongs to one sequence is in its `SequenceProposer`."""

    @abstractmethod
    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        """Called for each sequence that may have draft tokens."""


def proposer_of(function: Callable[[list[int]], list[int]]) -> Proposer:
    """A proposer made of `function(token_ids)`, which returns draft tokens, best at most 16 of them, or none."""
    return _FunctionProposer(function)


class _FunctionProposer(Proposer):
    def __init__(self, function: Callable[[list[int]], list[int]]) -> None:
        self._function = function

    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        return _SequenceFunction(self._function, sequence)


class _SequenceFunction(SequenceProposer):
    """Calls the function once per step, and compares what it returned with the tokens that came."""

    def __init__(self, function: Callable[[list[int]], list[int]], sequence: DraftedSequence) -> None:
        self._function = function
        self._token_ids = sequence.token_ids
        self._num_read = 0
        self._guess: list[int] = []

    def read(self) -> bool:
        if self._num_read == len(self._token_ids):
            return True
        for guessed, token_id in zip(self._guess, self._token_ids[self._num_read :], strict=False):
            self.accuracy = moved(self.accuracy, is_right=guessed == token_id)
            if guessed != token_id:
                break
        self._num_read = len(self._token_ids)
        self._guess = list(self._function(self._token_ids))[:MAX_DRAFT]
        return True

    @property
    def has_guess(self) -> bool:
        return bool(self._guess)

    def propose(self, num_tokens: int) -> list[int]:
        return self._guess[:num_tokens]


def moved(accuracy: float, *, is_right: bool) -> float:
    """The moving average after one more guess."""
    return MEMORY * accuracy + (1 - MEMORY) * is_right


class GuardedProposer(SequenceProposer):
    """A plug-in's proposer: after an error, or an id that is not a token, it proposes nothing more for its sequence."""

    def __init__(self, proposer: Proposer, sequence: DraftedSequence, vocab_size: int, name: str) -> None:
        self._proposer: SequenceProposer | None = None
        self._vocab_size = vocab_size
        self._name = name
        self._draft: list[int] = []
        try:
            self._proposer = proposer.begin(sequence)
        except Exception:
            self._fail()

    def read(self) -> bool:
        if self._proposer is None:
            return True
        self._draft = []
        try:
            if not self._proposer.read():
                return False
            self.accuracy = float(self._proposer.accuracy)
            if self._proposer.has_guess:
                self._draft = self._checked(self._proposer.propose(MAX_DRAFT))
        except Exception:
            self._fail()
        return True

    def _fail(self) -> None:
        logger.exception("The proposer %r failed: its sequence gets no more draft tokens", self._name)
        self._proposer = None

    def _checked(self, draft: list[int]) -> list[int]:
        for token_id in draft:
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(f"it proposed {token_id!r}, and token ids are from 0 to {self._vocab_size - 1}")
        return draft[:MAX_DRAFT]

    @property
    def has_guess(self) -> bool:
        return bool(self._draft)

    def propose(self, num_tokens: int) -> list[int]:
        return self._draft[:num_tokens]

    def end(self, num_known_tokens: int) -> None:
        if self._proposer is not None:
            try:
                self._proposer.end(num_known_tokens)
            except Exception:
                self._fail()
