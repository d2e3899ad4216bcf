"""Where an answer starts: read from the rendered prompt, never from request fields alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.parsing import Phase


@dataclass(frozen=True, slots=True)
class Turn:
    """What a parser may know about the answer it will read.

    `prompt_tail` is the rendered prompt after the last assistant header: `"<think>\\n"`, `"<think>\\n\\n</think>\\n\\n"` or `""`, and with
    `continue_final_message` the text that is being continued. That text is `continued`, as the client wrote it: a template may leave its
    reasoning out of the prompt. `added_tokens` are the texts that the vocabulary holds as single tokens.
    `tools` are the request's tools as JSON; `tool_choice` is `"auto"`, `"none"`, `"required"` or a tool's name. `response_template` is
    that of the checkpoint's tokenizer config, if it has one. If the answer `is_constrained`, a grammar applies to everything after the
    reasoning: once that has ended, nothing may be read as reasoning again.
    """

    prompt_tail: str = ""
    added_tokens: frozenset[str] = frozenset()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "none"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_template: Mapping[str, Any] | None = None
    continued: str = ""
    is_constrained: bool = False

    def phase(self, starts: str | Sequence[str], ends: str | Sequence[str], boundaries: Sequence[str] = ()) -> Phase:
        """REASONING where the last marker in the tail is one of `starts`, CONTENT where it is one of `ends`, UNDECIDED with neither.

        Markers before the last of `boundaries` belong to an earlier turn and are ignored. Without markers, the continuation of
        non-empty content is CONTENT.
        """
        for text in (self.prompt_tail, self.continued):
            boundary = _last(text, boundaries)
            start = _last(text, (starts,) if isinstance(starts, str) else starts)
            end = _last(text, (ends,) if isinstance(ends, str) else ends)
            if max(start, end) > boundary:
                return Phase.REASONING if start > end else Phase.CONTENT
        return Phase.CONTENT if self.continued.strip() else Phase.UNDECIDED


def _last(text: str, markers: Sequence[str]) -> int:
    return max((text.rfind(marker) for marker in markers), default=-1)
