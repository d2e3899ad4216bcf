"""Which grammar backend a request names, in vLLM's words or ours."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.api.common_protocol import GenerationFields
from penstock.engine.errors import InvalidRequest

AUTO = "auto"
ALIASES = {"guidance": "llguidance", "outlines": "outlines_core"}  # vLLM's names of the same libraries
NO_FALLBACK = "no-fallback"
COMPACT = "disable-any-whitespace"
CLOSED = "no-additional-properties"
OPTIONS = (NO_FALLBACK, COMPACT, CLOSED)
MAX_CHARACTERS = 1000


class NamedBackend(NamedTuple):
    """A backend as a request writes it, `name:option,option`, and the path of the field."""

    name: str
    options: tuple[str, ...]
    param: str


def named_backend(body: GenerationFields) -> NamedBackend | None:
    """What the request says, in either place. Raises `InvalidRequest` for two different ones and for options that there are not.

    Naming a backend means that no other is tried, so `no-fallback` asks for nothing more.
    """
    fields = [("guided_decoding_backend", body.guided_decoding_backend)]
    if body.structured_outputs is not None:
        fields.append(("structured_outputs.backend", body.structured_outputs.backend))
    given = [_parsed(text, param) for param, text in fields if text]
    if len(given) > 1 and given[0][:2] != given[1][:2]:
        raise InvalidRequest(f"`{given[0].param}` and `{given[1].param}` differ", given[1].param)
    return given[0] if given else None


def chosen_backend(body: GenerationFields, known: Iterable[str]) -> str | None:
    """The name of one of the `known` backends, or None for whichever takes the constraint. Raises `InvalidRequest` for any other name."""
    named = named_backend(body)
    if named is None or named.name == AUTO:
        return None
    names = list(known)
    name = known_backend(named.name, names)
    if name is None:
        raise InvalidRequest(f"no grammar backend {named.name[:100]!r}: there are {', '.join([AUTO, *names])}", named.param)
    return name


def known_backend(name: str, known: Collection[str]) -> str | None:
    """The one of the `known` backends that has this name, or had it in vLLM; None where there is none."""
    return next((spelling for spelling in (name, ALIASES.get(name)) if spelling in known), None)


def _parsed(text: str, param: str) -> NamedBackend:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"`{param}` may have {MAX_CHARACTERS} characters", param)
    name, _, rest = text.partition(":")
    options = tuple(option.strip().replace("_", "-") for option in rest.split(",") if option.strip())
    for option in options:
        if option not in OPTIONS:
            raise InvalidRequest(f"no backend option {option[:100]!r}: there are {', '.join(OPTIONS)}", param)
    return NamedBackend(name.strip(), options, param)
