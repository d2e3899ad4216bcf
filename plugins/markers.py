"""Finds a format's markers in streamed text, however the stream cuts them, for every parser."""

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

from penstock.engine.contracts.parsing import Event, SpecialText, Text, Turn
from penstock.engine.text.streaming import PatternState


def split_symbols(marker: str, added_tokens: frozenset[str]) -> list[str]:
    """The added tokens in a marker, each as `SpecialText`, and the single characters of the rest."""
    tokens = sorted((token for token in added_tokens if token and token in marker), key=len, reverse=True)
    if not tokens:
        return list(marker)
    symbols: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", marker):
        symbols.extend([SpecialText(part)] if part in added_tokens else part)
    return symbols


def _key(symbol: str) -> str:
    """An added token in brackets, which no character of plain text equals even where the token is a single one."""
    return f"[{symbol}]" if isinstance(symbol, SpecialText) else symbol


@lru_cache(maxsize=256)
def compile_markers(markers: tuple[str, ...], added_tokens: frozenset[str]) -> PatternState[str]:
    """The initial state over these markers, made once for all answers.

    The symbols are characters of plain text and whole added tokens: a marker that is one is a single symbol that no plain text matches.
    """
    return PatternState([[_key(symbol) for symbol in split_symbols(marker, added_tokens)] for marker in markers])


_SPACE = " \t\r\n"
_SUFFIXED = re.compile(r"</?(?:think|tool_calls)([^<>\s]*)>")


class MarkerBuffer:
    """Buffers streamed text and splits it at markers; keeps at most a partial marker.

    Of several markers the one that is complete first counts, and of two that end together the longer. Text is returned as pieces: every
    `SpecialText` by itself, in order. A marker in `added_tokens` matches only such a piece; any other matches plain text.
    """

    def __init__(self, added_tokens: frozenset[str] = frozenset()) -> None:
        self._added_tokens = added_tokens
        self._initials: dict[tuple[str, ...], PatternState[str]] = {}  # by the markers that are looked for
        self._initial = self._state = compile_markers((), added_tokens)
        self._held: list[str] = []  # as many symbols as the depth of the state: they may yet become a marker
        self._space: list[str] = []  # white space before a marker that `take_start` is waiting for
        self._unread: deque[str] = deque()
        self._offset = 0  # into the first unread piece, so that a long one is never copied
        self.marker_pieces: list[str] = []
        """The last marker as it came: in several pieces where it holds added tokens and other text."""

    def feed(self, piece: str) -> None:
        """Adds text as it arrived. A `SpecialText` is a separate piece."""
        if piece:
            self._unread.append(piece)

    def take_until(self, *markers: str) -> tuple[list[str], str | None]:
        """The pieces before the first marker, and that marker as it arrived, which is consumed too; None if no marker has arrived yet."""
        assert not self._space, "take_start has not decided yet"
        self._use(markers)
        taken: list[str] = []
        while (piece := self.peek()) is not None:
            start = self._offset
            if isinstance(piece, SpecialText):
                state, self._offset, num_symbols = self._state.step(_key(piece)), len(piece), 1
            else:
                state, self._offset = self._state.read(piece, start, len(piece))
                num_symbols = self._offset - start
                piece = piece[start : self._offset]
            if state is self._state is self._initial:
                taken.append(piece)
                continue
            self._held.append(piece)
            self._release(self._state.depth + num_symbols - state.num_held, taken)
            self._state = state
            if state.found is not None:
                return join_pieces(taken), self._take_marker()
        return join_pieces(taken), None

    def _take_marker(self) -> str:
        self.marker_pieces = join_pieces(self._held)
        self._state = self._initial
        self._held = []
        return self.marker_pieces[0] if len(self.marker_pieces) == 1 else "".join(self.marker_pieces)

    def _release(self, num_symbols: int, taken: list[str]) -> None:
        """Moves the first of the symbols held to `taken`."""
        while num_symbols:
            piece = self._held.pop(0)
            length = 1 if isinstance(piece, SpecialText) else len(piece)
            if length > num_symbols:
                self._held.insert(0, piece[num_symbols:])
                piece, length = piece[:num_symbols], num_symbols
            taken.append(piece)
            num_symbols -= length

    def take_start(self, *markers: str) -> tuple[list[str], str | None] | None:
        """White space and the marker right after it; the marker is None if other text follows, which is left in the buffer.

        None altogether while undecided: so far there is only white space and perhaps part of a marker.
        """
        self._use(markers)
        while (piece := self.peek()) is not None:
            symbol = piece if isinstance(piece, SpecialText) else piece[self._offset]
            if self._state is self._initial and symbol.isspace():
                self._space.append(symbol)
                self._offset += len(symbol)
                continue
            state = self._state.step(_key(symbol))
            if state.depth <= self._state.depth:
                self._restart()
                return self._take_space(), None
            self._offset += len(symbol)
            self._held = join_pieces([*self._held, symbol])
            self._state = state
            if state.found is not None and len(state.found) == state.depth:
                return self._take_space(), self._take_marker()
        return None

    def _take_space(self) -> list[str]:
        space, self._space = self._space, []
        return join_pieces(space)

    def peek(self) -> str | None:
        """The first unread piece whole, of which `skip` has passed `offset` characters; None where all has been read."""
        while self._unread and self._offset >= len(self._unread[0]):
            self._unread.popleft()
            self._offset = 0
        return self._unread[0] if self._unread else None

    @property
    def offset(self) -> int:
        return self._offset

    def skip(self, num_characters: int) -> None:
        """Takes characters of the piece that `peek` returned, for a parser that reads a stretch by itself, while no partial
        marker is buffered.

        The rest of an added token that is taken in part is plain text.
        """
        assert not self._held
        assert not self._space
        self._offset += num_characters
        if num_characters and isinstance(self._unread[0], SpecialText):
            self._unread[0] = self._unread[0][self._offset :]
            self._offset = 0

    def put_back(self, pieces: list[str]) -> None:
        """Puts pieces that were taken in front again, to be read anew."""
        self._restart()
        self._put_in_front([*pieces, *self._take_space()])

    def finish(self) -> list[str]:
        """The rest of the text."""
        self._restart()
        rest = self._take_space()
        while (piece := self.peek()) is not None:
            rest.append(piece if isinstance(piece, SpecialText) else piece[self._offset :])
            self._offset = len(piece)
        return join_pieces(rest)

    def _use(self, markers: tuple[str, ...]) -> None:
        initial = self._initials.get(markers)
        if initial is None:
            initial = self._initials[markers] = compile_markers(markers, self._added_tokens)
        if initial is not self._initial:
            self._initial = initial
            self._restart()

    def _restart(self) -> None:
        # Puts the buffered text back in front: other markers are searched for from here on, so it must be read again.
        self._state = self._initial
        self._put_in_front(self._held)
        self._held.clear()

    def _put_in_front(self, pieces: list[str]) -> None:
        if not pieces:
            return
        if self._offset:
            rest = self._unread.popleft()[self._offset :]
            self._offset = 0
            if rest:
                self._unread.appendleft(rest)
        self._unread.extendleft(reversed(pieces))


def is_cut_marker(pieces: list[str], *markers: str) -> bool:
    """Whether an answer that ends in these pieces was cut within one of the markers, or before it; leading white space is ignored."""
    text = "".join(pieces).lstrip()
    return any(marker.startswith(text) for marker in markers) or not text


def join_pieces(pieces: list[str]) -> list[str]:
    """The same pieces with plain text joined to plain text."""
    if len(pieces) < 2:
        return pieces
    if SpecialText not in map(type, pieces):
        return ["".join(pieces)]
    joined: list[str] = []
    for is_special, run in groupby(pieces, key=lambda piece: isinstance(piece, SpecialText)):
        texts = list(run)
        joined += texts if is_special else ["".join(texts)]
    return joined


class Waiting(Exception):
    """More text has to come before a step can be taken."""


class StepBuffer(MarkerBuffer):
    """A buffer for state machines, whose steps simply ask for what comes next: one that needs more text than there is ends in `Waiting`.

    It is taken again when more has come, so it changes nothing before that but by `until`.
    """

    def start(self, *markers: str) -> tuple[list[str], str | None]:
        """As `take_start`. Raises `Waiting` while undecided."""
        start = self.take_start(*markers)
        if start is None:
            raise Waiting
        return start

    def until(self, take: Callable[[str], object], *markers: str) -> str:
        """Gives `take` each piece before the first marker, and returns that. Raises `Waiting` where no marker has come yet."""
        pieces, marker = self.take_until(*markers)
        for piece in pieces:
            take(piece)
        if marker is None:
            raise Waiting
        return marker

    def next_piece(self) -> str:
        """As `peek`. Raises `Waiting` where all has been read."""
        piece = self.peek()
        if piece is None:
            raise Waiting
        return piece

    @staticmethod
    def run(step: Callable[[list[Event]], object]) -> list[Event]:
        """The events of as many steps as can be taken. Where steps change which is next, `step` looks that up."""
        events: list[Event] = []
        try:
            while True:
                step(events)
        except Waiting:
            return events


def text_into(events: list[Event]) -> Callable[[str], None]:
    """Adds a piece to the events as text."""
    return lambda piece: events.append(Text(piece))


class EdgeSpace:
    """Emits a stretch of text without the white space before it, where `drops_leading`, and holds back what may be that at its end."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._has_text = False

    def take(self, pieces: list[str], *, drops_leading: bool) -> list[str]:
        """What of the stretch so far is certain."""
        certain: list[str] = []
        for piece in pieces:
            text = piece if isinstance(piece, SpecialText) else piece.rstrip(_SPACE)
            space = piece[len(text) :]
            if text and drops_leading and not self._has_text:
                self._held.clear()
                text = text if isinstance(text, SpecialText) else text.lstrip(_SPACE)
            if text:
                certain += [*self._held, text]
                self._held.clear()
                self._has_text = True
            if space:
                self._held.append(space)
        return certain

    def end(self, *, drops_trailing: bool) -> list[str]:
        """A marker ends the stretch: what of the held white space is text. It never is where there is nothing else."""
        kept = [] if drops_trailing or not self._has_text else self._held
        self._held = []
        self._has_text = False
        return kept

    def finish(self) -> list[str]:
        """All that is held."""
        held, self._held = self._held, []
        return held


def marker_suffix(turn: Turn) -> str:
    """The suffix that a checkpoint adds to the names of all its markers: `<think:opensource>`, `<tool_calls:opensource>`.

    That of a marker at the end of the prompt, or else of one in the vocabulary; empty where neither has any.
    """
    found = _SUFFIXED.search(turn.prompt_tail) or next(filter(None, map(_SUFFIXED.fullmatch, sorted(turn.added_tokens))), None)
    return "" if found is None else found[1]
