"""TensorRT-LLM's callbacks on logits as logits processors."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.logits_processor import LogitsProcessor, LogitsRow, as_processor, per_row

BATCHED = "batched"  # the name by which a request asks for the batched callback
NUM_PARAMETERS = 5
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ClientId = int | str | None
RowCallback = Callable[[int, Tensor, list[list[int]], int, ClientId], None]
BatchedCallback = Callable[[list[int], list[Tensor], list[list[list[int]]], int, list[ClientId]], None]


def row_processor(given: Any, name: str) -> LogitsProcessor:
    """`callback(request_id, logits, token_ids, stream, client_id)` as a processor; a processor as it is. Raises `TypeError` for all else.

    The callback changes `logits` [1, 1, V] in place. `token_ids` hold one list, and `stream` is CUDA's, 0 on a CPU.
    """
    if not takes_five(given):
        try:
            return as_processor(given)
        except TypeError as error:
            raise TypeError(f"`{name}`: {error}; a callback takes (request_id, logits, token_ids, stream, client_id)") from None
    callback: RowCallback = given

    def process(row: LogitsRow, logits: Tensor) -> None:
        callback(int(row.request_id), logits.view(1, 1, -1), [row.token_ids], stream_of(logits), row.client_id)

    return per_row(process)


def batched_processor(callback: BatchedCallback) -> LogitsProcessor:
    """`callback(request_ids, logits, token_ids, stream, client_ids)` as a processor: lists with an entry for each row of a step, as above.

    Raises `TypeError` for anything else.
    """
    if not takes_five(callback):
        raise TypeError("`processor_batched` must take (request_ids, logits, token_ids, stream, client_ids)")
    return BatchedProcessor(callback)


class BatchedProcessor(LogitsProcessor):
    """Every beam is a row of its own."""

    def __init__(self, callback: BatchedCallback) -> None:
        self._callback = callback

    def process(self, rows: Sequence[LogitsRow], logits: Tensor) -> None:
        self._callback(
            [int(row.request_id) for row in rows],
            [logits_V.view(1, 1, -1) for logits_V in logits],
            [[row.token_ids] for row in rows],
            stream_of(logits),
            [row.client_id for row in rows],
        )


def stream_of(logits: Tensor) -> int:
    return torch.cuda.current_stream(logits.device).cuda_stream if logits.is_cuda else 0


def takes_five(callback: object) -> bool:
    """Whether it has the parameters of the original's callbacks, of which the last may have a default."""
    if not callable(callback) or isinstance(callback, type):
        return False
    try:
        parameters = inspect.signature(callback).parameters.values()
    except ValueError:  # of what is written in C
        return False
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    num_required = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    return len(positional) == NUM_PARAMETERS and num_required >= NUM_PARAMETERS - 1
