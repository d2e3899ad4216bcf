"""Stop strings in an answer's text, and stop sequences in its tokens."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence

from penstock.engine.contracts.parsing import Parser, SpecialText, Text
from penstock.engine.text.patterns import compile_sequences, compile_strings


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
