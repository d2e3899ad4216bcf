import json
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from penstock.api.errors import body_of, error_response
from penstock.engine.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    NoSuchModel,
    PenstockError,
    QueueFull,
    UnsupportedGrammar,
)
from penstock.serving.endpoints.errors import error_body


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequest("m", "a.b"), 400, "BadRequestError", "a.b", None),
        (UnsupportedGrammar("m", "guided_json.not"), 400, "BadRequestError", "guided_json.not", None),
        (ContextLengthExceeded("m", "prompt"), 400, "BadRequestError", "prompt", "context_length_exceeded"),
        (NoSuchModel("m", "model"), 404, "NotFoundError", "model", "model_not_found"),
        (QueueFull("m", 3), 429, "RateLimitError", None, "queue_full"),
        (EngineUnavailable("m", 3), 503, "ServiceUnavailableError", None, None),
        (GenerationFailed("m"), 500, "InternalServerError", None, None),
        (ConfigurationError("m"), 500, "InternalServerError", None, None),
    ],
)
def test_every_error_has_its_status_and_openais_body(
    error: PenstockError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    response = error_response(make_mocked_request("POST", "/v1/chat/completions"), error)
    assert response.status == status
    assert response.headers.get("Retry-After") == ("3" if status in (429, 503) else None)
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {"error": {"message": "m", "type": kind, "param": param, "code": code}}


def test_a_bug_of_ours_is_logged_and_not_described(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        body = body_of(ZeroDivisionError("secret"))
    assert "secret" not in body.error.message
    assert "secret" in caplog.text


def test_aiohttps_own_errors_have_the_same_shape() -> None:
    assert body_of(web.HTTPRequestEntityTooLarge(1, 2)).error.type == "BadRequestError"
    assert error_body(401, "no").error.type == "AuthenticationError"
