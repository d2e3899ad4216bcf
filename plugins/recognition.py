"""Which format a model writes, told from its own chat templates and added tokens: what `--plugin auto` goes by."""

from collections.abc import Iterator, Mapping
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
    shown = [(signs, name) for name, info in infos.items() for signs in signs_shown(info, evidence)]
    if shown:
        return max(shown, key=lambda fit: (len(fit[0]), sum(map(len, fit[0])), fit[1]))[1]
    return next((name for name, info in infos.items() if evidence.declared_fields.intersection(info.declared_fields)), None)


def signs_shown(info: FormatInfo, evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Those of its sets of signs that are all there, where no counter-sign is."""
    if any(map(evidence.shows, info.counter_signs)):
        return
    for signs in (info.signs, *info.other_signs):
        if signs and all(map(evidence.shows, signs)):
            yield signs
