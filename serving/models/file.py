"""`--models FILE.toml`: which models a server has, with the options of each."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.store import PACKAGED_MODELS, check_model_path
from penstock.engine.options import Option, flattened, seconds, size
from penstock.engine.pooling.files import ModelKind, model_kind
from penstock.engine.scripted.file import is_scripted
from penstock.serving.options import OPTIONS, OPTIONS_BY_ANY_NAME, Arguments, parse_toml

# Groups of options that may differ between models, and those of them that hold for the whole process.
GROUPS = ("model", "formats and plug-ins", "engine")
OF_THE_PROCESS = ("models", "models_memory", "models_wait", "served_model_name", "adapter_dir", "native_kernels")
# What a server with one model alone has.
NOT_BESIDE = {
    "tensor_parallel_size": "ranks compute one model",
    "pipeline_parallel_size": "ranks compute one model",
    "distributed_address": "ranks compute one model",
    "distributed_timeout": "ranks compute one model",
    "sleep_idle_seconds": "the `ttl` of a model says when it is unloaded",
}
# Flags that are about one model.
OF_ONE_MODEL = ("model", "served_model_name", "adapter", "adapter_dir", "draft_model")
SETTINGS = ("aliases", "pin", "ttl", "memory")  # of a model, beside options
MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the file.

    `arguments` are those of the command line with the file's in their place; `own` are the options that the file sets for this model
    itself. The `kind` is None where only the model's files say it, which are not here. A model that has been idle for `ttl` seconds is
    unloaded. `num_bytes` is the memory that the operator expects it to take.
    """

    name: str
    arguments: Arguments
    kind: ModelKind | None = None
    aliases: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    pin: bool = False
    ttl: float | None = None
    num_bytes: int | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those of the model itself."""
        return (self.name, *self.aliases)

    @property
    def least_num_bytes(self) -> int | None:
        """What it takes at least, so far as that is known before its files are read."""
        if self.num_bytes is not None:
            return self.num_bytes
        has_cache = self.kind == "generate" or (self.kind is None and "kv_cache_memory" in self.own)
        return self.arguments.engine.kv_cache_memory if has_cache else None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.arguments.engine.adapters)

    def for_pooling(self) -> Arguments:
        """The arguments without those that only a model that generates has a use for, unless they are set for this model itself."""
        values = {
            each.name: value for each, value in self.arguments.values() if each.name in self.own or not each.asks_for_generation(value)
        }
        return Arguments.of(values)


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The models in the file's order; `num_bytes` and `wait_seconds` are the bounds that it sets for all of them, if it does."""

    models: tuple[ModelSpec, ...]
    num_bytes: int | None = None
    wait_seconds: float | None = None


def read_models_file(arguments: Arguments) -> ModelsFile:
    """The file of `--models`. Options of the command line hold for every model that does not set them. Raises `ConfigurationError`."""
    assert arguments.models is not None
    for option, value in arguments.values():
        if option.name in OF_ONE_MODEL and value != option.default:
            raise ConfigurationError(f"{option.flag} is about one model, and --models serves several: set it in the file")
        if option.name in NOT_BESIDE and value != option.default:
            raise ConfigurationError(f"{option.flag} cannot be used beside --models: {NOT_BESIDE[option.name]}")
    return _Reader(arguments.models).read({option.name: value for option, value in arguments.values()})


@dataclass
class _Reader:
    """`taken` are the names so far, each with the key path that has it."""

    path: str
    taken: dict[str, str] = field(default_factory=dict)

    def read(self, given: dict[str, Any]) -> ModelsFile:
        content = self._content()
        self._check_keys("", content, ("memory", "wait", "defaults", "models"))
        values = given | self._options("defaults", self._table("defaults", content.get("defaults", {})), but=OF_ONE_MODEL)
        if values["pin_threads"] == "auto":
            values["pin_threads"] = "off"  # each model would choose the same cores
        tables = self._table("models", content.get("models", {}))
        if not tables:
            self._refuse("models", "there are no models: each is a table such as [models.small]")
        file = ModelsFile(
            tuple(self._model(name, table, values) for name, table in tables.items()),
            None if "memory" not in content else self._converted("memory", content["memory"], size),
            None if "wait" not in content else self._converted("wait", content["wait"], seconds),
        )
        bound, where = (given["models_memory"], "--models-memory") if given["models_memory"] else (file.num_bytes, "`memory` at the top")
        for spec in file.models:
            self._check_fits(spec, bound, where)
        return file

    def _check_fits(self, spec: ModelSpec, bound: int | None, where: str) -> None:
        """Refuses a model that can never be loaded."""
        num_bytes = spec.least_num_bytes
        if bound is not None and num_bytes is not None and num_bytes > bound:
            name = "kv_cache_memory" if spec.num_bytes is None else "memory"
            what = f"its {name} is {gib(num_bytes)}, and all models together may take {gib(bound)} ({where})"
            self._refuse(f"models.{key(spec.name)}", what)

    def _content(self) -> dict[str, Any]:
        try:
            return parse_toml(Path(self.path).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--models {self.path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        except ValueError as error:
            raise ConfigurationError(f"--models {self.path}: not TOML: {error}") from error

    def _model(self, name: str, given: Any, values: Mapping[str, Any]) -> ModelSpec:
        at = f"models.{key(name)}"
        table = self._table(at, given)
        options = self._options(at, {each: value for each, value in table.items() if each not in SETTINGS})
        own = {"model": name} | options
        try:
            check_model_path(own["model"])
            kind = known_kind(own["model"])
            check_not_alone(kind)
        except ConfigurationError as error:
            self._refuse(f"{at}.model", str(error))
        aliases = tuple(self._texts(f"{at}.aliases", table.get("aliases", [])))
        spec = ModelSpec(
            name=name,
            arguments=Arguments.of({**values, **own, "served_model_name": (name, *aliases), "response_store": None, "files_dir": None}),
            kind=kind,
            aliases=aliases,
            own=frozenset(own),
            pin=self._switch(f"{at}.pin", table.get("pin", False)),
            ttl=None if "ttl" not in table else self._converted(f"{at}.ttl", table["ttl"], seconds) or None,
            num_bytes=None if "memory" not in table else self._converted(f"{at}.memory", table["memory"], size),
        )
        self._take_names(spec, at)
        for source in spec.arguments.engine.adapters:
            if not Path(source.path).expanduser().is_dir():
                self._refuse(f"{at}.adapters", f"there is no directory {source.path}")
        return spec

    def _take_names(self, spec: ModelSpec, at: str) -> None:
        places = [at, *[f"{at}.aliases"] * len(spec.aliases), *[f"{at}.adapters"] * len(spec.adapter_names)]
        for name, place in zip((*spec.model_names, *spec.adapter_names), places, strict=True):
            if not 0 < len(name) <= MAX_NAME or not name.isprintable():
                self._refuse(place, f"{name[:MAX_NAME]!r} is no name: it takes 1 to {MAX_NAME} printable characters")
            if name in self.taken:
                self._refuse(place, f"{self.taken[name]} has the name {name!r} already")
            self.taken[name] = place

    def _options(self, at: str, table: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
        """The values by the names of their options, which may be written with hyphens."""
        values: dict[str, Any] = {}
        for name, given in table.items():
            option = OPTIONS_BY_ANY_NAME.get(name.replace("-", "_"))
            if option is None:
                self._check_keys(at, {name: given}, [each for each in OPTIONS if per_model(OPTIONS[each])] + [*SETTINGS])
            assert option is not None
            if option.name in NOT_BESIDE:
                self._refuse(f"{at}.{key(name)}", f"not with several models: {NOT_BESIDE[option.name]}")
            if not per_model(option) or option.name in but:
                whose = "one model" if per_model(option) else "the whole server, by its flag"
                self._refuse(f"{at}.{key(name)}", f"this is set for {whose}")
            if option.name in values:
                self._refuse(f"{at}.{key(name)}", f"this is another name of {option.name}, which is set already")
            values[option.name] = self._value(f"{at}.{key(name)}", option, given)
        return values

    def _value(self, at: str, option: Option, given: Any) -> Any:
        """An option's value, from TOML's types or from a text as on the command line."""
        if option.is_switch:
            return self._switch(at, given)
        if option.is_repeatable:
            if isinstance(given, dict):
                given = [f"{name}={value}" for name, value in given.items()]
            items = given if isinstance(given, list) else [given]
            return flattened([self._one(at, option, item) for item in items])
        return self._one(at, option, given)

    def _one(self, at: str, option: Option, given: Any) -> Any:
        if option.takes_table and isinstance(given, dict):
            return self._converted(at, json.dumps(given, default=str), option.value_of)  # a date is a text in JSON
        if isinstance(given, bool) or not isinstance(given, str | (str if option.read is str else int | float)):
            self._refuse(at, f"{given!r} is no value for it: it takes {option.values_help or 'a text'}")
        return self._converted(at, given, option.value_of)

    def _converted(self, at: str, given: Any, read: Any) -> Any:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            self._refuse(at, f"{given!r} is no value for it")
        try:
            return read(str(given))
        except ValueError as error:
            self._refuse(at, str(error))

    def _switch(self, at: str, given: Any) -> bool:
        if not isinstance(given, bool):
            self._refuse(at, f"{given!r} is neither true nor false")
        return given

    def _texts(self, at: str, given: Any) -> Iterator[str]:
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            self._refuse(at, "this is a list of texts")
        yield from given

    def _table(self, at: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            self._refuse(at, f"this is a table: [{at}]")
        return given

    def _check_keys(self, at: str, table: Mapping[str, Any], known: Any) -> None:
        for name in table:
            if name not in known:
                near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
                self._refuse(f"{at}.{key(name)}".lstrip("."), "there is no such key" + (f"; did you mean {near[0]}?" if near else ""))

    def _refuse(self, at: str, message: str) -> NoReturn:
        raise ConfigurationError(f"--models {self.path}: {at}: {message}")


def per_model(option: Option) -> bool:
    """Whether models of one server may have different values of it."""
    return option.group in GROUPS and option.name not in OF_THE_PROCESS


def known_kind(model: str) -> ModelKind | None:
    """What a model is, by its files where these are here, or by its name. Raises `ConfigurationError` where its config cannot be read."""
    if model in PACKAGED_MODELS:
        packaged = PACKAGED_MODELS[model]
        return "transcription" if packaged.is_whisper else "generate" if packaged.is_gguf else "pooling"
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():
        return model_kind(directory)
    return "generate" if model.endswith(".gguf") or is_scripted(model) else None


def check_not_alone(kind: ModelKind | None) -> None:
    """Raises `ConfigurationError` for a kind of model that a server has alone: the model of a form is known when it has been read."""
    if kind == "transcription":
        raise ConfigurationError("a model that turns speech into text is served alone, by --model")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def key(name: str) -> str:
    """As TOML writes it in a path."""
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else f'"{name}"'
