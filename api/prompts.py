"""Prompts as token ids."""

import functools

from penstock.api.context import SharedContext
from penstock.api.errors import ContextLengthExceeded
from penstock.api.workers import run
from penstock.engine.errors import InvalidRequest
from penstock.engine.tokenizer import Tokenizer

LONG_TEXT = 2**12  # characters; tokenizing less takes a millisecond or two
MAX_PROMPTS = 2048  # OpenAI's, of embeddings
SHRINKAGE = 2  # normalizers may shorten a text before it is split into tokens


def split_prompts(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts of all four forms that OpenAI has: a string, strings, token ids, lists of these.

    Raises `InvalidRequest` for none, for too many, and for a list of both ids and prompts.
    """
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        position = next(position for position, item in enumerate(given) if isinstance(item, int) != isinstance(given[0], int))
        raise InvalidRequest(f"`{param}` must hold either token ids or prompts, not both", f"{param}[{position}]")
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(f"`{param}` must hold from 1 to {MAX_PROMPTS} prompts, got {len(given)}", param)
    return [item for item in given if not isinstance(item, int)]


def path_of(param: str, position: int, count: int) -> str:
    return param if count == 1 else f"{param}[{position}]"


async def encode_text(context: SharedContext, text: str, *, add_special_tokens: bool) -> list[int]:
    is_long = len(text) >= LONG_TEXT
    return await run(context, lambda: context.tokenizer.encode(text, add_special_tokens=add_special_tokens), is_long=is_long)


async def check_text_length(context: SharedContext, text: str, param: str) -> None:
    """Raises `ContextLengthExceeded` for a text that cannot fit the context, however few tokens it may be: no need to count megabytes."""
    if len(text) < LONG_TEXT:
        return
    longest = await run(context, lambda: longest_token(context.tokenizer), is_long=True)
    if len(text) > SHRINKAGE * longest * context.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context.max_model_len} tokens. However, your prompt has {len(text)} characters, "
            f"which are at least {len(text) // longest} tokens. Please shorten it.",
            param,
        )


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: Tokenizer) -> int:
    """In bytes, so at least as many as its characters."""
    return max(len(tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode()) for token_id in range(tokenizer.vocab_size))


def check_prompt_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, and for an id that is not in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt holds no tokens", param)
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)
