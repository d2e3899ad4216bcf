"""/v1/files: uploads that are streamed to disk, and what batches have written."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal

from aiohttp import hdrs, web
from msgspec import Meta, Struct

from penstock.api.answers import json_response
from penstock.api.requests import FILES_PATH, Form, owner_of, read_query, receiving_form
from penstock.api.routes import Route
from penstock.engine.errors import InvalidRequest
from penstock.serving.batches.files import MAX_FILENAME, FileObject, FileStore, Order, Page, Purpose, Upload
from penstock.serving.endpoints.bodies import converted

log = logging.getLogger("penstock.api")

FILES: web.AppKey[FileStore] = web.AppKey("files", FileStore)
BINARY = "application/octet-stream"

Seconds = Annotated[int, Meta(ge=3600, le=30 * 86400)]


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
