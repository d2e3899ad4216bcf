"""A logits processor as one sequence has it."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.engine.hooks import LogitsRow
from penstock.engine.sampling.processors import BatchMember, Form, made_form


@dataclass(frozen=True, slots=True)
class SequenceProcessor:
    """A processor as one sequence has it. `process` is a function of one row, or what has `process_batch`."""

    process: Any
    form: Form
    row: LogitsRow

    @classmethod
    def of(cls, made: Any, row: LogitsRow) -> "SequenceProcessor":
        """What a request's maker gave, for a sequence whose identity and tokens are in `row`."""
        form = made_form(made)
        if isinstance(made, BatchMember):
            return cls(made.processor, form, replace(row, arguments=made.arguments, state=made.state))
        return cls(made, form, row)

    def fork(self, token_ids: list[int]) -> "SequenceProcessor":
        """One that goes on by itself, on other tokens: what it remembers is copied."""
        row = replace(self.row, token_ids=token_ids, state=copy.deepcopy(self.row.state))
        return SequenceProcessor(self.process if self.form is Form.BATCH else copy.deepcopy(self.process), self.form, row)

    def apply(self, logits_V: Tensor) -> None:
        """Changes the row in place. Raises whatever the processor raises, and `TypeError` for an answer that is no logits."""
        row = self.row
        if self.form is Form.ROW:
            changed = self.process(row.request_id, logits_V, row.token_ids, row.client_id)
            changed = logits_V if changed is None else changed
        else:
            changed = self.process(row.token_ids, logits_V)
        take_changed(changed, logits_V)


def take_changed(changed: object, logits: Tensor) -> None:
    """Leaves a processor's answer in `logits`, which it may have changed in place. Raises `TypeError` for one that is no logits."""
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"expected logits of shape {tuple(logits.shape)}, got {shape}")
    if changed is not logits:
        logits.copy_(changed)
