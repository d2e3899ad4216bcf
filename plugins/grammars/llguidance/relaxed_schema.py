"""JSON Schemas that cannot be enforced whole: without the keywords that stand in the way, each of them named."""

import copy
from collections.abc import Callable
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarSpec
from penstock.plugins.grammars.json_schema.json_document import parse_document
from penstock.plugins.grammars.json_schema.left_out import MAX_WARNINGS, left_out
from penstock.plugins.grammars.json_schema.schema_faults import Fault, as_written, find_fault
from penstock.plugins.grammars.json_schema.schema_walk import Steps, at, path, walk
from penstock.plugins.grammars.llguidance.exact_schema import ExactSchema

MAX_ROUNDS = 32

# Known keywords that llguidance compiles in no case.
_NEVER_ENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)

# Those that it compiles in some cases, and whose absence only allows more.
_SOMETIMES_ENFORCED = frozenset(
    {"format", "pattern", "patternProperties", "minProperties", "maxProperties", "multipleOf", "oneOf", "allOf", "const", "enum"}
)

_MISTAKES = ("Expected", "must be", "Unsatisfiable")


def refusal(fault: Fault, schema: ExactSchema, spec: GrammarSpec) -> UnsupportedGrammar:
    """Names the keyword and its path, as the client has them."""
    fault = _as_client_has_it(fault, schema, parse_document(spec.text, spec.param))
    if fault.keyword is None:
        return UnsupportedGrammar(f"the schema: {fault.message}", spec.param + path(fault.steps))
    message = fault.message if fault.message.startswith(f"`{fault.keyword}`") else f"`{fault.keyword}`: {fault.message}"
    return UnsupportedGrammar(message, spec.param + path((*fault.steps, fault.keyword)))


def relaxed(schema: ExactSchema, error_of: Callable[[Any], str | None], spec: GrammarSpec) -> tuple[Any, tuple[str, ...]]:
    """What the schema holds less what cannot be enforced, and the names of that. Unchanged where all of it can be.

    Raises `UnsupportedGrammar` for a malformed schema and for what cannot be left out.
    """
    if error_of(schema.content) is None:
        return schema.content, ()
    content = copy.deepcopy(schema.content)
    dropped = [Fault(steps, keyword, "") for steps, keyword in _without_never_enforced(content)]
    for _ in range(MAX_ROUNDS):
        fault = find_fault(content, error_of)
        if fault is None:
            document = parse_document(spec.text, spec.param)
            return content, tuple(_warning(fault, schema, document, spec.param) for fault in dropped[:MAX_WARNINGS])
        dropped.append(_drop(content, fault, schema, spec))
    raise UnsupportedGrammar(f"more than {MAX_ROUNDS} keywords cannot be enforced", spec.param)


def _warning(fault: Fault, schema: ExactSchema, document: Any, param: str) -> str:
    written = _as_client_has_it(fault, schema, document)
    keyword = written.keyword or fault.keyword
    return left_out(str(keyword), param + path((*written.steps, str(keyword))))


def _as_client_has_it(fault: Fault, schema: ExactSchema, document: Any) -> Fault:
    return as_written(Fault(schema.origin(fault.steps), fault.keyword, fault.message), document)


def _without_never_enforced(schema: Any) -> list[tuple[Steps, str]]:
    dropped = []
    for steps, current in walk(schema):
        for keyword in [keyword for keyword in current if keyword in _NEVER_ENFORCED]:
            del current[keyword]
            dropped.append((steps, keyword))
    return dropped


def _drop(content: Any, fault: Fault, schema: ExactSchema, spec: GrammarSpec) -> Fault:
    if fault.keyword not in _SOMETIMES_ENFORCED or any(word in fault.message for word in _MISTAKES):
        raise refusal(fault, schema, spec)
    current = at(content, fault.steps)
    value = current[fault.keyword]
    if fault.keyword == "oneOf" and isinstance(value, list):
        # In its place: members keep their order, which decides the order of properties.
        relaxed_members = {}
        for name, member in current.items():
            relaxed_members["anyOf" if name == "oneOf" else name] = member
        if "anyOf" in current:
            relaxed_members["anyOf"] = current["anyOf"]
            relaxed_members["allOf"] = [*current.get("allOf", []), {"anyOf": value}]
        current.clear()
        current.update(relaxed_members)
    else:
        del current[fault.keyword]
        if fault.keyword == "patternProperties":
            current.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do
    return fault
