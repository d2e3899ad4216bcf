"""From deltas to answers: server-sent events, usage, log probabilities, and what is common to the folds of all endpoints that generate."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.engine.contracts.parsing import Event, Reasoning, Text
from penstock.engine.deltas import PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import InvalidRequest, QueueFull
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.context import JobQueue, LocalContext, ServerContext, Workers, queue_for
from penstock.serving.endpoints.errors import body_of
from penstock.serving.messages import WARNING_HEADER, ExactSampling, TokenCounts
from penstock.serving.requests import GenerationFields, KVTransferParams, StreamOptions

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # of a stream

_encode = msgspec.json.Encoder().encode


def encode_event(chunk: Struct) -> bytes:
    """A server-sent event. One of a tagged struct is named after the tag."""
    tag = chunk.__struct_config__.tag
    name = b"" if tag is None else b"event: %b\n" % str(tag).encode()
    return b"%bdata: %b\n\n" % (name, _encode(chunk))


def encode_events(chunks: Iterable[Struct]) -> bytes:
    return b"".join(map(encode_event, chunks))


MARK = "\0text\0"


class TextEvent:
    """The event of a chunk that differs from others of its kind in nothing but one text: all else is encoded once.

    `chunk` has `MARK` where the text belongs.
    """

    __slots__ = ("_around",)

    def __init__(self, chunk: Struct) -> None:
        self._around = encode_event(chunk).split(_encode(MARK))

    def of(self, text: str) -> bytes:
        return _encode(text).join(self._around)


class StreamFormat:
    """How an endpoint writes what is not the answer itself: by default as OpenAI's chat completions."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    ending: ClassVar[bytes] = b"data: [DONE]\n\n"  # of every stream, be it after an error

    def failure(self, error: Exception) -> bytes:
        """The events for an exception in mid-stream."""
        return encode_event(body_of(error))


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """The predictions' two count draft tokens from the request's prediction. The last two are there where free text precedes an answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    preamble_tokens: int | UnsetType = UNSET
    answer_tokens: int | UnsetType = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counts: TokenCounts) -> Usage:
    num_prompt_tokens, num_completion_tokens = counts.num_prompt_tokens, counts.num_completion_tokens
    num_reasoning_tokens, num_preamble_tokens = counts.num_reasoning_tokens, counts.num_preamble_tokens
    details = CompletionTokensDetails(num_reasoning_tokens, counts.num_predicted_right, counts.num_predicted - counts.num_predicted_right)
    if num_preamble_tokens:
        details.preamble_tokens = num_preamble_tokens
        details.answer_tokens = num_completion_tokens - num_reasoning_tokens - num_preamble_tokens
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(counts.num_cached_tokens),
        details,
    )


class PromptLogprob(Struct):
    """One candidate for one position of the prompt; keyed by token id on the wire. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


# Of each position a dict of `PromptLogprob`, or null. Encoded one by one: the objects of a whole prompt would take a gigabyte, and
# encoding them in one call would hold the interpreter's lock.
PromptLogprobs = list[Raw]


LOWEST = -9999.0  # JSON has no -inf


def clamp(logprob: float) -> float:
    return max(logprob, LOWEST)


class TokenWriter:
    """Names tokens as the client asked: by their text, or as `token_id:123`, which is never ambiguous."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """An added token counts with its text, as it appears where special tokens are not skipped."""
        content = self._tokenizer.token_bytes(token_id)
        return self._tokenizer.token_text(token_id).encode() if content is None else content

    def prompt(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """One entry per token of the prompt, None for the first. Each holds the token itself and the best `num_top`, keyed by id."""
        return [Raw(_encode(None if token is None else self._prompt_candidates(token, num_top))) for token in logprobs]

    def _prompt_candidates(self, token: TokenLogprobs, num_top: int) -> dict[str, PromptLogprob]:
        best = [(other, logprob, rank) for rank, (other, logprob) in enumerate(token.top[:num_top], start=1)]
        return {
            str(token_id): PromptLogprob(clamp(logprob), rank, self._tokenizer.token_text(token_id))
            for token_id, logprob, rank in (*best, (token.token_id, token.logprob, token.rank))
        }


def prompt_logprobs(prompt: PromptInfo | None, num_top: int | None, tokens: TokenWriter) -> PromptLogprobs | UnsetType:
    """Those of the prompt, where they were asked for and are known."""
    return UNSET if num_top is None or prompt is None or prompt.logprobs is None else tokens.prompt(prompt.logprobs, num_top)


class AnswerFold(StreamFormat, ABC):
    """One request's deltas as an endpoint writes them.

    Streaming: `opening`, then the `events` of each delta, then `closing`. Otherwise: `add` each delta, then `body`. Each of them is
    called in a worker where it writes many log probabilities, by `num_logprobs`.
    """

    @abstractmethod
    def num_logprobs(self, delta: SequenceDelta) -> int:
        """How many log probabilities a delta brings."""

    def opening(self) -> bytes:
        return b""

    @abstractmethod
    def events(self, delta: SequenceDelta) -> bytes: ...

    def closing(self) -> bytes:
        return b""

    @abstractmethod
    def add(self, delta: SequenceDelta) -> None: ...

    @abstractmethod
    def body(self) -> Struct: ...

    def headers(self) -> dict[str, str]:
        """Those that only the answer itself gives, where it is sent as a whole."""
        return {}


def only_text(delta: SequenceDelta) -> Text | Reasoning | None:
    """The event of a delta that brings one text and nothing else, as most do."""
    if len(delta.events) != 1 or delta.finish_reason is not None or delta.logprobs:
        return None
    event = delta.events[0]
    return event if isinstance(event, Text | Reasoning) else None


TRANSFER_PARAM = "kv_transfer_params"


class TransferAnswer(Struct):
    """What a response to `do_remote_decode` has, and the request to the other server has in its turn."""

    state: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


async def plan_transfer(context: ServerContext, body: GenerationFields, given: KVTransferParams, requests: "list[Request]") -> None:
    """Has the prompt exported, or receives its blocks, as the body's parameters say. Raises `InvalidRequest`."""
    if not (given.do_remote_decode or given.do_remote_prefill):
        return
    if given.do_remote_decode and given.do_remote_prefill:
        raise InvalidRequest("`do_remote_decode` and `do_remote_prefill` are for two servers: set one of them", TRANSFER_PARAM)
    if not isinstance(context, LocalContext) or (core := context.engine.core).transfer is None:
        raise InvalidRequest(f"`{TRANSFER_PARAM}` is off: start the server with --kv-transfer-dir", TRANSFER_PARAM)
    request, *others = requests
    if others or request.beam is not None or request.exact:
        raise InvalidRequest(f"`{TRANSFER_PARAM}` is for one prompt, without beams or exact sampling", TRANSFER_PARAM)
    if given.do_remote_decode:
        if body.stream:
            raise InvalidRequest(
                "a prompt is handed over with a whole answer: `do_remote_decode` does not go with `stream`", TRANSFER_PARAM
            )
        request.is_exported = True
        return
    state = given.state
    if state is None:
        raise InvalidRequest("`do_remote_prefill` needs the `state` that the other server's answer has", f"{TRANSFER_PARAM}.state")
    try:
        request.received = await context.workers.run(JobQueue.LONG, lambda: core.receive(request, state.encode()))
    except InvalidRequest as refusal:
        raise InvalidRequest(f"`{TRANSFER_PARAM}`: {refusal}", f"{TRANSFER_PARAM}.state") from None


class ChunkFold(AnswerFold):
    """The deltas as chunks of chat completions or completions: `n` sequences for each prompt."""

    def __init__(self, context: ServerContext, body: GenerationFields, request_id: str, model: str, n: int) -> None:
        self._id, self._created, self._model, self._fingerprint = request_id, int(time.time()), model, context.system_fingerprint
        self._stream_options = body.stream_options or StreamOptions()
        self._num_prompt_top = body.prompt_logprobs
        self._tokens = TokenWriter(context.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._counts = TokenCounts(n)
        self._text_events: dict[tuple[int, type[Event]], TextEvent | None] = {}
        self._exact: dict[int, ExactSampling] = {}

    def headers(self) -> dict[str, str]:
        reasons = {str(found.reason) for found in self._exact.values() if not found.exact}
        return {WARNING_HEADER: "; ".join(f"not sampled exactly: {reason}" for reason in sorted(reasons))} if reasons else {}

    @property
    def handed_over(self) -> TransferAnswer | UnsetType:
        """What another server needs to go on from the prompt, where it was exported."""
        state = self._counts.transfer_state
        return UNSET if state is None else TransferAnswer(state.decode())

    def num_logprobs(self, delta: SequenceDelta) -> int:
        """Those of the prompt included, which come with each sequence's first delta."""
        entries: Iterable[TokenLogprobs | None] = delta.logprobs
        if delta.prompt is not None:
            prompt = self._counts.prompts.get(delta.index // self._counts.n, delta.prompt)
            entries = (*delta.logprobs, *(prompt.logprobs or ()))
        return sum(1 + len(entry.top) for entry in entries if entry is not None)

    def events(self, delta: SequenceDelta) -> bytes:
        event = only_text(delta)
        if event is None:
            return encode_events(self.chunks(delta))
        key = delta.index, type(event)
        known = self._text_events.get(key)
        if known is not None and event.text:
            self._counts.add(delta)
            return known.of(event.text)
        events = encode_events(self.chunks(delta))
        if key not in self._text_events:  # the first of its kind may have had more in its chunk
            chunk = self.text_chunk(delta.index, type(event)(MARK))
            self._text_events[key] = None if chunk is None else TextEvent(chunk)
        return events

    @abstractmethod
    def text_chunk(self, index: int, event: Text | Reasoning) -> Struct | None:
        """The chunk that every delta makes which brings another text of the kind, and no more, to a choice that has begun.

        None where there is no such chunk.
        """

    @abstractmethod
    def chunks(self, delta: SequenceDelta) -> Sequence[Struct]: ...

    def closing(self) -> bytes:
        return encode_event(self._chunk([], usage_of(self._counts))) if self._stream_options.include_usage else b""

    @abstractmethod
    def _chunk(self, choices: list[Any], usage: Usage | UnsetType | None) -> Struct: ...

    def _usage_so_far(self) -> Usage | UnsetType | None:
        # OpenAI sends `usage: null` on every chunk but the last where usage was asked for.
        if not self._stream_options.include_usage:
            return UNSET
        return usage_of(self._counts) if self._stream_options.continuous_usage_stats else None


def joined_headers(headers: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """All of them; the values of one that is in both, one after the other."""
    return headers | {name: f"{headers[name]}; {value}" if name in headers else value for name, value in more.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that is being generated. `deltas` are to be closed. It is streamed in chunks of `interval` tokens, or sent as a whole.

    `headers` are those that are known before its first token.
    """

    deltas: AsyncGenerator[SequenceDelta, None]
    fold: AnswerFold
    is_streamed: bool
    interval: int | None = None
    headers: dict[str, str]


AT_ONCE = 32  # sequences; adding one takes up to 0.1 ms, in which no other stream goes on
MAX_OPEN = 256  # sequences: enough for any batch; all of a long list at once would overflow the engine's queue, or shut others out of it
OpenStream = Callable[[], AsyncGenerator[SequenceDelta, None]]


async def merge(streams: Sequence[OpenStream], n: int) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of several prompts as they come, their choices numbered through: prompt p's sequence s becomes choice p * n + s.

    At most `MAX_OPEN` sequences are open at a time, and fewer where the engine's queue is full: what has begun is not refused any more, and
    the next stream is opened when there is room. The first exception of any other ends all of them and is raised here. Closing this
    generator closes the streams.
    """
    places = _Places(max(1, MAX_OPEN // n))
    queue: asyncio.Queue[SequenceDelta | Exception | None] = asyncio.Queue()

    async def pump(position: int, open_stream: OpenStream) -> None:
        try:
            async for delta in places.read(open_stream):
                delta.index += position * n
                queue.put_nowait(delta)
        except Exception as error:  # raised again below, where the caller can see it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for position, open_stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(position, open_stream)))
            if len(tasks) % max(1, AT_ONCE // n) == 0:
                await asyncio.sleep(0)
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, SequenceDelta):
                yield item
            elif item is None:
                num_running -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Places:
    """How many streams of one request may be open at a time, and which of them wait for room in the engine's queue."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._num_accepted = 0
        self._refused: deque[asyncio.Event] = deque()

    async def read(self, open_stream: OpenStream) -> AsyncGenerator[SequenceDelta, None]:
        """The stream's deltas. Raises `QueueFull` if the very first stream is refused; later ones are opened again."""
        async with self._free:
            while True:
                self._num_accepted += 1
                try:
                    async with aclosing(open_stream()) as stream:
                        async for delta in stream:
                            yield delta
                    break
                except QueueFull as error:  # raised at once, before any other stream is opened
                    self._num_accepted -= 1
                    if not self._num_accepted:
                        raise
                    await self._wait(error.retry_after)
            if self._refused:
                self._refused.popleft().set()

    async def _wait(self, seconds: float) -> None:
        """Until another stream ends, which makes room, or for so long: other requests make room as well."""
        has_ended = asyncio.Event()
        self._refused.append(has_ended)
        try:
            async with asyncio.timeout(seconds):
                await has_ended.wait()
        except TimeoutError:
            self._refused.remove(has_ended)


async def bundled(deltas: AsyncGenerator[SequenceDelta, None], interval: int) -> AsyncGenerator[SequenceDelta, None]:
    """The same with `interval` tokens or more in each delta, but for a sequence's first and last one, which come at once.

    Closing this generator closes `deltas`.
    """
    held: dict[int, SequenceDelta] = {}
    begun: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            delta = delta if delta.index not in held else joined(held.pop(delta.index), delta)
            if delta.index in begun and delta.finish_reason is None and len(delta.token_ids) < interval:
                held[delta.index] = delta
                continue
            begun.add(delta.index)
            yield delta


def joined(first: SequenceDelta, second: SequenceDelta) -> SequenceDelta:
    """Two steps of a sequence as one, in which the text of both is there and only the later one may be the last."""
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        events=first.events + second.events,
        logprobs=first.logprobs + second.logprobs,
        prompt=first.prompt or second.prompt,
        pressures=first.pressures + [(len(first.events) + place, nats) for place, nats in second.pressures],
        num_predicted=first.num_predicted + second.num_predicted,
        num_predicted_right=first.num_predicted_right + second.num_predicted_right,
    )


class FirstDelta:
    """A stream whose first delta can be waited for, for a while, before anything is sent.

    An error in it is then still an HTTP status. `close` aborts the request at any point.
    """

    def __init__(self, stream: AsyncGenerator[SequenceDelta, None]) -> None:
        self._stream = stream
        self._first = asyncio.ensure_future(anext(stream))

    async def wait(self, seconds: float | None) -> None:
        """Raises what the stream raised; returns quietly where its first delta is there, or did not come in time."""
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    async def events(self, fold: AnswerFold, workers: Workers) -> AsyncIterator[bytes]:
        """What `fold` makes of the stream, without what ends every stream. Some events are empty."""
        yield fold.opening()
        delta: SequenceDelta | None = await self._first
        while delta is not None:
            num_logprobs = fold.num_logprobs(delta) if delta.logprobs or delta.prompt is not None else 0
            queue = queue_for(num_logprobs)
            yield fold.events(delta) if queue is None else await workers.run(queue, partial(fold.events, delta))
            delta = await anext(self._stream, None)
        yield fold.closing()

    async def close(self) -> None:
        if not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()


async def whole(answer: Answer, workers: Workers) -> tuple[bytes, dict[str, str]]:
    """The body of an answer that is not streamed, and the headers that only its end has. Raises what the engine raises."""
    fold, num_logprobs = answer.fold, 0
    async with aclosing(answer.deltas) as deltas:
        async for delta in deltas:
            num_written = fold.num_logprobs(delta)
            num_logprobs += num_written
            await workers.run(queue_for(num_written), partial(fold.add, delta))
    return await workers.run(queue_for(num_logprobs), lambda: msgspec.json.encode(fold.body())), fold.headers()


def chunked(answer: Answer) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of an answer that is streamed, with as many tokens in each as it has in a chunk."""
    return answer.deltas if answer.interval is None or answer.interval == 1 else bundled(answer.deltas, answer.interval)


if TYPE_CHECKING:
    from penstock.engine.request import Request
