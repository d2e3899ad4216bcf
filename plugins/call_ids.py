"""Ids of tool calls, for formats that have none of their own."""

import secrets
import string


def new_call_id() -> str:
    """A fresh id, as OpenAI writes them: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A fresh id, as Mistral's templates ask for them: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
