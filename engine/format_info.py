"""What a wire format is known by: to people, to clients of other servers, and to `--plugin auto`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock.engine.parsing import Parser
from penstock.engine.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Comes with a parser's factory when that is registered; docs/parsers.md is made of these.

    `models` are the families that write the format, `markers` what they write, `quirks` what else a reader should know, in a sentence.
    `aliases` are the names by which other servers' users know the parser.

    `signs` are texts that a model's own chat template or added tokens hold, all of them, where it writes this format; none of the
    `counter_signs` may be there. `other_signs` are further sets, each of which tells as much as `signs` do, for models whose template and
    whose tokens show different things. Of several parsers that fit, `--plugin auto` takes the one with the most signs, and of these the
    one whose signs are longest. Where none fits, it takes one of whose `declared_fields` the checkpoint's own `response_template`
    describes any. Without either a parser is never chosen automatically.

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
