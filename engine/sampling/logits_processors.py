"""Logits processors in all their forms: what is registered under a name, and what a request makes of it."""

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.engine.hooks import BatchLogitsProcessor, RegisteredLogitsProcessor

FORMS = (
    "a factory of one, `process(token_ids, logits)`, `process(request_id, logits, token_ids, client_id)`, "
    "or an object with `process_batch(rows, logits)`"
)


BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Form(enum.Enum):
    FACTORY = "factory"
    PLAIN = "plain"
    ROW = "row"
    BATCH = "batch"


NUM_OF_CALLBACK = 5
NUM_POSITIONAL = {2: Form.PLAIN, 4: Form.ROW}


def registered_form(registered: object) -> Form:
    """What was registered. A processor's second parameter is called `logits`; no factory has one whose name begins so.

    Raises `TypeError` for what is none of the forms.
    """
    if hasattr(registered, "process_batch"):
        return Form.BATCH
    if not callable(registered):
        raise TypeError(f"a logits processor is {FORMS}, not {registered!r}")
    parameters = _parameters(registered)
    if not any(parameter.name.startswith("logits") for parameter in parameters):
        return Form.FACTORY
    form = _processor_form(parameters)
    if form is None:
        raise TypeError(f"a logits processor is {FORMS}; this one takes ({', '.join(map(str, parameters))}){_hint(parameters)}")
    return form


def made_form(made: object) -> Form:
    """What a request's maker gave. What does not say what it takes is called as a plain one."""
    if isinstance(made, BatchMember) or hasattr(made, "process_batch"):
        return Form.BATCH
    return _processor_form(_parameters(made)) or Form.PLAIN


def as_registered(registered: Any) -> RegisteredLogitsProcessor:
    """What is to be kept under a name: of a class of batched processors an instance, which all sequences share. Raises `TypeError`."""
    if isinstance(registered, type) and hasattr(registered, "process_batch"):
        registered = registered()
    registered_form(registered)
    result: RegisteredLogitsProcessor = registered
    return result


def bind(registered: RegisteredLogitsProcessor, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """What a request holds: called once per sequence, it gives that sequence's processor.

    It is called once here, so that arguments which are refused are refused now: with `TypeError`, `ValueError` or `LookupError`.
    """
    known: Any = registered  # of which form, the next line says
    match registered_form(known):
        case Form.FACTORY:
            _check_arguments(known, arguments)
            make: Callable[[], Any] = partial(known, **arguments)
        case Form.BATCH:
            make = partial(_join, known, arguments)
        case _:
            num_positional = len([parameter for parameter in _parameters(known) if _is_required(parameter)])
            _check_arguments(known, arguments, num_positional)
            process = partial(known, **arguments) if arguments else known
            return lambda: process
    make()
    return make


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One sequence's part in a batched processor."""

    processor: BatchLogitsProcessor
    arguments: Mapping[str, Any]
    state: Any


def _join(processor: BatchLogitsProcessor, arguments: Mapping[str, Any]) -> BatchMember:
    begin = getattr(processor, "begin", None)
    if begin is not None:
        _check_arguments(begin, arguments)
    elif arguments:
        raise TypeError(f"it takes none, got {', '.join(arguments)}")
    return BatchMember(processor, arguments, None if begin is None else begin(**arguments))


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], num_positional: int = 0) -> None:
    """Raises `TypeError` for an argument that there is not, or that is missing: Python's own message would name the code as well.

    The first `num_positional` parameters are the engine's.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # it does not say what it takes
        return
    own = {parameter.name for parameter in parameters[:num_positional]}
    taken = {parameter.name: parameter for parameter in parameters[num_positional:] if parameter.kind in BY_NAME}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    for name in arguments:
        if name not in taken and (name in own or not takes_any):
            raise TypeError(f"it has no argument {name[:100]!r}: " + (f"there are {', '.join(taken)}" if taken else "it takes none"))
    for name, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise TypeError(f"the argument {name!r} is missing")


def _parameters(function: object) -> list[inspect.Parameter]:
    """Empty for what does not say, as some that are written in C."""
    if not callable(function):
        return []
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def _processor_form(parameters: list[inspect.Parameter]) -> Form | None:
    positional = [parameter for parameter in parameters if _is_required(parameter)]
    has_logits = len(positional) > 1 and positional[1].name == "logits"
    return NUM_POSITIONAL.get(len(positional)) if has_logits else None


def _hint(parameters: list[inspect.Parameter]) -> str:
    if len(parameters) != NUM_OF_CALLBACK:
        return ""
    return ": callbacks of TensorRT-LLM's form are given to an `Executor` in a `LogitsPostProcessorConfig`"


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return parameter.kind in kinds and parameter.default is inspect.Parameter.empty
