"""What a handler reads of an HTTP request: the server's objects, the request's timer, and its body, bounded and typed."""

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import BodyPartReader, HttpVersion11, MultipartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct, inspect

from penstock.api.limits.admission import DEADLINE, admit, check_fields, key_name, key_of, set_deadline, token_cap
from penstock.engine.errors import InvalidRequest, NoSuchModel
from penstock.engine.system.process import examined
from penstock.serving.context import ModelContext, PoolingContext, ServerContext, SharedContext, SpeechContext
from penstock.serving.messages import MAX_HEADER, header_text
from penstock.serving.metrics import LoggedTimer, Metrics, RequestMetrics, RequestTimer, ServerMetrics
from penstock.serving.preparing import ChatOptions
from penstock.serving.requests import RequestFields, check_json, message_of, mistaken_path
from penstock.serving.workers import LONG, JobQueue

T = TypeVar("T")

SHARED: web.AppKey[SharedContext] = web.AppKey("shared", SharedContext)

# That of the model. With several models, a handler sees the application of the one that is asked for: see api/models/routing.py.
MODEL: web.AppKey[ModelContext] = web.AppKey("model", ModelContext)

# One of these three is the same. No route leads to handlers of the other kind, so that each takes its own context without asking.
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)

POOLING: web.AppKey[PoolingContext] = web.AppKey("pooling", PoolingContext)

SPEECH: web.AppKey[SpeechContext] = web.AppKey("speech", SpeechContext)


SERVER_METRICS: web.AppKey[ServerMetrics] = web.AppKey("server_metrics", ServerMetrics)

REQUEST_METRICS: web.AppKey[RequestMetrics] = web.AppKey("request_metrics", RequestMetrics)  # with one model, the same

METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)  # the same again, where the model generates

# Keeps the model loaded while it is entered, for work that outlasts its request.
KEEP: web.AppKey[Callable[[], AbstractContextManager[None]]] = web.AppKey("keep")

BATCH_TIMERS: web.AppKey[Metrics] = web.AppKey("batch_timers", Metrics)  # not shown: the times of batches say nothing about the server

ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)

TIMER: web.RequestKey[LoggedTimer] = web.RequestKey("timer", LoggedTimer)

CLIENT: web.RequestKey[str] = web.RequestKey("client", str)  # of a batch's request, which brings no key

PRIORITY: web.RequestKey[int] = web.RequestKey("priority", int)  # of a batch's request, whatever its body says


def metrics_of(request: web.Request) -> Metrics:
    """Where a request that generates is counted."""
    return request.app[BATCH_TIMERS if CLIENT in request else METRICS]


def begin_timer(request: web.Request) -> RequestTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log.

    A handler writes `begin_timer(request).watch(engine.generate(...), params)` in place of `engine.generate(...)`.
    """
    timer = metrics_of(request).begin(request[ARRIVED])
    request[TIMER] = timer
    return timer


def client_of(http: web.Request) -> str | None:
    """The client that work is counted for: the owner of the API key if the server requires keys, else the address."""
    return http.remote if key_of(http) is None else owner_of(http)


def chat_options(http: web.Request, **others: Any) -> ChatOptions:
    """What the request's client, API key, time limit and id decide of its preparation, and `others`."""
    return ChatOptions(
        client=client_of(http),
        max_tokens=token_cap(http),
        deadline=http.get(DEADLINE),
        key_name=key_name(http),
        http_id=http[REQUEST_ID],
        **others,
    )


def owner_of(http: web.Request) -> str:
    """The client that files, batches and stored responses belong to: the owner of the API key. Without keys they all belong to one."""
    if CLIENT in http:
        return http[CLIENT]
    key = key_of(http)
    return "" if key is None else key.owner


LARGE_BODY = 2**20  # bytes

OFF: tuple[Any, ...] = (None, False, "", [], {})
MAX_UNKNOWN = 100

# Fields that change the result where other servers know them. They are refused even with --allow-unknown-fields, unless switched off.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "activation": ("logits are not given out: scores and probabilities are as the model's files say", (None, True)),
    "audio": ("audio is not supported", OFF),
    "custom_logit_processor": ("code never comes in with a request: use `logits_processors` by name", OFF),
    "detokenize": ("answers are always text", (None, True)),
    "documents": ("`documents` are not supported: put them in a message", OFF),
    "embed_dtype": ("vectors are float32", (None, "float32")),
    "endianness": ("base64 is little-endian", (None, "little", "native")),
    "function_call": ("`function_call` is deprecated and not supported: use `tool_choice`", (*OFF, "none")),
    "functions": ("`functions` is deprecated and not supported: use `tools`", OFF),
    "logprob_token_ids": ("`logprob_token_ids` is not supported", OFF),
    "lora_path": ("`lora_path` is not supported: give the adapter's name in `model`", OFF),
    "max_chunks_per_doc": ("documents are not split: use `max_tokens_per_doc`", OFF),
    "mm_processor_kwargs": ("images are read as the model's processor says", OFF),
    "modalities": ("only text can be generated", (*OFF, ["text"])),
    "no_stop_trim": ("use `include_stop_str_in_output`", OFF),
    "rank_fields": ("documents are texts, or objects with a `text` only", (*OFF, ["text"])),
    "repetition_detection": ("`repetition_detection` is not supported", OFF),
    "return_hidden_states": ("hidden states are not given out", OFF),
    "return_token_ids": ("`return_token_ids` is not supported: use `return_tokens_as_token_ids` with `logprobs`", OFF),
    "spaces_between_special_tokens": ("special tokens are shown as the tokenizer spells them", (None, True)),
    "stop_regex": ("`stop_regex` is not supported: use `stop`", OFF),
    "suffix": ("`suffix` is not supported: this server does not fill in the middle", OFF),
    "truncate_prompt_tokens": ("prompts are never truncated: shorten the prompt", OFF),
    "truncation_side": ("what is too long loses its end", (None, "right")),
    "use_activation": ("logits are not given out: scores and probabilities are as the model's files say", (None, True)),
    "vllm_xargs": ("`vllm_xargs` is not supported", OFF),
    "web_search_options": ("web search is not supported", OFF),
}

# Fields of vLLM's request classes that mean nothing at these values, its own defaults: clients send the class as a whole.
VLLM_DEFAULTS: dict[str, bool | int] = {
    "echo": False,
    "return_mm_kwargs": True,
    "return_token_offsets": False,
    "return_weight_versions": False,
    "routed_experts_prompt_start": 0,
}


def decode(body: bytes | bytearray, kind: type[T], *, allow_unknown_fields: bool = False) -> tuple[T, tuple[str, ...]]:
    """The decoded body, and the paths of the unknown fields that were ignored (always none unless they are allowed).

    Raises `InvalidRequest`: for malformed JSON, wrong types and ranges, refused fields, and unknown ones with the nearest known name.
    Fields that are null, or vLLM's with their default value, ask for nothing and are passed over.
    """
    check_json(body)
    try:
        return msgspec.json.decode(body, type=examined(kind)), ()
    except msgspec.ValidationError as error:
        if not str(error).startswith("Object contains unknown field"):
            raise _invalid(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return _decode_with_unknown_fields(body, kind, allow_unknown_fields)


def _invalid(error: msgspec.ValidationError, kind: type[Any]) -> InvalidRequest:
    return InvalidRequest(message_of(error, kind), mistaken_path(error))


def _decode_with_unknown_fields(body: bytes | bytearray, kind: type[T], allowed: bool) -> tuple[T, tuple[str, ...]]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    ignored: list[str] = []
    for path, holder, name, known in list(islice(_unknown_fields(value, inspect.type_info(kind), ""), MAX_UNKNOWN + 1)):
        if len(ignored) == MAX_UNKNOWN:
            raise InvalidRequest(f"more than {MAX_UNKNOWN} unknown fields", path)
        setting = holder.pop(name)
        if setting is None or (path == name and name in VLLM_DEFAULTS and setting == VLLM_DEFAULTS[name]):
            continue
        if path == name and name in REFUSED:
            reason, neutral = REFUSED[name]
            if setting not in neutral:
                raise InvalidRequest(reason, name)
        elif not allowed:
            nearest = difflib.get_close_matches(name[:100], known, n=1)
            hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
            raise InvalidRequest(f"unknown field `{path}`{hint}", path)
        else:
            ignored.append(path)
    for name in _raw_fields(kind) & value.keys() if isinstance(value, dict) else ():
        value[name] = msgspec.Raw(b"null")
    try:
        return msgspec.convert(value, kind, str_keys=True), tuple(ignored)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from None


def _raw_fields(kind: type[Any]) -> frozenset[str]:
    """Those that are not looked at."""
    info = inspect.type_info(kind)
    fields = info.fields if isinstance(info, inspect.StructType) else ()
    return frozenset(field.encode_name for field in fields if isinstance(field.type, inspect.RawType))


def _unknown_fields(value: Any, info: inspect.Type, path: str) -> Iterator[tuple[str, dict[str, Any], str, list[str]]]:
    """Walks a decoded body along its type: (path, the object that holds the field, its name, the names known there)."""
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _unknown_fields(value, member, path)
    elif isinstance(info, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in info.fields}
        known = list(fields)
        for name, item in value.items():
            at = f"{path}.{name}" if path else name
            if name in fields:
                yield from _unknown_fields(item, fields[name], at)
            elif info.forbid_unknown_fields:
                yield at, value, name, known
    elif isinstance(info, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_fields(item, info.item_type, f"{path}[{index}]")


def read_query(request: web.Request, kind: type[T]) -> T:
    """The query of a URL by its fields. Raises `InvalidRequest`, for a field that is given twice as well."""
    for name in kind.__struct_fields__ if issubclass(kind, Struct) else ():
        if len(request.query.getall(name, ())) > 1:
            raise InvalidRequest(f"`{name}` is given more than once", name)
    return converted(dict(request.query), kind)


def converted(given: dict[str, Any], kind: type[T]) -> T:
    """From texts to what they stand for. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from None


Fields = TypeVar("Fields", bound=RequestFields)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)  # one that was received to choose the model by it
CONTENT_ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})  # br and zstd where aiohttp has their libraries
IGNORED_HEADER = "x-ignored-fields"
IGNORED_TOOLS_HEADER = "x-ignored-tools"
TRUNCATED_HEADER = "x-truncated-items"
MIN_BYTES_PER_SECOND = 16 * 1024
FILES_PATH = "/v1/files"
MULTIPART_OVERHEAD = 2**16  # bytes of an upload beside its file


async def read_body(request: web.Request, kind: type[T], *, allow_unknown_fields: bool = False) -> tuple[T, int, dict[str, str]]:
    """The decoded body, its size in bytes, which says where it is worked on, and the response headers that it calls for.

    A `request_id` in it becomes the request's unless the header gave it one. Where the path names a model, that one is asked for. Unknown
    fields are allowed where the operator says so, and where `allow_unknown_fields` for this endpoint.

    Raises `InvalidRequest` for whatever is wrong with it, and aiohttp's own 413 and 408 where it is too large or too slow.
    """
    context = request.app[SHARED]
    data = await receive(request)
    allow = allow_unknown_fields or context.options.allow_unknown_fields
    body, ignored = await context.workers.run(decoding_queue(len(data)), lambda: decode(data, kind, allow_unknown_fields=allow))
    if isinstance(body, RequestFields):
        if body.request_id is not None and request.headers.get("x-request-id") != request[REQUEST_ID]:
            request[REQUEST_ID] = body.request_id
        body.model = request.match_info.get("deployment", body.model)
    if hasattr(body, "model"):
        check_model(request, body.model)
    return body, len(data), ignored_fields_header(ignored)


async def read_admitted_body(
    request: web.Request, kind: type[Fields], *, allow_unknown_fields: bool = False
) -> tuple[Fields, int, dict[str, str]]:
    """As `read_body`, for what the engine will be asked to do.

    Raises `QueueFull`, `RateLimitExceeded` or `EngineUnavailable` before anything is read.
    """
    context = request.app[SHARED]
    admit(request, request.app[MODEL], request.get(TIMER), is_batch=CLIENT in request)
    body, size, headers = await read_body(request, kind, allow_unknown_fields=allow_unknown_fields)
    check_fields(request, body, context.options)
    body.priority = request.get(PRIORITY, body.priority)
    set_deadline(request, request[ARRIVED], body.timeout, context.options)
    return body, size, headers


def decoding_queue(size: int) -> JobQueue | None:
    """Decoding takes a millisecond for 64 KiB. Large bodies are decoded one at a time: together they would hold the interpreter's lock."""
    if size < LONG:
        return None
    return JobQueue.LONG if size < LARGE_BODY else JobQueue.HUGE


async def receive(request: web.Request) -> bytes:
    """The body as it was sent, inflated. Raises aiohttp's 415 for an encoding that is not known, 413 where the body is larger than it may
    be, and 408 where it arrives too slowly.

    The deadline is extended by what arrives, at a minimum rate. A total deadline that suits a large body on a slow link would be just as
    long for a client that sends a byte now and then.
    """
    if (encoding := request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()) not in CONTENT_ENCODINGS:
        known = ", ".join(sorted(CONTENT_ENCODINGS))
        raise web.HTTPUnsupportedMediaType(text=f"a body may be encoded as {known}, got {encoding[:100]!r}")
    received: bytes | None = request.pop(BODY, None)
    if received is not None:
        return received
    await send_continue(request)
    options = request.app[SHARED].options
    body = bytearray()
    try:
        async with asyncio.timeout(options.read_timeout or None) as deadline:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > options.max_body_size:
                    raise web.HTTPRequestEntityTooLarge(max_size=options.max_body_size, actual_size=len(body))
                extend(deadline, len(chunk))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(body)


def extend(deadline: asyncio.Timeout, num_bytes: int) -> None:
    """Gives a client that has sent so many bytes the time for them."""
    if (due := deadline.when()) is not None:
        deadline.reschedule(due + num_bytes / MIN_BYTES_PER_SECOND)


CHUNK = 2**18  # bytes of a file
MAX_PARTS = 16


@asynccontextmanager
async def receiving_form(request: web.Request) -> AsyncIterator[asyncio.Timeout]:
    """The deadline for a form that its client has to send in time. Raises `InvalidRequest` and aiohttp's 408."""
    if request.content_type != "multipart/form-data":
        raise InvalidRequest(f"a file is uploaded as multipart/form-data, not as {request.content_type}")
    await send_continue(request)
    try:
        async with asyncio.timeout(request.app[SHARED].options.read_timeout or None) as deadline:
            try:
                yield deadline
            except InvalidRequest:
                raise
            except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:  # aiohttp's, for a form that is malformed
                raise InvalidRequest(f"the form cannot be read: {error}") from None
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


class Form(ABC):
    """The parts of a form: one file, and fields of up to `max_field` bytes. Those whose names end with `[]` may be there several times."""

    def __init__(self, deadline: asyncio.Timeout, max_field: int = 1024) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self._deadline = deadline
        self._max_field = max_field

    @abstractmethod
    async def begin_file(self, filename: str) -> None: ...

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Raises aiohttp's 413 for a file that becomes too large."""

    async def read(self, parts: MultipartReader) -> None:
        """Raises `InvalidRequest`, what `write` raises, or whatever aiohttp raises for a malformed form."""
        num_parts = 0
        async for part in parts:
            num_parts += 1
            if num_parts > MAX_PARTS or not isinstance(part, BodyPartReader) or not part.name:
                raise InvalidRequest(f"the form may have {MAX_PARTS} fields with names, and no forms inside")
            name = printable(part.name)
            if name in self.fields or (name == "file" and self.filename is not None):
                raise InvalidRequest(f"`{name}` is there twice", name)
            if name == "file":
                self.filename = printable(part.filename or "upload")
                await self.begin_file(self.filename)
                while data := await part.read_chunk(CHUNK):
                    extend(self._deadline, len(data))
                    await self.write(data)
            elif name.endswith("[]"):
                self.lists.setdefault(name, []).append(await self._read_field(part, name))
            else:
                self.fields[name] = await self._read_field(part, name)
        self._deadline.reschedule(None)  # what follows is the server's time
        if self.filename is None:
            raise InvalidRequest("the form has no `file`", "file")

    async def _read_field(self, part: BodyPartReader, name: str) -> str:
        value = b""
        while data := await part.read_chunk(self._max_field):
            value += data
            if len(value) > self._max_field:
                raise InvalidRequest(f"`{name[:100]}` is longer than {self._max_field} bytes", name)
        return value.decode()


def printable(text: str) -> str:
    """A name in a form may be any bytes, which aiohttp gives as lone surrogates."""
    return text.encode(errors="replace").decode()


def is_upload(request: web.Request) -> bool:
    return request.path == FILES_PATH and request.method == hdrs.METH_POST


def body_limit(request: web.Request) -> int:
    """The most bytes that its body may have."""
    options = request.app[SHARED].options
    return options.max_file_size + MULTIPART_OVERHEAD if is_upload(request) else options.max_body_size


def too_large(request: web.Request) -> str:
    """The message for a body beyond its limit."""
    options = request.app[SHARED].options
    if is_upload(request):
        return f"the file is larger than {options.max_file_size} bytes (--max-file-size)"
    return f"the body is larger than {options.max_body_size} bytes (--max-body-size)"


async def send_continue(request: web.Request) -> None:
    """Tells a client that waits for it to send the body. By now its key is known to be right, and the body not to be too large."""
    expected = request.headers.get(hdrs.EXPECT)
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the only expectation that can be met is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun


async def leave_expectation(request: web.Request) -> None:
    """What aiohttp would answer to an `Expect` before any middleware has run: `receive` does, when the body is wanted."""


def ignored_fields_header(names: tuple[str, ...]) -> dict[str, str]:
    """Names come from the client: whatever could break out of a header is percent-encoded."""
    return {IGNORED_HEADER: quote(", ".join(names), safe=" ,.[]")[:MAX_HEADER]} if names else {}


def ignored_tools_header(kinds: Sequence[str]) -> dict[str, str]:
    return {IGNORED_TOOLS_HEADER: header_text(", ".join(dict.fromkeys(kinds)))[:MAX_HEADER]} if kinds else {}


def served_names(request: web.Request) -> list[str]:
    """The models that the request's API key may use, by all of their names."""
    key, names = key_of(request), request.app[SHARED].served_names
    return [name for name in names if key is None or key.allows_model(name)]


def check_model(request: web.Request, name: str | None) -> None:
    """Raises `NoSuchModel` where the request's API key may not use the model, which is the first one by default."""
    key = key_of(request)
    if key is None:
        return
    asked = name or request.app[MODEL].model_names[0]
    if not key.allows_model(asked):
        served = ", ".join(served_names(request)) or "none"
        raise NoSuchModel(f"The model `{asked}` does not exist, or this API key may not use it. It may use: {served}.", "model")


def named_model(context: ModelContext, name: str | None) -> str:
    """As `served_model`, for conversations: OpenAI's API and Anthropic's refuse those without a model. Raises `InvalidRequest`."""
    if not name:
        served = ", ".join(context.model_names)
        raise InvalidRequest(f"Object missing required field `model`. Served here: {served}.", "model")
    return served_model(context, name)


def served_model(context: ModelContext, name: str | None) -> str:
    """The name to answer with. Raises `NoSuchModel` where nothing is served under the one asked for."""
    context.adapter_of(name)
    return name or context.model_names[0]
