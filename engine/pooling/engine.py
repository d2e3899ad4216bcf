"""The engine of models that turn text into numbers: texts in, tensors out, computed in batches."""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.loop import ENGINE_FAILED, EngineLife, done
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.files import SentenceFiles
from penstock.engine.pooling.model import PoolingInput, PoolingModel
from penstock.engine.pooling.params import PoolingParams
from penstock.engine.pooling.queue import PoolingQueue, WaitingInput
from penstock.engine.text.tokenizer import Tokenizer

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


class PoolingEngine:
    """Runs a `PoolingModel` for as many clients as there are. Everything but the model's own thread is on one event loop: no locks."""

    def __init__(self, model: PoolingModel, tokenizer: Tokenizer, queue: PoolingQueue, *, num_threads: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.num_threads = num_threads
        self._queue = queue
        self._running: list[WaitingInput] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model", initializer=self._prepare_thread)
        self._wake = asyncio.Event()
        self._life = EngineLife()
        self._num_inputs = self._num_prompt_tokens = self._num_steps = 0

    def _prepare_thread(self) -> None:
        torch.set_num_threads(self.num_threads)  # OpenMP keeps it per thread
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)

    async def start(self) -> None:
        """Begins to serve. An engine is started once: the thread that its model runs in ends with it."""
        self._life.begin(self._run, "pooling-engine")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Takes no more inputs, computes those that wait for `drain_seconds`, refuses the others and waits for the batch in flight."""
        self._life.is_accepting = False
        if self._life.has_begun:
            if not await self._life.drain(drain_seconds, lambda: self._has_work):
                logger.warning("%d inputs were cut off by the shutdown", len(self._queue) + len(self._running))
            await self._life.end()
            self._end_all("the server is shutting down")
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def is_accepting(self) -> bool:
        """False before the start and from the beginning of the shutdown."""
        return self._life.is_accepting

    @property
    def is_healthy(self) -> bool:
        """False once several batches in a row have failed, or when the engine is not running."""
        return self._life.is_healthy

    def stats(self) -> PoolingStats:
        return PoolingStats(len(self._running), len(self._queue), self._num_inputs, self._num_prompt_tokens, self._num_steps)

    def check_admission(self) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where an input would be refused whatever it is."""
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
        except Exception:  # a defect of our own: there is no going on, and no client may be left waiting
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
        except Exception:  # whatever the model raised: it ends these texts and nothing else
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
