"""Prompts as token ids."""

import functools
from collections.abc import Callable
from typing import TypeVar

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.heap import release_heap
from penstock.engine.text.tokenizer import CHARS_PER_TOKEN
from penstock.serving.context import SharedContext
from penstock.serving.workers import Lane, run

T = TypeVar("T")

LONG_TEXT = 2**12  # characters; tokenizing less takes a millisecond or two
HUGE_TEXT = 2**19  # characters; tokenizing takes up to 300 bytes of memory for each
MAX_PROMPTS = 2048  # OpenAI's, of embeddings


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
    return await run_on_text(context, lambda: context.tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text))


async def run_on_text(context: SharedContext, call: Callable[[], T], num_characters: int) -> T:
    """Tokenizes: here where the text is short, else in a worker, and where it is huge after all others that are."""
    if num_characters < HUGE_TEXT:
        return await run(context, call, is_long=num_characters >= LONG_TEXT)
    return await context.workers.run(Lane.HUGE, functools.partial(_then_trim, call))


def _then_trim(call: Callable[[], T]) -> T:
    """The allocator would keep what a huge text has taken."""
    try:
        return call()
    finally:
        release_heap()


async def check_text_length(context: SharedContext, text: str, param: str) -> None:
    """Raises `ContextLengthExceeded` for a text that cannot fit the context, without tokenizing all of it."""
    if len(text) < LONG_TEXT:
        return
    limit = context.max_model_len
    beginning = await run_on_text(context, lambda: context.tokenizer.beginning(text, limit), min(len(text), CHARS_PER_TOKEN * limit))
    if len(beginning) < len(text):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, the first {len(beginning)} of your prompt's "
            f"{len(text)} characters are more than that. Please shorten it.",
            param,
        )


def check_prompt_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, and for an id that is not in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt holds no tokens", param)
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)
