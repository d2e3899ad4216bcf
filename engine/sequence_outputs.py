"""The named outputs of a request on their way from the model to its deltas: each token's once, whatever is computed again."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOGITS = "logits"  # the one output that no module has to be looked at for


@dataclass(slots=True)
class RowBuffer:
    """Rows of consecutive tokens, by output. `next_position` is that of the token whose row is still to come, if before `stop`."""

    next_position: int
    stop: int | None = None
    num_rows: int = 0
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.next_position == self.stop

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        """Takes rows of the tokens from position `first` on; those that are there already are passed over."""
        num_known = self.next_position - first
        assert num_known >= 0, "outputs are missing"
        num_wanted = None if self.stop is None else self.stop - first
        fresh = {name: part[num_known:num_wanted] for name, part in rows.items()}
        num_rows = min(map(len, fresh.values()), default=0)
        if num_rows:
            for name, part in fresh.items():
                self.parts.setdefault(name, []).append(part)
            self.num_rows += num_rows
            self.next_position += num_rows

    def first(self, num_rows: int) -> dict[str, Tensor]:
        return {name: rows[:num_rows] for name, rows in self.joined().items()}

    def take(self, num_rows: int) -> dict[str, Tensor]:
        """The first rows, which are kept no longer."""
        joined = self.joined()
        self.num_rows -= num_rows
        self.parts = {name: [rows[num_rows:]] for name, rows in joined.items()} if self.num_rows else {}
        return {name: rows[:num_rows] for name, rows in joined.items()}

    def joined(self) -> dict[str, Tensor]:
        """All rows that are there: the same tensors until there are more."""
        for parts in self.parts.values():
            if len(parts) > 1:
                parts[:] = [torch.cat(parts)]
        return {name: parts[0] for name, parts in self.parts.items()}


@dataclass(slots=True)
class ContextOutputs:
    """Those of the prompt, from its first token that had to be computed on. The n sequences of a request share them."""

    rows: RowBuffer
    first_token: int | None = None

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        if self.first_token is None:
            self.first_token = self.rows.next_position = first
        if not self.rows.is_whole:
            self.rows.add(first, rows)


@dataclass(slots=True)
class SequenceOutputs:
    """What one sequence has of the outputs that its request wants. `context` is None where the prompt's are not wanted.

    A generated token's row is that of the token before it: what the model had computed when it said it.
    """

    generated: RowBuffer
    context: ContextOutputs | None = None
    _num_said: int = 0

    @classmethod
    def for_all(cls, num_sequences: int, num_prompt_tokens: int, *, with_context: bool) -> "list[SequenceOutputs]":
        context = ContextOutputs(RowBuffer(0, stop=num_prompt_tokens)) if with_context else None
        return [cls(RowBuffer(num_prompt_tokens - 1), context) for _ in range(num_sequences)]

    @property
    def next_position(self) -> int:
        """Of the first token whose row is wanted and not there yet."""
        return self.generated.next_position if self.context is None or self.context.rows.is_whole else self.context.rows.next_position

    @property
    def num_reusable_tokens(self) -> int:
        """How many tokens at the beginning need not be computed where the cache has them: of the prompt, any while none has been."""
        has_begun = self.context is None or self.context.first_token is not None
        return self.next_position if has_begun else self.generated.next_position

    def add(self, first: int, rows: dict[str, Tensor]) -> None:
        """Rows of the tokens from position `first` on, which have been computed, perhaps not for the first time."""
        if self.context is not None:
            self.context.add(first, rows)
        self.generated.add(first, rows)

    def take(self, num_said: int) -> dict[str, Tensor]:
        """The rows for as many more generated tokens as have been said, as far as they are there."""
        self._num_said += num_said
        num_rows = min(self._num_said, self.generated.num_rows)
        self._num_said -= num_rows
        return self.generated.take(num_rows) if num_rows else {}

    def fork(self) -> "SequenceOutputs":
        """One that goes on by itself from here."""
        own = copy.copy(self)
        own.generated = copy.copy(self.generated)
        own.generated.parts = {name: list(parts) for name, parts in self.generated.parts.items()}
        return own
