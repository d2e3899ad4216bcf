"""Constrained answers that end within their `max_tokens`: which tokens still leave room for an ending, and the masks without the others."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import ref

import numpy as np
from torch import Tensor

from penstock.engine.constraints.endings import Ending, EndingSearch, EndingTokens
from penstock.engine.constraints.instances import Missing, missing_at_most, short_instances
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher, Vocabulary
from penstock.engine.errors import InvalidRequest

# By how many tokens n tokens may lengthen the shortest ending, as is assumed where the schema does not say: while many more are left, most
# are not looked at. Without the nesting of brackets an ending grows only where an object or list begins, whose first tokens make it
# shorter again.
MAX_GROWTH = 64  # + n * MEAN_GROWTH
MEAN_GROWTH = 16
NUM_STOPS = 1
MAX_KNOWN = 8
REST_BEGINNINGS = '",]}'  # of what may follow a value or the beginning of one
MAX_SECONDS = 0.1  # of the processor, in one search; a first one may take longer
MAX_REFUSED = 4
MAX_FAILED = 8  # searches after tokens of an answer in which nothing fits; later such tokens are refused without one
MAX_TRIED = 4096  # tokens of known endings behind one token: the event loop waits for it


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer to a grammar may end, for all sequences of a request.

    `shortest` is all of the shortest answer that was found, and `text` the same where it was read from the schema. `missing` is how much
    any beginning of an answer needs at most, where the schema says.
    """

    tokens: EndingTokens
    shortest: Ending | None
    text: str = ""
    missing: Missing | None = None

    @property
    def num_tokens(self) -> int:
        """What is reserved for the answer, as far as is known."""
        return 0 if self.shortest is None else len(self.shortest)

    def num_taken_freely(self, num_left: int, ending: Ending) -> int:
        """How many tokens may be taken of `num_left`, whichever they are, before those that are left may be too few for an ending.

        `ending` is one of the present place: its brackets are those that are open.
        """
        if self.missing is None:
            return 0
        growth, num_open = (self.tokens.max_opened, self.tokens.num_closed(ending)) if self.missing.is_open else (0, 0)
        return max(0, num_left - self.missing.rest - num_open - NUM_STOPS) // (1 + growth)


class AnswerEnds:
    """Finds the shortest answers to grammars, each once, those to several grammars at the same time. For any thread."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._lock = threading.Lock()
        self._made: EndingTokens | None = None
        # By the grammar's id, as long as it lives: a plug-in's may be a dataclass, which has no hash.
        self._by_grammar: dict[int, tuple[ref[CompiledGrammar], Future[AnswerEnd]]] = {}

    def of(self, grammar: CompiledGrammar) -> AnswerEnd:
        """Takes as long as some masks where the grammar's schema says what a short answer is, else as a search does.

        The first time as long as reading the vocabulary. Raises `UnsupportedGrammar`.
        """
        key, found = id(grammar), self._by_grammar

        def forget(_: object) -> None:
            found.pop(key, None)

        with self._lock:
            is_known = key in found
            if not is_known:
                found[key] = ref(grammar, forget), Future()
            search = found[key][1]
        if not is_known:
            try:
                search.set_result(shortest_answer(self._tokens, grammar))
            except BaseException as error:  # of a plug-in's code: the next request fails at it by itself
                with self._lock:
                    del found[key]
                search.set_exception(error)
        return search.result()

    @property
    def _tokens(self) -> EndingTokens:
        with self._lock:
            self._made = self._made or EndingTokens(self._make_vocabulary())
            return self._made


def shortest_answer(tokens: EndingTokens, grammar: CompiledGrammar) -> AnswerEnd:
    """The shortest of the schema's short instances that the masks allow; without one, what a search finds."""
    search, matcher = EndingSearch(tokens), grammar.matcher()
    missing = None if grammar.schema is None or grammar.warnings else missing_at_most(grammar.schema)
    for text in () if grammar.schema is None else short_instances(grammar.schema):
        ending = search.spelled(matcher, text)
        if ending is not None:
            return AnswerEnd(tokens, ending, text, missing)
    return AnswerEnd(tokens, search.find(matcher, 0), missing=missing)


def check_room(end: AnswerEnd, num_left: int, num_before: int) -> None:
    """Raises `InvalidRequest` where the shortest answer takes more than `num_left` tokens, with the `num_before` that come before it."""
    num_needed = num_before + end.num_tokens
    if num_needed > num_left:
        raise InvalidRequest(
            f"`max_tokens` leaves {num_left} tokens, and the shortest answer that was found takes {num_needed}: it cannot end within them, "
            "as `structured_outputs.within_max_tokens` demands",
            "max_tokens",
        )


class Closing:
    """Keeps one answer within its `num_left` tokens: no token is taken from which no ending is found that fits into the rest.

    Any token that is sampled is tried first with endings that are known, which takes no masks. Where none fits and the answer is near its
    end, the token is in doubt: it is not taken, and the next mask job searches for an ending after it. Where none is found, the token is
    masked, and another is sampled. So nothing is masked that the model would not have said, and searches take place where masks are filled.

    `num_to_reason` tokens have to be left behind the marker that begins reasoning. Methods take the answer's own matcher, and leave it in
    the same state.
    """

    def __init__(self, end: AnswerEnd, num_left: int, num_to_reason: int = 0) -> None:
        self.is_closed = self._has_hurried = self._is_urgent = False
        self._num_to_reason = num_to_reason
        self._end = end
        self._search = EndingSearch(end.tokens)
        self._rests = [start for start, character in enumerate(end.text) if character in REST_BEGINNINGS]
        self._known: list[Ending] = []
        if end.shortest is not None:
            self._know(end.shortest)
        self._ending: Ending | None = None  # that of the present state, where it is known
        self._endings_after: dict[int, Ending] = {}  # after tokens that may come next
        self._in_doubt: int | None = None
        self._num_failed = 0
        self._refused: set[int] = set()
        self.begin(num_left)

    def begin(self, num_left: int) -> None:
        """The answer begins, or its tokens have been rolled back, with `num_left` tokens to come."""
        self.num_left = num_left
        self._num_rests_passed = 0
        self._looks_at = num_left  # how many tokens are left when the next one is looked at
        self._ending = self._in_doubt = None
        self._endings_after.clear()
        self._refused.clear()
        if self._end.shortest is not None:
            self._look_later(self._end.shortest)

    def hurry(self) -> None:
        """The answer is to end as soon as it can: nothing new is said any more. Where no ending is found, it goes on to its limit."""
        if not self._has_hurried:
            self.begin(self.num_left)
            self._looks_at = self.num_left
            self._has_hurried = self._is_urgent = True

    @property
    def is_due(self) -> bool:
        """Whether an ending has to be searched for before the next token is sampled."""
        return self.samples_again or (self._ending is None and self.num_left <= self._looks_at)

    @property
    def samples_again(self) -> bool:
        """Whether a token was sampled here that has not been taken."""
        return self._in_doubt is not None or bool(self._refused)

    @property
    def num_refused(self) -> int:
        """How many tokens were sampled at this place and refused."""
        return len(self._refused)

    def took(self, token_id: int) -> None:
        """A token was added to the answer."""
        self.num_left -= 1
        following = self._ending[1:] if self._ending and self._ending[0] == token_id else None
        self._ending = self._endings_after.get(token_id, following)
        self._endings_after.clear()
        self._refused.clear()
        self._in_doubt = None
        if self._ending is not None:
            self._look_later(self._ending)

    def forget(self) -> None:
        """The matcher has taken tokens that were not sampled."""
        self._ending = None

    def may_reason(self, token_id: int) -> bool:
        """Whether there is room to reason before the answer, which this token begins."""
        if self.num_left > self._num_to_reason:
            return True
        self._refused.add(token_id)
        return False

    def may_end_after(self, matcher: GrammarMatcher, token_id: int) -> bool:
        """Whether the answer can end in time after the token that the matcher has just taken. If not, that is in doubt."""
        if token_id in self._endings_after:
            return True
        if self._ending is None:
            is_looked_for = self.num_left - 1 <= self._looks_at
            found = self._first_that_ends(matcher, self._parts(), self.num_left - 1, MAX_TRIED) if is_looked_for else None
            if found is not None:
                self._endings_after[token_id] = found  # nothing has to be searched for
            return True
        if self.num_left - 1 > self._looks_at or len(self._ending) > self.num_left:
            return True
        ending = self._known_ending(matcher, token_id)
        if ending is not None:
            self._endings_after[token_id] = ending
            return True
        if self.num_left - len(self._ending) > MAX_GROWTH + MEAN_GROWTH:
            return True
        self._in_doubt = token_id
        return False

    def prepare(self, matcher: GrammarMatcher) -> None:
        """Searches for what has to be known before the next token is sampled. May take as long as some hundred masks."""
        if self._ending is None and self.num_left <= self._looks_at:
            self._ending = (
                self._first_that_ends(matcher, self._parts(), self.num_left)
                or self._rest_of_shortest(matcher)
                or self._find(matcher, self.num_left)
            )
            if self._ending is not None and self._is_urgent:
                self.num_left = min(self.num_left, len(self._ending))
            self._is_urgent = False
            if self._ending is None:
                self._looks_at = self.num_left - max(1, self.num_left // 4)  # perhaps from there
            else:
                self._look_later(self._ending)
        token_id, self._in_doubt = self._in_doubt, None
        if token_id is None:
            return
        ending = None
        if not self._has_hurried and self._num_failed < MAX_FAILED:
            if not matcher.advance(token_id):
                return
            ending = self._find(matcher, self.num_left - 1)
            matcher.rollback(1)
        if ending is not None and len(ending) < self.num_left:
            self._endings_after[token_id] = ending
        else:
            self._num_failed += 1
            self._refused.add(token_id)

    def restrict(self, matcher: GrammarMatcher, row_W: Tensor) -> None:
        """Masks the tokens that were refused here; after some, or where none is left to spare, all that are not known to leave an end."""
        if not self._refused:
            return
        self.is_closed = True
        words = row_W.numpy().view(np.uint8)
        mask = self._search.unpacked(words)
        if self._ending and (len(self._ending) >= self.num_left or len(self._refused) >= MAX_REFUSED):
            left = np.zeros_like(mask)
            left[list(self._fitting(matcher, [self._ending[0], *self._endings_after, *self._search.tokens.candidates(mask)]))] = True
            mask &= left
        mask[list(self._refused)] = False
        packed = np.packbits(mask, bitorder="little")
        words[:] = 0
        words[: len(packed)] = packed

    def _fitting(self, matcher: GrammarMatcher, token_ids: list[int]) -> Iterator[int]:
        for token_id in token_ids:
            if token_id in self._endings_after:
                yield token_id
            elif matcher.advance(token_id):
                ending = self._known_ending(matcher, token_id)
                matcher.rollback(1)
                if ending is not None:
                    self._endings_after[token_id] = ending
                    yield token_id

    def _known_ending(self, matcher: GrammarMatcher, token_id: int) -> Ending | None:
        """One that fits behind the token, which the matcher has taken."""
        assert self._ending is not None
        if self._ending and token_id == self._ending[0]:
            return self._ending[1:]
        endings = itertools.chain(((self._ending, 1), (self._ending, 0)), self._parts())
        return self._first_that_ends(matcher, endings, self.num_left - 1, MAX_TRIED)

    def _know(self, ending: Ending) -> None:
        self._known = [ending, *(known for known in self._known if known != ending)][:MAX_KNOWN]

    def _parts(self) -> Iterator[tuple[Ending, int]]:
        """The ends of all endings that are known, the shortest first, each as an ending and where in it the part begins.

        As the answer goes on, it comes to later and later parts of one.
        """
        for length in range(1, max(map(len, self._known), default=0) + 1):
            for known in self._known:
                if length <= len(known):
                    yield known, len(known) - length

    def _first_that_ends(
        self, matcher: GrammarMatcher, endings: Iterable[tuple[Ending, int]], limit: int, max_tried: float = math.inf
    ) -> Ending | None:
        """The first from the given place on that ends the answer."""
        until = self._search.num_tried + max_tried
        for ending, start in endings:
            if self._search.num_tried >= until:
                break
            if len(ending) - start <= limit and self._search.ends(matcher, ending, start):
                return ending[start:]
        return None

    def _rest_of_shortest(self, matcher: GrammarMatcher) -> Ending | None:
        """Where a value has begun: its end, and all that comes behind it in the shortest answer, spelled anew."""
        until = time.thread_time() + MAX_SECONDS
        for place in range(self._num_rests_passed, len(self._rests)):
            if time.thread_time() > until:
                break
            ending = self._search.spelled(matcher, self._end.text[self._rests[place] :])
            if ending is not None and len(ending) <= self.num_left:
                self._num_rests_passed = place
                self._know(ending)
                return ending
        return None

    def _find(self, matcher: GrammarMatcher, limit: int) -> Ending | None:
        # A copy, where there can be one: some engines have to work out their masks anew after a rollback.
        ending = self._search.find(matcher.fork() or matcher, limit, MAX_SECONDS)
        if ending:
            self._know(ending)
        return ending

    def _look_later(self, ending: Ending) -> None:
        num_assumed = max(0, self.num_left - len(ending) - MAX_GROWTH) // MEAN_GROWTH
        self._looks_at = self.num_left - max(num_assumed, self._end.num_taken_freely(self.num_left, ending)) + 1
