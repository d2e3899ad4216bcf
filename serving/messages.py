"""Messages from the engine's deltas, step by step and whole, and whether they keep to their schemas. Endpoints and the library share it."""

import asyncio
import json
import math
import re
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.contracts.parsing import Event, Preamble, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import ClientFault, ExactDraws, FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest, JobLimitExceeded, QueueFull
from penstock.engine.system.sandbox import Limits, Sandbox
from penstock.plugins.grammars.json_schema.values import PATTERNS
from penstock.serving.constraints.pressure import FieldPressure, PressureReader
from penstock.serving.requests import GenerationFields, beam_refusal


def check_delta(delta: SequenceDelta) -> None:
    """Raises where a sequence ended otherwise than by its own end or its limit: that is an error on the wire, not a finish reason."""
    if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) and isinstance(delta.error, ClientFault):
        raise InvalidRequest(str(delta.error))
    if delta.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(delta.error or "the step that this request was in failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable(delta.error or "the request was aborted before it was complete")


def drop_missing_beams(body: GenerationFields, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    """The deltas of one prompt without the answers that its beam search did not find; unchanged where there is no beam search."""
    return _found_beams(body, deltas) if body.use_beam_search else deltas


async def _found_beams(body: GenerationFields, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.beam_score != -math.inf:
                    yield delta
    except InvalidRequest as error:
        raise beam_refusal(error, body) from None


@dataclass(slots=True)
class TokenCounts:
    """The tokens of a request over all its sequences; a prompt counts once, however many sequences (`n`) share it."""

    n: int
    prompts: dict[int, PromptInfo] = field(default_factory=dict)
    num_completion_tokens: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    transfer_state: bytes | None = None
    _num_reasoning_tokens: dict[int, int] = field(default_factory=dict)
    _num_preamble_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, delta: SequenceDelta) -> None:
        if delta.prompt is not None:
            self.prompts.setdefault(delta.index // self.n, delta.prompt)
        self.num_completion_tokens += len(delta.token_ids)
        self.num_predicted += delta.num_predicted
        self.num_predicted_right += delta.num_predicted_right
        self.transfer_state = delta.transfer_state or self.transfer_state
        if delta.num_reasoning_tokens:
            self._num_reasoning_tokens[delta.index] = delta.num_reasoning_tokens
        if delta.num_preamble_tokens:
            self._num_preamble_tokens[delta.index] = delta.num_preamble_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts.values())

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(self._num_reasoning_tokens.values())

    @property
    def num_preamble_tokens(self) -> int:
        return sum(self._num_preamble_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningView:
    """How the client wants to see reasoning: left out, set apart, or inside the content between its markers; as it comes, or in one piece.

    `opening` is empty where the prompt already holds the start marker, so that prompt and content together read as the model wrote them.
    `shows_preamble` says that the free text before a constrained answer is shown, apart; otherwise it is left out.
    """

    is_included: bool = True
    is_separate: bool = True
    is_streamed: bool = True
    opening: str = ""
    closing: str = ""
    shows_preamble: bool = False


@dataclass(slots=True)
class MessageStep:
    """What one step adds to one message.

    Neighbouring `events` of one kind are one event; no text is empty. The log probabilities are of the tokens that the client sees, by
    the part of the message that they belong to: those of tool calls are content. The last step has the `finish_reason`, in OpenAI's words.
    """

    events: list[Event] = field(default_factory=list)
    content_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: Event) -> None:
        """Joins it to the last event where that is of the same kind. A call's start is never joined."""
        last = self.events[-1] if self.events else None
        match last, event:
            case (_, Text("") | Reasoning("") | Preamble("")) | (_, ToolCallArguments(_, "")):
                return
            case Text(before), Text(text):
                self.events[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                self.events[-1] = Reasoning(before + text)
            case Preamble(before), Preamble(text):
                self.events[-1] = Preamble(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, fragment) if index == same:
                self.events[-1] = ToolCallArguments(index, before + fragment)
            case _:
                self.events.append(event)


class MessageReader:
    """One sequence's deltas as the steps of a message, with the reasoning as `view` says."""

    def __init__(self, view: ReasoningView | None = None) -> None:
        self._view = view or ReasoningView()
        self._held_reasoning: list[str] = []
        self._is_reasoning_inline = False
        self._num_tool_calls = 0
        self._arguments: list[str] = []  # of the last call

    def feed(self, delta: SequenceDelta) -> MessageStep:
        """Raises `GenerationFailed`, `InvalidRequest` or `EngineUnavailable` where the delta says that the sequence was cut off."""
        check_delta(delta)
        step = MessageStep()
        for token in delta.logprobs:
            self._add_logprobs(token, step)
        for event in delta.events:
            self._add(event, step)
        if delta.finish_reason is not None:
            self._release_reasoning(step)
            step.finish_reason, step.stop_reason = self._finish_reason(delta), delta.stop_reason
        return step

    def passes(self, event: Text | Reasoning) -> bool:
        """Whether each delta with an event of the kind alone makes a step that has it alone, and nothing depends on those before."""
        is_in_place = self._view.is_separate and self._view.is_streamed
        return is_in_place if self._view.is_included else isinstance(event, Text)

    def _add(self, event: Event, step: MessageStep) -> None:
        match event:
            case Reasoning(text):
                self._add_reasoning(text, step)
                return
            case Preamble():
                self._end_reasoning(step)
                if not self._view.shows_preamble:
                    return
            case Text():
                self._end_reasoning(step)
            case ToolCallStart():
                self._end_reasoning(step)
                self._num_tool_calls += 1
                self._arguments.clear()
            case ToolCallArguments(_, fragment):
                self._arguments.append(fragment)
        step.add(event)

    def _add_reasoning(self, text: str, step: MessageStep) -> None:
        view = self._view
        if not view.is_included:
            return
        if not view.is_separate:
            step.add(Text(text if self._is_reasoning_inline else view.opening + text))
            self._is_reasoning_inline = True
        elif not view.is_streamed:
            self._held_reasoning.append(text)
        else:
            step.add(Reasoning(text))

    def _end_reasoning(self, step: MessageStep) -> None:
        self._release_reasoning(step)
        if self._is_reasoning_inline:
            step.add(Text(self._view.closing))
            self._is_reasoning_inline = False

    def _release_reasoning(self, step: MessageStep) -> None:
        if self._held_reasoning:
            step.add(Reasoning("".join(self._held_reasoning)))
            self._held_reasoning.clear()

    def _add_logprobs(self, token: TokenLogprobs, step: MessageStep) -> None:
        # A token's log probabilities are shown where its text is, or are left out with it. Those of the preamble always are.
        if token.is_preamble:
            return
        if not token.is_reasoning:
            step.content_logprobs.append(token)
        elif self._view.is_included:
            (step.reasoning_logprobs if self._view.is_separate else step.content_logprobs).append(token)

    def _finish_reason(self, delta: SequenceDelta) -> str:
        """`tool_calls` where the model has called and was not cut off in the middle of a call."""
        is_stopped = delta.finish_reason is FinishReason.STOP
        has_called = self._num_tool_calls > 0 and is_stopped and (delta.stop_reason is None or is_json(self._arguments))
        return "tool_calls" if has_called else str(delta.finish_reason)


def is_json(fragments: list[str]) -> bool:
    """Whether they are a whole document: a stop string may end an answer in the middle of a call."""
    try:
        json.loads("".join(fragments))
    except (ValueError, RecursionError):
        return False
    return True


class FunctionCall(Struct):
    """`arguments` are JSON text, as far as the model has written it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call in OpenAI's shape."""

    id: str
    type: str
    function: FunctionCall


class Message:
    """One sequence's steps added up."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._preamble: list[str] = []
        self._calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        self.content_logprobs: list[TokenLogprobs] = []
        self.reasoning_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, step: MessageStep) -> None:
        for event in step.events:
            self.add_event(event)
        self.content_logprobs += step.content_logprobs
        self.reasoning_logprobs += step.reasoning_logprobs
        if step.finish_reason is not None:
            self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason

    def add_event(self, event: Event) -> None:
        match event:
            case Text(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case Preamble(text):
                self._preamble.append(text)
            case ToolCallStart(index):
                self._calls[index] = (event, [])
            case ToolCallArguments(index, fragment):
                self._calls[index][1].append(fragment)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def preamble(self) -> str:
        return "".join(self._preamble)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """In the order of their indexes."""
        return [
            ToolCall(start.id, "function", FunctionCall(start.name, "".join(fragments)))
            for _, (start, fragments) in sorted(self._calls.items())
        ]


class AssistantMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    preamble: str | UnsetType = UNSET
    refusal: None = None
    annotations: list[Any] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, *, has_reasoning_parser: bool, is_call_forced: bool = False) -> "AssistantMessage":
        """`reasoning_content` is there, if only as null, wherever the server tells reasoning apart. A forced call leaves no content."""
        reasoning, calls = message.reasoning or None, message.tool_calls
        return cls(
            content=message.content or (None if reasoning or calls or is_call_forced else ""),
            reasoning_content=reasoning if has_reasoning_parser else UNSET,
            preamble=message.preamble or UNSET,
            tool_calls=calls or UNSET,
        )


class Conformance(Struct, omit_defaults=True):
    """Whether an answer keeps to a schema that its grammar enforced only in part; `valid` is null where that could not be decided.

    `path` is where in the answer the first mistake is, as JSONPath. `valid` is left out where there was nothing to decide. The others are
    there where they were asked for: the constraint's `pressure` in nats, with the field that has most of it, and whether the answer was
    `closed`, as it would not have ended within its `max_tokens`.
    """

    valid: bool | UnsetType | None
    error: str | UnsetType = UNSET
    path: str | UnsetType = UNSET
    pressure: float | UnsetType = UNSET
    worst: FieldPressure | UnsetType = UNSET
    closed: bool | UnsetType = UNSET


MAX_MESSAGE = 300
LIMITS = Limits(cpu_seconds=2.0, memory_bytes=2**29, niceness=10)  # the model's own threads go first
MAX_WAIT = 10.0


class ConformanceChecker:
    """Checks answers in one process, which takes one at a time. An answer that waits for longer than `MAX_WAIT` goes out unchecked."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._sandbox = Sandbox("checking the answer", limits, initializer=prepare)

    async def check(self, schema: str, answer: str) -> Conformance:
        try:
            return await asyncio.wait_for(self._sandbox.run(conformance, schema, answer), MAX_WAIT)
        except (TimeoutError, QueueFull):
            return undecided("too many others wait to be checked")
        except JobLimitExceeded as limit:
            return undecided(limit.message)
        except EngineUnavailable as failure:
            return undecided(str(failure))

    def close(self) -> None:
        self._sandbox.close()


def prepare() -> None:
    """What the first check in a process would import."""
    sys.set_int_max_str_digits(0)
    conformance("true", "1")


def conformance(schema_text: str, answer: str) -> Conformance:
    """Judges by the schema's own draft, 2020-12 where it does not say, formats included. Nothing is fetched that a schema refers to."""
    from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    try:
        instance = json.loads(answer, parse_constant=_no_constant)
    except ValueError as error:
        return _mistake(f"this is not JSON: {error}", "$")
    except RecursionError:
        return undecided("it is nested too deeply")
    try:
        mistake = best_match(_validator(schema_text).iter_errors(instance))
    except SchemaError as schema_error:
        return undecided(f"the schema is not valid at {schema_error.json_path}: {schema_error.message}")
    except Unresolvable as unresolvable:
        return undecided(f"nothing is fetched: {unresolvable}")
    except re.error as pattern_error:
        return undecided(f"a pattern cannot be read: {pattern_error}")
    except RecursionError:
        return undecided("it is nested too deeply, or the schema refers to itself without end")
    return Conformance(True) if mistake is None else _mistake(mistake.message, mistake.json_path)


def undecided(reason: str) -> Conformance:
    return Conformance(None, _bounded(f"not checked: {reason}"))


def _mistake(message: str, path: str) -> Conformance:
    return Conformance(False, _bounded(message), _bounded(path))


def _bounded(text: str) -> str:
    # The message quotes answers, which may contain anything.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


@cache
def _formats() -> Any:
    """Those that jsonschema knows by itself; where the grammars know them too, they mean the same."""
    from jsonschema import FormatChecker  # type: ignore[import-untyped]

    checker = FormatChecker()
    for name, pattern in PATTERNS.items():
        whole = re.compile(pattern, re.ASCII)
        checker.checks(name)(lambda instance, whole=whole: not isinstance(instance, str) or whole.fullmatch(instance) is not None)
    return checker


def _validator(schema_text: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    schema: Any = json.loads(schema_text)
    has_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    kind = validator_for(schema, default=Draft202012Validator) if has_draft else Draft202012Validator
    kind.check_schema(schema)
    return extend(kind, {"multipleOf": _multiple_of})(schema, registry=REGISTRY, format_checker=_formats())


def _multiple_of(validator: Any, divisor: float, instance: Any, _schema: Any) -> Iterator[Exception]:
    # Decimal numbers are divided as written: for jsonschema, which divides in binary, 0.28 is not a multiple of 0.01.
    from jsonschema import ValidationError

    if validator.is_type(instance, "number") and math.isfinite(instance) and Fraction(str(instance)) % Fraction(str(divisor)):
        yield ValidationError(f"{instance!r} is not a multiple of {divisor}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


WARNING_HEADER = "x-structured-output-warning"
MAX_HEADER = 1000


def header_text(text: str) -> str:
    """What a client has sent, such as the name of a keyword or a path, so that nothing of it can break out of a header."""
    text = text.encode("ascii", "backslashreplace").decode()
    return "".join(character if character.isprintable() else " " for character in text)


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Names what of the constraint is not enforced."""
    if not warnings:
        return {}
    text = header_text("; ".join(warnings)[: MAX_HEADER + 1])
    return {WARNING_HEADER: text if len(text) <= MAX_HEADER else f"{text[: MAX_HEADER - 3]}..."}


class ExactSampling(Struct, omit_defaults=True):
    """How a choice came that was to be sampled exactly: after so many draws, the last of which is the answer.

    Where `exact` is false, the answer was sampled under masks, or the request's time limit passed before there was one: see `reason`.
    """

    exact: bool
    draws: int
    reason: str | UnsetType = UNSET

    @classmethod
    def of(cls, found: ExactDraws) -> "ExactSampling":
        return cls(found.fallback is None, found.num_draws, UNSET if found.fallback is None else found.fallback)


class AnswerCheck:
    """Checks the choices of one request against `schema`, the JSON Schema of its content, and `arguments`, those of its tools.

    Without either there is nothing to check, and no cost. What was found of a choice is in `found` from before its last delta on. With
    `reads_pressure` that holds the constraint's pressure, with `reads_closing` whether the answer was closed.
    """

    def __init__(
        self,
        checker: ConformanceChecker,
        schema: str | None = None,
        arguments: Mapping[str, str] | None = None,
        *,
        reads_pressure: bool = False,
        reads_closing: bool = False,
    ) -> None:
        self._checker = checker
        self._schema = schema
        self._arguments = arguments or {}
        self._said: dict[int, Message] = {}
        self._reads_pressure = reads_pressure
        self._reads_closing = reads_closing
        self._pressures: dict[int, PressureReader] = {}
        self.found: dict[int, Conformance] = {}

    def watch(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        """The same deltas."""
        has_schema = self._schema is not None or bool(self._arguments)
        return self._watched(deltas) if has_schema or self._reads_pressure or self._reads_closing else deltas

    async def _watched(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        async with aclosing(deltas):
            async for delta in deltas:
                said = self._said.setdefault(delta.index, Message())
                for event in delta.events:
                    said.add_event(event)
                if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    await self._check(delta.index)
                if self._reads_pressure:
                    self._read_pressure(delta)
                if delta.is_closed is not None:
                    self.found.setdefault(delta.index, Conformance(UNSET)).closed = delta.is_closed
                yield delta

    def _read_pressure(self, delta: SequenceDelta) -> None:
        reader = self._pressures.setdefault(delta.index, PressureReader())
        reader.feed(delta)
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            read, found = reader.result(), self.found.setdefault(delta.index, Conformance(UNSET))
            found.pressure, found.worst = read.nats, read.worst

    async def _check(self, index: int) -> None:
        """Of several parts the first mistake counts, else the first that could not be checked."""
        outcomes: list[Conformance] = []
        for prefix, schema, text in self._parts(self._said.pop(index)):
            found = await self._checker.check(schema, text)
            path = found.path if found.path is UNSET or not prefix else f"$.{prefix}{found.path.removeprefix('$')}"
            outcomes.append(Conformance(found.valid, found.error, path))
            if found.valid is False:
                break
        if outcomes:
            self.found[index] = min(outcomes, key=lambda outcome: (False, None, True).index(outcome.valid))

    def _parts(self, said: Message) -> Iterator[tuple[str, str, str]]:
        """Each with where it is in the message, its schema, and its text."""
        calls = said.tool_calls
        if self._schema is not None and not calls:
            yield "", self._schema, said.content
        for index, call in enumerate(calls):
            if call.function.name in self._arguments:
                yield f"tool_calls[{index}].function.arguments", self._arguments[call.function.name], call.function.arguments
