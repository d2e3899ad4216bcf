"""Steps as CUDA graphs: one launch in place of the hundreds that a model's Python code makes.

A graph repeats what the device did while it was captured, on the same memory and with the same grids. So there is one for each of a few
shapes, with tensors of its own to read from, and a batch is padded to the next shape. Only the numbers in these tensors say which rows are
decodes, prompts or padding. A batch that no shape has room for runs without a graph.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.engine.attention.interface import NUM_HEADER_FIELDS, AttentionMetadata, flatten
from penstock.engine.batch import Batch, StepInputs
from penstock.engine.scheduling.step import SHORT_CHUNK

logger = logging.getLogger(__name__)

FINE_FROM = 64  # rows; from here on a step's time grows with its rows, and twice as many as needed would cost
# Of steps with prompts. Matrix products are computed in tiles of 64 rows or more, so padding to a multiple of that is cheap.
TOKENS_APART = 64
COARSE_FROM = 1024  # tokens; from here on, twice as far apart
MAX_TOKENS = 2048  # a larger step takes the device longer than Python takes to launch it
MAX_PROMPTS = 16  # in one graph; each has programs for as many tokens as the graph has, and those that find none end at once

Forward = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
Kind = Literal["decode", "mixed"]


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
    """The numbers of decodes that get a graph: powers of two, from `FINE_FROM` on also the middles between them, and the greatest one."""
    sizes = {1 << power for power in range(max_num_rows.bit_length())}
    sizes |= {3 * size // 2 for size in sizes if size >= FINE_FROM}
    return sorted({size for size in sizes if size < max_num_rows} | {max_num_rows})


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """The numbers of tokens that get a graph for steps with prompts, the greatest one among them if it is not above `MAX_TOKENS`."""
    largest = min(max_num_tokens, MAX_TOKENS)
    sizes = [16, 32, *range(TOKENS_APART, COARSE_FROM, TOKENS_APART), *range(COARSE_FROM, MAX_TOKENS, 2 * TOKENS_APART)]
    return [*(size for size in sizes if size < largest), largest] if largest > SHORT_CHUNK else []


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph has room for, or a batch wants: tokens, decodes and prompts among their sequences, rows whose logits are computed."""

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_kept: int

    @classmethod
    def of_decodes(cls, num_rows: int) -> "GraphShape":
        return cls(num_rows, num_rows, 0, num_rows)

    @classmethod
    def of_mixed(cls, num_tokens: int, max_num_rows: int) -> "GraphShape":
        shortest = SHORT_CHUNK + 1  # tokens of a prompt: fewer are decodes
        num_prompts = min(num_tokens // shortest, max_num_rows, MAX_PROMPTS)
        return cls(num_tokens, min(num_tokens - shortest, max_num_rows), num_prompts, min(num_tokens, max_num_rows))

    @classmethod
    def wanted_by(cls, inputs: StepInputs) -> "GraphShape":
        num_decodes = inputs.attention.num_decodes
        num_prompts = inputs.attention.num_sequences - num_decodes
        # Only a batch of decodes is so small that it is padded already.
        return cls(inputs.input_ids_1T.shape[1] if num_prompts else num_decodes, num_decodes, num_prompts, len(inputs.kept_T))

    @property
    def kind(self) -> Kind:
        return "mixed" if self.num_prompts else "decode"

    def has_room_for(self, wanted: "GraphShape") -> bool:
        return (
            self.num_tokens >= wanted.num_tokens
            and self.num_decodes >= wanted.num_decodes
            and self.num_prompts >= wanted.num_prompts
            and self.num_kept >= wanted.num_kept
        )

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens" if self.num_prompts else f"{self.num_decodes} decodes"


def padding(shape: GraphShape, block_tables_PN: Tensor, *, max_context_len: int, num_groups: int = 1) -> StepInputs:
    """The tensors that a graph reads, all of it padding: tokens without a slot, and sequences without tokens or keys.

    Of the block tables it reads those of the engine, as all steps do.
    """
    num_sequences = shape.num_decodes + shape.num_prompts
    tokens, sequences = [0] * shape.num_tokens, [0] * num_sequences
    slots, starts, rows = [-1] * shape.num_tokens * num_groups, [0] * (num_sequences + 1), sequences * num_groups
    attention = flatten(slots, starts, sequences, rows, num_decodes=shape.num_decodes, num_groups=num_groups)
    attention[NUM_HEADER_FIELDS - 2 : NUM_HEADER_FIELDS] = [shape.num_tokens if shape.num_prompts else 1, max_context_len]
    return StepInputs.pack(attention, tokens, tokens, [0] * shape.num_kept, [], block_tables_PN).on(block_tables_PN.device)


def load(own: StepInputs, given: StepInputs) -> None:
    """Copies a batch into a graph's tensors, and makes padding of what is left of them. Never waits for the device.

    Prompts begin at the same sequence in each batch: that of the graph's decodes which the batch does not have are padding.
    """
    mine, theirs = own.attention, given.attention
    wanted = GraphShape.wanted_by(given)
    num_tokens, num_decodes = wanted.num_tokens, wanted.num_decodes
    first_prompt, end_prompt = mine.num_decodes, mine.num_decodes + wanted.num_prompts
    own.packed[NUM_HEADER_FIELDS:].zero_()  # positions, too: some models look for the greatest of all
    for group in mine.groups:
        group.slot_mapping_T[num_tokens:].fill_(-1)
    mine.query_start_loc[num_decodes:first_prompt].fill_(num_decodes)
    mine.query_start_loc[end_prompt + 1 :].fill_(num_tokens)
    copies = [
        (own.input_ids_1T[0, :num_tokens], given.input_ids_1T[0, :num_tokens]),
        (own.positions_1T[0, :num_tokens], given.positions_1T[0, :num_tokens]),
        (own.kept_T[: wanted.num_kept], given.kept_T),
        (mine.query_start_loc[:num_decodes], theirs.query_start_loc[:num_decodes]),
        (mine.query_start_loc[first_prompt : end_prompt + 1], theirs.query_start_loc[num_decodes:]),
    ]
    per_sequence = [(mine.context_lens_B, theirs.context_lens_B)]
    for group, given_group in zip(mine.groups, theirs.groups, strict=True):
        copies.append((group.slot_mapping_T[:num_tokens], given_group.slot_mapping_T[:num_tokens]))
        per_sequence.append((group.table_rows_B, given_group.table_rows_B))
    for vector, source in per_sequence:
        copies += [(vector[:num_decodes], source[:num_decodes]), (vector[first_prompt:end_prompt], source[num_decodes:])]
    targets, sources = zip(*(pair for pair in copies if len(pair[0])), strict=True)
    torch._foreach_copy_(targets, sources)


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: StepInputs
    replay: Callable[[], None]


class StepGraphs:
    """The graphs of one model. Belongs to the thread that runs the model, in inference mode.

    `forward` gives logits [K, V] from input ids and positions [1, T], the attention metadata and the K rows that are kept. There are
    graphs for up to `max_num_rows` decodes, and for steps with prompts of up to `max_num_tokens` tokens. The KV cache has `num_groups`
    groups of layers. A graph is kept that all ranks have captured, as `agree` finds out. `num_steps` counts the steps that ran, by kind and
    by whether they had a graph.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        block_tables_PN: Tensor,
        block_size: int,
        num_groups: int = 1,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._agree = agree
        self._forward = forward
        self._recorder = recorder
        self._block_tables_PN = block_tables_PN
        self._num_groups = num_groups
        self._max_context_len = block_tables_PN.shape[1] * block_size
        self._shapes: dict[Kind, list[GraphShape]] = {
            "mixed": [GraphShape.of_mixed(size, max_num_rows) for size in mixed_sizes(max_num_tokens)],
            "decode": [GraphShape.of_decodes(size) for size in graph_sizes(max_num_rows)],
        }
        self._wanted = [shape for shapes in self._shapes.values() for shape in shapes]
        self._graphs: dict[GraphShape, _Graph] = {}
        self._logits_KV: Tensor | None = None  # one for all graphs: it is read before the next replay
        self._has_logged_size = False
        self.num_steps: Counter[tuple[Kind, bool]] = Counter()

    @property
    def shapes(self) -> list[GraphShape]:
        """Those that have been captured, in the order in which they were."""
        return list(self._graphs)

    @property
    def num_wanted(self) -> int:
        """How many graphs are still to be captured."""
        return len(self._wanted)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Captures the next graph; False where none is left to capture.

        Decodes come first, of which there are most. Of each kind, the largest comes first so that smaller ones find its memory; where
        capture fails, those left of the kind run without a graph, and the log says so.
        """
        if not self._wanted:
            return False
        shape = self._wanted.pop()
        graph = None
        try:
            graph = self._capture(shape)
        except Exception as error:  # a compiler's errors have no common type; the model runs as well without
            reason = (str(error).strip().splitlines() or [""])[0]
            steps = f"Steps with prompts of {shape} and fewer" if shape.num_prompts else f"Steps of {shape} and fewer"
            logger.warning("%s run without CUDA graphs: %s: %s", steps, type(error).__name__, reason)
        if self._agree(graph is not None) and graph is not None:
            self._graphs[shape] = graph
        else:
            self._wanted = [other for other in self._wanted if other.kind != shape.kind]
        return bool(self._wanted)

    def run(self, batch: Batch) -> Tensor | None:
        """The logits of the batch's kept rows, valid until the next run; None where the batch is to be run without a graph."""
        wanted = GraphShape.wanted_by(batch.inputs)
        shape = next((shape for shape in self._shapes[wanted.kind] if shape.has_room_for(wanted)), None)
        graph = None if shape is None else self._graphs.get(shape)
        self.num_steps[wanted.kind, graph is not None] += 1
        if shape is None and not self._has_logged_size:
            self._has_logged_size = True
            logger.info("A step runs without a CUDA graph, as others like it will, because none is as large: %r", wanted)
        if graph is None:
            return None
        assert self._logits_KV is not None
        load(graph.inputs, batch.inputs)
        graph.replay()
        return self._logits_KV[: wanted.num_kept]

    def _capture(self, shape: GraphShape) -> _Graph:
        inputs = padding(shape, self._block_tables_PN, max_context_len=self._max_context_len, num_groups=self._num_groups)

        def work() -> None:
            logits_KV = self._forward(inputs.input_ids_1T, inputs.positions_1T, inputs.attention, inputs.kept_T)
            if self._logits_KV is None:
                self._logits_KV = torch.empty_like(logits_KV)
            self._logits_KV[: shape.num_kept].copy_(logits_KV)

        return _Graph(inputs, self._recorder.capture(work))
