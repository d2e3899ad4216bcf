"""GET /openapi.json: the routes as an OpenAPI document, made from their declarations and the types of their bodies. GET /docs shows it."""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_origin

import msgspec
from aiohttp import hdrs, web
from msgspec import NODEFAULT
from msgspec import inspect as types

from penstock.api.middleware import needs_key
from penstock.api.requests import SHARED
from penstock.api.routes import JSON, Route, path_parameters, path_template
from penstock.engine.sampling.params import SamplingParams, parameters_of
from penstock.serving.context import JobQueue
from penstock.serving.options import ServerOptions

Schema = dict[str, Any]

API_VERSION = "1"  # of the API, as in its paths; that of Penstock is at /version, which asks for a key where there is one
DESCRIPTION = (
    "An OpenAI-compatible API for open-weight language models. docs/requests.md says what each field means. "
    "Routes for other kinds of models than the one that is served are left out."
)
SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The API key, as OpenAI's clients send it."},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key", "description": "The API key, as Azure's clients send it."},
}
EVENT_STREAM = "text/event-stream"
THE_SERVER, OTHER_PATHS = "server", "other paths of the same routes"  # tags; the others are the modules that have the handlers
PAGE = Path(__file__).parent / "swagger_ui"
ASSETS = frozenset({"favicon-32x32.png", "start.js", "swagger-ui-bundle.js", "swagger-ui.css"})
MEDIA_TYPES = {".css": "text/css", ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".png": "image/png"}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REF = "#/components/schemas/{name}"


class Document:
    """The document of an application's routes, made once it is first asked for."""

    def __init__(self, routes: Sequence[Route], options: ServerOptions) -> None:
        self._routes, self._options = routes, options

    @cached_property
    def data(self) -> bytes:
        return msgspec.json.encode(document(self._routes, self._options))


DOCUMENT: web.AppKey[Document] = web.AppKey("document", Document)


async def show_document(request: web.Request) -> web.Response:
    """This document."""
    described = request.app[DOCUMENT]
    data = await request.app[SHARED].workers.run(JobQueue.LONG, lambda: described.data)
    return web.Response(body=data, content_type=JSON)


async def show_page(request: web.Request) -> web.StreamResponse:
    """A page that shows this document, and sends requests."""
    return _file("index.html")


async def show_asset(request: web.Request) -> web.StreamResponse:
    """A file of the page."""
    name = request.match_info["file"]
    if name not in ASSETS:
        raise web.HTTPNotFound
    return _file(name)


def _file(name: str) -> web.FileResponse:
    return web.FileResponse(PAGE / name, headers=PAGE_HEADERS | {hdrs.CONTENT_TYPE: MEDIA_TYPES[Path(name).suffix]})


def document(routes: Sequence[Route], options: ServerOptions) -> Schema:
    schemas = Schemas(routes)
    paths: dict[str, Schema] = {}
    for route in routes:
        for path in route.paths:
            operation = schemas.operation(route, path)
            if options.requires_key and not needs_key(path, options):
                operation["security"] = []
            paths.setdefault(path_template(path), {})[route.method.lower()] = operation
    tags = dict.fromkeys([*(tag_of(route, route.path) for route in routes if route.request is not None), THE_SERVER, OTHER_PATHS])
    written: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": API_VERSION, "description": DESCRIPTION},
        "tags": [{"name": tag} for tag in tags],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": SECURITY_SCHEMES},
    }
    if options.requires_key:
        written["security"] = [{name: []} for name in SECURITY_SCHEMES]
    return written


class Schemas:
    """The types of all routes as JSON Schemas. `components` has those of the structs by their names."""

    def __init__(self, routes: Sequence[Route]) -> None:
        requests = [route.request for route in routes if route.request is not None]
        answers = [kind for route in routes for kind in (route.response, route.events, *route.errors) if kind is not None]
        structs = {struct.cls: struct for struct in structs_in(map(types.type_info, (*requests, *answers)))}
        kinds = [*requests, *answers, *structs]
        written, components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self.components: dict[str, Schema] = dict(components)
        self._by_kind: dict[Any, Schema] = dict(zip(kinds, written, strict=True))
        self._describe_fields(requests)
        self._require_what_is_always_there(answers)

    def operation(self, route: Route, path: str) -> Schema:
        text = inspect.getdoc(route.handler) or ""
        operation: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path_template(path)}").strip("_"),
            "summary": text.partition("\n")[0],
            "description": text,
            "tags": [tag_of(route, path)],
            "parameters": [*_path_parameters(path), *_query_parameters(route)],
            "responses": self._responses(route),
        }
        if route.request is not None:
            content = {route.request_media_type: {"schema": self._by_kind[route.request]}}
            operation["requestBody"] = {"required": True, "content": content}
        return operation

    def _responses(self, route: Route) -> Schema:
        body = {"type": "string"} if route.response is None else self._by_kind[route.response]
        content: Schema = {route.media_type.partition(";")[0]: {"schema": body}}
        if route.events is not None:
            content[EVENT_STREAM] = {"schema": self._event_schema(route.events)}
        errors = [self._by_kind[kind] for kind in route.errors]
        error = {"content": {JSON: {"schema": errors[0] if len(errors) == 1 else {"anyOf": errors}}}}
        return {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "The request is refused."} | error,
            "5XX": {"description": "The request failed, or cannot be served now."} | error,
        }

    def _event_schema(self, kind: Any) -> Schema:
        # OpenAPI 3.1 cannot describe a stream: this is a text whose `data` lines have the type.
        text = "Server-sent events. The data of each has this type."
        return {"type": "string", "description": text, "contentMediaType": JSON, "contentSchema": self._by_kind[kind]}

    def _component(self, struct: types.StructType) -> Schema:
        return self.components[self._by_kind[struct.cls]["$ref"].rpartition("/")[2]]

    def _describe_fields(self, requests: Iterable[Any]) -> None:
        # The parameters of sampling are described where they are declared.
        for struct in structs_in(map(types.type_info, requests)):
            properties = self._component(struct)["properties"]
            for name, parameter in parameters_of(SamplingParams).items():
                if name in properties:
                    properties[name]["description"] = parameter.meaning

    def _require_what_is_always_there(self, answers: Iterable[Any]) -> None:
        # A field with a default may be missing in a request; a response always has it, unless it is unset.
        for struct in structs_in(map(types.type_info, answers)):
            if not (get_origin(struct.cls) or struct.cls).__struct_config__.omit_defaults:
                always = [field.encode_name for field in struct.fields if not _may_be_unset(field)]
                self._component(struct)["required"] = always


def structs_in(kinds: Iterable[types.Type]) -> Iterator[types.StructType]:
    """All structs that the types are made of, each once."""
    waiting, seen = list(kinds), set[Any]()
    while waiting:
        match waiting.pop():
            case types.StructType() as struct if struct.cls not in seen:
                seen.add(struct.cls)
                yield struct
                waiting += [field.type for field in struct.fields]
            case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
                waiting.append(item)
            case types.TupleType(item_types=items) | types.UnionType(types=items):
                waiting += items
            case types.DictType(value_type=value):
                waiting.append(value)
            case types.Metadata(type=inner):
                waiting.append(inner)


def _may_be_unset(field: types.Field) -> bool:
    return not field.required and field.default is NODEFAULT and field.default_factory is NODEFAULT


def tag_of(route: Route, path: str) -> str:
    """The group in which a page shows the route."""
    if path != route.path:
        return OTHER_PATHS
    module = route.handler.__module__.rpartition(".")[2]
    return THE_SERVER if module in ("app", "openapi") else module


def _path_parameters(path: str) -> list[Schema]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_parameters(path)]


def _query_parameters(route: Route) -> list[Schema]:
    if route.query is None:
        return []
    info = types.type_info(route.query)
    assert isinstance(info, types.StructType)
    [schema] = msgspec.json.schema_components([route.query])[1].values()
    return [
        {"name": field.encode_name, "in": "query", "required": field.required, "schema": schema["properties"][field.encode_name]}
        for field in info.fields
    ]
