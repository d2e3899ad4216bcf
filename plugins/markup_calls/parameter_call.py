"""One call that is made of named parameters, written out as the JSON object of its arguments while they arrive."""

from penstock.plugins.schema_values import TextValue, quoted


class ParameterCall:
    """Collects the pieces of the object. A parameter that comes again is passed over: the first may have been given out already."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._pieces: list[str] = []
        self._name = ""
        self._is_written = False  # the name of the parameter that is open
        self.value: TextValue | None = None

    @property
    def names(self) -> frozenset[str]:
        """The parameters that have been opened."""
        return frozenset(self._names)

    def open(self, name: str, value: TextValue) -> None:
        """A parameter begins."""
        self._name = name
        self._is_written = False
        self.value = value

    def feed(self, text: str) -> None:
        """More of the open parameter's value."""
        assert self.value is not None
        self._write(self.value.feed(text))

    def end(self) -> None:
        """The open parameter's value is complete."""
        assert self.value is not None
        self._write(self.value.finish())
        self.drop()

    def drop(self) -> None:
        """The open parameter is over."""
        self._names.add(self._name)
        self.value = None

    def add(self, name: str, json_text: str) -> None:
        """A whole parameter."""
        self.open(name, TextValue(None))
        self._write(json_text)
        self.drop()

    def write(self, json_text: str) -> None:
        """More of arguments that are one JSON object by themselves."""
        if json_text:
            self._pieces.append(json_text)

    def close(self) -> None:
        """The call is complete."""
        self._pieces.append("}" if self._names else "{}")

    def cut(self) -> None:
        """The call ends inside a parameter: what has come of it is kept, and nothing is closed."""
        if self.value is not None:
            self._write(self.value.cut())

    def take(self) -> str:
        """What has come since the last call of this."""
        fragment = "".join(self._pieces)
        self._pieces.clear()
        return fragment

    def _write(self, json_text: str) -> None:
        if not json_text or self._name in self._names:
            return
        if not self._is_written:
            self._is_written = True
            self._pieces.append(f"{', ' if self._names else '{'}{quoted(self._name)}: ")
        self._pieces.append(json_text)
