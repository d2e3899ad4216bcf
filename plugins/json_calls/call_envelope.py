"""What stands around tool calls in a wire format."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnvelope:
    """The markers of a format; white space between them is part of it.

    A call begins after one of `openings`, which may stand alone or first in one of `sections`. After a call, `closings` may follow, in this
    order and each at most once, and then the next call. `separators` stand between calls that have no opening of their own.

    With `is_array`, `openings` are followed by an array of calls; where `may_be_array`, by one call or by an array. `bare` are texts with
    which calls begin that have no opening at all: the first character of an array or of an object, and what more it takes to tell it from
    prose. `first` are such texts that count only where the answer begins, and `following` those that count only after another call.
    """

    openings: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    following: tuple[str, ...] = ()
    is_array: bool = False
    may_be_array: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return (*self.sections, *self.openings, *self.bare)

    @property
    def starts_of_answer(self) -> tuple[str, ...]:
        return (*self.starts, *self.first)

    @property
    def starts_after_call(self) -> tuple[str, ...]:
        return (*self.starts, *self.following)

    def is_bare(self, start: str) -> bool:
        """Whether a call or an array begins with this itself."""
        return start in (*self.bare, *self.first, *self.following)
