"""White space at the ends of a stretch of text, held until it is known whether it belongs to the markers around it."""

from penstock.engine.events import SpecialText

_SPACE = " \t\r\n"


class EdgeSpace:
    """Gives text out without the white space before it, where `drops_leading`, and holds back what may be that at its end."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._has_text = False

    def take(self, pieces: list[str], *, drops_leading: bool) -> list[str]:
        """What of the stretch so far is certain."""
        certain: list[str] = []
        for piece in pieces:
            text = piece if isinstance(piece, SpecialText) else piece.rstrip(_SPACE)
            space = piece[len(text) :]
            if text and drops_leading and not self._has_text:
                self._held.clear()
                text = text if isinstance(text, SpecialText) else text.lstrip(_SPACE)
            if text:
                certain += [*self._held, text]
                self._held.clear()
                self._has_text = True
            if space:
                self._held.append(space)
        return certain

    def end(self, *, drops_trailing: bool) -> list[str]:
        """A marker ends the stretch: what of the held white space is text. It never is where there is nothing else."""
        kept = [] if drops_trailing or not self._has_text else self._held
        self._held = []
        self._has_text = False
        return kept

    def finish(self) -> list[str]:
        """All that is held."""
        held, self._held = self._held, []
        return held
