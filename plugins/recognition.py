"""Which format a model writes, told from its own chat templates and added tokens: what `--plugin auto` goes by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.engine.format_info import FormatInfo


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a model's files say of the formats that it writes: the source of its chat templates, and its added tokens.

    `declared_fields` are those that its `response_template` describes, where it has one.
    """

    templates: tuple[str, ...] = ()
    added_tokens: frozenset[str] = frozenset()
    declared_fields: frozenset[str] = frozenset()

    def shows(self, sign: str) -> bool:
        """An added token is a sign as a whole; in a template it may stand anywhere."""
        return sign in self.added_tokens or any(sign in template for template in self.templates)


def recognize(infos: Mapping[str, FormatInfo], evidence: Evidence) -> str | None:
    """The name whose format fits best by the rule of `FormatInfo`; None where none fits."""
    fitting = [(name, info) for name, info in infos.items() if fits(info, evidence)]
    if fitting:
        return max(fitting, key=lambda item: (len(item[1].signs), _length(item[1].signs), item[0]))[0]
    return next((name for name, info in infos.items() if evidence.declared_fields.intersection(info.declared_fields)), None)


def fits(info: FormatInfo, evidence: Evidence) -> bool:
    """All signs are there, of which there is one at least, and no counter-sign."""
    return bool(info.signs) and all(map(evidence.shows, info.signs)) and not any(map(evidence.shows, info.counter_signs))


def _length(signs: Iterable[str]) -> int:
    return sum(map(len, signs))
