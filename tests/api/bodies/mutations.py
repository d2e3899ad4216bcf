"""Request bodies with something wrong in them."""

import json
import random
from collections.abc import Iterator
from typing import Any

from msgspec import inspect as types

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
CHAT: dict[str, Any] = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "user", "content": "Hi"},
    ],
    "stream": True,
    "max_tokens": 50,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "top_k": 3,
    "thinking_token_budget": 5,
    "reasoning_effort": "low",
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "stop": ["a", "b"],
    "logit_bias": {"1": 2.0},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "logits_processors": [{"name": "double", "arguments": {"factor": 2}}],
    "chat_template_kwargs": {"enable_thinking": True},
    "best_of": 1,
}


_CACHED = {"type": "ephemeral", "ttl": "1h"}
MESSAGES: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief", "cache_control": _CACHED}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me look"},
                {"type": "tool_use", "id": "toolu_-YQ", "name": "f", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_-YQ", "content": [{"type": "text", "text": "7"}], "is_error": True},
                {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}, "title": "t"},
                {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "r"}]},
            ],
        },
        {"role": "system", "content": "Now"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": _CACHED},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["a", "b"],
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "metadata": {"user_id": "u"},
    "cache_control": _CACHED,
    "context_management": {"edits": []},
}


COMPLETION: dict[str, Any] = {
    "model": "scripted",
    "prompt": ["a", [1, 2], "b"],
    "n": 2,
    "echo": True,
    "max_tokens": 3,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "bad_words": ["x"],
    "guided_choice": ["a", "b"],
    "suffix": None,
    "cache_salt": "salt",
    "seed": 1,
    "repetition_penalty": 1.1,
}


_TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text", "excludes": ["c"]}, "end": ["</a>", "b"]}
_TAGS = {"type": "triggered_tags", "triggers": ["<a"], "tags": [_TAG], "at_least_one": True, "excludes": ["z"]}
_TAG_FORMAT = {
    "type": "sequence",
    "elements": [{"type": "repeat", "min": 1, "max": 3, "content": {"type": "regex", "pattern": "x"}}, _TAGS],
}
CONSTRAINED: dict[str, Any] = {
    "prompt": "a",
    "max_tokens": 3,
    "guided_decoding_backend": "recording:no-fallback",
    "guided_whitespace_pattern": "",
    "structured_outputs": {
        "json": None,
        "structural_tag": {"type": "structural_tag", "format": _TAG_FORMAT},
        "backend": "recording:no-fallback",
        "disable_any_whitespace": True,
        "json_object": False,
    },
    "response_format": {"type": "text"},
    "json_schema": "",
    "ebnf": None,
}


# By the path of the route. Those of other routes are made from their types.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {name: value for name, value in MESSAGES.items() if name != "max_tokens"},
    "/tokenize": {"messages": CHAT["messages"], "tools": CHAT["tools"], "chat_template_kwargs": {}, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "model": "scripted"},
}


def example_of(kind: types.Type) -> Any:
    """A value of a type, with every field that it may have."""
    match kind:
        case types.StructType(fields=fields, tag_field=tag_field, tag=tag):
            written = {field.encode_name: example_of(field.type) for field in fields}
            return written if tag_field is None else {tag_field: tag} | written
        case types.UnionType(types=members):
            return example_of(next(member for member in members if not isinstance(member, types.NoneType)))
        case types.ListType(item_type=item):
            return [example_of(item)]
        case types.DictType(value_type=value):
            return {"1": example_of(value)}
        case types.LiteralType(values=values):
            return values[0]
        case types.Metadata(type=inner):
            return example_of(inner)
        case types.BoolType():
            return True
        case types.IntType():
            return 1
        case types.FloatType():
            return 0.5
        case types.StrType():
            return "a"
        case _:
            return None


def mutated_bodies(whole: dict[str, Any], count: int, seed: int) -> Iterator[bytes]:
    """Bodies changed in one to three places; one in five is broken as JSON as well."""
    rng = random.Random(seed)
    for _ in range(count):
        body: Any = whole
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            body = mutated(body, rng, depth_first=0.97)
        data = json.dumps(body).encode()
        if rng.random() < 0.2:
            cut = rng.randrange(len(data))
            data = data[:cut] + rng.randbytes(rng.randrange(3)) + data[cut + rng.randrange(3) :]
        yield data


def mutated(value: Any, rng: random.Random, depth_first: float = 0.8) -> Any:
    """A JSON value with something wrong in it, somewhere: with the probability `depth_first` inside, else instead."""
    junk: list[Any] = [
        None,
        True,
        -1,
        0,
        10**30,
        -(10**30),
        1e308,
        0.5,
        "",
        "x",
        "\u0000",
        "\ud83d\ude42",
        [],
        {},
        [[]],
        [None],
        {"a": {}},
        "9" * 500,
    ]
    if isinstance(value, dict) and value and rng.random() < depth_first:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[key[:-1] + rng.choice("xyz`$.")] = changed.pop(key)
            case _:
                changed[key] = mutated(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        position = rng.randrange(len(value))
        return [*value[:position], mutated(value[position], rng), *value[position + rng.randrange(2) :]]
    return rng.choice(junk)
