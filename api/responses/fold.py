"""From an answer's deltas to the items of a response and to its events: one fold makes both."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.api.errors import body_of
from penstock.api.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    ErrorDetails,
    ErrorEvent,
    Failed,
    FunctionCallOutput,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    MessageOutput,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDelta,
    ReasoningDone,
    ReasoningOutput,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    StreamEvent,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    TextDelta,
    TextDone,
)
from penstock.engine.contracts.parsing import Event, Preamble, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta, TokenLogprobs
from penstock.engine.errors import InvalidRequest, QueueFull
from penstock.serving.context import ServerContext
from penstock.serving.endpoints.answers import MARK, AnswerFold, TokenWriter, encode_event, only_text
from penstock.serving.endpoints.chat import TokenLogprob, chat_logprob
from penstock.serving.messages import Conformance, ExactSampling, MessageReader, TokenCounts, is_json
from penstock.serving.preparing import PreparedChat
from penstock.serving.responses.items import Status, new_id, seal
from penstock.serving.responses.requests import ENCRYPTED, ResponsesRequest

_encode = msgspec.json.Encoder().encode


class NumberedTextEvent:
    """The event of a delta of text, encoded once but for the text and its number, which is the last field."""

    def __init__(self, event: StreamEvent) -> None:
        """`event` has `MARK` where the text belongs."""
        self._head, after = encode_event(event).split(_encode(MARK))
        self._middle = after.removesuffix(b"%d}\n\n" % event.sequence_number)

    def of(self, number: int, text: str) -> bytes:
        return b"%b%b%b%d}\n\n" % (self._head, _encode(text), self._middle, number)


class EventWriter:
    """Numbers the events of a stream, and writes nothing where the answer is not streamed."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._next = 0

    def write(self, kind: type[StreamEvent], **fields: Any) -> bytes:
        if not self._is_streamed:
            return b""
        self._next += 1
        return encode_event(kind(sequence_number=self._next - 1, **fields))

    def write_text(self, event: NumberedTextEvent, text: str) -> bytes:
        if not self._is_streamed:
            return b""
        self._next += 1
        return event.of(self._next - 1, text)


class ItemWriter(ABC):
    """The item that is being said: its events, and what it is in the response. Each item is `added`, said in deltas, and `done`."""

    def __init__(self, events: EventWriter, item: OutputItem, index: int) -> None:
        self.item = item
        self._events = events
        self._texts: list[str] = []
        self._index = index
        self._delta_event = NumberedTextEvent(self._delta(MARK))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item.id, "output_index": self._index}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def added(self) -> bytes:
        return self._events.write(ItemAdded, output_index=self._index, item=self.item)

    def say(self, text: str) -> bytes:
        self._texts.append(text)
        return self._events.write_text(self._delta_event, text)

    def done(self, status: Status) -> bytes:
        self.item.status = status
        return self._completed() + self._events.write(ItemDone, output_index=self._index, item=self.item)

    @abstractmethod
    def _delta(self, text: str) -> StreamEvent:
        """The event of more text, as if it were the first one."""

    @abstractmethod
    def _completed(self) -> bytes:
        """Puts the whole text into the item, and says so."""


class MessageWriter(ItemWriter):
    item: MessageOutput

    def __init__(self, events: EventWriter, index: int) -> None:
        super().__init__(events, MessageOutput(new_id("msg"), "in_progress", "assistant", []), index)
        self._part = OutputText("", [], [])

    def added(self) -> bytes:
        return super().added() + self._events.write(PartAdded, **self._place, content_index=0, part=self._part)

    def say_with(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        if not logprobs:
            return self.say(text)
        self._texts.append(text)
        self._part.logprobs += logprobs
        return self._events.write(TextDelta, **self._place, content_index=0, delta=text, logprobs=logprobs)

    def _delta(self, text: str) -> StreamEvent:
        return TextDelta(sequence_number=0, **self._place, content_index=0, delta=text, logprobs=[])

    def _completed(self) -> bytes:
        self._part.text = self.text
        self.item.content = [self._part]
        place = self._place | {"content_index": 0}
        done = self._events.write(TextDone, **place, text=self._part.text, logprobs=self._part.logprobs)
        return done + self._events.write(PartDone, **place, part=self._part)


class CallWriter(ItemWriter):
    item: FunctionCallOutput

    def __init__(self, events: EventWriter, index: int, call_id: str, name: str) -> None:
        super().__init__(events, FunctionCallOutput(new_id("fc"), "in_progress", call_id, name, ""), index)

    def done(self, status: Status) -> bytes:
        """A stop string may have ended the answer in the middle of the arguments."""
        return super().done(status if is_json(self._texts) else "incomplete")

    def _delta(self, text: str) -> StreamEvent:
        return ArgumentsDelta(sequence_number=0, **self._place, delta=text)

    def _completed(self) -> bytes:
        self.item.arguments = self.text
        return self._events.write(ArgumentsDone, **self._place, name=self.item.name, arguments=self.text)


class ReasoningWriter(ItemWriter):
    item: ReasoningOutput

    def __init__(self, events: EventWriter, index: int, secret: str | None) -> None:
        super().__init__(events, ReasoningOutput(new_id("rs"), "in_progress", [], []), index)
        self._secret = secret

    def done(self, status: Status) -> bytes:
        if self._secret is not None:
            self.item.encrypted_content = seal(self.text, self._secret)
        return super().done(status)

    def _delta(self, text: str) -> StreamEvent:
        return ReasoningDelta(sequence_number=0, **self._place, content_index=0, delta=text)

    def _completed(self) -> bytes:
        self.item.content = [ReasoningText(self.text)]
        return self._events.write(ReasoningDone, **self._place, content_index=0, text=self.text)


class SummaryWriter(ReasoningWriter):
    """The reasoning where a summary of it was asked for: all of it, in the place of the summary."""

    def added(self) -> bytes:
        return super().added() + self._events.write(SummaryPartAdded, **self._place, summary_index=0, part=SummaryText(""))

    def _delta(self, text: str) -> StreamEvent:
        return SummaryDelta(sequence_number=0, **self._place, summary_index=0, delta=text)

    def _completed(self) -> bytes:
        self.item.summary = [SummaryText(self.text)]
        done = self._events.write(SummaryDone, **self._place, summary_index=0, text=self.text)
        return done + self._events.write(SummaryPartDone, **self._place, summary_index=0, part=self.item.summary[0])


class ResponseFold(AnswerFold):
    """One request's deltas as events, and as the response that the same events add up to.

    `response` is complete once the last delta has been read. `secret` seals the reasoning.
    """

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        prepared: PreparedChat,
        response: Response,
        *,
        secret: str,
        found: Mapping[int, Conformance],
        is_streamed: bool,
    ) -> None:
        self.response = response
        self._events = EventWriter(is_streamed=is_streamed)
        self._reader = MessageReader(prepared.view)
        self._counts = TokenCounts(1)
        self._tokens = TokenWriter(context.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._num_top = prepared.request.params.logprobs
        self._is_summarized = body.is_summarized
        self._secret = secret if body.includes(ENCRYPTED) else None
        self._found = found
        self._open: ItemWriter | None = None
        self._failure: tuple[ResponseError, bytes] | None = None
        self._logprobs: list[TokenLogprobs] = []  # of content that has not been sent

    def num_logprobs(self, delta: SequenceDelta) -> int:
        return sum(1 + len(entry.top) for entry in delta.logprobs)

    def opening(self) -> bytes:
        created = self._events.write(Created, response=self.response)
        return created + self.begin()

    def queued(self) -> bytes:
        """The first events of a response that waits, and that `begin` follows."""
        self.response.status = "queued"
        created = self._events.write(Created, response=self.response)
        return created + self._events.write(Queued, response=self.response)

    def begin(self) -> bytes:
        self.response.status = "in_progress"
        return self._events.write(InProgress, response=self.response)

    def events(self, delta: SequenceDelta) -> bytes:
        event = only_text(delta)
        if event is not None and event.text and self._open is not None and self._continues(event):
            self._counts.add(delta)
            return self._open.say(event.text)
        self._counts.add(delta)
        if delta.exact is not None:
            self.response.exact_sampling = ExactSampling.of(delta.exact)
        step = self._reader.feed(delta)
        self._logprobs += step.content_logprobs
        written = [self._write(event) for event in step.events]
        if step.finish_reason is not None:
            written.append(self._finish(step.finish_reason))
        return b"".join(written)

    def add(self, delta: SequenceDelta) -> None:
        self.events(delta)

    def closing(self) -> bytes:
        kind = Completed if self.response.status == "completed" else Incomplete
        return self._events.write(kind, response=self.response)

    def failure(self, error: Exception) -> bytes:
        """An error, at which clients of OpenAI's raise, and the response as it is then."""
        failed, closed = self.fail(error)
        param = error.param if isinstance(error, InvalidRequest) else None
        details = ErrorDetails(failed.code, failed.code, failed.message, param)
        event = self._events.write(ErrorEvent, error=details, code=details.code, message=details.message, param=details.param)
        return closed + event + self._events.write(Failed, response=self.response)

    def body(self) -> Response:
        return self.response

    def fail(self, error: Exception) -> tuple[ResponseError, bytes]:
        """What has failed, and the events that close the open item. The same when it is called again."""
        if self._failure is None:
            self.response.error = ResponseError(code_of_failure(error), body_of(error).error.message)
            self._failure = self.response.error, self._end("failed")
        return self._failure

    def cancel(self) -> bytes:
        """OpenAI has no event of a cancelled response: clients know this one as the last, and find the status in the response."""
        return self._end("cancelled") + self._events.write(Incomplete, response=self.response)

    def _end(self, status: str) -> bytes:
        """The answer ends otherwise than by itself: the events that close the open item."""
        closed = self._close("incomplete")
        self._settle(status)
        return closed

    def _continues(self, event: Text | Reasoning) -> bool:
        """Whether it is more of what the open item has."""
        kind = MessageWriter if isinstance(event, Text) else ReasoningWriter
        return isinstance(self._open, kind) and self._reader.passes(event)

    def _write(self, event: Event) -> bytes:
        """Opens an item where the event does not go on with the open one."""
        opened, index = b"", len(self.response.output)
        match event:
            case Text(text):
                if not isinstance(self._open, MessageWriter):
                    opened = self._begin(MessageWriter(self._events, index))
                return opened + self._say(text)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningWriter):
                    kind = SummaryWriter if self._is_summarized else ReasoningWriter
                    opened = self._begin(kind(self._events, index, self._secret))
                assert self._open is not None
                return opened + self._open.say(text)
            case Preamble():
                return opened  # no item holds it, and requests that ask for it are refused
            case ToolCallStart(_, name, call_id):
                return self._begin(CallWriter(self._events, index, call_id, name))
            case ToolCallArguments(_, fragment):
                assert isinstance(self._open, CallWriter), "arguments belong to the call that has begun last"
                return self._open.say(fragment)

    def _say(self, text: str) -> bytes:
        assert isinstance(self._open, MessageWriter)
        return self._open.say_with(text, self._take_logprobs())

    def _begin(self, writer: ItemWriter) -> bytes:
        closed = self._close("completed")
        self._open = writer
        self.response.output.append(writer.item)
        if not isinstance(writer, MessageWriter):
            self._logprobs.clear()  # of what is no text
        return closed + writer.added()

    def _close(self, status: Status) -> bytes:
        if self._open is None:
            return b""
        closed = self._open.done(status)
        self._open = None
        return closed

    def _take_logprobs(self) -> list[TokenLogprob]:
        if self._num_top is None:
            return []
        taken, self._logprobs = self._logprobs, []
        return [chat_logprob(token, self._num_top, self._tokens) for token in taken]

    def _finish(self, reason: str) -> bytes:
        is_whole = reason in ("stop", "tool_calls")
        opened = b"" if self.response.output else self._begin(MessageWriter(self._events, 0))
        closed = self._close("completed" if is_whole else "incomplete")
        if not is_whole:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        self.response.structured_output = self._found.get(0, UNSET)
        self._settle("completed" if is_whole else "incomplete")
        return opened + closed

    def _settle(self, status: str) -> None:
        counts = self._counts
        num_prompt_tokens, num_completion_tokens = counts.num_prompt_tokens, counts.num_completion_tokens
        self.response.status = status
        self.response.completed_at = int(time.time()) if status == "completed" else None
        self.response.usage = ResponseUsage(
            num_prompt_tokens,
            InputTokensDetails(counts.num_cached_tokens, 0),
            num_completion_tokens,
            OutputTokensDetails(counts.num_reasoning_tokens),
            num_prompt_tokens + num_completion_tokens,
        )


def code_of_failure(error: Exception) -> str:
    match error:
        case QueueFull():
            return "rate_limit_exceeded"
        case InvalidRequest():
            return "invalid_prompt"
        case _:
            return "server_error"
