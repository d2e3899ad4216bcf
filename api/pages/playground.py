"""GET /: a page to try the model in a browser. Its files are static, and whatever it does goes through the API."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiohttp import ETag, hdrs, web
from aiohttp.typedefs import Handler

from penstock.api.routes import Route

FOLDER = Path(__file__).parent / "page"
START = "index.html"
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# What a model writes is data to the page. Should it ever be taken for markup, it can still load, run and send nothing.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    hdrs.CACHE_CONTROL: "no-cache",  # asks again each time, which the ETag makes cheap: all files are of one version
}


class PageFile(NamedTuple):
    body: bytes
    content_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """The files by their paths on the server."""
    files = {}
    for file in sorted(FOLDER.iterdir()):
        body = file.read_bytes()
        path = "/" if file.name == START else f"/playground/{file.name}"
        files[path] = PageFile(body, CONTENT_TYPES[file.suffix], hashlib.sha256(body).hexdigest()[:32])
    return files


def playground_routes() -> list[Route]:
    return [Route("GET", path, send(file), media_type=file.content_type) for path, file in page_files().items()]


def send(file: PageFile) -> Handler:
    """A handler that answers with the file, or with 304 where the browser has it."""

    async def send_file(request: web.Request) -> web.Response:
        """A file of the page to try the model in a browser."""
        if any(known.value in ("*", file.etag) for known in request.if_none_match or ()):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=HEADERS)
        response.etag = ETag(file.etag)
        return response

    return send_file
