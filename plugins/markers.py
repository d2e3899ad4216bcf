"""Finds a format's markers in streamed text, however the stream cuts them, for every parser."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

from penstock.engine.contracts.parsing import Event, SpecialText, Text, Turn


class MarkerAutomaton:
    """Aho-Corasick over a set of markers (Aho and Corasick, 1975): each symbol of the text is read once, however many markers there are.

    A symbol is one character of plain text or one whole `SpecialText`. A marker is split into symbols at the vocabulary's added tokens, so
    one that is an added token is a single symbol that no plain text matches. State 0 is the root; `depths[s]` symbols are held in state s.
    """

    def __init__(self, markers: Sequence[str], added_tokens: frozenset[str]) -> None:
        self._texts: list[dict[str, int]] = [{}]
        self._specials: list[dict[str, int]] = [{}]
        self._fails = [0]
        self.depths = [0]
        self.found: list[tuple[str, int] | None] = [None]  # the marker that ends in this state, and its length in symbols
        for marker in markers:
            self._add(marker, split_symbols(marker, added_tokens))
        self._link()
        firsts = "".join(map(re.escape, self._texts[0]))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def __deepcopy__(self, memo: object) -> "MarkerAutomaton":
        return self  # immutable

    def _add(self, marker: str, symbols: list[str]) -> None:
        state = 0
        for symbol in symbols:
            children = self._children(state, symbol)
            if symbol not in children:
                children[symbol] = len(self.depths)
                self._texts.append({})
                self._specials.append({})
                self._fails.append(0)
                self.depths.append(self.depths[state] + 1)
                self.found.append(None)
            state = children[symbol]
        self.found[state] = (marker, len(symbols))

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for children in (self._texts[state], self._specials[state]):
                for symbol, child in children.items():
                    if state:
                        self._fails[child] = self.step(self._fails[state], symbol)
                    self.found[child] = self.found[child] or self.found[self._fails[child]]
                    waiting.append(child)

    def _children(self, state: int, symbol: str) -> dict[str, int]:
        return (self._specials if isinstance(symbol, SpecialText) else self._texts)[state]

    def step(self, state: int, symbol: str) -> int:
        """The state after one more symbol."""
        table = self._specials if isinstance(symbol, SpecialText) else self._texts
        while symbol not in table[state]:
            if not state:
                return 0
            state = self._fails[state]
        return table[state][symbol]


def split_symbols(marker: str, added_tokens: frozenset[str]) -> list[str]:
    """The added tokens in a marker, each as `SpecialText`, and the single characters of the rest."""
    tokens = sorted((token for token in added_tokens if token and token in marker), key=len, reverse=True)
    if not tokens:
        return list(marker)
    symbols: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", marker):
        symbols.extend([SpecialText(part)] if part in added_tokens else part)
    return symbols


@lru_cache(maxsize=256)
def compile_markers(markers: tuple[str, ...], added_tokens: frozenset[str]) -> MarkerAutomaton:
    """The automaton for these markers, made once for all answers."""
    assert all(markers), "a marker is not empty"
    return MarkerAutomaton(markers, added_tokens)


_SPACE = " \t\r\n"
_SUFFIXED = re.compile(r"</?(?:think|tool_calls)([^<>\s]*)>")


class MarkerBuffer:
    """Buffers streamed text and splits it at markers; holds back at most a partial marker.

    Of several markers the one that is complete first counts, and of two that end together the longer. Text comes out as pieces: every
    `SpecialText` by itself, in order. A marker that `added_tokens` holds matches only such a piece; any other matches plain text.
    """

    def __init__(self, added_tokens: frozenset[str] = frozenset()) -> None:
        self._added_tokens = added_tokens
        self._automata: dict[tuple[str, ...], MarkerAutomaton] = {}
        self._automaton: MarkerAutomaton | None = None
        self._state = 0
        self._held: list[str] = []  # as many symbols as the depth of the state: they may yet become a marker
        self._space: list[str] = []  # white space before a marker that `take_start` is waiting for
        self._unread: deque[str] = deque()
        self._offset = 0  # into the first unread piece, so that a long one is never copied
        self.marker_pieces: list[str] = []
        """The last marker as it came: in several pieces where it holds added tokens and other text."""

    def feed(self, piece: str) -> None:
        """Adds text as it arrived. A `SpecialText` is a piece of its own."""
        if piece:
            self._unread.append(piece)

    def take_until(self, *markers: str) -> tuple[list[str], str | None]:
        """The pieces before the first marker, and that marker as it came, which is used up too; None where no marker has come yet."""
        assert not self._space, "take_start has not decided yet"
        automaton = self._use(markers)
        taken: list[str] = []
        while (piece := self.peek()) is not None:
            if isinstance(piece, SpecialText):
                self._offset = len(piece)
                self._held.append(piece)
                self._move(automaton, automaton.step(self._state, piece), 1, taken)
            else:
                self._read(automaton, piece, taken)
            found = automaton.found[self._state]
            if found is not None:
                return join_pieces(taken), self._take_marker(found[0])
        return join_pieces(taken), None

    def _take_marker(self, marker: str) -> str:
        self.marker_pieces = join_pieces(self._held)
        self._state = 0
        self._held = []
        return self.marker_pieces[0] if len(self.marker_pieces) == 1 else marker

    def _read(self, automaton: MarkerAutomaton, piece: str, taken: list[str]) -> None:
        """Reads plain text to its end, or to the end of the first marker."""
        start = self._offset
        position = start
        state = self._state
        while position < len(piece):
            if state == 0:
                first = automaton.first.search(piece, position)
                if first is None:
                    position = len(piece)
                    break
                position = first.start()
            state = automaton.step(state, piece[position])
            position += 1
            if automaton.found[state] is not None:
                break
        self._offset = position
        num_symbols = position - start
        num_kept = self._num_kept(automaton, state)
        if num_kept < num_symbols:  # the symbols held before are text
            taken.extend(self._held)
            self._held.clear()
            taken.append(piece[start : position - num_kept])
            if num_kept:
                self._held.append(piece[position - num_kept : position])
            self._state = state
        else:
            self._held.append(piece[start:position])
            self._held = join_pieces(self._held)
            self._move(automaton, state, num_symbols, taken)

    def _move(self, automaton: MarkerAutomaton, state: int, num_symbols: int, taken: list[str]) -> None:
        """Enters `state` with `num_symbols` more held, and releases those that the state does not hold."""
        surplus = automaton.depths[self._state] + num_symbols - self._num_kept(automaton, state)
        while surplus > 0:
            piece = self._held.pop(0)
            num_symbols = 1 if isinstance(piece, SpecialText) else len(piece)
            if num_symbols > surplus:
                self._held.insert(0, piece[surplus:])
                piece = piece[:surplus]
            taken.append(piece)
            surplus -= num_symbols
        self._state = state

    @staticmethod
    def _num_kept(automaton: MarkerAutomaton, state: int) -> int:
        found = automaton.found[state]
        return found[1] if found is not None else automaton.depths[state]

    def take_start(self, *markers: str) -> tuple[list[str], str | None] | None:
        """White space and the marker right after it; the marker is None where something else follows, which is left in the buffer.

        None altogether while undecided: so far there is only white space and perhaps part of a marker.
        """
        automaton = self._use(markers)
        while (piece := self.peek()) is not None:
            symbol = piece if isinstance(piece, SpecialText) else piece[self._offset]
            if not self._state and symbol.isspace():
                self._space.append(symbol)
                self._offset += len(symbol)
                continue
            state = automaton.step(self._state, symbol)
            if automaton.depths[state] <= automaton.depths[self._state]:
                self._restart()
                return self._take_space(), None
            self._offset += len(symbol)
            self._held = join_pieces([*self._held, symbol])
            self._state = state
            if automaton.depths[state] == self._num_kept(automaton, state) and (found := automaton.found[state]):
                return self._take_space(), self._take_marker(found[0])
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
        """Takes characters of the piece that `peek` gave, for a parser that reads a stretch by itself. Nothing may be held back then.

        What is left of an added token that is taken in part is plain text.
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
        """Everything that is left."""
        self._restart()
        rest = self._take_space()
        while (piece := self.peek()) is not None:
            rest.append(piece if isinstance(piece, SpecialText) else piece[self._offset :])
            self._offset = len(piece)
        return join_pieces(rest)

    def _use(self, markers: tuple[str, ...]) -> MarkerAutomaton:
        automaton = self._automata.get(markers)
        if automaton is None:
            automaton = self._automata[markers] = compile_markers(markers, self._added_tokens)
        if automaton is not self._automaton:
            self._restart()
            self._automaton = automaton
        return automaton

    def _restart(self) -> None:
        """Puts what is held back in front again: other markers are looked for from here on, so it has to be read under those."""
        self._state = 0
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
