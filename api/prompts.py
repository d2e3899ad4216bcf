"""Prompts as token ids."""

from penstock.api.context import ServerContext
from penstock.api.workers import run
from penstock.engine.errors import InvalidRequest

LONG_TEXT = 2**12  # characters; tokenizing less takes a millisecond or two


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
