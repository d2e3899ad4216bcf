"""The logits processor `no_repeat_ngram`, and the proposers of draft tokens that come with the engine: `ngram` and `suffix`."""

from typing import TYPE_CHECKING

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.logits_processor import per_sequence

if TYPE_CHECKING:
    from torch import Tensor
from penstock.engine.speculation.proposers import BUILT_IN

MAX_SIZE = 256


@hookimpl
def register_logits_processors(register: Register) -> None:
    register("no_repeat_ngram", per_sequence(NoRepeatNgram))


class NoRepeatNgram:
    """Masks each token that would repeat an n-gram of the output. One instance belongs to one sequence.

    `size` is n, 2 to 256. The prompt does not count: an answer may quote it. Raises `ValueError` for any other `size`.
    """

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= MAX_SIZE:
            raise ValueError(f"`size` must be an integer from 2 to {MAX_SIZE}, got {size!r}")
        self._size = size
        self._num_prompt_tokens: int | None = None
        self._num_read = 0
        self._followers: dict[tuple[int, ...], set[int]] = {}

    def __call__(self, token_ids: list[int], logits: "Tensor") -> "Tensor":
        """`logits` is [V]; returns a copy if anything is masked."""
        # The first call precedes any output: its tokens are the prompt.
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = self._num_read = len(token_ids)
        for end in range(self._num_read + 1, len(token_ids) + 1):
            start = end - self._size
            if start >= self._num_prompt_tokens:
                self._followers.setdefault(tuple(token_ids[start : end - 1]), set()).add(token_ids[end - 1])
        self._num_read = len(token_ids)
        context_start = len(token_ids) - self._size + 1
        banned = self._followers.get(tuple(token_ids[context_start:])) if context_start >= self._num_prompt_tokens else None
        if not banned:
            return logits
        masked = logits.clone()
        masked[sorted(banned)] = float("-inf")
        return masked


@hookimpl
def register_proposers(register: Register) -> None:
    for name, factory in BUILT_IN.items():
        register(name, factory)
