"""What a request asks for: its body, decoded into its type, with refused and unknown fields; its model; and what its client may ask for."""

import asyncio
import difflib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import inspect

from penstock.engine.errors import DeadlineExceeded, InvalidRequest
from penstock.engine.system.process import examined
from penstock.serving.anthropic import MessagesRequest
from penstock.serving.context import LONG, JobQueue, ModelContext, Workers
from penstock.serving.limits import ApiKey
from penstock.serving.messages import MAX_HEADER, header_text
from penstock.serving.options import ServerOptions
from penstock.serving.preparing import ChatOptions
from penstock.serving.requests import RequestFields, check_json, message_of, mistaken_path

T = TypeVar("T")


LARGE_BODY = 2**20  # bytes
OFF: tuple[Any, ...] = (None, False, "", [], {})
MAX_UNKNOWN = 100
# Fields that change the result where other servers know them. They are refused even with --allow-unknown-fields, unless switched off.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "activation": ("logits are not given out: scores and probabilities are as the model's files say", (None, True)),
    "audio": ("audio is not supported", OFF),
    "custom_logit_processor": ("code never comes in with a request: use `logits_processors` by name", OFF),
    "detokenize": ("answers are always text", (None, True)),
    "documents": ("`documents` are not supported: put them in a message", OFF),
    "embed_dtype": ("vectors are float32", (None, "float32")),
    "endianness": ("base64 is little-endian", (None, "little", "native")),
    "function_call": ("`function_call` is deprecated and not supported: use `tool_choice`", (*OFF, "none")),
    "functions": ("`functions` is deprecated and not supported: use `tools`", OFF),
    "logprob_token_ids": ("`logprob_token_ids` is not supported", OFF),
    "lora_path": ("`lora_path` is not supported: give the adapter's name in `model`", OFF),
    "max_chunks_per_doc": ("documents are not split: use `max_tokens_per_doc`", OFF),
    "mm_processor_kwargs": ("images are read as the model's processor says", OFF),
    "modalities": ("only text can be generated", (*OFF, ["text"])),
    "no_stop_trim": ("use `include_stop_str_in_output`", OFF),
    "rank_fields": ("documents are texts, or objects with a `text` only", (*OFF, ["text"])),
    "return_hidden_states": ("hidden states are not given out", OFF),
    "return_token_ids": ("`return_token_ids` is not supported: use `return_tokens_as_token_ids` with `logprobs`", OFF),
    "spaces_between_special_tokens": ("special tokens are shown as the tokenizer spells them", (None, True)),
    "stop_regex": ("`stop_regex` is not supported: use `stop`", OFF),
    "suffix": ("`suffix` is not supported: this server does not fill in the middle", OFF),
    "truncate_prompt_tokens": ("prompts are never truncated: shorten the prompt", OFF),
    "truncation_side": ("what is too long loses its end", (None, "right")),
    "use_activation": ("logits are not given out: scores and probabilities are as the model's files say", (None, True)),
    "vllm_xargs": ("`vllm_xargs` is not supported", OFF),
    "web_search_options": ("web search is not supported", OFF),
}


# Fields of vLLM's request classes that mean nothing at these values, its own defaults: clients send the class as a whole.
VLLM_DEFAULTS: dict[str, bool | int] = {
    "echo": False,
    "return_mm_kwargs": True,
    "return_token_offsets": False,
    "return_weight_versions": False,
    "routed_experts_prompt_start": 0,
}


def decode(body: bytes | bytearray, kind: type[T], *, allow_unknown_fields: bool = False) -> tuple[T, tuple[str, ...]]:
    """The decoded body, and the paths of the unknown fields that were ignored (always none unless they are allowed).

    Raises `InvalidRequest`: for malformed JSON, wrong types and ranges, refused fields, and unknown ones with the nearest known name.
    Fields that are null, or vLLM's with their default value, ask for nothing and are passed over.
    """
    check_json(body)
    try:
        return msgspec.json.decode(body, type=examined(kind)), ()
    except msgspec.ValidationError as error:
        if not str(error).startswith("Object contains unknown field"):
            raise _invalid(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return _decode_with_unknown_fields(body, kind, allow_unknown_fields)


async def decoded(
    workers: Workers, body: bytes | bytearray, kind: type[T], *, allow_unknown_fields: bool = False
) -> tuple[T, tuple[str, ...]]:
    """As `decode`, in a worker where the body is long."""
    # A millisecond for 64 KiB. Large bodies are decoded one at a time: together they would hold the interpreter's lock.
    queue = None if len(body) < LONG else JobQueue.LONG if len(body) < LARGE_BODY else JobQueue.HUGE
    return await workers.run(queue, lambda: decode(body, kind, allow_unknown_fields=allow_unknown_fields))


def _invalid(error: msgspec.ValidationError, kind: type[Any]) -> InvalidRequest:
    return InvalidRequest(message_of(error, kind), mistaken_path(error))


def _decode_with_unknown_fields(body: bytes | bytearray, kind: type[T], allowed: bool) -> tuple[T, tuple[str, ...]]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    ignored: list[str] = []
    for path, holder, name, known in list(islice(_unknown_fields(value, inspect.type_info(kind), ""), MAX_UNKNOWN + 1)):
        if len(ignored) == MAX_UNKNOWN:
            raise InvalidRequest(f"more than {MAX_UNKNOWN} unknown fields", path)
        setting = holder.pop(name)
        if setting is None or (path == name and name in VLLM_DEFAULTS and setting == VLLM_DEFAULTS[name]):
            continue
        if path == name and name in REFUSED:
            reason, neutral = REFUSED[name]
            if setting not in neutral:
                raise InvalidRequest(reason, name)
        elif not allowed:
            nearest = difflib.get_close_matches(name[:100], known, n=1)
            hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
            raise InvalidRequest(f"unknown field `{path}`{hint}", path)
        else:
            ignored.append(path)
    for name in _raw_fields(kind) & value.keys() if isinstance(value, dict) else ():
        value[name] = msgspec.Raw(b"null")
    try:
        return msgspec.convert(value, kind, str_keys=True), tuple(ignored)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from None


def _raw_fields(kind: type[Any]) -> frozenset[str]:
    """Those that are not looked at."""
    info = inspect.type_info(kind)
    fields = info.fields if isinstance(info, inspect.StructType) else ()
    return frozenset(field.encode_name for field in fields if isinstance(field.type, inspect.RawType))


def _unknown_fields(value: Any, info: inspect.Type, path: str) -> Iterator[tuple[str, dict[str, Any], str, list[str]]]:
    """Walks a decoded body along its type: (path, the object that holds the field, its name, the names known there)."""
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _unknown_fields(value, member, path)
    elif isinstance(info, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in info.fields}
        known = list(fields)
        for name, item in value.items():
            at = f"{path}.{name}" if path else name
            if name in fields:
                yield from _unknown_fields(item, fields[name], at)
            elif info.forbid_unknown_fields:
                yield at, value, name, known
    elif isinstance(info, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_fields(item, info.item_type, f"{path}[{index}]")


def converted(given: dict[str, Any], kind: type[T]) -> T:
    """From texts to what they stand for. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from None


IGNORED_HEADER = "x-ignored-fields"
IGNORED_TOOLS_HEADER = "x-ignored-tools"
TRUNCATED_HEADER = "x-truncated-items"


def ignored_fields_header(names: tuple[str, ...]) -> dict[str, str]:
    """Names come from the client: whatever could break out of a header is percent-encoded."""
    return {IGNORED_HEADER: quote(", ".join(names), safe=" ,.[]")[:MAX_HEADER]} if names else {}


def ignored_tools_header(kinds: Sequence[str]) -> dict[str, str]:
    return {IGNORED_TOOLS_HEADER: header_text(", ".join(dict.fromkeys(kinds)))[:MAX_HEADER]} if kinds else {}


def named_model(context: ModelContext, name: str | None) -> str:
    """As `served_model`, for conversations: OpenAI's API and Anthropic's refuse those without a model. Raises `InvalidRequest`."""
    if not name:
        served = ", ".join(context.model_names)
        raise InvalidRequest(f"Object missing required field `model`. Served here: {served}.", "model")
    return served_model(context, name)


def served_model(context: ModelContext, name: str | None) -> str:
    """The name to answer with. Raises `NoSuchModel` where nothing is served under the one asked for."""
    context.adapter_of(name)
    return name or context.model_names[0]


TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # by endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`client` is what work is counted for. The answer has `max_tokens` at most, and ends at `deadline`, in `time.monotonic()`. `key_name`
    is that of the API key, and `request_id` that of the HTTP request, both for operators.
    """

    client: str | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    key_name: str | None = None
    request_id: str | None = None

    def chat_options(self, **others: Any) -> ChatOptions:
        """For the preparation of a conversation, with `others` of its fields."""
        return ChatOptions(
            client=self.client,
            max_tokens=self.max_tokens,
            deadline=self.deadline,
            key_name=self.key_name,
            http_id=self.request_id,
            **others,
        )


def deadline_of(arrived: float, asked: float | None, options: ServerOptions) -> float | None:
    """`asked` for in seconds, as far as the operator allows. None without a limit."""
    bounds = [bound for bound in (asked, options.request_timeout) if bound]
    return arrived + min(bounds) if bounds else None


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Cancels what is inside at the deadline, if there is one. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the time limit of the request passed before its answer") from None


def check_fields(body: RequestFields, key: ApiKey | None, options: ServerOptions) -> None:
    """Raises `InvalidRequest` for fields that ask for more than the operator or the key allows; sets what the key decides."""
    least = options.min_priority if key is None or key.limits.priority is None else key.limits.priority
    if body.priority is None:
        body.priority = None if key is None else key.limits.priority
    elif least is not None and body.priority < least:
        source = "--min-priority" if key is None or key.limits.priority is None else "the API key's priority"
        raise InvalidRequest(f"`priority` must be at least {least} on this server ({source}), got {body.priority}", "priority")
    if key is not None and key.limits.max_tokens is not None:
        cap_tokens(body, key.limits.max_tokens)


def cap_tokens(body: RequestFields, most: int) -> None:
    for name in TOKEN_LIMITS:
        asked = getattr(body, name, None)
        if asked is not None and asked > most:
            if not isinstance(body, MessagesRequest):
                raise InvalidRequest(f"`{name}` must be at most {most} for this API key, got {asked}", name)
            body.max_tokens = most  # every request of that API has the field, and clients send the largest number they know
