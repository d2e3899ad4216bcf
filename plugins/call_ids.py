"""Ids of tool calls, for formats that have none of their own."""

import secrets


def new_call_id() -> str:
    """A fresh id, as OpenAI writes them: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"
