"""Runs the logits processors of a step: each request's in its order, and batched ones with as many rows at a time as there are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.logits_processor import SequenceProcessor, take_changed


class ProcessorPass:
    """The rows of one step that have processors. Logits float32 [R, V] are changed in place.

    `failures` maps a row to why it has no logits: a processor of its raised. The other rows are none the worse for it.
    """

    def __init__(self, logits_RV: Tensor, processors: Sequence[Sequence[SequenceProcessor]]) -> None:
        self.logits_RV = logits_RV
        self.failures: dict[int, str] = {}
        self._remaining = {row: list(own) for row, own in enumerate(processors)}

    def run(self) -> None:
        while True:
            for row in self._remaining:
                self._run_own(row)
            rows = self._next_batch()
            if not rows:
                return
            self._run_batch([(row, self._remaining[row].pop(0)) for row in rows])

    def _run_own(self, row: int) -> None:
        """Up to the row's next batched processor."""
        remaining = self._remaining[row]
        while remaining and not remaining[0].processor.is_batched:
            member = remaining.pop(0)
            logits = self.logits_RV[row : row + 1]
            try:
                self._take(member.processor.process([member.row], logits), logits)
            except Exception as error:  # a plug-in's code: whatever it raises ends its own request
                self._fail(row, error)

    def _next_batch(self) -> list[int]:
        """The rows whose turn it is with one batched processor: one that no row has yet to come to, if there is such."""
        ready: dict[int, list[int]] = {}
        for row, remaining in self._remaining.items():
            if remaining:
                ready.setdefault(id(remaining[0].processor), []).append(row)
        later = {id(member.processor) for remaining in self._remaining.values() for member in remaining[1:]}
        return max(ready.items(), key=lambda item: (item[0] not in later, len(item[1])), default=(0, []))[1]

    def _run_batch(self, members: list[tuple[int, SequenceProcessor]]) -> None:
        rows = [row for row, _ in members]
        processor = members[0][1].processor
        index = to_device(torch.tensor(rows), self.logits_RV.device)
        logits = self.logits_RV[index]  # a copy: where the call raises, the rows are as they were
        try:
            self._take(processor.process([member.row for _, member in members], logits), logits)
            self.logits_RV[index] = logits
        except Exception as error:  # as above; of several rows it has to be found out whose fault it is
            if len(members) == 1:
                self._fail(rows[0], error)
            else:
                for member in members:
                    self._run_batch([member])

    @staticmethod
    def _take(changed: Tensor | None, logits: Tensor) -> None:
        if changed is not None:
            take_changed(changed, logits)

    def _fail(self, row: int, error: Exception) -> None:
        self.failures[row] = f"a logits processor raised {type(error).__name__}: {error}"
        self._remaining[row].clear()
