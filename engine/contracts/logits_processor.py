"""The contract of logits processors, and adapters that make one of a function."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(slots=True)
class LogitsRow:
    """One sequence as a logits processor sees it. `index` is its number among the n sequences of its request.

    `token_ids` are prompt and output so far, not to be changed. `state` is the value that `begin` returned for this sequence.
    """

    request_id: str
    index: int = 0
    client_id: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None


class LogitsProcessor(ABC):
    """Changes the logits of all sequences whose requests name it, in one call per step, on the device's current stream.

    If a call raises, it is repeated for each row alone, on the original logits. A processor that is not `is_batched` is always called with
    one row, and never again for it. One object serves all requests: a sequence's own data is in its row's `state`.
    """

    is_batched = True

    def begin(self, /, *_: Any, **arguments: Any) -> Any:
        """Called with the request's arguments once per sequence; returns the row's `state`. `TypeError` or `ValueError` refuses them."""
        if arguments:
            raise TypeError(f"it takes none, got {', '.join(arguments)}")

    @abstractmethod
    def process(self, rows: Sequence[LogitsRow], logits: "Tensor") -> "Tensor | None":
        """`logits` are float32 [R, V], row r for `rows[r]`: changed in place, or returned."""


def per_sequence(factory: Callable[..., Callable[[list[int], "Tensor"], "Tensor"]]) -> LogitsProcessor:
    """A processor made of `factory(**arguments)`, which returns a `process(token_ids, logits)` for each sequence.

    `token_ids` are prompt and output so far, `logits` float32 [V]. They are returned, changed in place or not.
    """
    return _PerSequence(factory)


def per_row(function: Callable[..., "Tensor | None"]) -> LogitsProcessor:
    """A processor made of `function(row, logits, **arguments)`, which has no state; `logits` [V] are changed in place or returned."""
    return _PerRow(function)


class _PerSequence(LogitsProcessor):
    is_batched = False

    def __init__(self, factory: Callable[..., Callable[[list[int], "Tensor"], "Tensor"]]) -> None:
        self._factory = factory

    def begin(self, /, *_: Any, **arguments: Any) -> Any:
        _check_arguments(self._factory, arguments)
        return self._factory(**arguments)

    def process(self, rows: Sequence[LogitsRow], logits: "Tensor") -> None:
        for row, logits_V in zip(rows, logits, strict=True):
            take_changed(row.state(row.token_ids, logits_V), logits_V)


class _PerRow(LogitsProcessor):
    is_batched = False

    def __init__(self, function: Callable[..., "Tensor | None"]) -> None:
        self._function = function

    def begin(self, /, *_: Any, **arguments: Any) -> None:
        _check_arguments(self._function, arguments, num_positional=2)

    def process(self, rows: Sequence[LogitsRow], logits: "Tensor") -> None:
        for row, logits_V in zip(rows, logits, strict=True):
            changed = self._function(row, logits_V, **row.arguments)
            if changed is not None:
                take_changed(changed, logits_V)


def take_changed(changed: object, logits: "Tensor") -> None:
    """Copies a processor's result into `logits`, unless it changed them in place. Raises `TypeError` for a result that is no logits."""
    if not isinstance(changed, type(logits)) or changed.shape != logits.shape:
        shape = tuple(changed.shape) if isinstance(changed, type(logits)) else type(changed).__name__
        raise TypeError(f"expected logits of shape {tuple(logits.shape)}, got {shape}")
    if changed is not logits:
        logits.copy_(changed)


@dataclass(frozen=True, slots=True)
class ChosenProcessor:
    """A processor that a request names, with arguments that the processor has accepted."""

    processor: LogitsProcessor
    arguments: Mapping[str, Any]

    def begin(self, row: LogitsRow) -> "SequenceProcessor":
        """The processor of one sequence, whose identity and tokens are in `row`."""
        return SequenceProcessor(self.processor, replace(row, arguments=self.arguments, state=self.processor.begin(**self.arguments)))


@dataclass(frozen=True, slots=True)
class SequenceProcessor:
    """A processor and its state for one sequence."""

    processor: LogitsProcessor
    row: LogitsRow

    def fork(self, token_ids: list[int]) -> "SequenceProcessor":
        """An independent copy for other tokens, with a deep copy of its state."""
        return SequenceProcessor(self.processor, replace(self.row, token_ids=token_ids, state=copy.deepcopy(self.row.state)))


def as_processor(registered: object) -> LogitsProcessor:
    """The processor to register: an instance if a class is given, shared by all sequences. Raises `TypeError` for anything else."""
    made = registered() if isinstance(registered, type) and issubclass(registered, LogitsProcessor) else registered
    if not isinstance(made, LogitsProcessor):
        raise TypeError(
            f"{made!r} does not derive from `penstock.LogitsProcessor`; `per_sequence(factory)` and `per_row(function)` make a processor "
            "of a function, and callbacks of TensorRT-LLM's form are given to an `Executor` in a `LogitsPostProcessorConfig`"
        )
    return made


def choose(processor: LogitsProcessor, arguments: Mapping[str, Any]) -> ChosenProcessor:
    """A processor with a request's arguments. Raises the errors of `begin`: `TypeError`, `ValueError` or `LookupError`."""
    _check_arguments(processor.begin, arguments)
    processor.begin(**arguments)
    return ChosenProcessor(processor, arguments)


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], num_positional: int = 0) -> None:
    """Raises `TypeError` for an unknown or a missing argument: Python's own message would name the code as well.

    The first `num_positional` parameters are the engine's.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # it has no signature
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


def chosen_processors(registered: Mapping[str, LogitsProcessor], choices: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ChosenProcessor]:
    """The processors for `Request.logits_processors`, from names and arguments, in the order in which they run.

    Raises `InvalidRequest`, with the path in `logits_processors`, for a name that is not registered or arguments that are refused.
    """
    chosen = []
    for index, (name, arguments) in enumerate(choices):
        path = f"logits_processors[{index}]"
        if name not in registered:
            known = ", ".join(registered) or "none"
            raise InvalidRequest(f"no logits processor {name[:100]!r}: there are {known}", f"{path}.name")
        try:
            chosen.append(choose(registered[name], arguments))
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"the logits processor `{name}` refused its arguments: {error}", f"{path}.arguments") from error
    return chosen
