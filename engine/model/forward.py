"""The forward pass of a step, which all ranks of a model compute alike, and the message by which rank 0 orders it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from penstock.engine.adapters.checkpoint import LowRank
from penstock.engine.adapters.registry import Adapter, AdapterRows
from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.batch import Batch, StepInputs
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model.adapted import AdaptedLayers
from penstock.engine.model.cuda_graphs import StepGraphs
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.outputs import Capture, ModelOutputs
from penstock.engine.parallel.group import Order
from penstock.engine.parallel.stages import Pipeline

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOWN, UP = "down", "up"


class ForwardPass:
    """A model over its KV cache. Belongs to the thread that runs the model.

    On rank 0, `order` comes before each step. `follow` is the same step on another rank.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        *,
        adapted: AdaptedLayers | None = None,
        graphs: StepGraphs | None = None,
        adapted_graphs: StepGraphs | None = None,
    ) -> None:
        self.loaded, self.cache = loaded, cache
        self.adapted = adapted
        self.graphs, self.adapted_graphs = graphs, adapted_graphs
        self.group = loaded.sharding.group
        num_layers = loaded.config.get_text_config(decoder=True).num_hidden_layers
        stage = loaded.sharding.stage
        self.pipeline = None if stage is None else Pipeline(loaded.model, stage, self.group, loaded.dtype, loaded.device)
        self.outputs = ModelOutputs(loaded.model, num_layers, is_sharded=self.group.size > 1, is_staged=stage is not None)
        self._sent: dict[int, int] = {}  # on rank 0, the numbers of the adapters that the others keep, by slot
        self._adapters: dict[int, Adapter] = {}  # on the others, those adapters

    def order(self, inputs: StepInputs, batch: Batch, *, is_seen: bool) -> None:
        """Has the other ranks compute the step. `inputs` are those of the batch, on the CPU."""
        if self.group.size == 1:
            return
        adapters = {} if batch.adapters is None else batch.adapters.adapters
        for slot, adapter in adapters.items():
            if self._sent.get(slot) != adapter.number:
                self._sent[slot] = adapter.number
                self.group.send(Order.ADAPTER, torch.tensor([slot]), adapter_message(adapter))
        self.group.send(Order.STEP, *step_message(inputs, batch, is_seen=is_seen))

    def keep(self, message: Tensor) -> None:
        """Keeps an adapter that rank 0 has sent, in place of the one that had its slot before."""
        self._adapters[int(message[0])] = adapter_of(message[1:])

    def capture_next(self, graphs: StepGraphs) -> bool:
        """As that of the graphs, on all ranks."""
        self.group.send(Order.CAPTURE, torch.tensor([graphs is self.adapted_graphs]))
        return graphs.capture_next()

    @torch.inference_mode()
    def follow(self, message: Tensor) -> None:
        """Computes a step that rank 0 has ordered, except for what only that needs."""
        batch, has_embeds, is_seen = batch_of(message, self.cache.block_tables_PN, self._adapters)
        batch = batch.on(self.loaded.device)
        self.begin(batch)
        if self.pipeline is not None:
            self.compute_stage(batch)
            return
        embedded = self._embeds_like(batch.inputs) if has_embeds else None
        if is_seen:
            with self.seen(batch, set(), batch.inputs.kept_T[:0]):
                self.plainly(batch, embedded)
        else:
            self.logits(batch, embedded)

    def begin(self, batch: Batch) -> None:
        """Prepares the KV cache for the step."""
        if batch.num_pending:
            self.group.share(batch.inputs.input_ids_1T)
        self.cache.write_tables(batch.inputs.table_updates_3U)
        self.cache.copy_blocks(batch.copies)

    def compute_stage(self, batch: Batch, embedded: dict[str, Any] | None = None) -> None:
        """Computes this rank's stage of the step. Rank 0 gets the logits later, from `Pipeline.logits`."""
        assert self.pipeline is not None
        inputs = batch.inputs
        self.pipeline.compute(inputs.input_ids_1T, inputs.positions_1T, inputs.attention, inputs.kept_T, embedded or {})

    def _embeds_like(self, inputs: StepInputs) -> dict[str, Any]:
        """Room for the vectors that rank 0 has put in the place of tokens' own."""
        embedding = self.loaded.model.get_input_embeddings()
        return {"inputs_embeds": embedding(inputs.input_ids_1T).contiguous()}

    def logits(
        self, batch: Batch, embedded: dict[str, Any] | None = None, positions: Tensor | None = None, *, may_replay: bool = True
    ) -> Tensor:
        """The logits of the batch's kept rows, [K, V], valid until the next call; by a graph, if it may be replayed."""
        graphs = self.graphs
        if batch.adapters is not None:
            self._adapted.load(batch.adapters)
            graphs = self.adapted_graphs
        logits_KV = None if graphs is None or embedded is not None or not may_replay else graphs.run(batch)
        return self.plainly(batch, embedded, positions) if logits_KV is None else logits_KV

    def plainly(self, batch: Batch, embedded: dict[str, Any] | None = None, positions: Tensor | None = None) -> Tensor:
        """As `logits`, without a graph, once the adapters are loaded."""
        inputs = batch.inputs
        if embedded is not None and self.group.size > 1:
            self.group.share(embedded["inputs_embeds"])
        positions = inputs.positions_1T if positions is None else positions
        given = (self.loaded.model, inputs.input_ids_1T, positions, inputs.attention, inputs.kept_T, embedded)
        return compute_logits(*given) if batch.adapters is None else adapted_logits(self._adapted, *given)

    @contextmanager
    def seen(self, batch: Batch, names: set[str], rows_R: Tensor) -> Iterator[Capture]:
        """Within the context the model's own modules run, with the outputs captured on the way."""
        with self.outputs.capturing(names, rows_R, batch.inputs.input_ids_1T.shape[1]) as capture:
            if batch.adapters is not None:
                self._adapted.load(batch.adapters)
            yield capture

    @property
    def _adapted(self) -> AdaptedLayers:
        assert self.adapted is not None, "no request can have an adapter"
        return self.adapted


def is_plain(positions: Tensor, embedded: dict[str, Any] | None) -> bool:
    """Whether native code, in place of the model's own, can compute a step: it knows embeddings alone, and positions of one part."""
    return positions.dim() == 2 and (embedded is None or embedded.keys() <= {"inputs_embeds"})


def compute_logits(
    model: "PreTrainedModel",
    input_ids_1T: Tensor,
    positions: Tensor,
    attention: AttentionMetadata,
    kept_K: Tensor,
    embedded: dict[str, Any] | None = None,
) -> Tensor:
    """The logits [K, V] of the flat rows `kept_K`, by positions [1, T], or [3, 1, T] where some have three parts.

    `embedded` are other inputs of the model than the ids: their embeddings, and what else its layers take.
    """
    inputs = {"input_ids": input_ids_1T} if embedded is None else embedded
    forward: Callable[..., Any] = model if is_plain(positions, embedded) else functools.partial(type(model).forward, model)
    output = forward(
        **inputs,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=kept_K,
        attention_metadata=attention,
    )
    logits_KV: Tensor = output.logits[0]
    return logits_KV


def adapted_logits(
    adapted: AdaptedLayers,
    model: "PreTrainedModel",
    input_ids_1T: Tensor,
    positions: Tensor,
    attention: AttentionMetadata,
    kept_K: Tensor,
    embedded: dict[str, Any] | None = None,
) -> Tensor:
    """As `compute_logits`, with the adapters that have been loaded."""
    with adapted.installed(input_ids_1T.shape[1], is_native=is_plain(positions, embedded)):
        return compute_logits(model, input_ids_1T, positions, attention, kept_K, embedded)


NUM_STEP_FIELDS = 11


def step_message(inputs: StepInputs, batch: Batch, *, is_seen: bool) -> list[Tensor]:
    """What `batch_of` makes a batch of: the sizes of its parts, blocks to copy, adapters and their rows, and its inputs."""
    adapters = batch.adapters or AdapterRows([], {})
    header = [*inputs.sizes, len(batch.copies), len(adapters.slots), len(adapters.adapters), batch.num_pending, bool(batch.embeds), is_seen]
    copies = [block for pair in batch.copies for block in pair]
    return [torch.tensor([*header, *copies, *adapters.slots, *adapters.adapters], dtype=torch.int64), inputs.packed]


def batch_of(message: Tensor, block_tables_PN: Tensor, adapters: dict[int, Adapter]) -> tuple[Batch, bool, bool]:
    """The batch on the CPU, without what is sampled; whether some tokens have vectors, and whether outputs are captured.

    `adapters` are by slot.
    """
    *sizes, num_copies, num_slots, num_adapters, num_pending, has_embeds, is_seen = message[:NUM_STEP_FIELDS].tolist()
    before = [NUM_STEP_FIELDS, 2 * num_copies, num_slots, num_adapters]
    _, copies, slots, used, packed = torch.split(message, [*before, len(message) - sum(before)])
    rows = AdapterRows(slots.tolist(), {slot: adapters[slot] for slot in used.tolist()})
    batch = Batch(
        inputs=StepInputs.unpack(packed, sizes, block_tables_PN),
        logits_rows=[],
        sampler_rows=[],
        prompts=[],
        masks=None,
        copies=[(source, target) for source, target in copies.view(-1, 2).tolist()],
        num_pending=num_pending,
        adapters=rows if num_slots else None,
    )
    return batch, bool(has_embeds), bool(is_seen)


def adapter_message(adapter: Adapter) -> Tensor:
    """Of which `adapter_of` makes an adapter with the same number and updates."""
    content = save(
        {
            f"{part}.{path}": tensor
            for path, update in adapter.updates.items()
            for part, tensor in ((DOWN, update.down_RI), (UP, update.up_OR))
        }
    )
    padded = content + bytes(-len(content) % 8)
    numbers = torch.frombuffer(bytearray(padded), dtype=torch.int64)
    return torch.cat([torch.tensor([adapter.number, len(content)]), numbers])


def adapter_of(message: Tensor) -> Adapter:
    number, num_bytes = message[:2].tolist()
    tensors = load(message[2:].numpy().tobytes()[:num_bytes])
    paths = [name.removeprefix(f"{DOWN}.") for name in tensors if name.startswith(f"{DOWN}.")]
    return Adapter("", "", {path: LowRank(tensors[f"{DOWN}.{path}"], tensors[f"{UP}.{path}"]) for path in paths}, number=number)
