"""Runs many requests at once, with a progress bar, and folds each one's deltas into its output."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import torch
from torch import Tensor

from penstock.engine import deltas
from penstock.engine.contracts.parsing import Preamble, Reasoning, Text
from penstock.engine.errors import GenerationFailed, InvalidRequest
from penstock.engine.pooling.engine import PoolingOutput
from penstock.engine.text.tokenizer import Tokenizer
from penstock.llm.model import LocalModel
from penstock.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from penstock.llm.preparing import Prepared, located
from penstock.serving.constraints.pressure import PressureReader
from penstock.serving.messages import Message, MessageReader, MessageStep

FAILED = "error"


class SequenceFold:
    """One sequence. Its message is read as for /v1/chat/completions, whether a parser read it or not."""

    def __init__(self, index: int, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._num_top = prepared.params.logprobs
        self._has_text = prepared.params.detokenize
        self._reader = MessageReader(prepared.view)
        self._message = Message()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0
        self._rows: dict[str, list[Tensor]] = {}
        self._pressure = PressureReader() if prepared.request.measures_pressure else None
        self._error: str | None = None
        self._beam_sum: float | None = None
        self._beam_score: float | None = None
        self._exact: deltas.ExactDraws | None = None
        self._is_closed: bool | None = None

    def add(self, delta: deltas.SequenceDelta) -> CompletionOutput:
        """What is new. Raises `GenerationFailed`, `InvalidRequest` or `EngineUnavailable` where the sequence was cut off.

        A call is given whole with the last delta.
        """
        new = CompletionOutput(self._index, token_ids=list(delta.token_ids), cumulative_logprob=self._new_logprobs(delta))
        self._token_ids += delta.token_ids
        if self._num_top is not None:
            new.logprobs = [logprobs_of(token, self._num_top, self._tokenizer) for token in delta.logprobs]
            self._logprobs += new.logprobs
        for name, rows in delta.outputs.items():
            self._rows.setdefault(name, []).append(rows)
        new.additional_outputs = dict(delta.outputs)
        self._beam_sum, self._beam_score = delta.cumulative_logprob, delta.beam_score
        self._exact = new.exact = delta.exact
        self._is_closed = new.closed = delta.is_closed
        if self._pressure is not None:
            self._pressure.feed(delta)
        step = self._reader.feed(delta)
        self._message.add(step)
        self._add_text(new, step)
        if delta.finish_reason is not None:
            whole = self.whole()
            new.finish_reason, new.stop_reason, new.tool_calls = whole.finish_reason, whole.stop_reason, whole.tool_calls
            new.pressure = whole.pressure
        return new

    def fail(self, error: str) -> None:
        """It ended with what it has said so far."""
        self._error = error

    def whole(self) -> CompletionOutput:
        """All there is so far."""
        message = self._message
        return CompletionOutput(
            self._index,
            message.content if self._has_text else "",
            list(self._token_ids),
            self._beam_sum if self._num_top is None else self._cumulative,
            None if self._num_top is None else list(self._logprobs),
            FAILED if self._error is not None else message.finish_reason,
            message.stop_reason,
            message.reasoning or None,
            message.tool_calls,
            {name: torch.cat(rows) for name, rows in self._rows.items()},
            self._error,
            self._beam_score,
            self._exact,
            message.preamble or None,
            None if self._pressure is None or message.finish_reason is None else self._pressure.result(),
            self._is_closed,
        )

    def _new_logprobs(self, delta: deltas.SequenceDelta) -> float | None:
        """The sum so far, this delta's included."""
        if self._num_top is None:
            return None
        self._cumulative += sum(token.logprob for token in delta.logprobs)
        return self._cumulative

    def _add_text(self, new: CompletionOutput, step: MessageStep) -> None:
        texts = [event.text for event in step.events if isinstance(event, Text)]
        reasoning = [event.text for event in step.events if isinstance(event, Reasoning)]
        new.text = "".join(texts) if self._has_text else ""
        new.reasoning_content = "".join(reasoning) or None
        new.preamble = "".join(event.text for event in step.events if isinstance(event, Preamble)) or None


class OutputFold:
    """All sequences of one request, and its times."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._sequences = [SequenceFold(index, prepared, tokenizer) for index in range(prepared.request.params.n)]
        self._num_unfinished = len(self._sequences)
        self._prompt: deltas.PromptInfo | None = None
        self._started = time.monotonic()
        self._metrics = RequestMetrics(arrival_time=time.time())

    def add(self, delta: deltas.SequenceDelta) -> CompletionOutput:
        """What is new. Raises as `SequenceFold.add`; then call `fail`, or give up the whole batch."""
        self._time(delta)
        if delta.prompt is not None and delta.index == 0:
            self._prompt = delta.prompt
        return self._sequences[delta.index].add(delta)

    def fail(self, index: int, error: str) -> None:
        self._sequences[index].fail(error)

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def whole(self) -> RequestOutput:
        """All there is so far."""
        return self.output([sequence.whole() for sequence in self._sequences])

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """`outputs` with what is known of the request."""
        prepared, prompt = self._prepared, self._prompt
        return RequestOutput(
            prepared.request.request_id,
            prepared.prompt,
            prepared.request.prompt_token_ids,
            self._prompt_logprobs(),
            outputs,
            self.is_finished,
            self._metrics,
            None if prompt is None else prompt.num_cached_tokens,
            {} if prompt is None else prompt.outputs,
            0 if prompt is None else prompt.first_output_token,
        )

    def _time(self, delta: deltas.SequenceDelta) -> None:
        metrics, now = self._metrics, self._metrics.arrival_time + time.monotonic() - self._started
        if delta.prompt is not None and delta.index == 0:
            metrics.time_in_queue = delta.prompt.queue_seconds
        if delta.token_ids:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            metrics.num_generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            metrics.finished_time = now

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        num_top = self._prepared.params.prompt_logprobs
        if num_top is None or self._prompt is None or self._prompt.logprobs is None:
            return None
        return [None if token is None else logprobs_of(token, num_top, self._tokenizer) for token in self._prompt.logprobs]


def logprobs_of(token: deltas.TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> TokenLogprobs:
    """The token itself first, then the `num_top` likeliest."""
    found = {token.token_id: Logprob(token.logprob, token.rank, tokenizer.token_text(token.token_id))}
    for rank, (other, logprob) in enumerate(token.top[:num_top], start=1):
        found.setdefault(other, Logprob(logprob, rank, tokenizer.token_text(other)))
    return found


logger = logging.getLogger(__name__)


async def run_batch(model: LocalModel, batch: Sequence[Prepared]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place in the batch, output), whichever is complete first. Closing it ends what still runs.

    A sequence that fails on its way ends with an `error` and what it had said; the others go on. Raises `InvalidRequest` for a request
    that the engine does not take, and `EngineUnavailable`; then all of the batch is ended.
    """
    complete: asyncio.Queue[asyncio.Task[RequestOutput]] = asyncio.Queue()
    places: dict[asyncio.Task[RequestOutput], int] = {}
    for place, prepared in enumerate(batch):
        task = asyncio.create_task(run_one(model, prepared))
        task.add_done_callback(complete.put_nowait)
        places[task] = place
    try:
        for _ in batch:
            task = await complete.get()
            yield places.pop(task), task.result()
    finally:
        for task in places:
            task.cancel()
        await asyncio.gather(*places, return_exceptions=True)


async def run_one(model: LocalModel, prepared: Prepared) -> RequestOutput:
    context = model.generating
    fold = OutputFold(prepared, context.tokenizer)
    deltas = model.generate(prepared.request)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                try:
                    fold.add(delta)
                except (GenerationFailed, InvalidRequest) as error:
                    logger.warning("%s: answer %d failed: %s", prepared.path, delta.index, error)
                    fold.fail(delta.index, str(error))
    except InvalidRequest as error:
        raise located(error, prepared.path) from None
    return fold.whole()


UseTqdm = bool | Callable[..., Any]
"""True for tqdm's own bar, False for none, or what makes one: it is called as tqdm is."""


class Progress:
    """A bar over `total` prompts, None where that is not known, or nothing. To be used as a context manager."""

    def __init__(self, use_tqdm: UseTqdm, total: int | None) -> None:
        self._bar: Any = None
        self._started = time.perf_counter()
        self._num_input = self._num_output = 0
        if use_tqdm:
            self._bar = _maker(use_tqdm)(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0.0, 0.0))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        self.count(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in output.outputs))

    def count_pooled(self, output: PoolingOutput) -> None:
        self.count(len(output.prompt_token_ids), 0)

    def count(self, num_input: int, num_output: int) -> None:
        """One more prompt is done: its tokens, and those of its answers."""
        if self._bar is None:
            return
        self._num_input += num_input
        self._num_output += num_output
        seconds = max(time.perf_counter() - self._started, 1e-9)
        if hasattr(self._bar, "postfix"):
            self._bar.postfix = _speeds(self._num_input / seconds, self._num_output / seconds)
        self._bar.update(1)


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    made: Callable[..., Any] = tqdm
    return made


def _speeds(input_rate: float, output_rate: float) -> str:
    return f"est. speed input: {input_rate:.2f} toks/s, output: {output_rate:.2f} toks/s"
