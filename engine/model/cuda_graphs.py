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

from penstock.engine.attention.metadata import NUM_HEADER_FIELDS, AttentionMetadata, flatten
from penstock.engine.batch import Batch, StepInputs

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


def padding(num_rows: int, block_tables_PN: Tensor, *, max_context_len: int, num_groups: int = 1) -> StepInputs:
    """The tensors that a graph over S rows reads, all of them rows of padding, which have no keys and no slot.

    Of the block tables it reads those of the engine, as all steps do.
    """
    zeros = [0] * num_rows
    starts, slots, rows = list(range(num_rows + 1)), [-1] * num_rows * num_groups, zeros * num_groups
    attention = flatten(slots, starts, zeros, rows, num_decodes=num_rows, num_groups=num_groups)
    attention[NUM_HEADER_FIELDS - 1] = max_context_len
    return StepInputs.pack(attention, zeros, zeros, [], [], block_tables_PN).on(block_tables_PN.device)


def load(own: StepInputs, given: StepInputs) -> None:
    """Copies decodes into a graph's tensors, and makes padding of the rows beyond them. Never waits for the device."""
    num_rows = given.attention.num_sequences
    own_vectors = _vectors(own)
    torch._foreach_copy_([vector[:num_rows] for vector in own_vectors], [vector[:num_rows] for vector in _vectors(given)])
    if num_rows < len(own_vectors[0]):
        for attention in own.attention.groups:
            attention.slot_mapping_T[num_rows:].fill_(-1)
        others = own_vectors[len(own.attention.groups) :]
        torch._foreach_zero_([vector[num_rows:] for vector in others])  # positions, too: some models look for the greatest of all


def _vectors(inputs: StepInputs) -> list[Tensor]:
    """All that differs from one batch of decodes to the next, the slots of each group of layers first."""
    groups = inputs.attention.groups
    slots, rows = [attention.slot_mapping_T for attention in groups], [attention.table_rows_B for attention in groups]
    return [*slots, *rows, inputs.attention.context_lens_B, inputs.input_ids_1T[0], inputs.positions_1T[0]]


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: StepInputs
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of one model. Belongs to the thread that runs the model, in inference mode.

    `forward` gives logits [T, V] from input ids and positions [1, T]. The KV cache has `num_groups` groups of layers.
    """

    def __init__(
        self, forward: Forward, recorder: Recorder, *, max_num_rows: int, block_tables_PN: Tensor, block_size: int, num_groups: int = 1
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._block_tables_PN = block_tables_PN
        self._num_groups = num_groups
        self._max_context_len = block_tables_PN.shape[1] * block_size
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
        attention, kept_T = batch.inputs.attention, batch.inputs.kept_T
        num_rows = attention.num_sequences
        # A decode is a sequence with one new token, so no other kind of batch has a longest query of one.
        if attention.max_query_len != 1 or num_rows > self._sizes[-1]:
            return None
        graph = self._graphs.get(next(size for size in self._sizes if size >= num_rows))
        if graph is None:
            return None
        assert self._logits_SV is not None
        load(graph.inputs, batch.inputs)
        graph.replay()
        # A row of one token is kept once or not at all: when as many are kept as there are, it is all of them in their order.
        return self._logits_SV[:num_rows] if len(kept_T) == num_rows else self._logits_SV[kept_T]

    def _capture(self, size: int) -> _Graph:
        inputs = padding(size, self._block_tables_PN, max_context_len=self._max_context_len, num_groups=self._num_groups)

        def work() -> None:
            logits_SV = self._forward(inputs.input_ids_1T, inputs.positions_1T, inputs.attention)
            if self._logits_SV is None:
                self._logits_SV = torch.empty_like(logits_SV)
            self._logits_SV[:size].copy_(logits_SV)

        return _Graph(inputs, self._recorder.capture(work))
