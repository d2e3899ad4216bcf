"""Guesses how a text goes on where it repeats itself (prompt lookup decoding, as in Saxena's 2023 note of that name)."""

MATCH_LENGTH = 2
MAX_READ = 4096  # tokens at a time: it is the event loop that reads
FIRST_ACCURACY = 0.4
MEMORY = 0.8  # the share of the accuracy that a guess leaves as it was


class NgramProposer:
    """Finds where the last `MATCH_LENGTH` tokens stood before, and proposes what followed them there.

    Every token is looked at once, and has its guess whether or not anybody asked for it: `accuracy`, the share of late guesses that were
    right, is known without trying any. It belongs to one sequence, whose `token_ids` it reads as they grow.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._followers: dict[tuple[int, ...], int] = {}  # where the token after these last stood
        self._num_read = 0
        self._source: int | None = None
        self.accuracy = FIRST_ACCURACY

    @property
    def has_guess(self) -> bool:
        return self._source is not None

    def propose(self, num_tokens: int) -> list[int]:
        """So many tokens. Everything has to have been read, and there has to be a guess."""
        assert self._source is not None
        ids = self._token_ids
        draft = ids[self._source : self._source + num_tokens]
        while len(draft) < num_tokens:  # the text ends within what it repeats, and so on
            draft.append(draft[len(draft) - (len(ids) - self._source)])
        return draft

    def read(self) -> bool:
        """Takes in what is new, at most `MAX_READ` tokens of it. False where that was not all."""
        stop = min(len(self._token_ids), self._num_read + MAX_READ)
        self._read_prompt(min(stop, self._num_prompt_tokens - 1))
        for position in range(self._num_read, stop):
            self._read_token(position)
        self._num_read = stop
        return stop == len(self._token_ids)

    def _read_prompt(self, stop: int) -> None:
        """Here is nothing to be guessed, so it can be read faster: all of the prompt but its last token."""
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
            self.accuracy = MEMORY * self.accuracy + (1 - MEMORY) * is_right
            self._source = self._source + 1 if is_right else None
        if position + 1 < MATCH_LENGTH:
            return
        key = tuple(ids[position + 1 - MATCH_LENGTH : position + 1])
        if self._source is None:
            self._source = self._followers.get(key)
        self._followers[key] = position + 1
