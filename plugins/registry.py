"""The registry of one kind of plug-in: names, aliases, and the one in use, chosen by the operator or from a model's files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.engine.contracts.parsing import FormatInfo
from penstock.engine.errors import ConfigurationError

AUTO = "auto"
NONE = "none"

Factory = TypeVar("Factory")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a model's files say of the formats that it writes: the source of its chat templates, and its added tokens.

    `declared_fields` are those that its `response_template` describes, if it has one.
    """

    templates: tuple[str, ...] = ()
    added_tokens: frozenset[str] = frozenset()
    declared_fields: frozenset[str] = frozenset()

    def shows(self, sign: str) -> bool:
        """An added token is a sign as a whole; in a template it may occur anywhere."""
        return sign in self.added_tokens or any(sign in template for template in self.templates)


class Registry(Mapping[str, Factory]):
    """Factories by name, in the order in which they were registered.

    `origins` has the plug-in that registered each name, `infos` the descriptions of formats, and `aliases` names that stand for others. If
    `is_choice`, at most one of them, `active`, reads an answer. While `is_open`, the model's own files choose it (`choose`), and then it
    `is_automatic`; if they show none, it is the default, and `is_default`.
    """

    def __init__(self, kind: str, hook: str, *, is_choice: bool = False) -> None:
        self.kind = kind
        self.hook = hook
        self.is_choice = is_choice
        self.origins: dict[str, str] = {}
        self.infos: dict[str, FormatInfo] = {}
        self.aliases: dict[str, str] = {}
        self.active: str | None = None
        self.is_open = is_choice
        self.is_automatic = False
        self.is_default = False
        self._factories: dict[str, Factory] = {}
        self._undecided: dict[str, list[str]] = {}  # plug-ins that were activated and offer several

    def __getitem__(self, name: str) -> Factory:
        return self._factories[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __len__(self) -> int:
        return len(self._factories)

    @property
    def active_factory(self) -> Factory | None:
        return None if self.active is None else self._factories[self.active]

    def add(self, name: str, plugin: str, factory: Factory, info: FormatInfo | None = None) -> None:
        assert self.resolve(name) is None
        self._factories[name] = factory
        self.origins[name] = plugin
        if info is not None:
            self.infos[name] = info
            self.aliases.update(dict.fromkeys(info.aliases, name))

    def resolve(self, name: str) -> str | None:
        """The registered name for a name or an alias."""
        return name if name in self._factories else self.aliases.get(name)

    def activate(self, name: str) -> None:
        """Selects a name. Raises `ConfigurationError` where another is selected already."""
        if not self.is_choice or self.active == name:
            return
        assert not self.is_automatic, "the model decided already"
        if self.active is not None:
            raise ConfigurationError(
                f"two {self.kind}s cannot be active at once: {self.active!r} of plug-in {self.origins[self.active]!r} "
                f"and {name!r} of plug-in {self.origins[name]!r}"
            )
        self.active = name
        self.is_open = False

    def choose(self, evidence: Evidence, default: str | None = None) -> None:
        """Selects what a model's own files show, else the default if given, unless the operator has decided."""
        if self.is_open:
            self.active = recognize(self.infos, evidence)
            if self.active is None and default in self._factories:
                self.active, self.is_default = default, True
            self.is_automatic = True
            self.is_open = False

    def spellings(self, name: str) -> list[str]:
        """The aliases of a name."""
        return [alias for alias, known in self.aliases.items() if known == name]

    def activate_plugin(self, plugin: str) -> None:
        """Selects what a plug-in registered; if it registered several factories, a name has to be given as well."""
        names = [name for name, origin in self.origins.items() if origin == plugin]
        if len({id(self._factories[name]) for name in names}) > 1:
            self._undecided[plugin] = names
        elif names:
            self.activate(names[0])

    def check(self) -> None:
        """Raises `ConfigurationError` if an activated plug-in offers several of this kind and none of them was chosen."""
        for plugin, names in self._undecided.items():
            if self.is_choice and self.active not in names:
                raise ConfigurationError(
                    f"plug-in {plugin!r} has several {self.kind}s: choose one with `--plugin NAME`, which is one of {', '.join(names)}"
                )


def recognize(infos: Mapping[str, FormatInfo], evidence: Evidence) -> str | None:
    """The name whose format fits best by the rule of `FormatInfo`; None where none fits."""
    shown = [(signs, name) for name, info in infos.items() for signs in signs_shown(info, evidence)]
    if shown:
        return max(shown, key=lambda fit: (len(fit[0]), sum(map(len, fit[0])), fit[1]))[1]
    return next((name for name, info in infos.items() if evidence.declared_fields.intersection(info.declared_fields)), None)


def signs_shown(info: FormatInfo, evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Its sets of signs that are all present; nothing if a counter-sign is."""
    if any(map(evidence.shows, info.counter_signs)):
        return
    for signs in (info.signs, *info.other_signs):
        if signs and all(map(evidence.shows, signs)):
            yield signs
