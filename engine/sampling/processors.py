"""Logits processors: the forms that may be registered, one sequence's processor, and the pass over a step's rows."""

import copy
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.hooks import BatchLogitsProcessor, LogitsRow, RegisteredLogitsProcessor

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
    """The parameters of a function; empty where it has no signature, as some written in C."""
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


@dataclass(frozen=True, slots=True)
class SequenceProcessor:
    """A processor as one sequence has it. `process` is a function of one row, or what has `process_batch`."""

    process: Any
    form: Form
    row: LogitsRow

    @classmethod
    def of(cls, made: Any, row: LogitsRow) -> "SequenceProcessor":
        """What a request's maker gave, for a sequence whose identity and tokens are in `row`."""
        form = made_form(made)
        if isinstance(made, BatchMember):
            return cls(made.processor, form, replace(row, arguments=made.arguments, state=made.state))
        return cls(made, form, row)

    def fork(self, token_ids: list[int]) -> "SequenceProcessor":
        """An independent copy, over other tokens: its state is copied too."""
        row = replace(self.row, token_ids=token_ids, state=copy.deepcopy(self.row.state))
        return SequenceProcessor(self.process if self.form is Form.BATCH else copy.deepcopy(self.process), self.form, row)

    def apply(self, logits_V: Tensor) -> None:
        """Changes the row in place. Raises whatever the processor raises, and `TypeError` for an answer that is no logits."""
        row = self.row
        if self.form is Form.ROW:
            changed = self.process(row.request_id, logits_V, row.token_ids, row.client_id)
            changed = logits_V if changed is None else changed
        else:
            changed = self.process(row.token_ids, logits_V)
        take_changed(changed, logits_V)


def take_changed(changed: object, logits: Tensor) -> None:
    """Leaves a processor's answer in `logits`, which it may have changed in place. Raises `TypeError` for one that is no logits."""
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"expected logits of shape {tuple(logits.shape)}, got {shape}")
    if changed is not logits:
        logits.copy_(changed)


class ProcessorPass:
    """The rows of one step that have processors. Logits float32 [R, V] are changed in place.

    `failures` maps a row to why it has no logits: a processor of its raised. The other rows are none the worse for it.
    """

    def __init__(self, logits_RV: Tensor, processors: Sequence[Sequence[SequenceProcessor]]) -> None:
        self.logits_RV = logits_RV
        self.failures: dict[int, str] = {}
        self._remaining = {row: list(own) for row, own in enumerate(processors)}

    def run(self) -> None:
        while True:
            for row in self._remaining:
                self._run_own(row)
            rows = self._next_batch()
            if not rows:
                return
            self._run_batch([(row, self._remaining[row].pop(0)) for row in rows])

    def _run_own(self, row: int) -> None:
        """Runs the row's processors up to its next batched one."""
        remaining = self._remaining[row]
        while remaining and remaining[0].form is not Form.BATCH:
            try:
                remaining.pop(0).apply(self.logits_RV[row])
            except Exception as error:  # a plug-in's code: whatever it raises ends its own request
                self._fail(row, error)

    def _next_batch(self) -> list[int]:
        """The rows that one batched processor can run over now: preferably one that no other row reaches later."""
        ready: dict[int, list[int]] = {}
        for row, remaining in self._remaining.items():
            if remaining:
                ready.setdefault(id(remaining[0].process), []).append(row)
        later = {id(processor.process) for remaining in self._remaining.values() for processor in remaining[1:]}
        return max(ready.items(), key=lambda item: (item[0] not in later, len(item[1])), default=(0, []))[1]

    def _run_batch(self, members: list[tuple[int, SequenceProcessor]]) -> None:
        rows = [row for row, _ in members]
        processor = members[0][1].process
        index = to_device(torch.tensor(rows), self.logits_RV.device)
        logits = self.logits_RV[index]  # a copy: where the call raises, the rows are as they were
        try:
            changed = processor.process_batch([member.row for _, member in members], logits)
            take_changed(logits if changed is None else changed, logits)
            self.logits_RV[index] = logits
        except Exception as error:  # as above; of several rows it has to be found out whose fault it is
            if len(members) == 1:
                self._fail(rows[0], error)
            else:
                for member in members:
                    self._run_batch([member])

    def _fail(self, row: int, error: Exception) -> None:
        self.failures[row] = f"a logits processor raised {type(error).__name__}: {error}"
        self._remaining[row].clear()
