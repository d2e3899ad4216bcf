"""Exceptions as a status and OpenAI's error body."""

import logging
from http import HTTPStatus

import msgspec

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
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def body_of(error: BaseException) -> ErrorBody:
    """The body for any exception. What is not one of ours is our own bug: it is logged, and the client sees none of its text."""
    status = status_of(error)
    match error:
        case InvalidRequest():
            return error_body(status, error.message, param=error.param, code=code_of(error))
        case PenstockError():
            return error_body(status, str(error), code=code_of(error))
        case _:
            log.error("a handler failed", exc_info=error)
            return error_body(status, "internal server error")


def retry_headers(error: BaseException) -> dict[str, str]:
    """When the client may ask again, for an error that passes by itself."""
    return {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFull | RateLimitExceeded | EngineUnavailable) else {}
