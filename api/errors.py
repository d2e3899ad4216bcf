"""The one place where exceptions become HTTP: a status, and OpenAI's error body or, on the routes of its API, Anthropic's."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from penstock.api.bodies import REQUEST_ID
from penstock.engine.errors import (
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotLoaded,
    NoSuchModel,
    NoSuchObject,
    NoSuchPreviousResponse,
    PenstockError,
    QueueFull,
    RateLimitExceeded,
    StorageFull,
)

log = logging.getLogger(__name__)

MAX_MESSAGE = 2000  # characters of an error's message or field: errors quote what was sent, which may be megabytes
ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.UNPROCESSABLE_ENTITY: "UnprocessableEntityError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """OpenAI's error body; its `type` follows from the status."""
    kind = ERROR_TYPES.get(HTTPStatus(status), "BadRequestError" if status < 500 else "InternalServerError")
    return ErrorBody(ErrorInfo(shortened(message), kind, None if param is None else shortened(param), code))


def shortened(text: str) -> str:
    """The beginning and the end of a long text. Our own words are around what they quote."""
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE * 3 // 4]} ... {text[-MAX_MESSAGE // 4 :]}"


def status_of(error: BaseException) -> int:
    match error:
        case NoSuchModel() | NoSuchObject():
            return HTTPStatus.NOT_FOUND
        case StorageFull():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case Conflict():
            return HTTPStatus.CONFLICT
        case InvalidRequest():
            return HTTPStatus.BAD_REQUEST
        case QueueFull() | RateLimitExceeded():
            return HTTPStatus.TOO_MANY_REQUESTS
        case DeadlineExceeded():
            return HTTPStatus.GATEWAY_TIMEOUT
        case EngineUnavailable():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case web.HTTPException():
            return error.status
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def code_of(error: BaseException) -> str | None:
    match error:
        case NoSuchModel():
            return "model_not_found"
        case NoSuchPreviousResponse():
            return "previous_response_not_found"
        case ContextLengthExceeded():
            return "context_length_exceeded"
        case QueueFull():
            return "queue_full"
        case ModelNotLoaded():
            return "model_not_loaded"
        case RateLimitExceeded():
            return "rate_limit_exceeded"
        case DeadlineExceeded():
            return "timeout"
        case _:
            return None


def body_of(error: BaseException) -> ErrorBody:
    """The body for any exception. What is not one of ours is our own bug: it is logged, and the client sees none of its text."""
    status = status_of(error)
    match error:
        case InvalidRequest():
            return error_body(status, error.message, param=error.param, code=code_of(error))
        case PenstockError():
            return error_body(status, str(error), code=code_of(error))
        case web.HTTPException():
            return error_body(status, error.text or error.reason)
        case _:
            log.error("a handler failed", exc_info=error)
            return error_body(status, "internal server error")


def json_response(body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


def error_response(request: web.Request, error: BaseException) -> web.Response:
    """The whole answer for an exception that came up before the first byte was sent."""
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFull | RateLimitExceeded | EngineUnavailable) else None
    body = anthropic_body_of(error, request[REQUEST_ID]) if speaks_anthropic(request) else body_of(error)
    return json_response(body, status=status_of(error), headers=headers)


def refusal_response(
    request: web.Request, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """The whole answer where no exception says what is wrong."""
    body: msgspec.Struct = error_body(status, message, code=code)
    if speaks_anthropic(request):
        body = anthropic_body(status, message, request.get(REQUEST_ID))
    return json_response(body, status=status, headers=headers)


ANTHROPIC_ROUTE = "/v1/messages"
ANTHROPIC_HEADER = "anthropic-version"
ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
# What a converted request says in chat's names.
ANTHROPIC_FIELDS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema.schema": "output_config.format.schema",
    "`parallel_tool_calls: false`": "`disable_parallel_tool_use`",
    "`stop`": "`stop_sequences`",
    "thinking_token_budget": "thinking.budget_tokens",
}


def speaks_anthropic(request: web.Request) -> bool:
    """Whether the client expects answers of Anthropic's API: by the route, or by a header that its clients send with every request."""
    return is_anthropic(request.path, request.headers)


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """As `speaks_anthropic`, of what there is no request for."""
    return path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/") or ANTHROPIC_HEADER in headers


class AnthropicErrorInfo(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag="error"):
    error: AnthropicErrorInfo
    request_id: str | None


def anthropic_body(status: int, message: str, request_id: str | None) -> AnthropicErrorBody:
    kind = ANTHROPIC_TYPES.get(HTTPStatus(status), "invalid_request_error" if status < 500 else "api_error")
    return AnthropicErrorBody(AnthropicErrorInfo(kind, shortened(message)), request_id)


def anthropic_body_of(error: BaseException, request_id: str | None) -> AnthropicErrorBody:
    """As `body_of`. Clients look for these words in a prompt that is too long, and shorten it."""
    message = body_of(error).error.message
    if isinstance(error, ContextLengthExceeded) and error.num_prompt_tokens is not None:
        message = f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_prompt_tokens} maximum"
    elif isinstance(error, InvalidRequest) and error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"  # there is no other place for it
    for name, own in ANTHROPIC_FIELDS.items():
        message = message.replace(name, own)
    return anthropic_body(status_of(error), message, request_id)
