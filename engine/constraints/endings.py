"""Short endings: from a place in a grammar, the tokens with which the text may end soonest, found by walking masks."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.contracts.grammar import GrammarMatcher, Vocabulary

Ending: TypeAlias = tuple[int, ...]
"""The tokens to the end of an answer. The last is a stop token, unless the grammar is finished without one."""
Mask: TypeAlias = npt.NDArray[np.bool_]
Ids: TypeAlias = npt.NDArray[np.int64]

MAX_SECONDS = 0.4  # of the processor, in one search
MAX_ENDING = 512  # tokens
WIDTHS = (1, 4, 16)  # how many places of each length are gone on from: more where fewer find nothing short enough
MAX_TOKEN_BYTES = 48
MAX_FEW = 24  # allowed tokens that are all candidates, as where one of several keys or values begins
SEEN_COST = 0.5
SAME_COST = 0.5
RANK_COST = 0.25
MAX_RANK = 4
LETTER = b"z"  # begins no value of JSON: where it is allowed, text is being written

_BRACKETS = frozenset(b"}]")
_CLOSERS = frozenset(b'"}]')
_MARKS = frozenset(b'"}],: ')
_DIGITS = tuple(b"%d" % digit for digit in range(10))
_VALUES = (b'""', b"[]", b"{}", b"null", b"true", b"false")
_OPENERS = (b'"', b"-", b"n", b"t", b"f", b"{", b"[")
_ENDS_OF_TEXT = (b".", b"\n", b"'", b")", b">", b";", b"!", b"?", b"/", b",", b" ", b"a", b"0", b"A", b"_", b"-", b":", b"@")


class EndingTokens:
    """Which tokens of a vocabulary end texts soonest.

    `stops` are its stop tokens, and `by_bytes` the others that are text. Tokens that are closest to an end come first: of JSON, those that
    close values, then those that are whole values, separators, and the beginnings of values; of what is in between, whatever gets farthest.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        self.stops: Ids = _array(sorted(stop for stop in vocabulary.stop_token_ids if stop < vocabulary.size))
        texts = [
            (token_id, data)
            for token_id, data in enumerate(vocabulary.token_bytes[: vocabulary.size])
            if data and len(data) <= MAX_TOKEN_BYTES and token_id not in vocabulary.stop_token_ids
        ]
        texts.sort(key=lambda text: -len(text[1]))
        by_bytes = self.by_bytes = {data: token_id for token_id, data in reversed(texts)}
        self._letter = by_bytes.get(LETTER)
        every = [(token_id, data) for token_id, data in enumerate(vocabulary.token_bytes[: vocabulary.size]) if data]
        self.max_opened = max((_num_opened(data) for _, data in every), default=0)
        """How many values within each other one token begins at most."""
        closing = ((token_id, data.count(b"}") + data.count(b"]")) for token_id, data in every)
        self._num_closed = {token_id: number for token_id, number in closing if number}

        def spelled(*groups: Iterable[bytes]) -> Ids:
            return _array([by_bytes[data] for data in itertools.chain(*groups) if data in by_bytes])

        brackets = _array([token_id for token_id, data in texts if set(data) <= _BRACKETS])
        closers = _array([token_id for token_id, data in texts if data[:1] == b'"' and set(data) <= _CLOSERS])
        marks = _array([token_id for token_id, data in texts if set(data) <= _MARKS and not set(data) <= _CLOSERS])
        others = [_array([token_id for token_id, _ in texts]), _array([token_id for token_id, _ in reversed(texts)])]
        self._closing = {True: (closers, marks), False: (brackets, marks)}  # in text, and between
        # Each group with how many of it are candidates.
        self._in_text = [(closers, 2), (marks, 2), (others[0], 1), (spelled(_ENDS_OF_TEXT), 4), (others[1], 1)]
        self._between = [
            (brackets, 2),
            (spelled(_DIGITS), 1),
            (spelled(_VALUES), 2),
            (marks, 3),
            (spelled(_OPENERS), 3),
            (others[0], 1),
            (others[1], 1),
        ]

    def candidates(self, mask: Mask) -> list[int]:
        """The allowed tokens that are to be tried first, best first. `mask` is [size], True where a token is allowed."""
        found: dict[int, None] = {}
        for ids, count in self._in_text if self._is_text(mask) else self._between:
            found.update((int(token_id), None) for token_id in ids[mask[ids]][:count])
        if np.count_nonzero(mask) <= MAX_FEW:
            found.update((int(token_id), None) for token_id in np.flatnonzero(mask) if token_id not in self.stops)
        return [*found]

    def num_closed(self, ending: Ending) -> int:
        """How many values within each other these tokens end at most."""
        return sum(self._num_closed.get(token_id, 0) for token_id in ending)

    def closer(self, mask: Mask) -> int | None:
        """The allowed token that closes most of a JSON text, or else separates what has to follow."""
        return next((int(allowed[0]) for ids in self._closing[self._is_text(mask)] if (allowed := ids[mask[ids]]).size), None)

    def _is_text(self, mask: Mask) -> bool:
        return self._letter is not None and bool(mask[self._letter])


def _num_opened(data: bytes) -> int:
    # An object begins with a key, so its brackets are never adjacent.
    return 0 if b"{{" in data or b"{[" in data else data.count(b"{") + data.count(b"[")


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some tokens lead to, and what speaks against going on from there."""

    token_ids: Ending
    mask: Mask
    cost: float = 0.0


class _Walk:
    """Takes a matcher from place to place."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher
        self._token_ids: list[int] = []

    def take(self, token_id: int) -> bool:
        is_taken = self.matcher.advance(token_id)
        if is_taken:
            self._token_ids.append(token_id)
        return is_taken

    def go_to(self, token_ids: Ending) -> None:
        pairs = zip(self._token_ids, token_ids, strict=False)
        num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_shared < len(self._token_ids):
            self.matcher.rollback(len(self._token_ids) - num_shared)
            del self._token_ids[num_shared:]
        for token_id in token_ids[num_shared:]:
            self.take(token_id)


class EndingSearch:
    """Finds short endings by beam search. For one thread at a time: it reads masks into a row of its own."""

    def __init__(self, tokens: EndingTokens) -> None:
        self.tokens = tokens
        self.num_tried = 0
        """Endings that `ends` was asked about, and the tokens of them that a matcher took: the work that it has been."""
        self._row_W = allocate_bitmask(1, tokens.size)[0]
        self._bytes: npt.NDArray[np.uint8] = self._row_W.numpy().view(np.uint8)  # the same memory

    def mask(self, matcher: GrammarMatcher) -> Mask:
        """[size], True where a token is allowed."""
        matcher.fill_bitmask(self._row_W)
        return self.unpacked(self._bytes)

    def unpacked(self, words: npt.NDArray[np.uint8]) -> Mask:
        """A bitmask's bytes as [size], True where a token is allowed."""
        return np.unpackbits(words, count=self.tokens.size, bitorder="little").view(np.bool_)

    def find(self, matcher: GrammarMatcher, limit: int, max_seconds: float = MAX_SECONDS) -> Ending | None:
        """An ending of at most `limit` tokens; a longer one where none is found that is as short, and None where none is found at all.

        The matcher is in the same state afterwards. It need not be the shortest: not all tokens are tried at each place.
        """
        until = time.thread_time() + max_seconds
        found = self._closed(matcher, until)
        for width in WIDTHS:
            if found is not None and len(found) <= limit:
                break
            ending = self._find(matcher, width, until)
            found = ending if found is None or (ending is not None and len(ending) < len(found)) else found
        return found

    def _closed(self, matcher: GrammarMatcher, until: float) -> Ending | None:
        """The ending that only closes what is open: many brackets within each other look alike to the search, which leaves such places."""
        walk, token_ids = _Walk(matcher), list[int]()
        try:
            while len(token_ids) < MAX_ENDING and time.thread_time() < until:
                mask = self.mask(matcher)
                if (ending := self._ending(walk, _Place(tuple(token_ids), mask))) is not None:
                    return ending
                token_id = self.tokens.closer(mask)
                if token_id is None or not self.tokens.num_closed((token_id,)) or not walk.take(token_id):
                    break
                token_ids.append(token_id)
        finally:
            walk.go_to(())
        return None

    def _find(self, matcher: GrammarMatcher, width: int, until: float) -> Ending | None:
        """Goes on from the best `width` places of each length."""
        walk, seen = _Walk(matcher), set[bytes]()
        places = [_Place((), self.mask(matcher))]
        try:
            if (ending := self._ending(walk, places[0])) is not None:
                return ending
            for _ in range(MAX_ENDING):
                if time.thread_time() > until:
                    return None
                following: list[_Place] = []
                masks: Counter[bytes] = Counter()
                for place, rank, token_id in self._steps(places, walk):
                    if not walk.take(token_id):
                        continue
                    mask, key = self.mask(matcher), self._bytes.tobytes()
                    is_same = bool((mask == place.mask).all())
                    cost = RANK_COST * min(rank, MAX_RANK) + SEEN_COST * (masks[key] + (key in seen)) + SAME_COST * is_same
                    following.append(_Place((*place.token_ids, token_id), mask, place.cost + cost))
                    masks[key] += 1
                    if (ending := self._ending(walk, following[-1])) is not None:
                        return ending
                seen.update(masks)
                places = sorted(following, key=lambda place: place.cost)[:width]
        finally:
            walk.go_to(())
        return None

    def _steps(self, places: list[_Place], walk: _Walk) -> Iterator[tuple[_Place, int, int]]:
        """Each candidate of each place, while the matcher is there."""
        for place in places:
            for rank, token_id in enumerate(self.tokens.candidates(place.mask)):
                walk.go_to(place.token_ids)
                yield place, rank, token_id

    def _ending(self, walk: _Walk, place: _Place) -> Ending | None:
        stops = self.tokens.stops[place.mask[self.tokens.stops]]
        if not stops.size:
            return None
        return place.token_ids if walk.matcher.finished else (*place.token_ids, int(stops[0]))

    def spelled(self, matcher: GrammarMatcher, text: str) -> Ending | None:
        """The ending that is this text, in the longest tokens that the masks allow; None where they do not allow the text to its end.

        The matcher is in the same state afterwards.
        """
        data, token_ids, by_bytes = text.encode(), list[int](), self.tokens.by_bytes
        until = time.thread_time() + MAX_SECONDS
        try:
            matcher.fill_bitmask(self._row_W)
            while data and time.thread_time() < until:
                lengths = range(min(len(data), MAX_TOKEN_BYTES), 0, -1)
                found = next((length for length in lengths if self._is_set(by_bytes.get(data[:length]))), None)
                if found is None or not matcher.advance(by_bytes[data[:found]]):
                    return None
                token_ids.append(by_bytes[data[:found]])
                data = data[found:]
                matcher.fill_bitmask(self._row_W)
            if data:
                return None
            if matcher.finished:
                return tuple(token_ids)
            stops = self.tokens.stops[self.unpacked(self._bytes)[self.tokens.stops]]
            return (*token_ids, int(stops[0])) if stops.size else None
        finally:
            if token_ids:
                matcher.rollback(len(token_ids))

    def _is_set(self, token_id: int | None) -> bool:
        """Whether the last mask allows the token."""
        return token_id is not None and bool(self._bytes[token_id >> 3] >> (token_id & 7) & 1)

    def ends(self, matcher: GrammarMatcher, ending: Ending, start: int = 0) -> bool:
        """Whether these tokens, from `start` on, may come next and end the answer.

        The matcher is in the same state afterwards; no mask is asked for.
        """
        num_taken = 0
        while start + num_taken < len(ending) and matcher.advance(ending[start + num_taken]):
            num_taken += 1
        self.num_tried += 1 + num_taken
        is_stopped = start < len(ending) and ending[-1] in self.tokens.stops
        is_end = start + num_taken == len(ending) and (is_stopped or matcher.finished)
        if num_taken:
            matcher.rollback(num_taken)
        return is_end
