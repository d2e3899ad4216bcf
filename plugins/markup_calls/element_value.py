"""One value of an argument that is written as an element: text, or elements inside it."""

from penstock.plugins.schema_types import SchemaNode
from penstock.plugins.schema_values import TextValue, quoted

ITEM = "item"

_CONTAINERS = frozenset({"object", "array"})


class Element:
    """The elements inside an array are called `item`; in an object, a name that comes again makes an array of its values.

    Text is coerced by the schema; text beside elements is passed over.
    """

    def __init__(self, name: str, node: SchemaNode) -> None:
        self.name = name
        self._node = node
        self._types = node.types
        self._text = TextValue(self._types)
        self._json: list[str] = []
        self._raw: list[str] = []
        self._children: dict[str, list[str]] = {}

    @property
    def is_text(self) -> bool:
        """By its schema nothing else may be inside."""
        return self._types is not None and not self._types & _CONTAINERS

    @property
    def names(self) -> frozenset[str]:
        """Of the elements that its schema describes."""
        return self._node.names

    @property
    def is_in_json_string(self) -> bool:
        return self._text.is_in_json_string

    def feed(self, text: str) -> None:
        self._json.append(self._text.feed(text))
        if not self.is_text:
            self._raw.append(text)

    def take(self) -> str:
        """What is certain of text."""
        written = "".join(self._json) if self.is_text else ""
        if written:
            self._json.clear()
        return written

    def child(self, name: str) -> "Element":
        is_item = name == ITEM and self._types is not None and "array" in self._types
        return Element(name, self._node.item if is_item else self._node.member(name))

    def may_hold(self, name: str) -> bool:
        """As far as its schema tells."""
        if self._types == frozenset({"array"}):
            return name == ITEM
        return not self.names or name in self.names

    def add(self, name: str, json_text: str) -> None:
        """A child that is complete."""
        self._children.setdefault(name, []).append(json_text)

    def finish(self) -> str:
        """The rest of the value's JSON."""
        types = self._types or frozenset()
        if not self._children:
            if types and types <= _CONTAINERS and not "".join(self._raw).strip():
                return "[]" if "array" in types else "{}"
            return "".join([*self._json, self._text.finish()])
        items = self._children.get(ITEM, [])
        if len(self._children) == 1 and items and ("array" in types or "object" not in types):
            return f"[{', '.join(items)}]"
        members = (f"{quoted(name)}: {_one_or_all(values)}" for name, values in self._children.items())
        return "{" + ", ".join(members) + "}"

    def cut(self, name: str = "", json_text: str = "") -> str:
        """The rest as far as it came, with what came of the child that is open."""
        if not self._children and not name:
            return "".join([*self._json, self._text.cut()])
        types = self._types or frozenset()
        names = self._children.keys() | {name} - {""}
        if names == {ITEM} and ("array" in types or "object" not in types):
            return f"[{', '.join([*self._children.get(ITEM, []), *([json_text] if name else [])])}"
        members = [f"{quoted(key)}: {_one_or_all(values)}" for key, values in self._children.items() if key != name]
        if name:
            values = self._children.get(name, [])
            members.append(f"{quoted(name)}: {'[' if values else ''}{', '.join([*values, json_text])}")
        return "{" + ", ".join(members)


def _one_or_all(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
