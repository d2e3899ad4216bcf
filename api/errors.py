"""The one place where exceptions become HTTP: a status, and OpenAI's error body or, on the routes of its API, Anthropic's."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from penstock.api.answers import json_response
from penstock.api.requests import REQUEST_ID, speaks_anthropic
from penstock.engine.errors import (
    ContextLengthExceeded,
    InvalidRequest,
)
from penstock.serving.endpoints import errors
from penstock.serving.endpoints.errors import ErrorBody, error_body, retry_headers, shortened


def status_of(error: BaseException) -> int:
    """As `errors.status_of`, of what aiohttp raises as well."""
    return error.status if isinstance(error, web.HTTPException) else errors.status_of(error)


def body_of(error: BaseException) -> ErrorBody:
    """As `errors.body_of`, of what aiohttp raises as well."""
    return error_body(error.status, error.text or error.reason) if isinstance(error, web.HTTPException) else errors.body_of(error)


def error_response(request: web.Request, error: BaseException) -> web.Response:
    """The whole answer for an exception that came up before the first byte was sent."""
    body = anthropic_body_of(error, request[REQUEST_ID]) if speaks_anthropic(request) else body_of(error)
    return json_response(body, status=status_of(error), headers=retry_headers(error))


def refusal_response(
    request: web.Request, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """The whole answer where no exception says what is wrong."""
    body: msgspec.Struct = error_body(status, message, code=code)
    if speaks_anthropic(request):
        body = anthropic_body(status, message, request.get(REQUEST_ID))
    return json_response(body, status=status, headers=headers)


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
