"""POST /v1/messages and /v1/messages/count_tokens, and the models in the same API's shape: Anthropic's Messages API."""

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from penstock.api.answers import json_response, send
from penstock.api.errors import AnthropicErrorBody, anthropic_body_of
from penstock.api.requests import (
    CONTEXT,
    REQUEST_ID,
    SHARED,
    begin_timer,
    caller_of,
    read_admitted_body,
    read_body,
    read_query,
    served_names,
)
from penstock.api.routes import Route
from penstock.engine.contracts.parsing import Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.plugins.json.repair import JsonRepair
from penstock.serving.anthropic import (
    Conversion,
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
    ThinkingSigner,
    chat_request,
    tool_use_id,
)
from penstock.serving.context import ModelDescription, queue_for
from penstock.serving.endpoints.answers import MARK, Answer, AnswerFold, TextEvent, encode_event, encode_events, only_text
from penstock.serving.endpoints.bodies import ignored_tools_header, named_model, served_model
from penstock.serving.messages import MessageReader, MessageStep, TokenCounts, is_json, warning_header
from penstock.serving.observability.metrics import TIMEOUT
from penstock.serving.preparing import PreparedChat, count_prompt_tokens, generate_chat, prepare_chat

SIGNER: web.AppKey[ThinkingSigner] = web.AppKey("signer", ThinkingSigner)


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """The prompt's tokens are in three parts: those read from the cache, those kept in it as `cache_control` asks, and the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    server_tool_use: None = None


class WholeUsage(MessageUsage, kw_only=True):
    cache_creation: CacheCreation
    service_tier: str = "standard"
    inference_geo: str | None = None


class TextContent(Struct, tag="text"):
    text: str
    citations: list[Any] = []  # the AI SDK takes no null


class ThinkingContent(Struct, tag="thinking"):
    thinking: str
    signature: str


class Caller(Struct, tag="direct", frozen=True):
    """The model itself calls, not code that it has written."""


class ToolUseContent(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller = Caller()


Content = TextContent | ThinkingContent | ToolUseContent


class AnthropicMessage(Struct, tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: WholeUsage


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    partial_json: str


class MessageStart(Struct, tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: Content


class ContentBlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop"):
    index: int


class Stop(Struct):
    stop_reason: str
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Struct, tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, tag="message_stop"):
    pass


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
StreamedEvent = MessageStart | BlockEvent | MessageDelta | MessageStop


class BlockWriter:
    """The events of an answer as content blocks, of which one is open at a time.

    White space before a block's first word is held back, and left out where the block would have no other text: the API refuses such
    blocks when they are sent back to it.
    """

    def __init__(self, signer: ThinkingSigner, *, shows_thinking: bool) -> None:
        self._signer = signer
        self._shows_thinking = shows_thinking
        self._index = -1  # of the last block
        self._open: type[Event] | None = None
        self._call = -1  # the open one's number
        self._held = ""
        self._held_kind: type[Event] = Text
        self._thinking: list[str] = []  # that of the open block
        self._input: list[str] = []  # that of the last call

    def write(self, event: Event) -> Iterator[BlockEvent]:
        match event:
            case Text(text) | Reasoning(text):
                yield from self._write_text(type(event), str(text))
            case ToolCallStart(index, name, call_id):
                yield from self._begin(ToolCallStart, ToolUseContent(tool_use_id(call_id), name, {}))
                self._call = index
                self._input.clear()
            case ToolCallArguments(index, fragment):
                assert self._open is ToolCallStart, "arguments come before their call"
                assert self._call == index, "calls come one after the other"
                if fragment:
                    self._input.append(fragment)
                    yield self._delta(InputJsonDelta(str(fragment)))

    @property
    def is_call_whole(self) -> bool:
        """Whether the last call's input is a whole document: a model may end its answer in the middle of one."""
        return is_json(self._input)

    def finish(self) -> Iterator[BlockEvent]:
        """Ends the last block. An answer without any has one empty text: clients read the first block."""
        if self._index < 0:
            yield from self._begin(Text, TextContent(""))
        yield from self._end()

    def passes(self, event: Text | Reasoning) -> bool:
        """Whether every text of the kind is one delta of the open block."""
        return self._open is type(event) and (self._open is Text or self._shows_thinking)

    def text_delta(self, event: Text | Reasoning) -> ContentBlockDelta:
        """One more text of the open block."""
        if isinstance(event, Text):
            return self._delta(TextDelta(str(event.text)))
        self._thinking.append(str(event.text))
        return self._delta(ThinkingDelta(str(event.text)))

    def _write_text(self, kind: type[Text] | type[Reasoning], text: str) -> Iterator[BlockEvent]:
        if self._open is not kind:
            self._held = self._held + text if self._held_kind is kind else text
            self._held_kind = kind
            if not self._held.strip():
                return
            text = self._held
            yield from self._begin(kind, TextContent("") if kind is Text else ThinkingContent("", ""))
        if kind is Text or self._shows_thinking:
            yield self.text_delta(kind(text))

    def _begin(self, kind: type[Event], block: Content) -> Iterator[BlockEvent]:
        yield from self._end()
        self._held = ""
        self._index += 1
        self._open = kind
        yield ContentBlockStart(self._index, block)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is None:
            return
        if self._open is Reasoning:
            yield self._delta(SignatureDelta(self._signer.sign("".join(self._thinking))))
            self._thinking.clear()
        yield ContentBlockStop(self._index)
        self._open = None

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> ContentBlockDelta:
        return ContentBlockDelta(self._index, delta)


class MessageSum:
    """A stream's events added up to the message."""

    def __init__(self) -> None:
        self.message: AnthropicMessage | None = None
        self._texts: list[str] = []  # of the open block

    def add(self, event: Struct) -> None:
        match event:
            case MessageStart(message):
                self.message = message
            case ContentBlockStart(_, block):
                self._message.content.append(block)
            case ContentBlockDelta(_, delta):
                self._add_delta(delta)
            case ContentBlockStop():
                self._end_block()
            case MessageDelta(stop, usage):
                message = self._message
                message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
                for name in MessageUsage.__struct_fields__:
                    setattr(message.usage, name, getattr(usage, name))

    @property
    def _message(self) -> AnthropicMessage:
        assert self.message is not None, "the first event starts the message"
        return self.message

    def _add_delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> None:
        match delta:
            case TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text):
                self._texts.append(text)
            case SignatureDelta(signature):
                block = self._message.content[-1]
                assert isinstance(block, ThinkingContent), "only thinking is signed"
                block.signature = signature

    def _end_block(self) -> None:
        block, text = self._message.content[-1], "".join(self._texts)
        self._texts.clear()
        match block:
            case TextContent():
                block.text = text
            case ThinkingContent():
                block.thinking = text
            case ToolUseContent():
                block.input = object_of(text)


def object_of(text: str) -> dict[str, Any]:
    """A call's input; where the answer ended in the middle of it, as far as it goes."""
    repair = JsonRepair()
    repair.feed(text, 0)
    repair.close()
    try:
        value = json.loads(text if repair.is_malformed else repair.take())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessagesFold(AnswerFold):
    """One answer as the events of a stream, and as the message that the same events add up to."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    ending = b""

    def __init__(
        self, body: MessagesRequest, prepared: PreparedChat, conversion: Conversion, signer: ThinkingSigner, model: str, request_id: str
    ) -> None:
        self._model, self._request_id = model, request_id
        self._ttl = conversion.ttl
        self._stop_sequences = frozenset(body.stop_sequences or ())
        self._is_clamped = (prepared.request.params.max_tokens or 0) < body.max_tokens
        is_hidden = body.thinking is not None and body.thinking.display == "omitted"
        self._reader = MessageReader(prepared.view)
        self._blocks = BlockWriter(signer, shows_thinking=not is_hidden)
        self._counts = TokenCounts(1)
        self._has_begun = False
        self._sum = MessageSum()
        self._text_events: dict[tuple[int, type[Event]], TextEvent] = {}

    def failure(self, error: Exception) -> bytes:
        return encode_event(anthropic_body_of(error, self._request_id))

    def num_logprobs(self, delta: SequenceDelta) -> int:
        return 0

    def events(self, delta: SequenceDelta) -> bytes:
        event = only_text(delta)
        if event is None or not event.text or delta.prompt is not None or not self._blocks.passes(event):
            return encode_events(self._stream_events(delta))
        self._counts.add(delta)
        chunk = self._blocks.text_delta(event)
        key = chunk.index, type(event)
        if key not in self._text_events:
            marked = TextDelta(MARK) if isinstance(event, Text) else ThinkingDelta(MARK)
            self._text_events[key] = TextEvent(ContentBlockDelta(chunk.index, marked))
        return self._text_events[key].of(str(event.text))

    def add(self, delta: SequenceDelta) -> None:
        for event in self._stream_events(delta):
            self._sum.add(event)

    def body(self) -> AnthropicMessage:
        assert self._sum.message is not None, "an answer has at least one delta"
        return self._sum.message

    def _stream_events(self, delta: SequenceDelta) -> Iterator[Struct]:
        self._counts.add(delta)
        step = self._reader.feed(delta)
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(AnthropicMessage(id=f"msg_{uuid.uuid4().hex}", model=self._model, content=[], usage=self._whole_usage()))
        for event in step.events:
            yield from self._blocks.write(event)
        if step.finish_reason is not None:
            yield from self._blocks.finish()
            yield MessageDelta(self._stop(step), self._usage())
            yield MessageStop()

    def _stop(self, step: MessageStep) -> Stop:
        if step.finish_reason == "tool_calls":
            return Stop("tool_use" if self._blocks.is_call_whole else "end_turn", None)
        if step.finish_reason == "length":
            return Stop("model_context_window_exceeded" if self._is_clamped and step.stop_reason != TIMEOUT else "max_tokens", None)
        if isinstance(step.stop_reason, str) and step.stop_reason in self._stop_sequences:
            return Stop("stop_sequence", step.stop_reason)
        return Stop("end_turn", None)

    def _usage(self) -> MessageUsage:
        counts = self._counts
        num_new = counts.num_prompt_tokens - counts.num_cached_tokens
        num_kept = 0 if self._ttl is None else max(num_new - 1, 0)  # the last token is always computed
        return MessageUsage(
            input_tokens=num_new - num_kept,
            cache_creation_input_tokens=num_kept,
            cache_read_input_tokens=counts.num_cached_tokens,
            output_tokens=counts.num_completion_tokens,
            output_tokens_details=OutputTokensDetails(counts.num_reasoning_tokens),
        )

    def _whole_usage(self) -> WholeUsage:
        usage = self._usage()
        num_kept = usage.cache_creation_input_tokens
        kept = CacheCreation(ephemeral_1h_input_tokens=num_kept) if self._ttl == "1h" else CacheCreation(num_kept)
        return WholeUsage(**msgspec.structs.asdict(usage), cache_creation=kept)


async def converted(http: web.Request, body: PromptFields, size: int) -> Conversion:
    context, signer = http.app[CONTEXT], http.app[SIGNER]

    def convert() -> Conversion:
        return chat_request(body, signer, takes_late_system=context.chat_template.takes_late_system)

    return await context.workers.run(queue_for(size), convert)


async def create_message(http: web.Request) -> web.StreamResponse:
    """Answers a conversation: one message, or a stream of the events that it is the fold of."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, size, headers = await read_admitted_body(http, MessagesRequest, allow_unknown_fields=True)
    model = timer.model = named_model(context, body.model)
    adapter = context.adapter_of(body.model)
    conversion = await converted(http, body, size)
    options = caller_of(http).chat_options(clamps_max_tokens=True, adapter=adapter)
    prepared = await prepare_chat(context, conversion.body, size, options)
    request = prepared.request
    request.retention = conversion.retention
    fold = MessagesFold(body, prepared, conversion, http.app[SIGNER], model, http[REQUEST_ID])
    headers |= warning_header(request.grammar_warnings) | ignored_tools_header(conversion.skipped)
    timed = timer.watch(generate_chat(context, prepared), request.params)
    return await send(http, Answer(deltas=timed, fold=fold, is_streamed=bool(body.stream), headers=headers), {})


class TokenCount(Struct):
    input_tokens: int


async def count_tokens(http: web.Request) -> web.StreamResponse:
    """The number of tokens that the same body's prompt has on /v1/messages."""
    context = http.app[CONTEXT]
    body, size, headers = await read_body(http, CountTokensRequest, allow_unknown_fields=True)
    served_model(context, body.model)
    conversion = await converted(http, body, size)
    number = await count_prompt_tokens(context, conversion.body, size)
    return json_response(TokenCount(number), headers=headers | ignored_tools_header(conversion.skipped))


STARTED = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
DEFAULT_PAGE, MAX_PAGE = 20, 1000


class ModelInfo(Struct, tag="model", kw_only=True):
    id: str
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None = None


class ModelPage(Struct):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(model: ModelDescription) -> ModelInfo:
    limit = model.max_model_len
    return ModelInfo(id=model.name, display_name=model.name, created_at=STARTED, max_input_tokens=limit, max_tokens=limit)


class ModelQuery(Struct):
    """Of the list of models as Anthropic's API shows it."""

    after_id: str | None = None
    before_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE


def model_page(request: web.Request) -> ModelPage:
    """The models after or before one of them, as the query says. Raises `InvalidRequest`."""
    query, described = read_query(request, ModelQuery), {model.name: model for model in request.app[SHARED].descriptions()}
    names, limit, after, before = served_names(request), query.limit, query.after_id, query.before_id
    if after is not None:
        names = names[_place(names, after, "after_id") + 1 :]
    if before is not None:
        names = names[: _place(names, before, "before_id")]
    shown = names[-limit:] if before is not None and after is None else names[:limit]
    models = [model_info(described[name]) for name in shown]
    return ModelPage(models, len(shown) < len(names), shown[0] if shown else None, shown[-1] if shown else None)


def _place(names: list[str], name: str, param: Literal["after_id", "before_id"]) -> int:
    if name not in names:
        raise InvalidRequest(f"`{param}` is not the id of a model that is served here", param)
    return names.index(name)


MESSAGE_ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        create_message,
        request=MessagesRequest,
        response=AnthropicMessage,
        events=StreamedEvent,
        errors=(AnthropicErrorBody,),
        is_admitted=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        request=CountTokensRequest,
        response=TokenCount,
        errors=(AnthropicErrorBody,),
    ),
)
