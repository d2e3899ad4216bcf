"""The built-in proposers of draft tokens: n-grams of a sequence, suffixes of all texts under a key, and predictions of answers."""

import sys
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter

from penstock.engine.contracts.proposer import MAX_DRAFT, DraftedSequence, Proposer, SequenceProposer, moved

MATCH_LENGTH = 2
MAX_READ = 4096  # tokens at a time: it is the event loop that reads
FIRST_PREDICTION_ACCURACY = 0.8


class Prediction:
    """What a client expects as the answer, in tokens, and where in it any `MATCH_LENGTH` tokens are. Sequences share it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._followers: dict[tuple[int, ...], list[int]] = {}
        keys = zip(*(self.token_ids[shift:] for shift in range(MATCH_LENGTH)), strict=False)
        for position, key in enumerate(keys, start=MATCH_LENGTH):
            if position < len(self.token_ids):
                self._followers.setdefault(key, []).append(position)

    def position_after(self, key: tuple[int, ...], start: int) -> int | None:
        """The first position from `start` on that follows these tokens, else the last before it; None where they are nowhere."""
        positions = self._followers.get(key)
        if positions is None:
            return None
        return positions[min(bisect_left(positions, start), len(positions) - 1)]


class LayeredProposer(SequenceProposer):
    """Proposes where it has a guess, and has `other` propose where not."""

    def __init__(self, other: SequenceProposer) -> None:
        self.other = other

    def end(self, num_known_tokens: int) -> None:
        self.other.end(num_known_tokens)


class SequencePrediction(LayeredProposer):
    """Proposes a request's prediction: from its beginning, and where the answer diverges, from the next place that follows the same tokens.

    Where the prediction has no such place, `other` proposes.
    """

    def __init__(self, sequence: DraftedSequence, prediction: Prediction, other: SequenceProposer) -> None:
        super().__init__(other)
        self._token_ids = sequence.token_ids
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._num_read = sequence.num_prompt_tokens - 1
        self._prediction = prediction
        self._place = 0  # how far the answer has come
        self._source: int | None = None
        self._own_accuracy = FIRST_PREDICTION_ACCURACY

    @property
    def is_predicted(self) -> bool:  # type: ignore[override]
        return self._source is not None

    @property
    def has_guess(self) -> bool:
        return self._source is not None or self.other.has_guess

    def propose(self, num_tokens: int) -> list[int]:
        if self._source is None:
            return self.other.propose(num_tokens)
        return self._prediction.token_ids[self._source : self._source + num_tokens]

    def accuracy_after(self, num_right: int) -> float:
        return self.other.accuracy_after(num_right) if self._source is None else self._own_accuracy

    def read(self) -> bool:
        if not self.other.read():
            return False
        for position in range(self._num_read, len(self._token_ids)):
            self._read_token(position)
        self._num_read = len(self._token_ids)
        self.accuracy = self.other.accuracy if self._source is None else self._own_accuracy
        return True

    def _read_token(self, position: int) -> None:
        ids, predicted = self._token_ids, self._prediction.token_ids
        if self._source is not None:
            is_right = predicted[self._source] == ids[position]
            self._own_accuracy = moved(self._own_accuracy, is_right=is_right)
            if is_right:
                self._place = self._source + 1
                self._source = self._place if self._place < len(predicted) else None
                return
        is_first = position + 1 == self._num_prompt_tokens
        self._source = 0 if is_first and predicted else self._find(position)
        if self._source is not None:
            self._place = self._source

    def _find(self, position: int) -> int | None:
        key = tuple(self._token_ids[max(position + 1 - MATCH_LENGTH, 0) : position + 1])
        return self._prediction.position_after(key, self._place)


class NgramProposer(Proposer):
    """Proposes the tokens that followed the last occurrence of the last `MATCH_LENGTH` tokens (prompt lookup decoding; Saxena 2023)."""

    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        return SequenceNgrams(sequence.token_ids, sequence.num_prompt_tokens, sequence.placeholders)


class SequenceNgrams(SequenceProposer):
    """Every token is looked at once, and guessed whether or not a draft is wanted: `accuracy` is known without computing any draft."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, placeholders: frozenset[int] = frozenset()) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._placeholders = placeholders
        self._followers: dict[tuple[int, ...], int] = {}  # the position of the token that last followed these
        self._num_read = 0
        self._source: int | None = None

    @property
    def has_guess(self) -> bool:
        return self._source is not None and self._source not in self._placeholders

    def propose(self, num_tokens: int) -> list[int]:
        assert self._source is not None
        return continued(self._token_ids, self._source, num_tokens, self._placeholders)

    def read(self) -> bool:
        stop = min(len(self._token_ids), self._num_read + MAX_READ)
        self._read_prompt(min(stop, self._num_prompt_tokens - 1))
        for position in range(self._num_read, stop):
            self._read_token(position)
        self._num_read = stop
        return stop == len(self._token_ids)

    def _read_prompt(self, stop: int) -> None:
        """Reads the prompt but for its last token: nothing is guessed there, so it is quicker."""
        if stop <= self._num_read:
            return
        start = max(0, self._num_read + 1 - MATCH_LENGTH)
        ids = self._token_ids[start:stop]
        keys = zip(*(ids[shift:] for shift in range(MATCH_LENGTH)), strict=False)
        self._followers.update(zip(keys, range(start + MATCH_LENGTH, stop + 1), strict=False))
        self._num_read = stop

    def _read_token(self, position: int) -> None:
        ids = self._token_ids
        if self._source is not None:
            is_right = ids[self._source] == ids[position]
            self.accuracy = moved(self.accuracy, is_right=is_right)
            self._source = self._source + 1 if is_right else None
        key = tuple(ids[max(position + 1 - MATCH_LENGTH, 0) : position + 1])
        if len(key) < MATCH_LENGTH:
            return
        if self._source is None:
            self._source = self._followers.get(key)
        self._followers[key] = position + 1


def continued(token_ids: Sequence[int], source: int, num_tokens: int, placeholders: frozenset[int] = frozenset()) -> list[int]:
    """So many tokens from position `source` on of a text that ends within what it repeats, and so on; up to the first placeholder."""
    if placeholders:
        num_tokens = next((number for number in range(num_tokens) if source + number in placeholders), num_tokens)
    draft = list(token_ids[source : source + num_tokens])
    while len(draft) < num_tokens:
        draft.append(draft[len(draft) - (len(token_ids) - source)])
    return draft


FIRST_DRAFT_ACCURACY = 0.75


class DraftModelProposer(Proposer):
    """Proposes what a draft model, which runs behind each step in the model's thread, says next."""

    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        return SequenceDraft(sequence.token_ids)


class SequenceDraft(SequenceProposer):
    """The `accuracy` is that of the draft model's tokens, whether they were checked as draft tokens or came otherwise.

    The draft model has computed the first `num_computed` tokens of the sequence; at first, as many as the model has.
    """

    accuracy = FIRST_DRAFT_ACCURACY

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._num_known = 0
        self._draft: list[int] = []
        self.num_computed = sys.maxsize

    def offer(self, draft: list[int]) -> None:
        """What the draft model says after all tokens that there are."""
        self.read()
        self._num_known = self.num_computed = len(self._token_ids)
        self._draft = draft

    def read(self) -> bool:
        if len(self._token_ids) == self._num_known:
            return True
        for drafted, token_id in zip(self._draft, self._token_ids[self._num_known :], strict=False):
            self.accuracy = moved(self.accuracy, is_right=drafted == token_id)
            if drafted != token_id:
                break
        self._num_known, self._draft = len(self._token_ids), []
        return True

    @property
    def has_guess(self) -> bool:
        return bool(self._draft)

    def propose(self, num_tokens: int) -> list[int]:
        return self._draft[:num_tokens]


def draft_of(proposer: SequenceProposer | None) -> SequenceDraft | None:
    """The part of a sequence's proposer that takes the tokens of a draft model, also behind others; None without."""
    while isinstance(proposer, LayeredProposer):
        proposer = proposer.other
    return proposer if isinstance(proposer, SequenceDraft) else None


MATCH_LENGTHS = (2, 4, 8, 16, 32)  # a match is as good as the longest of these that it reaches: its level, from 1
NUM_AGREEMENTS = 3  # no other place has matched as well; all that have are followed by the same token; some by another
# How often a guess is right by the level of its match and by agreement, until that has been measured. At level 0 the match goes on behind
# a token that was another one.
FIRST_ACCURACIES = ((0.2, 0.3, 0.1), (0.35, 0.5, 0.25), (0.5, 0.7, 0.4), (0.7, 0.85, 0.5), (0.85, 0.93, 0.6), (0.95, 0.97, 0.8))
SUFFIX_MEMORY = 0.9  # of each guess in a sequence
PRIOR_MEMORY = 0.995  # of each guess of any sequence
EXPECTED_GUESSES = 4.0  # until a sequence has had more than a few guesses, they are taken to be as accurate as expected
MAX_CANDIDATES = 4  # places that are compared in one look-up
MAX_HEADS = 2**16
FIRST_TEXT_TOKENS = 2**12  # of the first generation of texts; each next one has twice as many
MAX_TEXT_TOKENS = 2**18
MAX_TEXTS_BYTES = 64 * 2**20
MAX_KEYS = 256  # adapters and salts, and each of their grammars
GRAMMAR_CONTEXT = 8  # tokens of the prompt that are kept with an answer under a grammar
SEPARATOR = -1

Tokens = list[int] | array  # type: ignore[type-arg]


class SuffixIndex:
    """Finds where tokens were followed by what, by the longest match with the last ones: hash chains, as in LZ77 (RFC 1951, section 4).

    `tokens` may grow. Of each pair's places the last few are compared. Beside the tokens it takes 4 bytes for each, and for each of
    `num_heads`, a power of two.
    """

    __slots__ = ("_heads", "_links", "_mask", "tokens")

    def __init__(self, tokens: Tokens, num_heads: int) -> None:
        self.tokens = tokens
        self._heads = array("i", bytes(4 * num_heads))  # the last place of a pair: the position after it; 0 is none
        self._links = array("i", bytes(4 * MATCH_LENGTH))  # from each place to the one before of a pair with the same hash
        self._mask = num_heads - 1

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._heads) + len(self._links) + len(self.tokens))

    def extend(self, stop: int) -> None:
        """Adds the places up to position `stop`."""
        heads, links, mask, first = self._heads, self._links, self._mask, len(self._links)
        tokens = self.tokens[first - MATCH_LENGTH : stop]
        for place, pair in enumerate(pairwise(tokens), first):
            head = hash(pair) & mask
            links.append(heads[head])
            heads[head] = place

    def find(self, text: list[int], stop: int) -> list["Match"]:
        """The places after matches with the last of the text's first `stop` tokens, at least two; the latest first."""
        first, second = text[stop - MATCH_LENGTH : stop]
        place = self._heads[hash((first, second)) & self._mask]
        if not place:
            return []
        tokens, links, matches, tail = self.tokens, self._links, [], None
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            if tokens[place - 1] == second and tokens[place - 2] == first:  # which the pairs in most places are not, if they are of many
                if tail is None:
                    last = text[max(0, stop - MATCH_LENGTHS[-1]) : stop]
                    tail = last if isinstance(tokens, list) else array("i", last)
                level, longest = 1, min(place, len(tail))
                while level < len(MATCH_LENGTHS) and (length := MATCH_LENGTHS[level]) <= longest:
                    if tokens[place - length : place] != tail[-length:]:
                        break
                    level += 1
                matches.append(Match(tokens, place, level))
            place = links[place]
        return matches


@dataclass(slots=True)
class Match:
    """The place of the token that follows a match. `level` is that of the match when it was found."""

    tokens: Tokens
    place: int
    level: int

    def token_at(self, offset: int) -> int:
        """So many places on; `SEPARATOR` at the end of the text."""
        place = self.place + offset
        return self.tokens[place] if place < len(self.tokens) else SEPARATOR


_level_of = attrgetter("level")


class Texts:
    """The texts of one key, in two generations: where the newer is full, it becomes the older, and the one before is forgotten.

    `accuracies`, by level and agreement, are of all guesses in sequences with the key: how long their drafts are says nothing about other
    keys.
    """

    def __init__(self, grammar: object = None) -> None:
        self.grammar = None if grammar is None else weakref.ref(grammar)
        self.accuracies = list(chain.from_iterable(FIRST_ACCURACIES))
        self._capacity = FIRST_TEXT_TOKENS
        self._newer = self._generation()
        self._older: SuffixIndex | None = None
        self._unread: deque[array[int]] = deque()
        self._num_unread = 0

    def _generation(self) -> SuffixIndex:
        return SuffixIndex(array("i"), self._capacity)

    @property
    def num_bytes(self) -> int:
        return self._newer.num_bytes + (0 if self._older is None else self._older.num_bytes) + 4 * self._num_unread

    def add(self, token_ids: Sequence[int]) -> None:
        """To be read by `read`. Where that has too much before it, the oldest is forgotten."""
        text = array("i", token_ids[-MAX_TEXT_TOKENS:])
        text.append(SEPARATOR)
        self._unread.append(text)
        self._num_unread += len(text)
        while self._num_unread > MAX_TEXT_TOKENS + 1:
            self._num_unread -= len(self._unread.popleft())

    def read(self) -> None:
        """Reads at most `MAX_READ` tokens of what was added."""
        if not self._unread:
            return
        text = self._unread.popleft()
        if len(text) > MAX_READ:
            self._unread.appendleft(text[MAX_READ:])
            text = text[:MAX_READ]
        self._num_unread -= len(text)
        if len(self._newer.tokens) + len(text) > self._capacity:
            self._capacity = min(2 * self._capacity, MAX_TEXT_TOKENS)
            self._newer, self._older = self._generation(), self._newer
        self._newer.tokens.extend(text)
        self._newer.extend(len(self._newer.tokens))

    def find(self, text: list[int], stop: int) -> list[Match]:
        """As `SuffixIndex.find`, of both generations; none at the end of a text."""
        found = self._newer.find(text, stop)
        if self._older is not None:
            found += self._older.find(text, stop)
        return [match for match in found if match.token_at(0) != SEPARATOR] if found else found


class SuffixProposer(Proposer):
    """Proposes what followed the longest match with the last tokens, in the sequence itself or in texts before it with the same key.

    After suffix decoding (Oliaro et al., arXiv:2411.04975), over hash chains instead of a tree. Prompts and answers of sequences that have
    ended are kept, at most `max_bytes` and `MAX_KEYS` of all keys together; answers under a grammar also apart, by the grammar.
    """

    def __init__(self, max_bytes: int = MAX_TEXTS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: OrderedDict[tuple[object, int], Texts] = OrderedDict()  # the most recently used last

    @property
    def num_bytes(self) -> int:
        return sum(texts.num_bytes for texts in self._texts.values())

    def begin(self, sequence: DraftedSequence) -> SequenceProposer:
        own = self._texts_of(sequence.key)
        under_grammar = None if sequence.grammar is None else self._texts_of(sequence.key, sequence.grammar)
        return SequenceSuffixes(sequence, own, under_grammar)

    def _texts_of(self, key: object, grammar: object = None) -> Texts:
        place = (key, 0 if grammar is None else id(grammar))
        texts = self._texts.get(place)
        if texts is None or (texts.grammar is not None and texts.grammar() is not grammar):
            texts = self._texts[place] = Texts(grammar)
        self._texts.move_to_end(place)
        while len(self._texts) > MAX_KEYS or (len(self._texts) > 2 and self.num_bytes > self._max_bytes):
            self._texts.popitem(last=False)
        return texts


class SequenceSuffixes(SequenceProposer):
    """The accuracy is that of matches as long as the present one: of recent guesses in this sequence, and under its key before any.

    It is lower where recent guesses, of any length, were right less often than expected: a sequence of another kind than those before it,
    such as prose after loops of tool calls, shows that in its first few guesses, long before it has had many of each length.

    Where several places matched, a token that follows all of them is surer, and one that others contradict is less sure: there a name or
    a value begins that is another one each time. Behind such a token, the match goes on: what follows is often the same again.
    """

    min_accuracy = 0.2  # it remembers twice as many guesses as others

    def __init__(self, sequence: DraftedSequence, texts: Texts, under_grammar: Texts | None) -> None:
        self._sequence = sequence
        self._texts = texts
        self._under_grammar = under_grammar
        self._others = [texts] if under_grammar is None else [under_grammar, texts]
        num_heads = min(1 << max(10, len(sequence.token_ids).bit_length()), MAX_HEADS)
        self._own = SuffixIndex(sequence.token_ids, num_heads)
        self._shared_accuracies = texts.accuracies
        self._accuracies = list(texts.accuracies)
        self._num_right = self._num_expected = EXPECTED_GUESSES
        self._calibration = 1.0
        self._num_read = 0
        self._source: Match | None = None
        self._alternatives: list[Match] = []  # other places of which all that came since they matched was right
        self._length = 0  # of the match, as far as it is known
        self._expected: list[float] = []  # the accuracy of each token of a draft, once that is asked for

    @property
    def has_guess(self) -> bool:
        source = self._source
        return source is not None and not (source.tokens is self._sequence.token_ids and source.place in self._sequence.placeholders)

    def propose(self, num_tokens: int) -> list[int]:
        assert self._source is not None
        tokens, place = self._source.tokens, self._source.place
        if tokens is self._sequence.token_ids:
            return continued(tokens, place, num_tokens, self._sequence.placeholders)
        draft = list(tokens[place : place + num_tokens])
        return draft[: draft.index(SEPARATOR)] if SEPARATOR in draft else draft

    def read(self) -> bool:
        token_ids = self._sequence.token_ids
        for texts in self._others:
            texts.read()
        if self._num_read < self._sequence.num_prompt_tokens:  # nothing is guessed within the prompt
            stop = min(self._sequence.num_prompt_tokens, self._num_read + MAX_READ)
            self._own.extend(stop - 1)
            self._num_read = stop
            if stop < self._sequence.num_prompt_tokens:
                return False
            self._look_up(stop)
            self._own.extend(stop)
        for position in range(self._num_read, len(token_ids)):
            self._read_token(position)
        self._num_read = len(token_ids)
        self._expected = []
        self.accuracy = 0.0 if self._source is None else self._accuracy_of(self._kind(self._source.token_at(0)))
        return True

    def _accuracy_of(self, kind: int) -> float:
        return self._calibration * self._accuracies[kind]

    def _kind(self, token_id: int) -> int:
        """The place in `_accuracies` of a guess at the next token."""
        kind = NUM_AGREEMENTS * bisect_right(MATCH_LENGTHS, self._length)
        if not self._alternatives:
            return kind
        return kind + (1 if all(match.token_at(0) == token_id for match in self._alternatives) else 2)

    def accuracy_after(self, num_right: int) -> float:
        """Each token that is right makes the match longer."""
        if not self._expected:
            self._expected = self._expect(self.propose(MAX_DRAFT)) if self.has_guess else [0.0]
        return self._expected[num_right] if num_right < len(self._expected) else 0.0

    def _expect(self, draft: list[int]) -> list[float]:
        agreeing, expected = self._alternatives, []
        for offset, token_id in enumerate(draft):
            kind = NUM_AGREEMENTS * bisect_right(MATCH_LENGTHS, self._length + offset)
            if agreeing:
                num_before = len(agreeing)
                agreeing = [match for match in agreeing if match.token_at(offset) == token_id]
                kind += 1 if len(agreeing) == num_before else 2
            expected.append(self._accuracy_of(kind))
        return expected

    def _read_token(self, position: int) -> None:
        token_id, source = self._sequence.token_ids[position], self._source
        if source is None:
            self._look_up(position + 1)
        else:
            guess = source.token_at(0)
            kind, is_right = self._kind(guess), guess == token_id
            self._calibrate(self._accuracies[kind], is_right=is_right)
            for accuracies, memory in ((self._accuracies, SUFFIX_MEMORY), (self._shared_accuracies, PRIOR_MEMORY)):
                accuracies[kind] = memory * accuracies[kind] + (1 - memory) * is_right
            self._go_on(source, token_id, position, is_right=is_right)
        self._own.extend(position + 1)

    def _calibrate(self, expected: float, *, is_right: bool) -> None:
        rest = (1 - SUFFIX_MEMORY) * EXPECTED_GUESSES  # which keeps as many of them as there were at first
        self._num_right = SUFFIX_MEMORY * self._num_right + rest + is_right
        self._num_expected = SUFFIX_MEMORY * self._num_expected + rest + expected
        self._calibration = min(1.0, self._num_right / self._num_expected)

    def _go_on(self, source: Match, token_id: int, position: int, *, is_right: bool) -> None:
        num_matched = self._length
        source.place += 1
        if not is_right or self._is_at_end(source):
            self._look_up(position + 1)
            if self._source is None and not is_right and num_matched >= MATCH_LENGTH and not self._is_at_end(source):
                self._source = source
            return
        self._length += 1
        if self._alternatives:
            self._alternatives = [match for match in self._alternatives if match.token_at(0) == token_id]
            for match in self._alternatives:
                match.place += 1

    def _is_at_end(self, source: Match) -> bool:
        return source.tokens is not self._sequence.token_ids and source.token_at(0) == SEPARATOR

    def _look_up(self, stop: int) -> None:
        """Guesses after the first `stop` tokens what followed the last of them before, in the sequence itself or under the same grammar.

        Other texts come first only where they match for two levels more: counted over recorded answers, drafts are better so.
        """
        self._source, self._alternatives, self._length = None, [], 0
        if stop < MATCH_LENGTH:
            return
        token_ids = self._sequence.token_ids
        near = [] if self._under_grammar is None else self._under_grammar.find(token_ids, stop)
        near += self._own.find(token_ids, stop)
        far = self._texts.find(token_ids, stop)
        if not near and not far:
            return
        found = near + far
        best = max(near, key=_level_of, default=found[0])  # the first of equal ones
        other = max(far, key=_level_of, default=best)
        if other.level > best.level + 1 or not near:
            best = other
        self._source = best
        self._length = MATCH_LENGTHS[best.level - 1]
        self._alternatives = [match for match in found if match.level >= best.level - 1 and match is not best]

    def end(self, num_known_tokens: int) -> None:
        sequence = self._sequence
        if len(sequence.token_ids) == sequence.num_prompt_tokens:
            return
        token_ids = sequence.token_ids
        if sequence.placeholders:
            token_ids = [SEPARATOR if position in sequence.placeholders else token_id for position, token_id in enumerate(token_ids)]
        self._texts.add(token_ids[max(0, num_known_tokens - MATCH_LENGTHS[-1]) :])
        if self._under_grammar is not None:
            self._under_grammar.add(token_ids[max(0, sequence.num_prompt_tokens - GRAMMAR_CONTEXT) :])


BUILT_IN: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
