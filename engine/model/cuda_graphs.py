"""Decode steps as CUDA graphs: one launch in place of the hundreds that a model's Python code makes.

A graph repeats what the device did while it was captured, on the same memory. So there is one for each of a few batch sizes, with tensors
of its own to read from, and a batch is padded to the next size. A batch that is not of decodes alone, or has no graph, runs without one.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.attention.metadata import AttentionMetadata
from penstock.engine.batch import Batch

logger = logging.getLogger(__name__)

FINE_FROM = 64  # rows; from here on a step's time grows with its rows, and twice as many as needed would cost

Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]


class Recorder(Protocol):
    """Captures device work: CUDA, or a fake of it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work`, which touches the same tensors whenever it is called, and returns what repeats it on the device alone.

        Raises `RuntimeError` where it does what cannot be captured, such as waiting for the device.
        """
        ...


class CudaRecorder:
    """Captures on a stream of its own. All graphs share one pool of memory, since no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        # Around all of it: `torch.cuda.graph` stays on its stream where a capture fails, and what follows would no longer be in order.
        with torch.cuda.stream(self._stream):
            work()  # kernels are compiled and libraries set up at their first call, which is nothing that can be captured
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # Only this thread is held to what may be captured: the event loop's goes on sending tensors to the device.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            except Exception:
                # Before 2.13, torch leaves its allocator in the belief that it still captures: `empty_cache` then fails for good,
                # and so does freeing what is cached when memory runs out. Later versions have ended it, and say that by an error.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise
        replay: Callable[[], None] = graph.replay
        return replay


def graph_sizes(max_num_rows: int) -> list[int]:
    """The batch sizes that get a graph: powers of two, from `FINE_FROM` on also the middles between them, and the greatest one."""
    sizes = {1 << power for power in range(max_num_rows.bit_length())}
    sizes |= {3 * size // 2 for size in sizes if size >= FINE_FROM}
    return sorted({size for size in sizes if size < max_num_rows} | {max_num_rows})


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The tensors that a graph over S rows reads. Rows of padding have no keys and no slot."""

    input_ids_1S: Tensor
    positions_1S: Tensor
    attention: AttentionMetadata

    @classmethod
    def of_padding(cls, num_rows: int, *, table_width: int, max_context_len: int, device: torch.device) -> "DecodeInputs":
        header = torch.tensor([num_rows, num_rows, table_width, num_rows, 1, max_context_len])
        slots = torch.full((num_rows,), -1)
        rest = torch.zeros(num_rows * (1 + table_width), dtype=torch.int64)  # context lengths and tables
        packed = torch.cat([header, slots, torch.arange(num_rows + 1), rest]).to(device)
        zeros_1S = torch.zeros(1, num_rows, dtype=torch.int64, device=device)
        return cls(zeros_1S, zeros_1S.clone(), AttentionMetadata.unpack(packed))

    def load(self, batch: Batch) -> None:
        """Copies in all that differs from one batch to the next, and makes padding of the rows beyond it. Never waits for the device."""
        own, given = self.attention, batch.attention
        num_rows, width = given.block_table_BN.shape
        self.input_ids_1S[:, :num_rows].copy_(batch.input_ids_1T[:, :num_rows])
        self.positions_1S[:, :num_rows].copy_(batch.positions_1T[:, :num_rows])
        own.slot_mapping_T[:num_rows].copy_(given.slot_mapping_T[:num_rows])
        own.context_lens_B[:num_rows].copy_(given.context_lens_B)
        own.block_table_BN[:num_rows, :width].copy_(given.block_table_BN)
        own.slot_mapping_T[num_rows:].fill_(-1)
        own.context_lens_B[num_rows:].zero_()
        self.positions_1S[:, num_rows:].zero_()  # some models look for the greatest position of all


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeInputs
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of one model. Belongs to the thread that runs the model, in inference mode.

    `forward` gives logits [T, V] from input ids and positions [1, T]. `table_width` blocks hold the longest sequence there is.
    """

    def __init__(self, forward: Forward, recorder: Recorder, *, max_num_rows: int, table_width: int, block_size: int, device: torch.device):
        self._forward = forward
        self._recorder = recorder
        self._table_width = table_width
        self._max_context_len = table_width * block_size
        self._device = device
        self._sizes = graph_sizes(max_num_rows)
        self._wanted = list(self._sizes)
        self._graphs: dict[int, _Graph] = {}
        self._logits_SV: Tensor | None = None  # one for all graphs: it is read before the next replay

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that have been captured."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Captures the next graph, the largest first so that smaller ones find its memory; False where none is left to capture.

        Where capture fails, the sizes left run without a graph, and the log says so.
        """
        if not self._wanted:
            return False
        size = self._wanted.pop()
        try:
            self._graphs[size] = self._capture(size)
        except Exception as error:  # a compiler's errors have no common type; the model runs as well without
            reason = (str(error).strip().splitlines() or [""])[0]
            logger.warning("Decode steps of %d rows and fewer run without CUDA graphs: %s: %s", size, type(error).__name__, reason)
            self._wanted.clear()
        return bool(self._wanted)

    def run(self, batch: Batch) -> Tensor | None:
        """The logits of the batch's kept rows, valid until the next run; None where the batch is to be run without a graph."""
        num_rows = batch.attention.num_sequences
        # A decode is a sequence with one new token, so no other kind of batch has a longest query of one.
        if batch.attention.max_query_len != 1 or num_rows > self._sizes[-1]:
            return None
        graph = self._graphs.get(next(size for size in self._sizes if size >= num_rows))
        if graph is None:
            return None
        assert self._logits_SV is not None
        graph.inputs.load(batch)
        graph.replay()
        # A row of one token is kept once or not at all: when as many are kept as there are, it is all of them in their order.
        return self._logits_SV[:num_rows] if len(batch.kept_T) == num_rows else self._logits_SV[batch.kept_T]

    def _capture(self, size: int) -> _Graph:
        inputs = DecodeInputs.of_padding(size, table_width=self._table_width, max_context_len=self._max_context_len, device=self._device)

        def work() -> None:
            logits_SV = self._forward(inputs.input_ids_1S, inputs.positions_1S, inputs.attention)
            if self._logits_SV is None:
                self._logits_SV = torch.empty_like(logits_SV)
            self._logits_SV[:size].copy_(logits_SV)

        return _Graph(inputs, self._recorder.capture(work))
