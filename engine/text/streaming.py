"""Incremental reading of an output, token by token: its text, as far as that is certain; search for several patterns at once; stop strings
and stop sequences, found by it; and outputs that repeat themselves.
"""

import codecs
import copy
import re
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from msgspec import Struct

from penstock.engine.contracts.parsing import Parser, SpecialText, Text
from penstock.engine.errors import InvalidRequest

if TYPE_CHECKING:  # imports the library of tokenizers, which a command's help does without
    from penstock.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are no character
_CONTEXT = 6  # ids kept as context: more than the four that one character can be spread over
_LONGEST_CHARACTER = 4  # bytes, hence tokens


class Detokenizer:
    """Incremental detokenization at a constant cost per token.

    The pieces joined are what decoding prompt and output together, special tokens included, adds to the decoded prompt. An added token's
    text is a `SpecialText` of its own; a character spread over several tokens comes out whole. One difference is meant: where byte tokens
    do not spell UTF-8, the library's byte fallback also removes the whole characters before them; here those stay, as they have been sent.

    `prompt_tail_ids`: the prompt, or at least its last few ids; empty only where the prompt is.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt_tail_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._whole_texts = tokenizer.whole_texts
        tail = list(prompt_tail_ids[-_CONTEXT:])
        self._text: _ByteText | _WindowText
        if tokenizer.table.is_opaque:
            self._text = _WindowText(tokenizer, tail)
        else:
            self._text = _ByteText(tokenizer, tail)
        self._is_between_characters = self._text.is_between_characters

    def whole_text(self, token_id: int) -> Text | None:
        """What the token adds, where that is known from the token alone: then it is not to be fed. None where it has to be."""
        return self._whole_texts[token_id] if self._is_between_characters else None

    def feed(self, token_id: int) -> list[str]:
        """The pieces of text that are certain now. None is empty; a `SpecialText` is a piece of its own."""
        whole = self.whole_text(token_id)
        if whole is not None:
            return [whole.text]
        token = self._tokenizer.token(token_id)
        if token is None:
            return []  # logits may be wider than the vocabulary
        text = self._text.feed(token)
        self._is_between_characters = self._text.is_between_characters
        added = self._tokenizer.added_tokens.get(token_id)
        if added is None or not text.endswith(added.text):
            return [text] if text else []
        # Before the token's own text: a character that stays incomplete, or the space that some decoders put between tokens.
        before = text.removesuffix(added.text)
        special = SpecialText(added.text, is_hidden=added.is_special)
        return [before, special] if before else [special]

    def copy(self) -> "Detokenizer":
        """An independent copy."""
        other = copy.copy(self)
        other._text = self._text.copy()
        return other

    def has_added(self, text: str) -> bool:
        """Whether the vocabulary holds the text as a token of its own."""
        return text in self._tokenizer.added_texts

    def after(self, token_ids: Sequence[int]) -> "Detokenizer":
        """A detokenizer of what follows these tokens, whose text has been read otherwise."""
        return Detokenizer(self._tokenizer, token_ids)

    def finish(self) -> list[str]:
        """Generation is over: bytes that never became a character are U+FFFD."""
        held = self._text.flush()
        return [held] if held else []


class _ByteText:
    """Text from the table's bytes."""

    def __init__(self, tokenizer: "Tokenizer", prompt_tail_ids: list[int]) -> None:
        self._table = tokenizer.table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._has_shown_start = False
        for token_id in prompt_tail_ids:
            token = tokenizer.token(token_id)
            if token is not None:
                self.feed(token)
        # A character that the prompt leaves open was shown there as U+FFFD, so it is not shown again when it is complete.
        self._has_shown_start = bool(self._decoder.getstate()[0])

    @property
    def is_between_characters(self) -> bool:
        return not (self._is_first or self._has_shown_start or self._decoder.getstate()[0])

    def feed(self, token: str) -> str:
        text = self._decoder.decode(self._table.bytes_of(token, self._is_first))
        self._is_first = False
        return self._without_shown(text)

    def copy(self) -> "_ByteText":
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def flush(self) -> str:
        return self._without_shown(self._decoder.decode(b"", final=True))

    def _without_shown(self, text: str) -> str:
        if not text or not self._has_shown_start:
            return text
        self._has_shown_start = False
        return text[1:]


class _WindowText:
    """Text from decoding a bounded window of tokens, for decoders whose tokens say little alone."""

    is_between_characters = False  # not known

    def __init__(self, tokenizer: "Tokenizer", prompt_tail_ids: list[int]) -> None:
        self._table = tokenizer.table
        tokens = [tokenizer.token(token_id) for token_id in prompt_tail_ids]
        self._context = [token for token in tokens if token is not None]
        self._pending: list[str] = []

    def feed(self, token: str) -> str:
        self._pending.append(token)
        after = self._table.decode(self._context + self._pending)
        if after.endswith(REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._release(after)

    def copy(self) -> "_WindowText":
        other = copy.copy(self)
        other._pending = self._pending.copy()  # the context is never changed in place
        return other

    def flush(self) -> str:
        return self._release(self._table.decode(self._context + self._pending)) if self._pending else ""

    def _release(self, after: str) -> str:
        before = self._table.decode(self._context) if self._context else ""
        self._context = (self._context + self._pending)[-_CONTEXT:]
        self._pending = []
        return after[len(before) :]


Symbol = TypeVar("Symbol", bound=Hashable)
MAX_PATTERN_SIZE = 4096  # tokens
MAX_PATTERN_COUNT = 4096
PROBES = (2, 3, 4, 7, 12)  # of the last tokens, which are compared first: in a list of numbers each second token may be a comma


class PatternState(Generic[Symbol]):
    """A state of the automaton of Aho and Corasick ("Efficient string matching", 1975); `PatternState(patterns)` is the initial one.

    Each symbol, a character or a token id, is read once, however many patterns there are. A state never changes for its users, so a
    reader that keeps a reference to its state can be copied and rolled back. States are made when a text first reaches them: thousands
    of long patterns cost little where the text has nothing of them.
    """

    __slots__ = ("_children", "_failure", "_first", "_initial", "_last_symbols", "_longer", "depth", "found", "num_held", "num_pending")

    def __init__(
        self,
        patterns: Sequence[Sequence[Symbol]],
        *,
        depth: int = 0,
        failure: "PatternState[Symbol] | None" = None,
        initial: "PatternState[Symbol] | None" = None,
    ) -> None:
        assert all(patterns), "a pattern is not empty"
        self._failure = failure  # the state of the longest proper suffix that is a beginning of a pattern
        self._initial: PatternState[Symbol] = initial or self
        self._longer = [pattern for pattern in patterns if len(pattern) > depth]
        self._children: dict[Symbol, PatternState[Symbol]] | None = None
        self._last_symbols: list[Symbol] = []  # those that complete a pattern from here
        self.depth = depth
        """The length of the longest beginning of a pattern that the symbols so far end with; it may be the whole pattern."""
        self.found: Sequence[Symbol] | None = None if failure is None else failure.found
        """The longest pattern that the symbols so far end with."""
        self.num_pending: int = depth if self._longer or failure is None else failure.num_pending
        """How many of the last symbols may become a match with those that follow."""
        if len(self._longer) < len(patterns):
            self.found = next(pattern for pattern in patterns if len(pattern) == depth)
        self.num_held: int = depth if self.found is None else len(self.found)
        """How many of the last symbols are the match that was found or, without a match, may become one."""
        if initial is None:
            firsts = {re.escape(pattern[0]) for pattern in patterns if isinstance(pattern[0], str) and len(pattern[0]) == 1}
            self._first = re.compile("|".join(firsts) or r"(?!)")  # a set of characters, as `re` compiles it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def has_patterns(self) -> bool:
        """Whether anything can be found at all."""
        return bool(self._initial._longer)

    @property
    def completing(self) -> list[Symbol]:
        """The symbols of which each would complete a pattern now."""
        if self._children is None:
            self._expand()
        symbols, state = self._last_symbols.copy(), self._failure
        while state is not None:
            symbols += state._last_symbols
            state = state._failure
        return symbols

    @property
    def completing_after(self) -> list[tuple[Symbol, Symbol]]:
        """Pairs of a symbol that may come next, and one that would complete a longer pattern after it."""
        state: PatternState[Symbol] | None = self
        pairs: dict[tuple[Symbol, Symbol], None] = {}
        alone = set(self._initial.completing)
        while state is not None:
            for symbol in state._expand() if state._children is None else state._children:
                pairs |= dict.fromkeys((symbol, last) for last in self.step(symbol).completing if last not in alone)
            state = state._failure
        return list(pairs)

    def step(self, symbol: Symbol) -> "PatternState[Symbol]":
        """The state after one more symbol."""
        state = self
        while True:
            children = state._children
            if children is None:
                children = state._expand()
            child = children.get(symbol)
            if child is not None:
                return child
            if state._failure is None:
                return state
            state = state._failure

    def read(self: "PatternState[str]", text: str, start: int, end: int) -> "tuple[PatternState[str], int]":
        """Reads characters from `start` to `end`, or to the end of the first match: the state there, and the position."""
        state, initial = self, self._initial
        while start < end:
            if state is initial:
                first = initial._first.search(text, start, end)
                if first is None:
                    return initial, end
                start = first.start()
            state = state.step(text[start])
            start += 1
            if state.found is not None:
                break
        return state, start

    def _expand(self) -> "dict[Symbol, PatternState[Symbol]]":
        # The children of a state need those of its failure state, which is less deep: made in this order, there is no recursion.
        # Threads that do so at the same time make equal states, and it makes no difference which of them stay.
        states = [self]
        while (failure := states[-1]._failure) is not None and failure._children is None:
            states.append(failure)
        while states:
            children = states.pop()._make_children()
        return children

    def _make_children(self) -> "dict[Symbol, PatternState[Symbol]]":
        groups: dict[Symbol, list[Sequence[Symbol]]] = {}
        for pattern in self._longer:
            groups.setdefault(pattern[self.depth], []).append(pattern)
        initial, depth = self._initial, self.depth + 1
        self._last_symbols = list({pattern[-1]: None for pattern in self._longer if len(pattern) == depth})
        self._children = {
            symbol: PatternState(
                group, depth=depth, failure=initial if self._failure is None else self._failure.step(symbol), initial=initial
            )
            for symbol, group in groups.items()
        }
        return self._children


@lru_cache(maxsize=16)  # the n sequences of a request share theirs
def compile_strings(strings: tuple[str, ...]) -> PatternState[str]:
    """The initial state over the characters of these strings."""
    return PatternState(strings)


@lru_cache(maxsize=16)
def compile_sequences(sequences: tuple[tuple[int, ...], ...]) -> PatternState[int]:
    """The initial state over these sequences of token ids."""
    return PatternState(sequences)


class StopStrings(Parser):
    """A parser that ends the text at the first stop string to be complete, and gives nothing out after it.

    Of several that end at the same character the longest wins; `match` is the winner. So nothing depends on how the text was cut, and no
    token is waited for once a stop string is there. Held back is only what may yet become one. Hidden special tokens are no text while
    `skip_special_tokens` is on: they pass by in their place, and a stop string may lie across them. Any other added token is text.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False, *, skip_special_tokens: bool = True) -> None:
        self.match: str | None = None
        self.is_armed = True
        """While it is off, a stop string that becomes complete is text like any other."""
        self._include_in_output = include_in_output
        self._skip_special_tokens = skip_special_tokens
        self._initial = self._state = compile_strings(tuple(stop))
        self._held: deque[str] = deque()
        self._num_held = 0  # characters in `_held`, hidden pieces not counted

    def feed(self, text: str) -> list[Text]:
        if self.match is not None:
            return []
        if self._is_hidden(text):
            self._held.append(text)
            return self._release(0)
        state, position, end = self._state, 0, len(text)
        while position < end:
            state, position = state.read(text, position, end)
            if state.found is not None and self.is_armed:
                self._hold(text[:position] if position < end else text)
                return self._end("".join(state.found))
        self._state = state
        if not self._held and not state.num_pending:
            return [Text(text)]
        self._hold(text)
        return self._release(self._num_held - state.num_pending)

    def copy(self) -> "StopStrings":
        """An independent copy."""
        other = copy.copy(self)
        other._held = self._held.copy()
        return other

    def finish(self) -> list[Text]:
        if self.match is not None:
            return []
        self._state = self._initial
        return self._release(self._num_held)

    def _end(self, match: str) -> list[Text]:
        self.match = match
        released = self._release(self._num_held - (0 if self._include_in_output else len(match)), is_last=True)
        self._held.clear()
        return released

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _release(self, num_characters: int, *, is_last: bool = False) -> list[Text]:
        """Gives out the first of the characters held, with the hidden pieces there. Only the last cut may go through an added token."""
        released: list[Text] = []
        while self._held:
            length = 0 if self._is_hidden(self._held[0]) else len(self._held[0])
            if length > num_characters:
                break
            released.append(Text(self._held.popleft()))
            num_characters -= length
            self._num_held -= length
        if num_characters and (is_last or not isinstance(self._held[0], SpecialText)):
            piece = self._held.popleft()
            released.append(Text(piece[:num_characters]))
            self._held.appendleft(piece[num_characters:])
            self._num_held -= num_characters
        return released

    def _is_hidden(self, piece: str) -> bool:
        return isinstance(piece, SpecialText) and piece.is_hidden and self._skip_special_tokens


class StopSequences:
    """Watches an output for several token sequences. A sequence that is complete before `min_tokens` tokens ends nothing.

    One that begins in the prompt is not found. Once `match` is set, nothing is to be appended.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], min_tokens: int = 0) -> None:
        self._state = compile_sequences(tuple(tuple(sequence) for sequence in sequences if sequence))
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.match: tuple[int, ...] | None = None
        """The sequence that the output ends with; the longest where it ends with several."""

    def append(self, token_id: int) -> None:
        assert self.match is None, "the output ended at a stop sequence"
        self._num_tokens += 1
        self._state = self._state.step(token_id)
        if self._state.found is not None and self._num_tokens >= self._min_tokens:
            self.match = tuple(self._state.found)

    def copy(self) -> "StopSequences":
        """An independent copy."""
        return copy.copy(self)

    @property
    def num_pending(self) -> int:
        """How many of the last tokens may yet be the beginning of a sequence."""
        return self._state.num_pending


class RepetitionDetection(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: an output repeats itself once its last tokens are `min_count` times the same pattern.

    A pattern has from `min_pattern_size` (0 is 1) to `max_pattern_size` tokens; where that is 0, nothing is detected.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def check(self) -> None:
        """Raises `InvalidRequest` naming the field that is out of range."""
        for name, low, high in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", 2 if self.max_pattern_size else 0, MAX_PATTERN_COUNT),
        ):
            path, value = f"repetition_detection.{name}", getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidRequest(f"`{path}` must be an integer from {low} to {high}, got {value!r}", path)

    def finds(self, token_ids: list[int], start: int = 0) -> bool:
        """Whether the tokens from `start` on end with a pattern that is repeated often enough."""
        if not self.max_pattern_size or len(token_ids) - start < self.min_count * max(self.min_pattern_size, 1):
            return False
        # A pattern repeats the last token: where that is not found at the pattern's distance, nothing has to be compared.
        before = token_ids[max(start, len(token_ids) - 1 - self.max_pattern_size) : -1][::-1]
        size = 0
        while True:
            try:
                size = before.index(token_ids[-1], size) + 1
            except ValueError:
                return False
            num_repeated = self.min_count * size
            if num_repeated > len(token_ids) - start:
                return False
            if size < self.min_pattern_size or any(token_ids[-place] != token_ids[-place - size] for place in PROBES if place <= size):
                continue
            if token_ids[-num_repeated:-size] == token_ids[size - num_repeated :]:
                return True
