"""/v1/files and /v1/batches: uploads that are streamed to disk, and what batches have written.

The requests of a batch are answered by the handlers of their endpoint, without a connection.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.http import RawRequestMessage, StreamWriter
from msgspec import Meta, Struct
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client.core import Metric
from yarl import URL

from penstock.api.answers import json_response
from penstock.api.middleware import identify_and_log, translate_errors
from penstock.api.requests import (
    BATCH_TIMERS,
    CLIENT,
    FILES_PATH,
    KEY,
    KEYS,
    PRIORITY,
    SERVER_METRICS,
    SHARED,
    Form,
    key_name,
    owner_of,
    read_body,
    read_query,
    receiving_form,
)
from penstock.api.routes import ROUTES, Route
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import BACKGROUND
from penstock.serving.batches.files import MAX_FILENAME, Disk, FileLimits, FileObject, FileStore, Order, Page, Purpose, Upload
from penstock.serving.batches.runner import Batch, BatchLimits, BatchStore, LineAnswer
from penstock.serving.endpoints.bodies import converted
from penstock.serving.endpoints.errors import error_body
from penstock.serving.observability.metrics import Metrics, StatsCollector

log = logging.getLogger("penstock.api")

FILES: web.AppKey[FileStore] = web.AppKey("files", FileStore)
BINARY = "application/octet-stream"

Seconds = Annotated[int, Meta(ge=3600, le=30 * 86400)]
BATCHES: web.AppKey[BatchStore] = web.AppKey("batches", BatchStore)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
TRY_AGAIN = (429, 503)

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """OpenAI's expiration policy: `seconds` after the file's creation, from an hour to 30 days."""

    anchor: Literal["created_at"]
    seconds: Seconds


class UploadFields(Struct, kw_only=True):
    """The fields of an upload's form but for its file."""

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileUpload(UploadFields, kw_only=True):
    """An upload's form, in which `expires_after` is written as `expires_after[anchor]` and `expires_after[seconds]`."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class FileList(Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileListQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Order = "desc"
    after: str | None = None
    purpose: str | None = None


async def create_file(request: web.Request) -> web.Response:
    """Keeps a file, which is a part of a form. It is streamed to disk."""
    files = request.app[FILES]
    files.check_room()
    async with receiving_form(request) as deadline, kept(UploadForm(files, deadline)) as form:
        await form.read(await request.multipart())
        given = read_fields({**form.fields, **dict.fromkeys(form.lists, "")})
        seconds = None if given.expires_after is None else given.expires_after.seconds
        assert form.upload is not None
        assert form.filename is not None
        with disk_errors():
            return json_response(await form.upload.commit(owner_of(request), form.filename, given.purpose, seconds))


@asynccontextmanager
async def kept(form: "UploadForm") -> AsyncIterator["UploadForm"]:
    """Nothing is left of the form unless its upload was committed."""
    try:
        yield form
    finally:
        if form.upload is not None:
            with disk_errors():
                await form.upload.close()


class UploadForm(Form):
    """A form whose file goes to disk."""

    def __init__(self, files: FileStore, deadline: asyncio.Timeout) -> None:
        super().__init__(deadline)
        self.upload: Upload | None = None
        self._files = files

    async def begin_file(self, filename: str) -> None:
        if len(filename) > MAX_FILENAME:
            raise InvalidRequest(f"a file's name may have {MAX_FILENAME} characters", "file")
        with disk_errors():
            self.upload = await self._files.begin_upload()

    async def write(self, data: bytes) -> None:
        assert self.upload is not None
        limit, size = self._files.limits.max_file, self.upload.size + len(data)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size)
        with disk_errors():
            await self.upload.write(data)


@contextmanager
def disk_errors() -> Iterator[None]:
    """A disk that is full, or fails, becomes a 507."""
    try:
        yield
    except OSError as error:
        log.error("a file cannot be written: %s", error)
        raise web.HTTPInsufficientStorage(text="the server cannot write to its disk") from error


def read_fields(fields: dict[str, str]) -> UploadFields:
    """`expires_after[seconds]` is how a form says what is in an object. Raises `InvalidRequest`."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        holder, _, member = name.removesuffix("]").partition("[")
        if holder == "expires_after" and member:
            given.setdefault("expires_after", {})[member] = value
        elif name == "purpose":
            given["purpose"] = value
        else:
            raise InvalidRequest(f"unknown field `{name[:100]}`", name)
    return converted(given, UploadFields)


async def list_files(request: web.Request) -> web.Response:
    """The client's files, the newest first unless `order` is `asc`."""
    files, query = request.app[FILES], read_query(request, FileListQuery)
    data, has_more = files.page_of(owner_of(request), Page(query.limit, query.after, query.order), query.purpose)
    ids = [file.id for file in data]
    return json_response(FileList(data, has_more, ids[0] if ids else None, ids[-1] if ids else None))


async def show_file(request: web.Request) -> web.Response:
    """One file's metadata."""
    return json_response(request.app[FILES].get(owner_of(request), request.match_info["file_id"]))


async def delete_file(request: web.Request) -> web.Response:
    """Removes a file, unless a batch still reads it."""
    file_id = request.match_info["file_id"]
    with disk_errors():
        await request.app[FILES].delete(owner_of(request), file_id)
    return json_response(DeletedFile(file_id))


async def send_file(request: web.Request) -> web.StreamResponse:
    """A file's content, or the range of it that is asked for."""
    files, file_id = request.app[FILES], request.match_info["file_id"]
    file = files.get(owner_of(request), file_id)
    # Whatever a client has uploaded, a browser is not to run it as a page of this server.
    headers = {
        hdrs.CONTENT_TYPE: BINARY,
        hdrs.CONTENT_DISPOSITION: f'attachment; filename="{file.id}"',
        "X-Content-Type-Options": "nosniff",
    }
    return web.FileResponse(files.path(file.id), headers=headers)


ONE_FILE = "/v1/files/{file_id}"
FILE_ROUTES = (
    Route("POST", FILES_PATH, create_file, request=FileUpload, response=FileObject, request_media_type="multipart/form-data"),
    Route("GET", FILES_PATH, list_files, query=FileListQuery, response=FileList),
    Route("GET", ONE_FILE, show_file, response=FileObject),
    Route("DELETE", ONE_FILE, delete_file, response=DeletedFile),
    Route("GET", f"{ONE_FILE}/content", send_file, media_type=BINARY),
)


class BatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Struct):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchListQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


async def create_batch(request: web.Request) -> web.Response:
    """Takes a file of requests, which are answered when the server has nothing else to do."""
    batches = request.app[BATCHES]
    body, _, headers = await read_body(request, BatchRequest)
    if body.endpoint not in batches.endpoints:
        raise InvalidRequest(f"a batch on this server asks {', '.join(batches.endpoints) or 'nothing'}, not {body.endpoint!r}", "endpoint")
    seconds = None if body.output_expires_after is None else body.output_expires_after.seconds
    with disk_errors():
        batch = await batches.create(
            owner_of(request),
            body.endpoint,
            body.input_file_id,
            key_name=key_name(request),
            metadata=body.metadata,
            output_seconds=seconds,
        )
    return json_response(batch, headers=headers)


async def list_batches(request: web.Request) -> web.Response:
    """The client's batches, the newest first."""
    batches, query = request.app[BATCHES], read_query(request, BatchListQuery)
    data, has_more = batches.page_of(owner_of(request), Page(query.limit, query.after))
    ids = [batch.id for batch in data]
    return json_response(BatchList(data, has_more, ids[0] if ids else None, ids[-1] if ids else None))


async def show_batch(request: web.Request) -> web.Response:
    """One batch, and how far it is."""
    return json_response(request.app[BATCHES].get(owner_of(request), request.match_info["batch_id"]))


async def cancel_batch(request: web.Request) -> web.Response:
    """Ends a batch. What has been answered by then is in its output file."""
    with disk_errors():
        return json_response(await request.app[BATCHES].cancel(owner_of(request), request.match_info["batch_id"]))


def serve_batches(app: web.Application) -> None:
    """Opens the files and the batches when the server starts, and closes them when it ends."""

    async def run(app: web.Application) -> AsyncIterator[None]:
        context, options = app[SHARED], app[SHARED].options
        assert options.files_dir is not None
        disk = Disk(Path(options.files_dir))
        files = app[FILES] = FileStore(disk, FileLimits(options.max_file_size, options.files_quota))
        batches = app[BATCHES] = BatchStore(
            disk,
            files,
            partial(answer_line, app),
            endpoints=endpoints_of(app),
            model_names=lambda: context.served_names,
            several=not context.metrics_label,
            limits=BatchLimits(options.max_batch_requests, options.max_body_size),
        )
        app[BATCH_TIMERS] = Metrics(None, context.metrics_label)
        app[SERVER_METRICS].registry.register(BatchCollector(lambda: batches, context.metrics_label))
        batches.start()
        yield
        await batches.stop()
        disk.close()

    app.cleanup_ctx.append(run)


async def stop_batches(app: web.Application) -> None:
    """Ends the work on batches at once, where there are any. They go on after the next start."""
    if BATCHES in app:
        await app[BATCHES].stop()


def endpoints_of(app: web.Application) -> tuple[str, ...]:
    """Those that the model is served by, and that a batch may ask."""
    served = {route.path for route in app[ROUTES] if route.method == "POST"}
    return tuple(path for path in ENDPOINTS if path in served)


async def answer_line(app: web.Application, endpoint: str, body: bytes, *, request_id: str, owner: str, key_name: str | None) -> LineAnswer:
    """What the endpoint's handler answers, whatever middleware there is but for the access log and errors."""
    if (name := unbatched_field(body)) is not None:
        refusal = error_body(400, f"a request of a batch is answered as a whole: leave `{name}` out", param=name)
        return LineAnswer(400, msgspec.json.encode(refusal))
    key = app[KEYS].of_owner(owner, key_name)
    if key is None and app[KEYS].is_required:
        return LineAnswer(401, msgspec.json.encode(error_body(401, "the API key of this batch is not accepted any more")))
    request = line_request(endpoint, body, request_id)
    request[CLIENT], request[PRIORITY] = owner, BACKGROUND
    if key is not None:
        request[KEY] = key
    match = await app.router.resolve(request)
    match.add_app(app)
    request._match_info = match  # what the application sets for a request from a connection
    response = await identify_and_log(request, partial(translate_errors, handler=match.handler))
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    retry_after = float(response.headers.get("Retry-After", "1")) if response.status in TRY_AGAIN else None
    return LineAnswer(response.status, response.body, retry_after)


class _Unbatched(Struct):
    stream: Any = None
    background: Any = None


def unbatched_field(body: bytes) -> str | None:
    """The field by which a body asks for an answer in pieces, or later; None where it does not."""
    given = msgspec.json.decode(body, type=_Unbatched)
    return "stream" if given.stream else "background" if given.background else None


def line_request(path: str, body: bytes, request_id: str) -> web.Request:
    """A request as aiohttp would have read it from a connection. The access log has `batch` for an address."""
    loop = asyncio.get_running_loop()
    headers = CIMultiDictProxy(
        CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body)), "x-request-id": request_id})
    )
    message = RawRequestMessage("POST", path, HttpVersion11, headers, (), False, None, False, False, URL(path))
    protocol = web.Server(_no_handler)()  # without a transport
    payload = StreamReader(protocol, 2**16, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    task = asyncio.current_task()
    assert task is not None
    return web.Request(message, payload, protocol, StreamWriter(protocol, loop), task, loop, client_max_size=len(body), remote="batch")


async def _no_handler(request: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError("no connection is made")


class BatchCollector(StatsCollector[BatchStore]):
    def collect(self) -> Iterator[Metric]:
        batches = self._read()
        yield self.gauge("batches_unfinished", "Batches that are not finished.", batches.num_unfinished)
        yield self.counters(
            "batch_requests",
            "Requests of batches that are done.",
            ["outcome"],
            (((key,), value) for key, value in batches.num_answered.items()),
        )
        yield self.gauge("files", "Files that are kept.", batches.files.num_files)
        yield self.gauge("files_bytes", "Their size, that of uploads under way included.", batches.files.num_bytes)


BATCH_ROUTES = (
    Route("POST", "/v1/batches", create_batch, request=BatchRequest, response=Batch),
    Route("GET", "/v1/batches", list_batches, query=BatchListQuery, response=BatchList),
    Route("GET", "/v1/batches/{batch_id}", show_batch, response=Batch),
    Route("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, response=Batch),
)
