"""References that no finite value satisfies, because what they require leads back to them."""

from typing import Any

from penstock.plugins.grammars.json_schema.schema_walk import Steps, walk

_DEFINITION = "#/$defs/"
MAX_ROUNDS = 8  # of looking through all definitions; what takes more is left to be found while it is generated
_DEMANDING = frozenset({"$ref", "allOf", "anyOf", "required", "minItems"})
_OTHER_TYPES = frozenset({"null", "boolean", "integer", "number", "string"})  # whose values hold no others
_HOLDING_OTHERS = ("object", "array")


def without_endless(content: dict[str, Any]) -> Steps | None:
    """Lets no value satisfy the references in `content` that none can: a member that may be left out always is, then.

    Where that leaves the whole without a value, the place of a reference to blame. Definitions are looked for in `$defs` only.
    """
    search = _Search(content)
    if not search.endless:
        return None
    if "#" in search.endless:
        return search.blamed(content, ())
    for _, schema in list(walk(content)):
        if schema.get("$ref") in search.endless:
            del schema["$ref"]
            schema["enum"] = []
    return None


class _Search:
    def __init__(self, content: dict[str, Any]) -> None:
        targets = {"#": content, **{_DEFINITION + name: schema for name, schema in content.get("$defs", {}).items()}}
        self.endless = set(targets)
        order = [*reversed(targets)]  # what is referred to mostly stands behind what refers to it
        for _ in range(MAX_ROUNDS):
            ended = [reference for reference in order if reference in self.endless and self._ends(reference, targets[reference])]
            if not ended:
                return
        self.endless.clear()

    def _ends(self, reference: str, target: Any) -> bool:
        has_end = self.has_end(target)
        if has_end:
            self.endless.discard(reference)
        return has_end

    def has_end(self, schema: Any) -> bool:
        """Whether a value may satisfy it, where none does what is still taken for endless. Bounds and the like are not looked at."""
        if not isinstance(schema, dict):
            return schema is not False
        if _DEMANDING.isdisjoint(schema) and schema.get("type") != []:
            return True
        reference, parts, options = schema.get("$ref"), schema.get("allOf"), schema.get("anyOf")
        if isinstance(reference, str) and reference in self.endless:
            return False
        if isinstance(parts, list) and not all(map(self.has_end, parts)):
            return False
        if isinstance(options, list) and options and not any(map(self.has_end, options)):
            return False
        types = schema.get("type")
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list) or not _OTHER_TYPES.isdisjoint(names):
            return True
        return any(name not in _HOLDING_OTHERS or self._has_ends(schema, name) for name in names)

    def _has_ends(self, schema: dict[str, Any], name: str) -> bool:
        demanded = self.demanded_members(schema) if name == "object" else self.demanded_items(schema)
        return all(self.has_end(child) for _, child in demanded)

    def demanded_members(self, schema: dict[str, Any]) -> list[tuple[Steps, Any]]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return []
        return [(("properties", name), properties[name]) for name in required if isinstance(name, str) and name in properties]

    def demanded_items(self, schema: dict[str, Any]) -> list[tuple[Steps, Any]]:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        items = schema.get("items", True)
        if not isinstance(least, int) or not isinstance(first, list) or isinstance(items, list):
            return []
        demanded: list[tuple[Steps, Any]] = [(("prefixItems", place), child) for place, child in enumerate(first[:least])]
        return [*demanded, (("items",), items)] if least > len(first) else demanded

    def blamed(self, schema: Any, steps: Steps) -> Steps:
        if not isinstance(schema, dict):
            return steps
        if schema.get("$ref") in self.endless:
            return (*steps, "$ref")
        joined = schema.get("allOf", [])
        parts: list[tuple[Steps, Any]] = [(("allOf", place), part) for place, part in enumerate(joined if isinstance(joined, list) else ())]
        for below, child in [*parts, *self.demanded_members(schema), *self.demanded_items(schema)]:
            if not self.has_end(child):
                return self.blamed(child, steps + below)
        return (*steps, "anyOf") if "anyOf" in schema else steps
