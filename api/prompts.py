"""From a request's bytes to a decoded body, and from its text to token ids, with the event loop kept free."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from aiohttp import web

from penstock.api.context import CONTEXT, ServerContext
from penstock.api.decoding import decode
from penstock.engine.errors import InvalidRequest, NoSuchModel

T = TypeVar("T")

LONG_BODY = 2**16  # bytes; decoding less takes under a millisecond
LONG_TEXT = 2**12  # characters; tokenizing less takes a millisecond or two
MANY = 500  # messages and tools, or prompts
MAX_HEADER = 1000


async def run(context: ServerContext, call: Callable[[], T], *, is_long: bool) -> T:
    """Calls it here where that is quick, in a worker where it would hold up the event loop and with it every stream."""
    return await asyncio.get_running_loop().run_in_executor(context.workers, call) if is_long else call()


async def read_body(request: web.Request, kind: type[T]) -> tuple[T, dict[str, str]]:
    """The decoded body, and the response headers that it calls for.

    Raises `InvalidRequest` for whatever is wrong with it, and aiohttp's own 413 where it is too large.
    """
    context = request.app[CONTEXT]
    data = await request.read()
    allow = context.options.allow_unknown_fields
    is_long = len(data) >= LONG_BODY
    body, ignored = await run(context, lambda: decode(data, kind, allow_unknown_fields=allow), is_long=is_long)
    return body, ignored_fields_header(ignored)


def ignored_fields_header(names: tuple[str, ...]) -> dict[str, str]:
    """Names come from the client: whatever could break out of a header is percent-encoded."""
    return {"x-ignored-fields": quote(", ".join(names), safe=" ,.[]")[:MAX_HEADER]} if names else {}


def served_model(context: ServerContext, name: str | None) -> str:
    """The name to answer with. Raises `NoSuchModel` where nothing is served under the one asked for."""
    if name is None or name == "":
        return context.model_names[0]
    if name not in context.model_names:
        raise NoSuchModel(f"The model `{name}` does not exist. Served here: {', '.join(context.model_names)}.", "model")
    return name


async def encode_text(context: ServerContext, text: str, *, add_special_tokens: bool) -> list[int]:
    is_long = len(text) >= LONG_TEXT
    return await run(context, lambda: context.tokenizer.encode(text, add_special_tokens=add_special_tokens), is_long=is_long)


def check_prompt_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, and for an id that is not in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt holds no tokens", param)
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)
