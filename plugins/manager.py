"""Loads plug-ins, built in, installed or named on the command line; the registry of each kind: names, aliases, and the one in use."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, packages_distributions, version
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import pluggy

from penstock import __version__
from penstock.engine.contracts import hooks
from penstock.engine.contracts.logits_processor import LogitsProcessor, as_processor
from penstock.engine.contracts.parsing import Format, FormatInfo, ReasoningParser, ToolParser, Turn
from penstock.engine.errors import ConfigurationError

AUTO = "auto"
NONE = "none"

Factory = TypeVar("Factory")
GROUP = "penstock"
MIN_BEGINNING = 4  # letters: a shorter common beginning does not make names similar
DEFAULT_TOOL_PARSER = "hermes"
RESERVED_PROPOSERS = ("draft", "prediction")  # of --draft-model, and of requests
BUILT_INS = (
    "penstock.plugins.tools.code_formats",
    "penstock.plugins.tools.json_formats",
    "penstock.plugins.harmony",
    "penstock.plugins.reasoning.formats",
    "penstock.plugins.decoding",
    "penstock.plugins.response_templates.parsers",
    "penstock.plugins.grammars.llguidance.backend",
    "penstock.plugins.grammars.outlines_core.backend",
)


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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plug-in comes from. A file and a module outside any distribution have neither distribution nor version."""

    plugin: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.plugin!r} of {self.distribution} {self.version}" if self.distribution else f"{self.plugin!r}"


@dataclass(frozen=True, slots=True)
class Listing:
    """One row of `penstock plugins`."""

    kind: str
    name: str
    plugin: str
    distribution: str | None
    version: str | None
    is_active: bool
    aliases: tuple[str, ...] = ()


class PluginFlags(Protocol):
    """What flags say of plug-ins: `--plugin`, `--without`, `--reasoning-parser` and `--tool-parser`."""

    @property
    def plugins(self) -> Sequence[str]: ...
    @property
    def without(self) -> Sequence[str]: ...
    @property
    def reasoning_parser(self) -> str: ...
    @property
    def tool_parser(self) -> str: ...


class Plugins:
    """Everything that plug-ins have registered, by kind and name.

    The constructor loads nothing: call `load_builtins`, `load_entry_points` and `load`, in this order, and `check` at the end, or use
    `start`. Every mistake is a `ConfigurationError` that names the plug-in. `without` drops plug-ins and single names, but never
    those of a file or module that `load` was asked for.
    """

    def __init__(self, without: Iterable[str] = ()) -> None:
        self.reasoning_parsers = Registry[hooks.ReasoningParserFactory]("reasoning parser", "register_reasoning_parsers", is_choice=True)
        self.tool_parsers = Registry[hooks.ToolParserFactory]("tool parser", "register_tool_parsers", is_choice=True)
        self.logits_processors = Registry[LogitsProcessor]("logits processor", "register_logits_processors")
        self.grammar_backends = Registry[hooks.GrammarBackendFactory]("grammar backend", "register_grammar_backends")
        self.proposers = Registry[hooks.ProposerFactory]("proposer", "register_proposers")
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hooks)
        self._origins: dict[str, Origin] = {}
        self._without = frozenset(without)
        self._dropped: set[str] = set()
        self._asked_for: set[str] = set()  # files and modules: their names are never dropped

    @classmethod
    def start(
        cls, names: Sequence[str] = (), without: Sequence[str] = (), *, reasoning_parser: str = AUTO, tool_parser: str = AUTO
    ) -> "Plugins":
        """Loads the built-ins, the installed plug-ins, and `names` in their order; then checks.

        `names` may hold `auto`, the default, or `none`: then only the parsers that are named are used. `reasoning_parser` and
        `tool_parser` are one name of their kind, `auto` or `none`.
        """
        plugins = cls(without)
        plugins.load_builtins()
        plugins.load_entry_points()
        if AUTO in names and NONE in names:
            raise ConfigurationError(f"`--plugin {AUTO}` and `--plugin {NONE}` contradict each other")
        for name in names:
            if name not in (AUTO, NONE):
                plugins.load(name)
        plugins.select(plugins.reasoning_parsers, "--reasoning-parser", reasoning_parser)
        plugins.select(plugins.tool_parsers, "--tool-parser", tool_parser)
        if NONE in names:
            plugins.reasoning_parsers.is_open = plugins.tool_parsers.is_open = False
        plugins.check()
        return plugins

    @classmethod
    def asked_for(cls, flags: PluginFlags) -> "Plugins":
        """As `start`, by the flags of a command line or of a configuration."""
        return cls.start(flags.plugins, flags.without, reasoning_parser=flags.reasoning_parser, tool_parser=flags.tool_parser)

    @property
    def registries(self) -> tuple[Registry[Any], ...]:
        return (self.reasoning_parsers, self.tool_parsers, self.logits_processors, self.grammar_backends, self.proposers)

    @property
    def reasoning_parser(self) -> hooks.ReasoningParserFactory | None:
        """The one that `--plugin` selected."""
        return self.reasoning_parsers.active_factory

    @property
    def tool_parser(self) -> hooks.ToolParserFactory | None:
        """The one that `--plugin` selected."""
        return self.tool_parsers.active_factory

    def select(self, registry: Registry[Any], option: str, name: str) -> None:
        """Selects one name of one kind; with `none` no parser of that kind, and with `auto` nothing."""
        if name == AUTO:
            return
        if name != NONE:
            registry.activate(self.resolve(registry, option, name))
        elif registry.active is not None:
            raise ConfigurationError(f"`{option} {NONE}` contradicts `--plugin`, which names the {registry.kind} {registry.active!r}")
        registry.is_open = False

    def resolve(self, registry: Registry[Any], option: str, name: str, others: Sequence[str] = ()) -> str:
        """The registered name for a name or an alias. Raises `ConfigurationError`, with similar names, for an unknown one.

        `others` are values that the option takes beside registered names.
        """
        known = registry.resolve(name)
        if known is None:
            names = [*registry, *registry.aliases, *others]
            other = next((other for other in self.registries if other is not registry and other.resolve(name) is not None), None)
            hint = self._hint(name, names) if other is None else f"it is the name of a {other.kind}"
            raise ConfigurationError(f"`{option} {name}`: there is no {registry.kind} of that name; {hint}")
        return known

    def recognize(self, evidence: Evidence, turn: Turn | None = None) -> None:
        """Selects the parsers that a model's own files show, of each kind that the operator has left open.

        Where they show no format of tool calls, the prompt asks for Hermes' format. All parsers that are selected are then made
        once more, for `turn`: it describes the model to the parsers.
        """
        self.reasoning_parsers.choose(evidence)
        self.tool_parsers.choose(evidence, default=DEFAULT_TOOL_PARSER)
        self._check_selected(turn or Turn())

    def load_builtins(self) -> None:
        """The plug-ins that come with the server."""
        for module in BUILT_INS:
            self._add(Origin(module, GROUP, __version__), partial(importlib.import_module, module))

    def load_entry_points(self) -> None:
        """Plug-ins of installed distributions, in the entry-point group `penstock`."""
        for distribution, entry_point in _entry_points():
            origin = Origin(entry_point.name, distribution.metadata["Name"], distribution.version)
            self._add(origin, entry_point.load)

    def load(self, name: str) -> None:
        """Activates what `name` stands for: a registered name, a plug-in's name, a Python file, or a module.

        A file or module is loaded first. Activating selects the reasoning parser and the tool parser; of each there can be one.
        """
        if name in self._without:
            raise ConfigurationError(f"`--plugin {name}` and `--without {name}` contradict each other")
        found = [(registry, known) for registry in self.registries if (known := registry.resolve(name)) is not None]
        for registry, known in found:
            registry.activate(known)
        if found:
            return
        plugin = self._load_new(name)
        for registry in self.registries:
            registry.activate_plugin(plugin)

    def _load_new(self, name: str) -> str:
        """Loads a file or module that is not loaded yet; returns the plug-in's name."""
        if name in self._origins:
            return name
        if name.endswith(".py"):
            path = Path(name).expanduser().resolve()
            if not path.is_file():
                raise ConfigurationError(f"`--plugin {name}`: there is no such file")
            if str(path) not in self._origins:
                self._asked_for.add(str(path))
                self._add(Origin(str(path)), partial(_load_file, path))
            return str(path)
        if not _is_module(name):
            self._raise_unknown("--plugin", name)
        # An installed plug-in is known by its entry point's name, and may be asked for by its module's.
        loaded = self._manager.get_name(sys.modules.get(name))
        if loaded is None:
            self._asked_for.add(name)
            self._add(_module_origin(name), partial(importlib.import_module, name))
        return loaded or name

    def register_logits_processors(self, processors: Mapping[str, hooks.RegisteredLogitsProcessor], origin: str) -> None:
        """Registers a caller's own processors, as a plug-in would. `origin` names them in errors."""
        source = self._origins.setdefault(origin, Origin(origin))
        for name, processor in processors.items():
            self._register(self.logits_processors, source, name, processor)

    def check(self) -> None:
        """Raises if `without` names nothing that was found, or if the selected parser is ambiguous or not a parser."""
        for name in sorted(self._without - self._dropped):
            self._raise_unknown("--without", name)
        for registry in self.registries:
            registry.check()
        self._check_selected(Turn())

    def _check_selected(self, turn: Turn) -> None:
        self._check_active(self.reasoning_parsers, ReasoningParser, turn)
        self._check_active(self.tool_parsers, ToolParser, turn)

    def listing(self) -> list[Listing]:
        """What is loaded, by kind and name."""
        rows = []
        for registry in self.registries:
            for name, origin in sorted(registry.origins.items()):
                source = self._origins[origin]
                aliases = tuple(sorted(registry.spellings(name)))
                rows.append(Listing(registry.kind, name, origin, source.distribution, source.version, name == registry.active, aliases))
        return rows

    def _check_active(self, registry: Registry[Any], contract: type[Any], turn: Turn) -> None:
        """Makes a parser as for an answer, so that mistakes are found at startup."""
        if registry.active is None or registry.active_factory is None:
            return
        described = f"{registry.kind} {registry.active!r} of plug-in {self._origins[registry.origins[registry.active]]}"
        try:
            parser = registry.active_factory(turn)
        except Exception as error:
            raise ConfigurationError(f"{described} cannot be made: {type(error).__name__}: {error}") from error
        made = type(parser).__name__
        if not isinstance(parser, contract):
            raise ConfigurationError(f"{described} makes a {made}, which does not derive from `penstock.{contract.__name__}`")

    def _add(self, origin: Origin, load: Callable[[], object]) -> None:
        if origin.plugin in self._without:
            self._dropped.add(origin.plugin)
            return
        if origin.plugin in self._origins:
            raise ConfigurationError(f"two plug-ins have one name: {self._origins[origin.plugin]} and {origin}")
        self._origins[origin.plugin] = origin
        try:
            plugin = load()
        except Exception as error:
            raise ConfigurationError(f"plug-in {origin} cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            self._manager.register(plugin, name=origin.plugin)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            problem = " ".join(str(error).split())
            raise ConfigurationError(f"plug-in {origin} has a wrong hook: {problem}{self._nearest_hook(plugin)}") from error
        except ValueError as error:
            raise ConfigurationError(f"plug-in {origin} is loaded already, under another name") from error
        self._run_hooks(plugin, origin)

    def _run_hooks(self, plugin: object, origin: Origin) -> None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        if not self._manager.get_hookcallers(plugin):
            raise ConfigurationError(f"plug-in {origin} implements no hook: mark its functions with `@hookimpl` from penstock")
        for registry in self.registries:
            caller = self._manager.subset_hook_caller(registry.hook, others)
            try:
                caller(register=partial(self._register, registry, origin))
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(f"plug-in {origin} failed in {registry.hook}: {type(error).__name__}: {error}") from error

    def _register(self, registry: Registry[Any], origin: Origin, name: str, factory: Any, info: FormatInfo | None = None) -> None:
        described = f"plug-in {origin} called register({name!r}, {factory!r})"
        if not isinstance(name, str) or not name or not isinstance(info, FormatInfo | None):
            raise ConfigurationError(f"{described}: it takes a name and a factory, and perhaps a FormatInfo")
        if registry is self.logits_processors:
            try:
                factory = as_processor(factory)
            except TypeError as error:
                raise ConfigurationError(f"{described}: {error}") from error
        elif not callable(factory):
            raise ConfigurationError(f"{described}: it takes a name and a factory, and perhaps a FormatInfo")
        if info is None and isinstance(factory, Format):
            info = factory.info
        if {AUTO, NONE} & {name, *(info.aliases if info else ())}:
            raise ConfigurationError(f"plug-in {origin} cannot register {name!r}: {AUTO!r} and {NONE!r} mean something else")
        if registry is self.proposers and name in RESERVED_PROPOSERS:
            raise ConfigurationError(
                f"plug-in {origin} cannot register the proposer {name!r}: {' and '.join(RESERVED_PROPOSERS)} are the engine's"
            )
        if name in self._without and origin.plugin not in self._asked_for:
            self._dropped.add(name)
            return
        for spelling in (name, *(info.aliases if info else ())):
            taken = registry.resolve(spelling)
            if taken is not None:
                first = self._origins[registry.origins[taken]]
                raise ConfigurationError(f"{registry.kind} {spelling!r} is registered twice: by plug-in {first} and by plug-in {origin}")
        registry.add(name, origin.plugin, factory, info)

    def _names(self) -> list[str]:
        return sorted({name for registry in self.registries for name in (*registry, *registry.aliases)})

    def _raise_unknown(self, option: str, name: str) -> NoReturn:
        hint = self._hint(name, [*self._names(), *self._origins])
        kinds = "registered name, plug-in, module or .py file" if option == "--plugin" else "registered name or plug-in"
        raise ConfigurationError(f"`{option} {name}`: no {kinds} of that name; {hint}")

    def _hint(self, name: str, known: Sequence[str]) -> str:
        """The names that begin with it, else those that are near, aliases among them; where none is, all that are registered."""
        plain = _plain(name)
        by_spelling = {_plain(spelling): spelling for spelling in known}
        near = sorted({name for registry in self.registries for name in registry if _plain(name).startswith(plain)} & set(known))
        if len(plain) < MIN_BEGINNING or not near:
            near = [by_spelling[spelling] for spelling in difflib.get_close_matches(plain, by_spelling, n=3, cutoff=0.5)]
        if near:
            return f"did you mean {' or '.join(map(self._spelled, near))}?"
        return f"the names are {', '.join(sorted(name for name in known if name not in self._origins))}"

    def _spelled(self, name: str) -> str:
        """An alias is shown with what it stands for."""
        meanings = {registry.aliases[name] for registry in self.registries if name in registry.aliases}
        return repr(name) + (f" (= {', '.join(map(repr, sorted(meanings)))})" if meanings else "")

    def _nearest_hook(self, plugin: object) -> str:
        known = [registry.hook for registry in self.registries]
        for name in dir(plugin):
            if self._manager.parse_hookimpl_opts(plugin, name) is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0)
                return f"; did you mean {near[0]!r}?"
        return ""


def _plain(name: str) -> str:
    # Names are as near as they are without case and hyphens.
    return name.lower().replace("-", "_")


def _entry_points() -> list[tuple[Distribution, EntryPoint]]:
    # Once each: an editable install may be found twice on the path.
    found: dict[tuple[str, str], tuple[Distribution, EntryPoint]] = {}
    for distribution in distributions():
        for entry_point in distribution.entry_points:
            if entry_point.group == GROUP:
                found.setdefault((distribution.metadata["Name"], entry_point.name), (distribution, entry_point))
    return [found[key] for key in sorted(found)]


def _load_file(path: Path) -> object:
    name = f"penstock_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    spec.loader.exec_module(module)
    return module


def _is_module(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        return error.name is None or not f"{name}.".startswith(f"{error.name}.")
    except Exception:
        return True  # its package fails to load: loading it says why


def _module_origin(name: str) -> Origin:
    owners = packages_distributions().get(name.partition(".")[0], [])
    return Origin(name, owners[0], version(owners[0])) if owners else Origin(name)
