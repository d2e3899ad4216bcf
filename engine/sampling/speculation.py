"""Speculative decoding by n-grams and predictions: the proposer of draft tokens of a sequence, and how many pay for their rows."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

MATCH_LENGTH = 2
MAX_READ = 4096  # tokens at a time: it is the event loop that reads
FIRST_ACCURACY = 0.4
FIRST_PREDICTION_ACCURACY = 0.8
MEMORY = 0.8  # the weight of the accuracy so far, in its moving average
MAX_DRAFT = 16  # tokens
MIN_ACCURACY = 0.3  # of so few remembered guesses, less may be chance
FIRST_HOST_SHARE = 0.2
MAX_HOST_SHARE = 10.0
HOST_MEMORY = 0.95  # the weight of the share so far, in its moving average
CALIBRATION_TOKENS = 8.0  # until drafts have been expected to bring more than a few, they are taken to do as expected
CALIBRATION_MEMORY = 0.99  # of each draft
MIN_MAX_ROWS = 32  # what a step may have with drafts, however few sequences may run at once


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


class NgramProposer:
    """Proposes the tokens that followed the last occurrence of the last `MATCH_LENGTH` tokens (prompt lookup decoding; Saxena 2023).

    Every token is looked at once, and guessed whether or not a draft is wanted: `accuracy`, the share of recent guesses that were right,
    is known without computing any draft. It belongs to one sequence, whose `token_ids` it reads as they grow.

    A `prediction` comes first: it is proposed from its beginning, and where the answer diverges from it, from the next place that follows
    the same tokens.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, prediction: Prediction | None = None) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._prediction = prediction
        self._place = 0  # in the prediction: how far the answer has come
        self._followers: dict[tuple[int, ...], int] = {}  # the position of the token that last followed these
        self._num_read = 0
        self._source_ids = token_ids  # or the prediction's
        self._source: int | None = None
        self.accuracy = FIRST_ACCURACY if prediction is None else FIRST_PREDICTION_ACCURACY

    @property
    def has_guess(self) -> bool:
        return self._source is not None

    @property
    def is_predicted(self) -> bool:
        """Whether its guesses are from the prediction."""
        return self._source_ids is not self._token_ids

    def propose(self, num_tokens: int) -> list[int]:
        """A draft of so many tokens, or as many as the prediction has left. All tokens must have been read, and `has_guess`."""
        assert self._source is not None
        ids = self._source_ids
        draft = ids[self._source : self._source + num_tokens]
        if self.is_predicted:
            return draft
        while len(draft) < num_tokens:  # the text ends within what it repeats, and so on
            draft.append(draft[len(draft) - (len(ids) - self._source)])
        return draft

    def read(self) -> bool:
        """Reads at most `MAX_READ` new tokens. False where more are left."""
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
            is_right = self._source_ids[self._source] == ids[position]
            self.accuracy = MEMORY * self.accuracy + (1 - MEMORY) * is_right
            self._source = self._source + 1 if is_right else None
        key = tuple(ids[max(position + 1 - MATCH_LENGTH, 0) : position + 1])
        if self._prediction is not None and position + 1 >= self._num_prompt_tokens:
            self._follow(self._prediction, key, is_first=position + 1 == self._num_prompt_tokens)
        if len(key) < MATCH_LENGTH:
            return
        if self._source is None:
            self._source_ids, self._source = self._token_ids, self._followers.get(key)
        self._followers[key] = position + 1

    def _follow(self, prediction: Prediction, key: tuple[int, ...], *, is_first: bool) -> None:
        """Guesses from the prediction, if it has a place for what was just read. It goes on where the last guess was right."""
        if self.is_predicted and self._source is not None:
            self._place = self._source
            if self._place == len(prediction.token_ids):
                self._source = None  # all of it has been said
            return
        place = 0 if is_first else prediction.position_after(key, self._place)
        if place is not None:
            self._source_ids, self._source, self._place = prediction.token_ids, place, place


@dataclass(slots=True)
class Speculation:
    """Decides how many draft tokens each sequence gets in a step, by what they cost and how accurate its proposer has been.

    A step over R rows takes about as long as `rows_for_weights` + R rows would if the weights cost nothing to read: one more row adds
    1 / (`rows_for_weights` + R) to the step. With S sequences, a draft's row gains a token of S with the probability that it and all
    before it are right. So it is worth its time where that probability is above S / (`rows_for_weights` + R). The likeliest come first,
    and all together they make a step at most half as long again, or are no more than one sequence may have: sequences without drafts
    gain nothing by those of others.

    `lengths` counts drafts by how many of their tokens were accepted. `host_share` is how long the host works for a step, over how long the
    device does. `has_device`: the model runs on another processor than the host's work.
    """

    rows_for_weights: float
    has_device: bool = True
    host_share: float = FIRST_HOST_SHARE
    num_drafted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))
    _num_expected: float = 0.0
    _num_accepted: float = 0.0

    def share(self, proposers: list[NgramProposer], limit: int, *, num_rows: int, num_sequences: int) -> list[int]:
        """How many tokens each may propose, at most `limit` in all, in a step of `num_rows` rows without them for `num_sequences`."""
        limit = min(limit, max(MAX_DRAFT, int((self.rows_for_weights + num_rows) / 2)))
        lengths = [0] * len(proposers)
        queue = [
            (-proposer.accuracy, index)
            for index, proposer in enumerate(proposers)
            if proposer.read() and proposer.has_guess and proposer.accuracy >= MIN_ACCURACY
        ]
        heapq.heapify(queue)
        for num_drafted in range(limit):
            if not queue or -queue[0][0] * (self.rows_for_weights + num_rows + num_drafted) <= num_sequences:
                break
            probability, index = queue[0]
            lengths[index] += 1
            if lengths[index] < MAX_DRAFT:
                heapq.heapreplace(queue, (probability * proposers[index].accuracy, index))
            else:
                heapq.heappop(queue)
        return lengths

    def is_worthwhile(self, proposers: list[NgramProposer], limit: int, *, num_sequences: int) -> bool:
        """Whether a step of `num_sequences` rows is better drafted for than scheduled ahead: a draft waits for the tokens before it.

        Drafts make a step longer by their rows and by the host's time, and bring the tokens that are expected to be accepted. Without, the
        step takes as long as the device or the host does, whichever takes longer.
        """
        if limit <= 0 or not proposers or not num_sequences:
            return False
        lengths = self.share(proposers, limit, num_rows=num_sequences, num_sequences=num_sequences)
        if not self.has_device:  # the host's work takes its time from the model's threads, ahead or not
            return any(lengths)
        num_gained = sum(_expected_tokens(proposer.accuracy, length) for proposer, length in zip(proposers, lengths, strict=True) if length)
        drafted = 1 + sum(lengths) / (self.rows_for_weights + num_sequences) + self.host_share
        return (1 + self._calibration * num_gained / num_sequences) * max(1.0, self.host_share) > drafted

    @property
    def _calibration(self) -> float:
        """How many draft tokens are accepted for each that is expected to be: the surest proposers are chosen, and then do worse."""
        return (self._num_accepted + CALIBRATION_TOKENS) / (self._num_expected + CALIBRATION_TOKENS)

    def observe(self, host_seconds: float, step_seconds: float, *, is_ahead: bool) -> None:
        """Measures a step: how long the host worked for it, and the time from the end of the step before. `is_ahead`: both at once."""
        device_seconds = step_seconds if is_ahead else step_seconds - host_seconds
        if device_seconds > 0:
            share = min(host_seconds / device_seconds, MAX_HOST_SHARE)
            self.host_share = HOST_MEMORY * self.host_share + (1 - HOST_MEMORY) * share

    def expect(self, proposer: NgramProposer, num_tokens: int) -> None:
        """A draft of so many tokens is computed."""
        self._num_expected += _expected_tokens(proposer.accuracy, num_tokens)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self._num_expected *= CALIBRATION_MEMORY
        self._num_accepted = CALIBRATION_MEMORY * self._num_accepted + num_accepted
        self.num_drafted += num_drafted
        self.lengths[num_accepted] += 1


def _expected_tokens(accuracy: float, length: int) -> float:
    """How many tokens of a draft are accepted on average, each with the probability `accuracy` where all before it were."""
    return float(length) if accuracy >= 1 else accuracy * (1 - accuracy**length) / (1 - accuracy)
