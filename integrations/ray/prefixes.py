"""What a router knows of a prompt: the hashes of its beginnings.

Serve pickles the router's module by value. A class of that module would be another in the router than in the ingress, so these
have a module of their own.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.serving.routing import prefix_hashes


class PromptFields(msgspec.Struct):
    """The fields of any body of the API that a prompt is made of, in the order in which templates have them, and the model's name."""

    model: str | msgspec.Raw = ""
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @classmethod
    def of(cls, body: bytes) -> "PromptFields":
        """Without any where the body is not JSON: its error is the replica's to report."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return cls()

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else ""

    def prefixes(self) -> "Prefixes":
        text = b"".join((self.tools, self.system, self.instructions, self.messages, self.prompt, self.input))
        return Prefixes(prefix_hashes(text, salt=self.model_name))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The `prefix_hashes` of a prompt, for the router of the handle that gets them as an argument. No other process can use them."""

    hashes: tuple[int, ...] = ()

    def __reduce__(self) -> Any:
        return (Prefixes, ())
