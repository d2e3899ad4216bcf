"""The engine of pooling models: texts in, tensors out, computed in batches; and scores of pairs of texts."""

import asyncio
import dataclasses
import heapq
import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from penstock.engine.config import PinThreads
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.loop import LivingEngine, call_from_elsewhere, done
from penstock.engine.native.runtime import model_thread
from penstock.engine.parallel.group import RankFailed
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.files import SentenceFiles
from penstock.engine.pooling.model import PoolingInput, PoolingModel, PoolingParams, PoolingTask
from penstock.engine.request import BACKGROUND
from penstock.engine.scheduling.admission import Pace, retry_seconds, unmeasured_seconds
from penstock.engine.system.memory import is_device_lost
from penstock.engine.text.tokenizer import Tokenizer

CLEAR_SECONDS = 0.05  # between two searches of a full queue for cancelled texts: a refusal is not to take longer the more wait


@dataclass(slots=True, eq=False)
class WaitingInput:
    """A text and where its answer goes. Cancelling the future takes the text out."""

    input: PoolingInput
    future: "asyncio.Future[Tensor]"
    queued_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.input.tokens.token_ids)


@dataclass(slots=True)
class _Heap:
    """Waiting texts, and how many tokens they have; cancelled ones are among them until they are removed."""

    entries: list[tuple[bool, int, int, WaitingInput]] = field(default_factory=list)  # has not aged, priority, arrival
    num_tokens: int = 0
    cleared_at: float = -math.inf

    def __len__(self) -> int:
        return sum(not entry[-1].future.done() for entry in self.entries)

    def push(self, priority: int, arrival: int, waiting: WaitingInput) -> None:
        heapq.heappush(self.entries, (True, priority, arrival, waiting))
        self.num_tokens += waiting.num_tokens

    def take(self, budget: int) -> list[WaitingInput]:
        """The next texts in order, as many as `budget` tokens hold; the first may exceed it."""
        batch: list[WaitingInput] = []
        while self.entries:
            waiting = self.entries[0][-1]
            if not waiting.future.done():
                if batch and waiting.num_tokens > budget:
                    break
                budget -= waiting.num_tokens
                batch.append(waiting)
            heapq.heappop(self.entries)
            self.num_tokens -= waiting.num_tokens
        return batch

    def age(self, oldest: float) -> None:
        """Moves what was queued at `oldest` or before to the front."""
        if any(is_fresh and waiting.queued_at <= oldest for is_fresh, _, _, waiting in self.entries):
            for place, (_, _, arrival, waiting) in enumerate(self.entries):
                if waiting.queued_at <= oldest:
                    self.entries[place] = (False, 0, arrival, waiting)
            heapq.heapify(self.entries)

    def remove_cancelled(self, now: float) -> None:
        if now < self.cleared_at + CLEAR_SECONDS:
            return
        self.cleared_at = now
        self.entries = [entry for entry in self.entries if not entry[-1].future.done()]
        heapq.heapify(self.entries)
        self.num_tokens = sum(entry[-1].num_tokens for entry in self.entries)


@dataclass(slots=True)
class PoolingQueue:
    """`max_num_batched_tokens` is the budget of a batch, which a single text may exceed.

    `max_waiting`, in texts, and `max_waiting_tokens` bound the queue: none is added once either is reached. A text that has waited for
    `aging_seconds` goes before all that have not, whatever their priority; 0 switches that off. Texts in the background are computed
    while no others wait. They do not age, and have bounds of their own, as large.
    """

    max_num_batched_tokens: int
    max_waiting: int
    max_waiting_tokens: int | None = None
    aging_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _foreground: _Heap = field(default_factory=_Heap)
    _background: _Heap = field(default_factory=_Heap)
    _arrivals: Iterator[int] = field(default_factory=itertools.count)
    _pace: Pace = field(default_factory=Pace)
    _taken: tuple[float, int] | None = None  # when the last batch was, and its tokens; None where nothing is computed

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def add(self, waiting: WaitingInput, priority: int) -> None:
        """Lower priorities go first. Raises `QueueFull`."""
        heap = self._background if priority == BACKGROUND else self._foreground
        self._check(heap)
        waiting.queued_at = self.clock()
        heap.push(priority, next(self._arrivals), waiting)

    def check_admission(self) -> None:
        """Raises `QueueFull` where a bound is reached."""
        self._check(self._foreground)

    def take_batch(self) -> list[WaitingInput]:
        """The next texts in order, as many as the budget holds. Empty where nothing waits."""
        if self.aging_seconds:
            self._foreground.age(self.clock() - self.aging_seconds)
        now = self.clock()
        if self._taken is not None:
            taken_at, num_tokens = self._taken
            self._pace.add(num_tokens, now - taken_at, now)
        batch = self._foreground.take(self.max_num_batched_tokens) or self._background.take(self.max_num_batched_tokens)
        self._taken = (now, sum(waiting.num_tokens for waiting in batch)) if batch else None
        return batch

    def take_all(self) -> list[WaitingInput]:
        waiting = [entry[-1] for heap in (self._foreground, self._background) for entry in heap.entries]
        self._foreground, self._background = _Heap(), _Heap()
        return waiting

    def _check(self, heap: _Heap) -> None:
        if self._is_full(heap):
            heap.remove_cancelled(self.clock())
        if self._is_full(heap):
            rest = unmeasured_seconds(self._pace)
            seconds = retry_seconds(self._pace.seconds_for(heap.num_tokens, 0, self.max_num_batched_tokens, rest))
            message = f"{len(heap.entries)} inputs with {heap.num_tokens} tokens are waiting already; try again in {seconds} s"
            raise QueueFull(message, seconds)

    def _is_full(self, heap: _Heap) -> bool:
        has_tokens = self.max_waiting_tokens is not None and heap.num_tokens >= self.max_waiting_tokens
        return len(heap.entries) >= self.max_waiting or has_tokens


logger = logging.getLogger(__name__)

BATCH_FAILED = "the model failed while it computed this input; the error has been logged"
MAX_OPEN = 256  # enough for any batch; all of a long list at once would overflow the engine's queue, or shut others out of it


@dataclass(frozen=True, slots=True)
class EncodedText:
    """`num_instruction_tokens` goes into `PoolingParams`; it is counted for models that leave them out."""

    tokens: EncoderInput
    num_instruction_tokens: int = 0


def encode_text(
    tokenizer: Tokenizer,
    files: SentenceFiles,
    text: str,
    pair: str | None = None,
    *,
    max_tokens: int | None = None,
    max_pair_tokens: int | None = None,
    prompt_name: str | None = None,
) -> EncodedText:
    """A text, or a pair as a cross-encoder reads it, with special tokens.

    A single text is put behind the instruction of that name (`prompts` in config_sentence_transformers.json), without one behind the
    default one if the files have any. `max_tokens` cuts what is longer, `max_pair_tokens` a longer second text. Raises `InvalidRequest`.
    """
    instruction = "" if pair is not None else _instruction(files, prompt_name)
    if files.do_lower_case:
        text, pair, instruction = text.lower(), None if pair is None else pair.lower(), instruction.lower()
    token_ids, token_type_ids = tokenizer.encode_pair(instruction + text, pair, max_tokens=max_tokens, max_pair_tokens=max_pair_tokens)
    tokens = EncoderInput(token_ids, None if pair is None else token_type_ids)
    is_counted = bool(instruction) and not files.include_prompt
    return EncodedText(tokens, _num_tokens(tokenizer, instruction) if is_counted else 0)


def _instruction(files: SentenceFiles, name: str | None) -> str:
    prompts = files.prompts or {}
    if name is None:
        return prompts.get(files.default_prompt_name or "") or ""
    if name not in prompts:
        raise InvalidRequest(f"this model has no prompt named {name!r}; it has {', '.join(sorted(prompts)) or 'none'}", "prompt_name")
    return prompts[name] or ""


def _num_tokens(tokenizer: Tokenizer, instruction: str) -> int:
    """With the special tokens before the instruction, without those after it."""
    token_ids, _ = tokenizer.encode_pair(instruction)
    plain = tokenizer.encode(instruction, add_special_tokens=False)
    for start in range(len(token_ids) - len(plain) + 1):
        if token_ids[start : start + len(plain)] == plain:
            return start + len(plain)
    return len(token_ids)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """`data` is float32 on the CPU: [D] for embed, [T, D] token_embed, [L] classify, [T, L] token_classify, [1] score."""

    data: Tensor
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class PoolingStats:
    """The first two are of this moment, the others have counted since the start."""

    num_running: int
    num_waiting: int
    num_inputs: int
    num_prompt_tokens: int
    num_steps: int


class PoolingEngine(LivingEngine):
    """Runs a `PoolingModel` for as many clients as there are. Everything but the model's own thread is on one event loop: no locks."""

    def __init__(
        self, model: PoolingModel, tokenizer: Tokenizer, queue: PoolingQueue, *, num_threads: int, pin_threads: PinThreads = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.num_threads = num_threads
        self._queue = queue
        self._running: list[WaitingInput] = []
        self._thread = model_thread(model.device, num_threads, pin_threads)
        self._wake = asyncio.Event()
        self._num_inputs = self._num_prompt_tokens = self._num_steps = 0

    async def start(self) -> None:
        """Begins to serve. An engine is started once: the thread that its model runs in ends with it."""
        loop = asyncio.get_running_loop()
        self._life.begin(self._run, "pooling-engine")
        fail = weakref.WeakMethod(self._end_with_rank)
        self.model.group.when_failed(lambda: call_from_elsewhere(loop, fail))

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Takes no more inputs, computes those that wait for `drain_seconds`, refuses the others and waits for the batch in flight."""
        self._life.is_accepting = False
        if self._life.has_begun:
            if not await self._life.drain(drain_seconds, lambda: self._has_work):
                logger.warning("%d inputs were cut off by the shutdown", len(self._queue) + len(self._running))
            await self._life.end()
            self._end_all("the server is shutting down")
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self.model.group.last_step():
            self._thread.shutdown()
        self.model.group.close()

    def _end_with_rank(self) -> None:
        """A rank has ended, while a batch was computed or not."""
        self._end_all(ENGINE_FAILED)
        self._life.fail()

    def stats(self) -> PoolingStats:
        return PoolingStats(len(self._running), len(self._queue), self._num_inputs, self._num_prompt_tokens, self._num_steps)

    def check_admission(self, priority: int = 0) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where an input would be refused whatever it is, and whatever its priority."""
        self._life.check_accepting()
        self._queue.check_admission()

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_tokens: int | None = None,
        max_pair_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> EncodedText:
        """`encode_text` for this model. May be called from any thread."""
        limits = {"max_tokens": max_tokens, "max_pair_tokens": max_pair_tokens}
        return encode_text(self.tokenizer, self.model.files, text, pair, **limits, prompt_name=prompt_name)

    async def pool(
        self, prompt_token_ids: list[int], params: PoolingParams, *, token_type_ids: list[int] | None = None, priority: int = 0
    ) -> PoolingOutput:
        """What the model makes of one text, or pair of texts. Lower priorities go first; cancelling the call takes the text out.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable` at once, `GenerationFailed` where the model fails.
        """
        self._life.check_accepting()
        checked = self.model.check(EncoderInput(prompt_token_ids, token_type_ids), params)
        waiting = WaitingInput(checked, asyncio.get_running_loop().create_future())
        self._queue.add(waiting, priority)
        self._wake.set()
        return PoolingOutput(await waiting.future, prompt_token_ids)

    @property
    def _has_work(self) -> bool:
        return bool(self._running) or len(self._queue) > 0

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)  # callers that have just had an answer may send more inputs
                self._running = self._queue.take_batch()
                if not self._running:
                    self._life.idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._compute(self._running)
        except Exception:  # a defect of our own, or the device is lost: there is no going on, and no client may be left waiting
            logger.exception("The engine has failed")
            self._end_all(ENGINE_FAILED)

    async def _compute(self, batch: list[WaitingInput]) -> None:
        # Where the model fails, one of the texts may be at fault: each is then computed alone.
        is_done = await self._try(batch)
        if not is_done and len(batch) > 1:
            is_done = any([await self._try([waiting]) for waiting in batch])
        self._life.num_failed_steps = 0 if is_done else self._life.num_failed_steps + 1
        for waiting in batch:
            self._fail(waiting, GenerationFailed(BATCH_FAILED))

    async def _try(self, batch: list[WaitingInput]) -> bool:
        """Computes the inputs; False where the model failed."""
        try:
            answers = await self._in_thread([waiting.input for waiting in batch])
        except Exception as error:  # whatever the model raised: it ends these texts and nothing else
            if is_device_lost(error) or isinstance(error, RankFailed):
                raise
            logger.exception("A batch of %d inputs failed", len(batch))
            return False
        self._num_steps += 1
        for waiting, answer in zip(batch, answers, strict=True):
            self._num_inputs += 1
            self._num_prompt_tokens += waiting.num_tokens
            if not waiting.future.done():
                waiting.future.set_result(answer)
        return True

    async def _in_thread(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        future = self._thread.submit(self.model.compute, inputs)
        await done(future)
        return future.result()

    def _end_all(self, reason: str) -> None:
        for waiting in [*self._running, *self._queue.take_all()]:
            self._fail(waiting, EngineUnavailable(reason))
        self._running = []
        self._life.idle.set()

    def _fail(self, waiting: WaitingInput, error: Exception) -> None:
        """Does nothing where the input has its answer, or was cancelled."""
        if not waiting.future.done():
            waiting.future.set_exception(error)


async def pool_all(
    engine: PoolingEngine,
    inputs: Sequence[EncodedText],
    params: PoolingParams | Sequence[PoolingParams],
    *,
    priority: int | Sequence[int] = 0,
    on_output: Callable[[PoolingOutput], None] | None = None,
) -> list[PoolingOutput]:
    """Their outputs in order. `params` and `priority` are for all of them, or one each. At most `MAX_OPEN` are with the engine at a time.

    The first exception of any ends the others and is raised. A full queue is waited out while inputs of this call are in it; it is a
    `QueueFull` only where none of them got in. Cancelling aborts those that run.
    """
    each = [params] * len(inputs) if isinstance(params, PoolingParams) else params
    priorities = [priority] * len(inputs) if isinstance(priority, int) else priority
    outputs: dict[int, PoolingOutput] = {}
    waiting = deque(zip(range(len(inputs)), inputs, each, priorities, strict=True))
    num_open = min(len(inputs), MAX_OPEN)

    async def work() -> None:
        nonlocal num_open
        while waiting:
            item = waiting.popleft()
            index, text, own, order = item
            if text.num_instruction_tokens:
                own = dataclasses.replace(own, num_instruction_tokens=text.num_instruction_tokens)
            try:
                output = await engine.pool(text.tokens.token_ids, own, token_type_ids=text.tokens.token_type_ids, priority=order)
            except QueueFull:
                if num_open == 1:
                    raise
                waiting.appendleft(item)
                num_open -= 1  # one place less: those that the others hold come free
                return
            outputs[index] = output
            if on_output is not None:
                on_output(output)

    tasks = [asyncio.create_task(work()) for _ in range(num_open)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outputs[index] for index in range(len(inputs))]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """`max_tokens` cuts what is scored, a text or a pair, and `max_second` the second text, to so many tokens. None: nothing is cut."""

    max_tokens: int | None = None
    max_second: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Of one pair. `prompt_token_ids` are those of both texts, as the model read them."""

    value: float
    prompt_token_ids: list[int]


class Scoring(Protocol):
    """From texts to what the model computes, and from that to scores. The first texts are one or as many as the second."""

    @property
    def params(self) -> PoolingParams: ...

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        """Raises `InvalidRequest` for a lone surrogate, and for limits that leave nothing."""
        ...

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        """Of the outputs for `inputs`, in the order of the second texts."""
        ...


class CrossScoring:
    """One input for each pair."""

    params = PoolingParams(task="score")

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        return [
            engine.encode(one, two, max_tokens=limits.max_tokens, max_pair_tokens=limits.max_second) for one, two in paired(first, second)
        ]

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        return [Score(float(output.data[0]), output.prompt_token_ids) for output in outputs]


class CosineScoring:
    """One input for each text, those of the first before those of the second: one that is in many pairs is computed once."""

    params = PoolingParams(task="embed", normalize=True)

    def inputs(self, engine: PoolingEngine, first: Sequence[str], second: Sequence[str], limits: ScoreLimits) -> list[EncodedText]:
        bounds = [bound for bound in (limits.max_tokens, limits.max_second) if bound is not None]
        one = [engine.encode(text, max_tokens=limits.max_tokens) for text in first]
        return one + [engine.encode(text, max_tokens=min(bounds, default=None)) for text in second]

    def scores(self, outputs: Sequence[PoolingOutput], num_first: int) -> list[Score]:
        one, two = outputs[:num_first], outputs[num_first:]
        cosines = (torch.stack([output.data for output in one]) * torch.stack([output.data for output in two])).sum(dim=-1)
        token_ids = (first.prompt_token_ids + second.prompt_token_ids for first, second in paired(one, two))
        return [Score(value, ids) for value, ids in zip(cosines.tolist(), token_ids, strict=True)]


def scoring_of(tasks: Collection[PoolingTask]) -> Scoring:
    """How a model that has these tasks scores; it has `score` or `embed`."""
    return CrossScoring() if "score" in tasks else CosineScoring()


def check_counts(num_first: int, num_second: int, first_param: str, second_param: str) -> None:
    """Raises `InvalidRequest` unless it is one text against one or many, or as many against as many."""
    for count, param in ((num_first, first_param), (num_second, second_param)):
        if not count:
            raise InvalidRequest(f"`{param}` holds no texts", param)
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"`{first_param}` must hold one text or as many as `{second_param}`, which has {num_second}; it has {num_first}", first_param
        )


def paired(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
    """Each of the second with its own of the first, or with the only one."""
    return list(zip(first if len(first) > 1 else [first[0]] * len(second), second, strict=True))
