"""Where an answer starts: read from the rendered prompt, never from request fields alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.parsing import Phase


@dataclass(frozen=True, slots=True)
class Turn:
    """What a parser may know about the answer that it is about to read.

    `prompt_tail` is the rendered prompt after the last assistant header: `"<think>\\n"`, `"<think>\\n\\n</think>\\n\\n"` or `""`, and with
    `continue_final_message` the text that is being continued. `added_tokens` are the texts that the vocabulary holds as single tokens.
    `tools` are the request's tools as JSON; `tool_choice` is `"auto"`, `"none"`, `"required"` or a tool's name.
    """

    prompt_tail: str = ""
    added_tokens: frozenset[str] = frozenset()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "none"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def phase(self, start_marker: str, end_marker: str) -> Phase:
        """REASONING where the last marker in the tail is `start_marker`, CONTENT where it is `end_marker`, UNDECIDED with neither."""
        start = self.prompt_tail.rfind(start_marker)
        end = self.prompt_tail.rfind(end_marker)
        if start == end:
            return Phase.UNDECIDED
        return Phase.REASONING if start > end else Phase.CONTENT
