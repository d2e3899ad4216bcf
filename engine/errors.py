"""Every exception the engine raises on purpose. `api.errors` is the one place that turns them into HTTP.

PenstockError
├── ConfigurationError          the operator's mistake: the server refuses to start
│   └── StartFailed             not a mistake, or not for sure: another start may succeed, as where a port is in use
├── InvalidRequest              the client's mistake: 400, with the field's path; a `ValueError` as well
│   ├── UnsupportedGrammar      a constraint the backend cannot express exactly
│   │   ├── UnsupportedKind     one of a kind that the backend does not know at all
│   │   └── ConstraintTooLarge  one that asks too much of any backend
│   ├── JobLimitExceeded        work in a sandbox took too much time or memory
│   ├── NoSuchModel             404
│   ├── NoSuchPreviousResponse  400: the response to continue is not stored
│   ├── NoSuchObject            404: a file, a batch, a stored response, an item of one
│   ├── StorageFull             413: no room for another file
│   └── Conflict                409: the server's state does not allow it now
├── QueueFull                   429 with Retry-After
├── RateLimitExceeded           429 with Retry-After: a limit of the client's API key
├── DeadlineExceeded            504: the request's own time limit passed before its first token
├── EngineUnavailable           503 with Retry-After: stopping, overloaded, or the engine cannot serve any more
│   ├── ModelNotLoaded          one of several models, which cannot be loaded
│   └── ModelAsleep             an operator has to wake the model
└── GenerationFailed            500: the step that this request was in failed
"""

import errno
import socket

ENGINE_FAILED = "the engine has failed and serves no more; the error has been logged"


class PenstockError(Exception):
    """Base of all of them."""


class ConfigurationError(PenstockError):
    """The server cannot start as configured. The message names the remedy."""


class StartFailed(ConfigurationError):
    """The server cannot start now, but may later without a change: an address in use, a full disk, a model that cannot be fetched."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_AGAIN, *DISK_FULL)


def start_error(message: str, error: OSError) -> ConfigurationError:
    """The kind that the system's error calls for. An address that the machine does not have yet may come with its network."""
    return (StartFailed if error.errno in _PASSING else ConfigurationError)(message)


class InvalidRequest(PenstockError, ValueError):
    """The request cannot be served as written.

    `param` is the JSON path of the offending field, such as `messages[0].role`, or None if the body as a whole is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UnsupportedGrammar(InvalidRequest):
    """A constraint that cannot be compiled: names the keyword and its path, or the position in a regex."""


class UnsupportedKind(UnsupportedGrammar):
    """A backend supports no constraints of this kind: any other refusal is more specific."""


class ConstraintTooLarge(UnsupportedGrammar):
    """A constraint too large for any backend: no other backend is tried.

    A bound that is due to how one backend works, such as the size of its tables, is an `UnsupportedGrammar`.
    """


class JobLimitExceeded(InvalidRequest):
    """A request's job exceeded a limit of its sandbox. The message names the limit."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the requested answer, is longer than the context. Clients check for its code.

    `num_prompt_tokens` and `max_prompt_tokens` are set if the prompt alone is too long; the first may be an estimate.
    """

    def __init__(
        self, message: str, param: str | None = None, *, num_prompt_tokens: int | None = None, max_prompt_tokens: int | None = None
    ) -> None:
        super().__init__(message, param)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class NoSuchModel(InvalidRequest):
    """The `model` field names no served model."""


class NoSuchObject(InvalidRequest):
    """The object named by a path or a field does not exist, or belongs to another client."""


class NoSuchPreviousResponse(InvalidRequest):
    """The response that a request continues is not stored, or another client's. Clients check for its code and send the history instead."""


class StorageFull(InvalidRequest):
    """A bound on stored objects is reached."""


class Conflict(InvalidRequest):
    """A valid request that conflicts with the server's state, such as a profile while another one is taken."""


class QueueFull(PenstockError):
    """The waiting queue is at its bound. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitExceeded(PenstockError):
    """A client has used what its API key allows. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(PenstockError):
    """The time limit of a request has passed before its first token."""


class EngineUnavailable(PenstockError):
    """The engine accepts no requests: it is shutting down, overloaded or has failed for good. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelNotLoaded(EngineUnavailable):
    """Loading the requested model, one of several, failed. The message has the cause."""


class ModelAsleep(EngineUnavailable):
    """An operator has put the model to sleep, and no request wakes it."""


class GenerationFailed(PenstockError):
    """This request was in a step that failed; the engine itself continues."""
