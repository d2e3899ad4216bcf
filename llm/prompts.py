"""What a caller may give as a prompt: text or token ids, one or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from penstock.engine.errors import InvalidRequest


class TextPrompt(TypedDict, total=False):
    """`cache_salt` keeps prefix-cache hits within prompts that share it."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """`prompt`, the text, is only given back."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt
BINARY = (bytes, bytearray, memoryview)  # sequences of integers to Python, and text to whoever gives them
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One prompt as it was given: its text, its token ids, or both. `path` says where, as in `prompts[3]`."""

    path: str
    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str = ""


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PromptSource]:
    """Raises `InvalidRequest` for what is no prompt."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [read_prompt(prompts, "prompts")]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BINARY):
        raise InvalidRequest(f"`prompts` must be a prompt or a list of them, got {type(prompts).__name__}", "prompts")
    return [read_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def read_prompt(prompt: Any, path: str) -> PromptSource:
    if isinstance(prompt, str):
        return PromptSource(path, text=prompt)
    if isinstance(prompt, Mapping):
        return _from_dict(prompt, path)
    if _are_token_ids(prompt) or _is_empty(prompt):
        return PromptSource(path, token_ids=[int(token_id) for token_id in prompt])
    raise InvalidRequest(f"`{path}` must be a string, a list of token ids, or a dict of one of these, got {_kind(prompt)}", path)


def _from_dict(prompt: Mapping[str, Any], path: str) -> PromptSource:
    for name in prompt:
        if name not in KEYS:
            hint = "; conversations are for `chat`" if name in ("role", "content", "messages") else ""
            raise InvalidRequest(f"`{path}` has the key {name!r}: there are {', '.join(KEYS)}{hint}", f"{path}.{name}")
    text, token_ids, salt = (prompt.get(name) for name in KEYS)
    if text is None and token_ids is None:
        raise InvalidRequest(f"`{path}` needs `prompt` or `prompt_token_ids`", path)
    if not isinstance(text, str | None) or not isinstance(salt, str | None):
        name = "prompt" if not isinstance(text, str | None) else "cache_salt"
        raise InvalidRequest(f"`{path}.{name}` must be a string", f"{path}.{name}")
    if token_ids is not None and not (_are_token_ids(token_ids) or _is_empty(token_ids)):
        message = f"`{path}.prompt_token_ids` must be a list of token ids, got {_kind(token_ids)}"
        raise InvalidRequest(message, f"{path}.prompt_token_ids")
    return PromptSource(path, text, None if token_ids is None else [int(token_id) for token_id in token_ids], salt or "")


def _are_token_ids(values: Any) -> bool:
    """Whether it is a list that holds them, numpy's integers included, and nothing else."""
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, *BINARY)) and len(values) > 0
    return is_list and all(map(_is_integer, values))


def _is_empty(values: Any) -> bool:
    return isinstance(values, list | tuple) and not values


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _kind(value: Any) -> str:
    """What was given in place of a prompt, for a message: of a list, what keeps it from being one of token ids."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if not _is_integer(item):
                return f"a {kind} with {item!r:.40} at [{index}]"
    return kind
