"""The Responses API on the wire: the response object, its items, and the events of its stream."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.sampling.params import SamplingParams
from penstock.serving.endpoints.chat import TokenLogprob
from penstock.serving.messages import Conformance, ExactSampling
from penstock.serving.responses.items import Status
from penstock.serving.responses.requests import ResponsesRequest


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(Struct, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag="summary_text"):
    text: str


class MessageOutput(Struct, tag="message"):
    id: str
    status: Status
    role: str
    content: list[OutputText]


class FunctionCallOutput(Struct, tag="function_call"):
    """`id` is the item's, `call_id` the call's, which its output names."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningOutput(Struct, tag="reasoning"):
    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET  # Open Responses knows no null here


OutputItem = MessageOutput | FunctionCallOutput | ReasoningOutput


class IncompleteDetails(Struct):
    reason: str


class ResponseError(Struct):
    code: str
    message: str


class FormatOptions(Struct):
    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: Any = UNSET
    strict: bool | UnsetType | None = UNSET


class TextSettings(Struct):
    format: FormatOptions
    verbosity: str


class ReasoningSettings(Struct):
    effort: str | None
    summary: str | None


class Response(Struct, kw_only=True):
    """Every key is always there, null where it has no value."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: TextSettings
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    structured_output: Conformance | UnsetType = UNSET
    exact_sampling: ExactSampling | UnsetType = UNSET


class StreamEvent(Struct, kw_only=True):
    sequence_number: int


class ResponseEvent(StreamEvent):
    response: Response


class Created(ResponseEvent, tag="response.created"):
    pass


class Queued(ResponseEvent, tag="response.queued"):
    """Of a response in the background that waits for its first token."""


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class ItemEvent(StreamEvent):
    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    pass


class ItemDone(ItemEvent, tag="response.output_item.done"):
    pass


class OfItem(StreamEvent):
    item_id: str
    output_index: int


class OfContent(OfItem):
    content_index: int


class PartAdded(OfContent, tag="response.content_part.added"):
    part: OutputText


class PartDone(OfContent, tag="response.content_part.done"):
    part: OutputText


class TextDelta(OfContent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(OfContent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(OfContent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(OfContent, tag="response.reasoning_text.done"):
    text: str


class OfSummary(OfItem):
    summary_index: int


class SummaryPartAdded(OfSummary, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(OfSummary, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(OfSummary, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(OfSummary, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDelta(OfItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(OfItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ErrorDetails(Struct):
    type: str
    code: str
    message: str
    param: str | None


class ErrorEvent(StreamEvent, tag="error"):
    """In both shapes that clients know: with `error`, and flat."""

    error: ErrorDetails
    code: str
    message: str
    param: str | None


StreamedEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)


def response_of(body: ResponsesRequest, params: SamplingParams, model: str, response_id: str, created: int) -> Response:
    """Before its first token: with what the request asks for, and the defaults that hold where it does not."""
    reasoning = body.reasoning
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return Response(
        id=response_id,
        created_at=created,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningSettings(None if reasoning is None else reasoning.effort, summary),
        safety_identifier=body.safety_identifier,
        store=body.is_stored,
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        text=text_settings(body),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {**dict.fromkeys(("type", "name", "description", "parameters", "strict")), **tool}


def text_settings(body: ResponsesRequest) -> TextSettings:
    given = None if body.text is None else body.text.format
    verbosity = "medium" if body.text is None or body.text.verbosity is None else body.text.verbosity
    if given is None or given.type != "json_schema":
        return TextSettings(FormatOptions("text" if given is None else given.type), verbosity)
    return TextSettings(FormatOptions(given.type, given.name or "", given.description, given.schema, given.strict), verbosity)
