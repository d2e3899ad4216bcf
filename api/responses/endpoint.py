"""The Responses API: POST /v1/responses, also in the background, and what is asked later of a response that was stored."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from penstock.api.answers import EventStream, json_response, send
from penstock.api.middleware import GATE
from penstock.api.requests import (
    CONTEXT,
    KEEP,
    SHARED,
    begin_timer,
    caller_of,
    open_to_the_end,
    owner_of,
    read_admitted_body,
    read_body,
    read_query,
)
from penstock.api.responses.events import Response, StreamedEvent, response_of
from penstock.api.responses.fold import ResponseFold
from penstock.api.routes import Route
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ContextLengthExceeded, InvalidRequest, NoSuchObject
from penstock.serving.context import queue_for
from penstock.serving.endpoints.answers import Answer
from penstock.serving.endpoints.bodies import TRUNCATED_HEADER, ignored_tools_header, named_model, served_model
from penstock.serving.messages import AnswerCheck, check_delta, warning_header
from penstock.serving.preparing import (
    PreparedChat,
    check_logprobs,
    generate_chat,
    planned_chat,
    prepare_chat,
)
from penstock.serving.responses.items import REFERENCE, ItemReference, Located, converted, located, new_id, stored_item, turns_to_drop
from penstock.serving.responses.requests import Asked, ResponsesRequest, ask, check_request
from penstock.serving.responses.store import ResponseStore, StoredResponse
from penstock.serving.structured_outputs import make_answer_check

END = b"\n\n"  # of each event
MAX_PAGE = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """What is stored of a response beside itself."""

    owner: str
    previous: str | None
    input: bytes

    def of(self, response: Response, events: bytes = b"") -> StoredResponse:
        return StoredResponse(response.id, self.owner, response.status, self.previous, msgspec.json.encode(response), self.input, events)


class BackgroundResponse:
    """A response that is being generated, with all events of its stream so far, whose places are their numbers."""

    def __init__(self, record: Record, fold: ResponseFold) -> None:
        self.fold = fold
        self._record = record
        self._events: list[bytes] = []
        self._has_news = asyncio.Event()
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.fold.response.id

    @property
    def owner(self) -> str:
        return self._record.owner

    @property
    def stored(self) -> StoredResponse:
        return self._record.of(self.fold.response, b"".join(self._events) if self._has_ended else b"")

    def start(self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]) -> None:
        """Goes on with what `deltas` has been asked for, its `first` one."""
        self._publish(self.fold.queued())
        self._task = asyncio.create_task(self._run(app, first, deltas))

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come."""
        while True:
            news = self._has_news
            if start < len(self._events):
                yield b"".join(self._events[start:])
                start = len(self._events)
            elif self._has_ended:
                return
            else:
                await news.wait()

    async def cancel(self) -> None:
        """Returns when it has ended, and is stored."""
        assert self._task is not None
        await asyncio.sleep(0)  # a task that is cancelled before it begins would never store anything
        if not self._has_ended:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]) -> None:
        with app[GATE].enter(), app[KEEP]():  # a server that is stopping waits for it, and its model is kept
            try:
                await self._generate(app, first, deltas)
            except asyncio.CancelledError:
                self._publish(self.fold.cancel())
            except Exception as error:
                self._publish(self.fold.failure(error))
            self._has_ended = True
            await app[RESPONSES].put(self.stored)
            self._publish(b"")
            del app[BACKGROUND][self.id]

    async def _generate(
        self, app: web.Application, first: "asyncio.Future[SequenceDelta]", deltas: AsyncGenerator[SequenceDelta, None]
    ) -> None:
        workers, fold = app[SHARED].workers, self.fold

        async def publish(delta: SequenceDelta) -> None:
            self._publish(await workers.run(queue_for(fold.num_logprobs(delta)), partial(fold.events, delta)))

        async with aclosing(deltas):
            delta = await first
            self._publish(fold.begin())
            await publish(delta)
            async for delta in deltas:
                await publish(delta)
        self._publish(fold.closing())

    def _publish(self, data: bytes) -> None:
        self._events += split_events(data)
        news, self._has_news = self._has_news, asyncio.Event()
        news.set()


BACKGROUND: web.AppKey[dict[str, BackgroundResponse]] = web.AppKey("background", dict)
RESPONSES: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)


async def run_in_background(app: web.Application, response: BackgroundResponse, deltas: AsyncGenerator[SequenceDelta, None]) -> None:
    """Returns once it can be asked for. Raises what the engine refuses the request with."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.sleep(0)  # the engine has the request in its queue then, or has refused it
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    response.start(app, first, deltas)
    app[BACKGROUND][response.id] = response
    await app[RESPONSES].put(response.stored)


async def cancel_all(app: web.Application) -> None:
    """At shutdown, of what has not ended in time."""
    for response in list(app[BACKGROUND].values()):
        await response.cancel()


def split_events(data: bytes) -> list[bytes]:
    return [event + END for event in data.split(END) if event]


async def send_events(http: web.Request, events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> web.StreamResponse:
    """A stream of events that are made elsewhere."""
    options = http.app[SHARED].options
    stream = EventStream(
        http, keep_alive_seconds=options.keep_alive_interval, headers=headers or {}, write_timeout_seconds=options.write_timeout
    )
    async with stream:
        async for data in events:
            await stream.send(data)
    return stream.response


@dataclass(frozen=True, slots=True)
class Turn:
    """A request with what came before it. `items` are all of these, `input` its own ones as they are stored, `size` is that of all."""

    asked: Asked
    items: list[Located]
    input: bytes
    size: int


async def read_turn(http: web.Request, body: ResponsesRequest, size: int) -> Turn:
    """Raises `InvalidRequest` for whatever is wrong with the request's own fields, and `NoSuchObject` for unknown ids."""
    check_request(body)
    context, owner = http.app[CONTEXT], owner_of(http)
    earlier: list[StoredResponse] = []
    if body.previous_response_id is not None:
        earlier = await http.app[RESPONSES].chain(owner, body.previous_response_id, "previous_response_id")
    items = located(body.input or [])
    size += await resolve_references(http, items, context.options.max_body_size - size)
    size += sum(stored.size for stored in earlier)

    def read() -> Turn:
        history = [Located(item, "previous_response_id") for each in earlier for item in (*each.input_items(), *each.output_items())]
        asked = ask(body, [*history, *items], owner)
        stored = [stored_item(each) for each in items] if body.is_stored else []
        return Turn(asked, [*history, *items], msgspec.json.encode(stored), size)

    return await context.workers.run(queue_for(size), read)


async def resolve_references(http: web.Request, items: list[Located], limit: int) -> int:
    """Puts stored items in the place of references to them, and returns their size in bytes. Raises `InvalidRequest` beyond `limit`.

    One item may be referred to thousands of times.
    """
    references: dict[int, ItemReference] = {
        index: converted(ItemReference, source) for index, source in enumerate(items) if source.type == REFERENCE
    }
    if not references:
        return 0
    wanted: dict[str, str] = {}
    for index, reference in references.items():
        wanted.setdefault(reference.id, f"{items[index].path}.id")
    found = await http.app[RESPONSES].items(owner_of(http), wanted, limit)
    size = 0
    for index, reference in references.items():
        source = items[index]
        item, item_size = found.get(reference.id, ({}, limit))  # what is not there is beyond the limit
        size += item_size
        if size > limit or not item:
            raise InvalidRequest("the items that `input` refers to make it larger than a body may be (--max-body-size)", source.path)
        items[index] = Located(item, source.path)
    return size


@dataclass(frozen=True, slots=True)
class Fitted(Generic[T]):
    """What was prepared of a turn, and the number of items that were dropped for it."""

    asked: Asked
    prepared: T
    num_dropped: int = 0

    @property
    def header(self) -> dict[str, str]:
        return {TRUNCATED_HEADER: str(self.num_dropped)} if self.num_dropped else {}


async def fit(http: web.Request, body: ResponsesRequest, turn: Turn, prepare: Callable[[Asked], Awaitable[T]]) -> Fitted[T]:
    """What `prepare` makes of a turn or, with `truncation` `auto`, of as much of it as the context holds. Raises `InvalidRequest`."""
    try:
        return Fitted(turn.asked, await prepare(turn.asked))
    except ContextLengthExceeded as error:
        turns = turns_to_drop(turn.items) if body.truncation == "auto" else []
        if not turns:
            raise turn.asked.renamed(error) from None
    except InvalidRequest as error:
        raise turn.asked.renamed(error) from None
    workers, owner, fitted = http.app[SHARED].workers, owner_of(http), None
    fewest, most = 1, len(turns)
    while fewest <= most:
        number = most if fitted is None else (fewest + most) // 2
        dropped = {index for each in turns[:number] for index in each}
        rest = [source for index, source in enumerate(turn.items) if index not in dropped]
        asked = await workers.run(queue_for(turn.size), partial(ask, body, rest, owner))
        try:
            fitted = Fitted(asked, await prepare(asked), len(dropped))
            most = number - 1
        except ContextLengthExceeded as error:
            if fitted is None:
                raise asked.renamed(error) from None
            fewest = number + 1
        except InvalidRequest as error:
            raise asked.renamed(error) from None
    assert fitted is not None
    return fitted


async def create_response(http: web.Request) -> web.StreamResponse:
    """Answers one turn of a conversation: a whole response, a stream of the events that it is the fold of, or in the background."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, size, headers = await read_admitted_body(http, ResponsesRequest)
    model = timer.model = named_model(context, body.model)
    adapter = context.adapter_of(body.model)
    if body.background and http.app[RESPONSES].is_shared:
        raise InvalidRequest("`background` takes a server of one process: this one runs with --api-servers", "background")
    turn = await read_turn(http, body, size)
    options = caller_of(http).chat_options(adapter=adapter, fetched={})

    async def prepare(asked: Asked) -> tuple[PreparedChat, AnswerCheck]:
        prepared = await prepare_chat(context, asked.chat, turn.size, options)
        check_logprobs(asked.chat, [prepared.request])
        return prepared, await make_answer_check(context, asked.chat, turn.size, prepared.request, prepared.tools)

    fitted = await fit(http, body, turn, prepare)
    prepared, check = fitted.prepared
    is_streamed = bool(body.stream)
    response = response_of(body, prepared.request.params, model, new_id("resp"), int(time.time()))
    fold = ResponseFold(
        context, body, prepared, response, secret=owner_of(http), found=check.found, is_streamed=is_streamed or bool(body.background)
    )
    deltas = check.watch(timer.watch(generate_chat(context, prepared), prepared.request.params))
    headers |= warning_header(prepared.request.grammar_warnings) | ignored_tools_header(turn.asked.tools.skipped) | fitted.header
    record = Record(owner_of(http), body.previous_response_id, turn.input)
    if body.background:
        running = BackgroundResponse(record, fold)
        await run_in_background(http.app, running, open_to_the_end(http, deltas))
        return await send_events(http, running.follow(0), headers) if is_streamed else json_response(response, headers=headers)
    if body.is_stored:
        deltas = stored_at_end(http, deltas, fold, record, is_streamed=is_streamed)
    answer = Answer(deltas=deltas, fold=fold, is_streamed=is_streamed, interval=body.stream_interval, headers=headers)
    return await send(http, answer, {})


async def stored_at_end(
    http: web.Request, deltas: AsyncGenerator[SequenceDelta, None], fold: ResponseFold, record: Record, *, is_streamed: bool
) -> AsyncGenerator[SequenceDelta, None]:
    """The same deltas. The response is stored once the last of them has been read, before the client hears that it is complete.

    One that fails in mid-stream is stored as such: its client knows its id.
    """
    store, has_begun = http.app[RESPONSES], False
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                check_delta(delta)
                yield delta
                has_begun = True
    except Exception as error:
        if has_begun and is_streamed:
            fold.fail(error)
            await store.put(record.of(fold.response))
        raise
    await store.put(record.of(fold.response))


class InputTokens(Struct):
    input_tokens: int
    object: str = "response.input_tokens"


async def count_input_tokens(http: web.Request) -> web.Response:
    """How many tokens the prompt of a request has."""
    context = http.app[CONTEXT]
    body, size, headers = await read_body(http, ResponsesRequest)
    served_model(context, body.model)
    turn = await read_turn(http, body, size)
    options = caller_of(http).chat_options(fetched={})

    async def plan(asked: Asked) -> PreparedChat:
        return await planned_chat(context, asked.chat, turn.size, options)

    fitted = await fit(http, body, turn, plan)
    headers |= ignored_tools_header(turn.asked.tools.skipped) | fitted.header
    return json_response(InputTokens(len(fitted.prepared.request.prompt_token_ids)), headers=headers)


class ResponseQuery(Struct):
    stream: bool = False
    starting_after: Annotated[int, Meta(ge=-1, le=2**63 - 2)] | None = None


class ItemQuery(Struct):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "desc"


def running_response(http: web.Request) -> BackgroundResponse | None:
    """The response that the path names, if it runs in the background and is the client's own."""
    running = http.app[BACKGROUND].get(http.match_info["response_id"])
    return running if running is not None and running.owner == owner_of(http) else None


async def stored_response(http: web.Request) -> StoredResponse:
    return await http.app[RESPONSES].get(owner_of(http), http.match_info["response_id"])


def raw_json(text: bytes) -> web.Response:
    return web.Response(body=text, content_type="application/json")


async def show_response(http: web.Request) -> web.StreamResponse:
    """A stored response; with `stream=true`, the events of one in the background, after number `starting_after`."""
    running = running_response(http)
    query = read_query(http, ResponseQuery)
    if not query.stream:
        return raw_json((await stored_response(http)).response) if running is None else json_response(running.fold.response)
    start = 0 if query.starting_after is None else 1 + query.starting_after
    if running is not None:
        return await send_events(http, running.follow(start))
    stored = await stored_response(http)
    if not stored.events:
        raise InvalidRequest("only the stream of a response with `background` can be read again", "stream")

    async def replay() -> AsyncGenerator[bytes, None]:
        yield b"".join(split_events(stored.events)[start:])

    return await send_events(http, replay())


async def cancel_response(http: web.Request) -> web.Response:
    """Ends a response in the background. One that has ended stays as it is."""
    running = running_response(http)
    if running is not None:
        await running.cancel()
        return json_response(running.fold.response)
    stored = await stored_response(http)
    if not msgspec.json.decode(stored.response)["background"]:
        raise InvalidRequest("only a response with `background` can be cancelled: end the connection of any other")
    return raw_json(stored.response)


class Deleted(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


async def delete_response(http: web.Request) -> web.Response:
    """Forgets a stored response. One that is running is cancelled."""
    if (running := running_response(http)) is not None:
        await running.cancel()
    response_id = http.match_info["response_id"]
    await http.app[RESPONSES].delete(owner_of(http), response_id)
    return json_response(Deleted(response_id))


class ItemPage(Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


async def list_input_items(http: web.Request) -> web.Response:
    """The items of the request's own input, the last one first unless `order` is `asc`."""
    stored = await stored_response(http)
    items = await http.app[SHARED].workers.run(queue_for(len(stored.input)), stored.input_items)
    query = read_query(http, ItemQuery)
    limit, after = query.limit, query.after
    if query.order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise NoSuchObject(f"Item with id '{after[:100]}' not found.", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return json_response(ItemPage(page, page[0]["id"] if page else None, page[-1]["id"] if page else None, len(items) > limit))


async def refuse_compaction(http: web.Request) -> web.Response:
    """Conversations are not compacted here."""
    raise NoSuchObject("conversations are not compacted here: send what is to be kept, or raise --max-model-len")


RESPONSE_ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        request=ResponsesRequest,
        response=Response,
        events=StreamedEvent,
        is_admitted=True,
    ),
    Route("POST", "/v1/responses/input_tokens", count_input_tokens, request=ResponsesRequest, response=InputTokens),
    Route("POST", "/v1/responses/compact", refuse_compaction),
    Route("GET", "/v1/responses/{response_id:resp_[^/]+}", show_response, response=Response, events=StreamedEvent, query=ResponseQuery),
    Route("DELETE", "/v1/responses/{response_id:resp_[^/]+}", delete_response, response=Deleted),
    Route("POST", "/v1/responses/{response_id:resp_[^/]+}/cancel", cancel_response, response=Response),
    Route("GET", "/v1/responses/{response_id:resp_[^/]+}/input_items", list_input_items, response=ItemPage, query=ItemQuery),
)
