"""The lines of batches: requests that are read from an input file, and answers that are appended to output files."""

import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw, Struct

from penstock.engine.errors import InvalidRequest
from penstock.serving.batches.files import create_private
from penstock.serving.requests import NOTHING, check_json

MAX_REQUESTS = 50_000  # OpenAI's bound
MAX_ERRORS = 100  # that are listed
MAX_CUSTOM_ID = 512  # characters
ENVELOPE = 2**16  # bytes of a line beside its body
READ_AT_ONCE = 2**20  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BatchError(Struct):
    """A mistake in the input file. Lines count from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchLine(Struct):
    """A line of the input. Nothing in it is checked yet."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Raw = NOTHING


class LineResponse(Struct):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct):
    """Why there is no answer at all."""

    code: str
    message: str


class OutputLine(Struct):
    """A line of the output file or the error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None


class _Named(Struct):
    model: Any = None


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_named = msgspec.json.Decoder(_Named).decode


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """`text` is None where the line is too long to be read."""

    number: int
    text: bytes | None


class InputFile:
    """A file of requests, opened by the first `read` and read a piece at a time. Empty lines count and are passed over."""

    def __init__(self, path: Path, max_line: int) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._max_line = max_line
        self._number = 0

    def read(self) -> list[NumberedLine]:
        """The next lines, about a mebibyte of them; none at the end."""
        if self._file is None:
            self._file = self._path.open("rb")
        lines: list[NumberedLine] = []
        num_bytes = 0
        while num_bytes < READ_AT_ONCE and (text := self._file.readline(self._max_line + 1)):
            self._number += 1
            if self._number == 1:
                text = text.removeprefix(BYTE_ORDER_MARK)
            num_bytes += len(text)
            if len(text) > self._max_line and not text.endswith(b"\n"):
                self._skip_line(self._file)
                lines.append(NumberedLine(self._number, None))
            elif stripped := text.strip():
                lines.append(NumberedLine(self._number, stripped))
        return lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _skip_line(self, file: BinaryIO) -> None:
        while (text := file.readline(READ_AT_ONCE)) and not text.endswith(b"\n"):
            pass


def read_line(text: bytes) -> BatchLine:
    """Raises `InvalidRequest` for what is not a JSON object."""
    try:
        check_json(text)
        return _decode_line(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("This line is not parseable as a JSON object.") from None


@dataclass(slots=True)
class LineChecker:
    """Checks all lines of a batch before any of them runs. Of custom ids it remembers digests."""

    endpoint: str
    model_names: Collection[str]
    num_requests: int = 0
    errors: list[BatchError] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return len(self.errors) >= MAX_ERRORS

    def check(self, lines: list[NumberedLine]) -> None:
        for line in lines:
            self.num_requests += 1
            if self.num_requests > MAX_REQUESTS:
                message = f"A batch may have {MAX_REQUESTS} requests at most."
                self.errors.append(BatchError("too_many_tasks", message, line=line.number))
                return
            if (error := self._error_in(line.text)) is not None:
                error.line = line.number
                self.errors.append(error)
            if self.is_full:
                return

    def finish(self) -> None:
        if not self.num_requests and not self.errors:
            self.errors.append(BatchError("empty_file", "The input file has no requests."))

    def _error_in(self, text: bytes | None) -> BatchError | None:
        if text is None:
            return BatchError("invalid_json_line", "This line is longer than a request may be (--max-body-size).")
        try:
            line = read_line(text)
        except InvalidRequest as error:
            return BatchError("invalid_json_line", error.message)
        return self._envelope_error(line) or self._body_error(bytes(line.body))

    def _envelope_error(self, line: BatchLine) -> BatchError | None:
        custom_id = line.custom_id
        if custom_id is None:
            return BatchError("missing_required_parameter", "Missing required parameter: 'custom_id'.", "custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            return BatchError("invalid_value", f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return BatchError("duplicate_custom_id", f"The custom_id {custom_id!r} is that of an earlier line.", "custom_id")
        self._seen.add(digest)
        if line.method != "POST":
            code = "missing_required_parameter" if line.method is None else "invalid_method"
            return BatchError(code, "'method' must be 'POST'.", "method")
        if line.url != self.endpoint:
            code = "missing_required_parameter" if line.url is None else "url_mismatch"
            return BatchError(code, f"'url' must be the endpoint of the batch, {self.endpoint!r}.", "url")
        return None

    def _body_error(self, body: bytes) -> BatchError | None:
        if not body:
            return BatchError("missing_required_parameter", "Missing required parameter: 'body'.", "body")
        try:
            model = _decode_named(body).model
        except msgspec.MsgspecError:
            return BatchError("invalid_value", "'body' must be an object.", "body")
        if model is None or model in self.model_names:
            return None
        return BatchError("model_not_found", f"This server serves {', '.join(self.model_names)}, not {model!r}."[:500], "body.model")


class _UsageDetails(Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(Struct):
    """Of chat completions and completions, or of responses, or of embeddings."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _UsageDetails | None = None
    completion_tokens_details: _UsageDetails | None = None
    input_tokens_details: _UsageDetails | None = None
    output_tokens_details: _UsageDetails | None = None


class _Used(Struct):
    usage: _Usage | None = None


class _WrittenResponse(Struct):
    status_code: int
    body: Raw


class _WrittenLine(Struct):
    id: str
    response: _WrittenResponse | None = None


_decode_used = msgspec.json.Decoder(_Used).decode
_decode_written = msgspec.json.Decoder(_WrittenLine).decode


class InputTokensDetails(Struct):
    cached_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    """The sums over all answers."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int = 0

    def add(self, body: bytes | Raw) -> None:
        """What the body of an answer says of its tokens; nothing where it says nothing."""
        try:
            usage = _decode_used(body).usage
        except msgspec.MsgspecError:
            return
        if usage is None:
            return
        num_input, num_output = usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
        self.input_tokens += num_input
        self.output_tokens += num_output
        self.total_tokens += num_input + num_output
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            self.input_tokens_details.cached_tokens += details.cached_tokens if details else 0
        for details in (usage.completion_tokens_details, usage.output_tokens_details):
            self.output_tokens_details.reasoning_tokens += details.reasoning_tokens if details else 0


def line_id(key: str, number: int) -> str:
    """Names a request of a batch, by its line: what is written says by itself what has been answered."""
    return f"batch_req_{key}_{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


# Where `str.splitlines` splits, which clients use on what they download: U+0085, U+2028 and U+2029. The others are control
# characters, which JSON always escapes.
_LINE_BREAKS = re.compile("|".join("\u0085\u2028\u2029").encode())


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


class LineFile:
    """A file that whole lines are appended to, made with the first of them. What a crash has left of another line is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size if path.exists() else 0

    def recover(self, usage: BatchUsage) -> set[int]:
        """The numbers of the lines that have been answered here. Adds up their `usage`."""
        if not self._path.exists():
            return set()
        answered: set[int] = set()
        whole = 0
        with self._path.open("rb+") as file:
            for text in file:
                try:
                    line = _decode_written(text)
                    number = number_of(line.id)
                except (msgspec.MsgspecError, ValueError):
                    break
                if not text.endswith(b"\n"):
                    break
                answered.add(number)
                if line.response is not None:
                    usage.add(line.response.body)
                whole += len(text)
            file.truncate(whole)
        self._size = whole
        return answered

    def sync(self) -> None:
        """Its lines are on disk afterwards, and not only in the system's cache."""
        if self._path.exists():
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())

    def append(self, line: OutputLine) -> None:
        """Raises `OSError`, for example where the disk is full; the file is as it was then."""
        data = memoryview(_LINE_BREAKS.sub(_escape, msgspec.json.encode(line)) + b"\n")
        if not self._path.exists():
            create_private(self._path).close()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, self._size)
            raise
        else:
            self._size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
