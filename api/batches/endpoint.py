"""/v1/batches, and how the requests of a batch are answered: by the handlers of their endpoint, without a connection."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage, StreamWriter
from msgspec import Meta, Struct
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client.core import Metric
from yarl import URL

from penstock.api.answers import json_response
from penstock.api.batches.files import FILES, ExpiresAfter, disk_errors
from penstock.api.middleware import identify_and_log, translate_errors
from penstock.api.requests import (
    BATCH_TIMERS,
    CLIENT,
    KEY,
    KEYS,
    PRIORITY,
    SERVER_METRICS,
    SHARED,
    key_name,
    owner_of,
    read_body,
    read_query,
)
from penstock.api.routes import ROUTES, Route
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import BACKGROUND
from penstock.serving.batches.files import Disk, FileLimits, FileStore, Page
from penstock.serving.batches.runner import Batch, BatchLimits, BatchStore, LineAnswer
from penstock.serving.endpoints.errors import error_body
from penstock.serving.metrics import Metrics, StatsCollector

BATCHES: web.AppKey[BatchStore] = web.AppKey("batches", BatchStore)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
TRY_AGAIN = (429, 503)

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


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
