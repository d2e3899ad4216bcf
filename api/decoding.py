"""From a body's bytes to its Struct. Every mistake in it becomes an `InvalidRequest` that carries the JSON path."""

import difflib
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from penstock.api.body_limits import check_body
from penstock.engine.errors import InvalidRequest

T = TypeVar("T")

OFF: tuple[Any, ...] = (None, False, "", [], {})
MAX_UNKNOWN = 100
PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]+)`")

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
    "kv_transfer_params": ("`kv_transfer_params` is not supported", OFF),
    "logprob_token_ids": ("`logprob_token_ids` is not supported", OFF),
    "lora_path": ("adapters are not supported", OFF),
    "max_chunks_per_doc": ("documents are not split: use `max_tokens_per_doc`", OFF),
    "mm_processor_kwargs": ("only text can be read", OFF),
    "modalities": ("only text can be generated", (*OFF, ["text"])),
    "no_stop_trim": ("use `include_stop_str_in_output`", OFF),
    "prediction": ("predicted outputs are not supported", OFF),
    "prompt_embeds": ("prompt embeddings are not supported", OFF),
    "rank_fields": ("documents are texts, or objects with a `text` only", (*OFF, ["text"])),
    "repetition_detection": ("`repetition_detection` is not supported", OFF),
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


def decode(body: bytes, kind: type[T], *, allow_unknown_fields: bool = False) -> tuple[T, tuple[str, ...]]:
    """The decoded body, and the paths of the unknown fields that were ignored (always none unless they are allowed).

    Raises `InvalidRequest`: for malformed JSON, wrong types and ranges, refused fields, and unknown ones with the nearest known name.
    Fields that are null, or vLLM's with their default value, ask for nothing and are passed over.
    """
    check_body(body)
    try:
        return msgspec.json.decode(body, type=kind), ()
    except msgspec.ValidationError as error:
        if not str(error).startswith("Object contains unknown field"):
            raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return _decode_with_unknown_fields(body, kind, allow_unknown_fields)


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec says what it expected, what it got and where: the client reads just that."""
    return InvalidRequest(str(error), mistaken_path(error))


def mistaken_path(error: msgspec.ValidationError) -> str | None:
    """Where in the value the mistake is: None where it is the value itself."""
    found = PATH.search(str(error))
    path = found[1] if found else None
    field = FIELD.match(str(error))
    if field:
        path = f"{path}.{field[1]}" if path else field[1]
    return path


def _decode_with_unknown_fields(body: bytes, kind: type[T], allowed: bool) -> tuple[T, tuple[str, ...]]:
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
        raise _invalid(error) from None


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
