"""The forward pass and the sampling of one step, in the one thread that touches the model."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.batch import Batch, OutputRows, PendingTokens, PromptRows
from penstock.engine.config import PinThreads
from penstock.engine.deltas import TokenLogprobs
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model.adapted import AdaptedLayers
from penstock.engine.model.compiled_layers import LayerCompilation
from penstock.engine.model.cuda_graphs import StepGraphs
from penstock.engine.model.drafters.drafter import Drafter, ModelDraft
from penstock.engine.model.forward import ForwardPass
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder
from penstock.engine.model.outputs import Capture, ModelOutputs, owned_rows
from penstock.engine.multimodal.vision import PromptEmbedder
from penstock.engine.native.runtime import model_thread
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.stages import Pipeline
from penstock.engine.recurrent.states import RecurrentStates
from penstock.engine.sampling.greedy_head import MAX_DRAFT_ROWS, MAX_ROWS, GreedyHead, prepare_greedy_head
from penstock.engine.sampling.logprobs import LaunchedPromptLogprobs
from penstock.engine.sampling.rows import SamplingState
from penstock.engine.sampling.sampler import LaunchedSamples, Sampler, SamplerOutput
from penstock.engine.sequence import LOGITS, Sequence
from penstock.engine.system.memory import HostCopies, index_on, to_device

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepOutput:
    """Sampled tokens, an entry for each of `rows` of `Batch.sampler_rows`, and the log probabilities of the prompt tokens computed.

    `outputs` are, for each entry of `Batch.outputs`, its rows of each of its names, or why it has none. `sample_again` samples an entry
    under a mask, int32 [ceil(V / 32)], that it was sampled without; it is there where the batch `has_unmasked` rows, until the next step
    begins. `drafts` are a draft model's, for the next step.
    """

    samples: SamplerOutput
    rows: list[int]
    prompt_logprobs: list[tuple[Sequence, int, list[TokenLogprobs]]] = field(default_factory=list)
    outputs: list[dict[str, Tensor] | str] = field(default_factory=list)
    sample_again: Callable[[int, Tensor], SamplerOutput] | None = None
    drafts: list[ModelDraft] = field(default_factory=list)


@dataclass(slots=True)
class StepHandle:
    """A step in flight. The thread that launched it must not touch what the step reads."""

    future: "Future[StepOutput]"

    @classmethod
    def failed(cls, error: Exception) -> "StepHandle":
        """The handle of a step that could not be launched."""
        future: Future[StepOutput] = Future()
        future.set_exception(error)
        return cls(future)

    def awaited(self) -> "Future[StepOutput]":
        """Its future, from the moment on when nothing else is to be launched before it is done."""
        return self.future

    def collect(self) -> StepOutput:
        """Waits for the step. Raises whatever the model raised."""
        return self.awaited().result()


@dataclass(slots=True)
class StagedHandle(StepHandle):
    """A step on its way through the stages of other ranks. Its results are waited for in the model's thread, so later ones go first."""

    thread: ThreadPoolExecutor
    begun: "Future[Callable[[], StepOutput]]"
    is_awaited: bool = False

    def awaited(self) -> "Future[StepOutput]":
        if not self.is_awaited:
            self.is_awaited = True
            self.thread.submit(self._finish)
        return self.future

    def _finish(self) -> None:
        try:
            output = self.begun.result()()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(output)


def _logits_of(batch: Batch, rows: list[int], logits_KV: Tensor) -> Tensor:
    """The logits of these of the batch's sampler rows."""
    kept_rows = [batch.logits_rows[row] for row in rows]
    return logits_KV if kept_rows == list(range(len(logits_KV))) else logits_KV[index_on(logits_KV.device, kept_rows)]


def _sampler_inputs(batch: Batch, logits_KV: Tensor) -> tuple[list[int], Tensor, list[SamplingState], Tensor | None]:
    """The rows to be sampled, once the step has waited for their masks, with their logits, states and bitmask."""
    rows = list(range(len(batch.sampler_rows))) if batch.masks is None else batch.masks.rows_to_sample()
    bitmask_BW = None if batch.masks is None else batch.masks.of(rows, logits_KV.device)
    return rows, _logits_of(batch, rows, logits_KV), [batch.sampler_rows[row].sampling for row in rows], bitmask_BW


def sample_rows(batch: Batch, logits_KV: Tensor, sampler: Sampler, pending_ids_P: Tensor | None = None) -> StepOutput:
    """Samples the rows whose masks are there. `pending_ids_P` are what the step before sampled."""
    rows, logits_BV, states, bitmask_BW = _sampler_inputs(batch, logits_KV)
    output = StepOutput(sampler.sample(logits_BV, states, bitmask_BW, pending_ids_P), rows)
    if batch.has_unmasked:
        output.sample_again = lambda place, mask_W: sampler.sample(
            logits_BV[place, None], [states[place]], mask_W.to(logits_BV.device)[None]
        )
    return output


def _with_prompts(batch: Batch, entries: list[list[TokenLogprobs]]) -> list[tuple[Sequence, int, list[TokenLogprobs]]]:
    return [(rows.sequence, rows.first_token, own) for rows, own in zip(batch.prompts, entries, strict=True)]


def _read_later(
    copies: HostCopies, batch: Batch, output: StepOutput, samples: LaunchedSamples, scored: list[LaunchedPromptLogprobs]
) -> Callable[[], StepOutput]:
    """Starts the copy of all results. The function that is returned waits for it and completes the output."""
    parts = [samples.packed(), *(entries.packed() for entries in scored)]
    sizes = [len(part) for part in parts]
    wait = copies.begin(torch.cat(parts))

    def read() -> StepOutput:
        sampled, *rest = torch.split(wait(), sizes)
        output.samples = samples.read(sampled)
        output.prompt_logprobs = _with_prompts(batch, [entries.read(part) for entries, part in zip(scored, rest, strict=True)])
        return output

    return read


def _finish(started: "Future[Callable[[], StepOutput]]") -> StepOutput:
    return started.result()()


def _output_rows(outputs: list[OutputRows], logits_KV: Tensor, capture: Capture | None) -> Iterator[dict[str, Tensor] | str]:
    """For each entry its rows of each of its names, on the CPU, by one copy per name.

    An entry is the reason, a string, where one of its names has no rows.
    """
    captured = {} if capture is None else {name: states.cpu() for name, states in capture.rows.items()}
    failures = {} if capture is None else capture.failures
    if any(LOGITS in rows.names for rows in outputs):
        logits_KV = logits_KV.cpu()
    start = 0
    for rows in outputs:
        stop = start + rows.stop - rows.start
        kept = slice(rows.first_kept, rows.first_kept + stop - start)
        failed = next((failures[name] for name in rows.names if name in failures), None)
        yield failed or {
            name: owned_rows(logits_KV[kept], torch.float32) if name == LOGITS else owned_rows(captured[name][start:stop])
            for name in rows.names
        }
        start = stop


class ModelRunner:
    """Runs batches, one at a time, in a thread of its own: torch releases the interpreter lock in its kernels, so the loop goes on.

    `min_tokens` is the least number of tokens in a batch: a compiler would make a special case of one. With `copies`, the thread
    launches a step and goes on to the next one; another thread waits for the results.
    """

    min_tokens = 2

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        *,
        vocab_size: int,
        compilation: LayerCompilation | None = None,
        graphs: StepGraphs | None = None,
        copies: HostCopies | None = None,
        drafter: Drafter | None = None,
        seed: int | None = None,
        num_threads: int,
        pin_threads: PinThreads = "auto",
        adapted: AdaptedLayers | None = None,
        adapted_graphs: StepGraphs | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        self.loaded = loaded
        self.states = states
        self.num_threads = num_threads
        self._compilation = compilation
        self._copies = copies
        self.passes = ForwardPass(loaded, cache, adapted=adapted, graphs=graphs, adapted_graphs=adapted_graphs)
        self.drafter = drafter
        self.sampler = Sampler(vocab_size, loaded.device, seed)
        self._pending = PendingTokens(vocab_size, loaded.device)
        self.embedder = PromptEmbedder(loaded.model, loaded.vision, loaded.device)
        self.greedy_head: GreedyHead | None = None
        self.thread = model_thread(loaded.device, self.num_threads, pin_threads)
        self._results_thread = None if copies is None else ThreadPoolExecutor(1, thread_name_prefix="results")
        self._together = nullcontext if self.group.size == 1 else self.group.together
        self.readers: list[threading.Thread] = []  # which read the weights beside the steps, and end soon
        self.around_step: Callable[[Batch], AbstractContextManager[None]] | None = None  # entered for each step while a profile is taken

    @property
    def group(self) -> Group:
        """The ranks of the model."""
        return self.loaded.sharding.group

    @property
    def cache(self) -> KVCache:
        return self.passes.cache

    @property
    def outputs(self) -> ModelOutputs:
        return self.passes.outputs

    @property
    def adapted(self) -> AdaptedLayers | None:
        return self.passes.adapted

    @property
    def graphs(self) -> StepGraphs | None:
        return self.passes.graphs

    @graphs.setter
    def graphs(self, graphs: StepGraphs | None) -> None:
        self.passes.graphs = graphs

    def launch(self, batch: Batch) -> StepHandle:
        if self.passes.pipeline is not None:
            return StagedHandle(Future(), self.thread, self.thread.submit(self.start, batch))
        if self._results_thread is None:
            return StepHandle(self.thread.submit(self.run, batch))
        return StepHandle(self._results_thread.submit(_finish, self.thread.submit(self.start, batch)))

    def optimize(self) -> None:
        """Captures and compiles what makes steps faster, and swaps it in between two steps. Takes long, outside the model's thread."""
        self.capture_graphs()
        self._compile_layers()
        self.prepare_greedy_head()

    def capture_graphs(self) -> None:
        """Captures the CUDA graphs that are still to be captured, one at a time: steps go on in between."""
        for graphs, what in ((self.graphs, "Steps"), (self.passes.adapted_graphs, "Steps with adapters")):
            if graphs is not None:
                self._capture(graphs, what)

    def _capture(self, graphs: StepGraphs, what: str) -> None:
        started = time.monotonic()
        with suppress(RuntimeError):  # the runner was shut down meanwhile
            while self.thread.submit(self._capture_next, graphs).result():
                captured, wanted = graphs.shapes, graphs.num_wanted
                logger.info("CUDA graphs: %d captured, %d to go, after %.0f s", len(captured), wanted, time.monotonic() - started)
        for largest in {shape.kind: shape for shape in reversed(graphs.shapes)}.values():
            kind = "with prompts" if largest.num_prompts else "of decodes alone"
            logger.info("%s %s of up to %s run as CUDA graphs.", what, kind, largest)

    def _capture_next(self, graphs: StepGraphs) -> bool:
        if self.states is not None:
            self.states.begin(())  # a capture computes padding
        return self.passes.capture_next(graphs)

    def _compile_layers(self) -> None:
        if self._compilation is None or not self._compilation.compile():
            return
        try:
            self.thread.submit(self._compilation.install).result()
        except RuntimeError as error:  # the runner was shut down meanwhile, or what the compiler made does not load
            logger.warning("The decoder layers run uncompiled: %s", error)
        else:
            logger.info("The decoder layers are compiled.")

    def prepare_greedy_head(self) -> None:
        """Has steps of few greedy rows do without logits, where that is faster."""
        decoder = self.loaded.model.forward
        if not isinstance(decoder, NativeDecoder) or self.group.size > 1 or not decoder.form.outer.keeps_logits:
            return  # changed logits are rounded once more, which may make others of them equal
        torch.set_num_threads(1)  # of this thread: the model's has the cores
        with suppress(RuntimeError):  # the runner was shut down meanwhile
            self.greedy_head = prepare_greedy_head(
                decoder.head, decoder.embedding, self.sampler.vocab_size, lambda function: self.thread.submit(function).result()
            )

    def shutdown(self) -> None:
        """Waits for the step in flight."""
        if self._compilation is not None:
            self._compilation.cancel()
        self.thread.shutdown()
        if self._results_thread is not None:
            self._results_thread.shutdown()

    def copy_states(self, source: int | None, target: int) -> None:
        """Copies the states of recurrent layers from slot to slot, between the steps launched before and after this."""
        assert self.states is not None
        self.thread.submit(self.states.copy, source, target)

    def run(self, batch: Batch) -> StepOutput:
        """Computes a step and waits for its results."""
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], StepOutput]:
        """Launches a step on the device. The function that it returns waits for the results and returns them."""
        around_step = self.around_step  # which the thread of the loop may set meanwhile
        if around_step is None:
            return self._start(batch)
        with around_step(batch):
            return self._start(batch)

    @torch.inference_mode()
    def _start(self, batch: Batch) -> Callable[[], StepOutput]:
        if batch.masks is not None:
            batch.masks.begin()
        on_host = batch.inputs
        batch = batch.on(self.loaded.device)
        pending_ids_P = self._pending.fill_in(batch.inputs.input_ids_1T) if batch.num_pending else None
        self._pending.clear()
        names = {name for rows in batch.outputs for name in rows.names if name != LOGITS}
        self.passes.order(on_host, batch, is_seen=bool(names))
        with self._together():
            self.passes.begin(batch)
        if self.drafter is not None:
            self.drafter.cache.copy_blocks(batch.copies)
        if self.states is not None:
            self.states.begin(batch.states)
        if (found := self._most_probable(batch)) is not None:
            greedy: StepOutput = found
            self._pending.keep(greedy.samples.token_ids, greedy.rows, len(batch.sampler_rows))
            return lambda: greedy
        if self.passes.pipeline is not None:
            with self._together():
                self.passes.compute_stage(batch, self._embedded(batch))
            return functools.partial(self._finish_stages, batch, self.passes.pipeline)
        with self._together():
            if names:
                logits_KV, capture = self._forward_seen(batch, names)
            else:
                logits_KV, capture = self.forward(batch), None
        if self.states is not None:
            self.states.finish()
        if self.drafter is not None:
            self.drafter.see(batch.inputs)
        outputs = list(_output_rows(batch.outputs, logits_KV, capture))
        scored = [self._score(logits_KV, rows) for rows in batch.prompts]
        if self._copies is not None and not batch.has_unmasked:
            rows, logits_BV, states, bitmask_BW = _sampler_inputs(batch, logits_KV)
            launched = self.sampler.launch(logits_BV, states, bitmask_BW, pending_ids_P)
            if launched is not None:
                self._pending.keep(launched.token_ids_B, rows, len(batch.sampler_rows))
                return _read_later(self._copies, batch, StepOutput(SamplerOutput([], []), rows, outputs=outputs), launched, scored)
        output = sample_rows(batch, logits_KV, self.sampler, pending_ids_P)
        self._pending.keep(output.samples.token_ids, output.rows, len(batch.sampler_rows))
        output.prompt_logprobs = _with_prompts(batch, [entries.read(entries.packed().cpu()) for entries in scored])
        output.outputs = outputs
        if self.drafter is not None and batch.drafting:
            output.drafts = self.drafter.propose(batch.drafting, output.samples, output.rows)
        return lambda: output

    @torch.inference_mode()
    def _finish_stages(self, batch: Batch, pipeline: Pipeline) -> StepOutput:
        """Waits for what the last rank makes of the step, and samples."""
        with self._together():
            logits_KV = pipeline.logits(len(batch.inputs.kept_T))
        outputs = list(_output_rows(batch.outputs, logits_KV, None))
        scored = [self._score(logits_KV, rows) for rows in batch.prompts]
        output = sample_rows(batch, logits_KV, self.sampler)
        output.prompt_logprobs = _with_prompts(batch, [entries.read(entries.packed().cpu()) for entries in scored])
        output.outputs = outputs
        return output

    def _most_probable(self, batch: Batch) -> StepOutput | None:
        """Samples a step that wants nothing but the most probable tokens of few rows. None for others, and where a logit is not finite."""
        has_draft = any(row.num_drafted for row in batch.sampler_rows)
        if self.greedy_head is None or not 0 < len(batch.sampler_rows) <= (MAX_DRAFT_ROWS if has_draft else MAX_ROWS):
            return None
        states = [row.sampling for row in batch.sampler_rows]
        wants = (batch.outputs, batch.prompts, batch.masks, batch.adapters, batch.embeds, batch.rope_rows, self.drafter)
        if any(wants):
            return None
        decoder = self.loaded.model.forward
        if not isinstance(decoder, NativeDecoder) or not all(state.takes_most_probable for state in states):
            return None
        inputs = batch.inputs
        hidden_KH = decoder.hidden(inputs.input_ids_1T, inputs.positions_1T, inputs.attention, inputs.kept_T)
        drafted = None
        if has_draft and not batch.has_unmasked:  # a grammar may put the draft token in place of what was sampled
            kept_ids = inputs.input_ids_1T[0, inputs.kept_T].tolist()
            rows = zip(batch.sampler_rows[1:], batch.logits_rows[1:], strict=True)
            drafted = [kept_ids[kept] if row.num_drafted else -1 for row, kept in rows] + [-1]
        hidden_BH = hidden_KH[batch.logits_rows]
        found = self.greedy_head.most_probable(hidden_BH, decoder.logits, drafted)
        if found is None:
            return None
        output = StepOutput(SamplerOutput(found.token_ids, [None] * len(states)), list(range(len(states))))
        if batch.has_unmasked:

            @torch.inference_mode()
            def sample_again(row: int, mask_W: Tensor) -> SamplerOutput:
                only, logits_BV = slice(row, row + 1), found.logits_KV
                logits_1V = self.thread.submit(decoder.logits, hidden_BH[only]).result() if logits_BV is None else logits_BV[only]
                return self.sampler.sample(logits_1V, states[only], mask_W[None])

            output.sample_again = sample_again
        return output

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """The logits of the batch's kept rows, [K, V], valid until the next call."""
        batch = batch.on(self.loaded.device)
        may_replay = self.states is None or self.states.is_decode
        return self.passes.logits(batch, self._embedded(batch), self._rope_positions(batch), may_replay=may_replay)

    def _embedded(self, batch: Batch) -> dict[str, Any] | None:
        return self.embedder.embed(batch.inputs.input_ids_1T, batch.embeds) if batch.embeds else None

    def _rope_positions(self, batch: Batch) -> Tensor | None:
        """The three parts of each position, where these differ."""
        if not batch.rope_rows:
            return None
        rows_R, *parts_3R = to_device(torch.tensor(batch.rope_rows).T.contiguous(), self.loaded.device)
        return batch.inputs.positions_1T.repeat(3, 1).index_copy_(1, rows_R, torch.stack(parts_3R))[:, None]

    def _forward_seen(self, batch: Batch, names: set[str]) -> tuple[Tensor, Capture]:
        """As `forward`, by the model's own modules, with the outputs captured on the way."""
        rows_R = index_on(self.loaded.device, [row for rows in batch.outputs for row in range(rows.start, rows.stop)])
        with self.passes.seen(batch, names, rows_R) as capture:
            return self.passes.plainly(batch, self._embedded(batch), self._rope_positions(batch)), capture

    def _score(self, logits_KV: Tensor, rows: PromptRows) -> LaunchedPromptLogprobs:
        sequence = rows.sequence
        targets = sequence.token_ids[rows.first_token : rows.first_token + rows.stop - rows.start]
        num_top = sequence.request.params.prompt_logprobs or 0
        return LaunchedPromptLogprobs.launch(logits_KV[rows.start : rows.stop, : self.sampler.vocab_size], targets, num_top)
