"""Grammars as requests write them: which dialect, by what is said or by what the text itself shows."""

import re

from penstock.api.common_protocol import GrammarDefinition
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.grammars.grammar_limits import MAX_GRAMMAR

KINDS = {"lark": GrammarKind.LARK, "gbnf": GrammarKind.GBNF, "ebnf": GrammarKind.GBNF}
# Both dialects begin each rule on a line of its own. Lark's names may have a modifier, a priority, attributes or parameters.
RULE = re.compile(r"^[ \t]*[?!]{0,2}([A-Za-z_][\w-]*)(?:\.-?\d+|\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*(::=|:)", re.MULTILINE)


def grammar_of(source: str | GrammarDefinition, param: str) -> GrammarSpec:
    """The grammar in the dialect that is stated, or that its text leaves no doubt about. Raises `InvalidRequest` where it does."""
    if isinstance(source, str):
        return GrammarSpec(detected_kind(source, param), source, param)
    return GrammarSpec(KINDS[source.syntax], source.definition, f"{param}.definition")


def detected_kind(text: str, param: str) -> GrammarKind:
    """GBNF where every rule is defined by `::=` and one is `root`, Lark where each is by `:` and one is `start`."""
    if len(text) > MAX_GRAMMAR:  # which would be refused later, and here is the event loop
        raise InvalidRequest(f"a grammar of more than {MAX_GRAMMAR} characters is refused", param)
    operators: set[str] = set()
    names: set[str] = set()
    for rule in RULE.finditer(text):
        names.add(rule[1])
        operators.add(rule[2])
    if operators == {"::="} and "root" in names:
        return GrammarKind.GBNF
    if operators == {":"} and "start" in names:
        return GrammarKind.LARK
    raise InvalidRequest(
        f"`{param}` is neither clearly GBNF (rules with `::=`, one of them `root`) nor clearly Lark (rules with `:`, one of them `start`): "
        'say which, as {"syntax": "gbnf" or "lark", "definition": ...}',
        param,
    )
