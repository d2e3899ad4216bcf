"""The description of a wire format: for docs, for names from other servers, and for `--plugin auto`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock.engine.parsing import Parser
from penstock.engine.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Registered with a parser's factory; docs/parsers.md is generated from these.

    `models` are the families that write the format, `markers` its markers, `quirks` anything else worth knowing, in a sentence.
    `aliases` are the parser's names in other servers.

    `signs` are texts that a model's own chat template or added tokens hold, all of them, where it writes this format; none of the
    `counter_signs` may be there. `other_signs` are further sets, each of which suffices like `signs`, for models whose template and
    tokens differ. Of several parsers that fit, `--plugin auto` takes the one with the most signs, and of these the
    one whose signs are longest. Where none fits, it takes one of whose `declared_fields` the checkpoint's own `response_template`
    describes any. A parser with neither is never chosen automatically.

    `prompt_tail` is how these models' prompts end after the last assistant header, with thinking on where it can be switched: what
    `penstock parse` assumes without `--prompt-tail`. `example` is a short, complete answer in the format; that of a tool parser calls the
    tool `weather` with the argument `city`, a string that is `Oslo`.
    """

    models: str
    markers: tuple[str, ...]
    quirks: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    other_signs: tuple[tuple[str, ...], ...] = ()
    counter_signs: tuple[str, ...] = ()
    declared_fields: tuple[str, ...] = ()
    prompt_tail: str = ""
    example: str = ""


class Format(ABC):
    """A format that is a declaration: registered in place of a factory, it makes the parsers and describes itself."""

    __slots__ = ()

    @property
    @abstractmethod
    def info(self) -> FormatInfo: ...

    @abstractmethod
    def __call__(self, turn: Turn) -> Parser:
        """The parser of one answer."""
