"""Chat completions."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.contracts.parsing import Event, Preamble, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta, TokenLogprobs
from penstock.serving.context import ServerContext
from penstock.serving.endpoints.answers import (
    Answer,
    ChunkFold,
    PromptLogprobs,
    TokenWriter,
    TransferAnswer,
    Usage,
    clamp,
    encode_events,
    plan_transfer,
    prompt_logprobs,
    usage_of,
)
from penstock.serving.endpoints.bodies import Caller, named_model
from penstock.serving.messages import (
    AssistantMessage,
    Conformance,
    ExactSampling,
    Message,
    MessageReader,
    MessageStep,
    drop_missing_beams,
    warning_header,
)
from penstock.serving.observability.metrics import RequestTimer
from penstock.serving.preparing import PreparedChat, check_logprobs, generate_chat, prepare_chat
from penstock.serving.requests import ChatCompletionRequest, ReasoningField
from penstock.serving.structured_outputs import make_answer_check


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`content` are the tokens of content and calls; those of the reasoning are apart, where any are shown."""

    content: list[TokenLogprob]
    refusal: None = None
    reasoning_content: list[TokenLogprob] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first one of a call has its id, type and name; the following ones only more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    """The first one of a choice has its role, and `refusal`, which is always null, as OpenAI sends it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    preamble: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    structured_output: Conformance | UnsetType = UNSET
    exact_sampling: ExactSampling | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    structured_output: Conformance | UnsetType = UNSET
    exact_sampling: ExactSampling | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | None = None
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


def name_reasoning(answer: ChatDelta | AssistantMessage, field: ReasoningField) -> None:
    """Puts the reasoning where clients look for it: null, not absent, if the answer has none."""
    text = answer.reasoning_content or None
    if field != "reasoning_content":
        answer.reasoning = text
    answer.reasoning_content = UNSET if field == "reasoning" else text


def chat_delta(event: Event) -> ChatDelta:
    """One event on the wire. Each delta holds one kind of thing: clients look at one field and skip the others."""
    match event:
        case Text(text):
            return ChatDelta(content=str(text))
        case Reasoning(text):
            return ChatDelta(reasoning_content=str(text))
        case Preamble(text):
            return ChatDelta(preamble=str(text))
        case ToolCallStart(index, name, call_id):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), call_id, "function")])
        case ToolCallArguments(index, fragment):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(str(fragment)))])


class ChoiceWriter:
    """The steps of one message as the choices of chunks, or as one whole choice. `num_top` is None where no log probabilities are shown.

    `found` is what checking complete choices has found, by their index: it is in there before a choice's last step comes. So is `exact`.
    """

    def __init__(
        self,
        index: int,
        tokens: TokenWriter,
        num_top: int | None,
        found: Mapping[int, Conformance] | None = None,
        exact: Mapping[int, ExactSampling] | None = None,
    ) -> None:
        self._index = index
        self._tokens = tokens
        self._num_top = num_top
        self._found = {} if found is None else found
        self._exact = {} if exact is None else exact
        self._content: list[TokenLogprobs] = []  # of tokens whose text has not been sent
        self._reasoning: list[TokenLogprobs] = []

    @property
    def shows_logprobs(self) -> bool:
        return self._num_top is not None

    def opening(self) -> ChatChunkChoice:
        return ChatChunkChoice(self._index, ChatDelta(role="assistant", content="", refusal=None))

    def write(self, step: MessageStep) -> list[ChatChunkChoice]:
        self._content += step.content_logprobs
        self._reasoning += step.reasoning_logprobs
        choices = [ChatChunkChoice(self._index, chat_delta(event), self._take_logprobs()) for event in step.events]
        if step.finish_reason is not None:
            stop = UNSET if step.stop_reason is None else step.stop_reason
            found, exact = self._found.get(self._index, UNSET), self._exact.get(self._index, UNSET)
            choices.append(ChatChunkChoice(self._index, ChatDelta(), self._take_logprobs(), step.finish_reason, stop, found, exact))
        return choices

    def whole(self, message: Message, answer: AssistantMessage) -> ChatChoice:
        """The choice of a body: the message as `answer` shows it."""
        logprobs = self.logprobs(message.content_logprobs, message.reasoning_logprobs)
        found, exact = self._found.get(self._index, UNSET), self._exact.get(self._index, UNSET)
        return ChatChoice(self._index, answer, logprobs, message.finish_reason or "", message.stop_reason, found, exact)

    def logprobs(self, content: Sequence[TokenLogprobs], reasoning: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_top is None or not (content or reasoning):
            return None
        num_top = self._num_top
        written = [chat_logprob(token, num_top, self._tokens) for token in reasoning]
        return ChatLogprobs([chat_logprob(token, num_top, self._tokens) for token in content], reasoning_content=written or UNSET)

    def _take_logprobs(self) -> ChatLogprobs | None:
        content, reasoning = self._content, self._reasoning
        self._content, self._reasoning = [], []
        return self.logprobs(content, reasoning)


def chat_logprob(token: TokenLogprobs, num_top: int, tokens: TokenWriter) -> TokenLogprob:
    top = [TopLogprob(tokens.name(other), clamp(logprob), list(tokens.bytes(other))) for other, logprob in token.top[:num_top]]
    return TokenLogprob(tokens.name(token.token_id), clamp(token.logprob), list(tokens.bytes(token.token_id)), top)


class ChatFold(ChunkFold):
    """One request's deltas as chunks, and as the body that the same chunks add up to."""

    def __init__(
        self, context: ServerContext, body: ChatCompletionRequest, prepared: PreparedChat, model: str, found: Mapping[int, Conformance]
    ) -> None:
        params = prepared.request.params
        super().__init__(context, body, prepared.request.request_id, model, params.n)
        self._is_call_forced = prepared.tools.is_forced
        self._has_reasoning_parser = context.reasoning_parser is not None
        self._reasoning_field: ReasoningField = context.options.reasoning_field
        self._without_role = set(range(params.n)) if self._has_reasoning_parser else set[int]()
        self._readers = [MessageReader(prepared.view) for _ in range(params.n)]
        self._choices = [ChoiceWriter(index, self._tokens, params.logprobs, found, self._exact) for index in range(params.n)]
        self._messages = [Message() for _ in range(params.n)]

    def opening(self) -> bytes:
        """A chunk of the role for each choice; where the answer may begin with reasoning, its first delta has the role instead.

        Clients print a heading at the first `content`, be it empty, and take what is not reasoning for content.
        """
        if self._has_reasoning_parser:
            return b""
        return encode_events(self._chunk([choice.opening()], self._usage_so_far()) for choice in self._choices)

    def chunks(self, delta: SequenceDelta) -> list[ChatCompletionChunk]:
        choices = self._choices[delta.index].write(self._read(delta))
        if self._has_reasoning_parser:
            self._show_reasoning(choices)
        return [self._chunk([choice], self._usage_so_far()) for choice in choices]

    def text_chunk(self, index: int, event: Text | Reasoning) -> ChatCompletionChunk | None:
        varies = self._choices[index].shows_logprobs or self._stream_options.continuous_usage_stats
        if varies or index in self._without_role or not self._readers[index].passes(event):
            return None
        choices = self._choices[index].write(MessageStep([event]))
        if self._has_reasoning_parser:
            self._show_reasoning(choices)
        (choice,) = choices
        return self._chunk([choice], self._usage_so_far())

    def add(self, delta: SequenceDelta) -> None:
        self._messages[delta.index].add(self._read(delta))

    def body(self) -> ChatCompletion:
        choices = [
            choice.whole(message, self._shown(message))
            for choice, message in zip(self._choices, self._messages, strict=True)
            if message.finish_reason is not None  # beam search may find fewer than were asked for
        ]
        usage, written = usage_of(self._counts), prompt_logprobs(self._counts.prompts.get(0), self._num_prompt_top, self._tokens)
        return ChatCompletion(
            self._id, "chat.completion", self._created, self._model, choices, usage, written, self._fingerprint, self.handed_over
        )

    def _read(self, delta: SequenceDelta) -> MessageStep:
        self._counts.add(delta)
        if delta.exact is not None:
            self._exact[delta.index] = ExactSampling.of(delta.exact)
        return self._readers[delta.index].feed(delta)

    def _shown(self, message: Message) -> AssistantMessage:
        answer = AssistantMessage.of(message, has_reasoning_parser=self._has_reasoning_parser, is_call_forced=self._is_call_forced)
        answer.annotations = []
        if self._has_reasoning_parser:
            name_reasoning(answer, self._reasoning_field)
        return answer

    def _show_reasoning(self, choices: list[ChatChunkChoice]) -> None:
        for choice in choices:
            if choice.index in self._without_role:
                self._without_role.remove(choice.index)
                choice.delta.role, choice.delta.refusal = "assistant", None
            if choice.finish_reason is not None:
                choice.delta.content = ""  # clients read `content` of each delta without reasoning, as DeepSeek's API lets them
            name_reasoning(choice.delta, self._reasoning_field)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage, self._fingerprint)


async def answer_chat(context: ServerContext, body: ChatCompletionRequest, size: int, caller: Caller, timer: RequestTimer) -> Answer:
    """Begins the answer to a conversation, of which `size` is that of the body in bytes. Raises `InvalidRequest` or `EngineUnavailable`."""
    model = timer.model = named_model(context, body.model)
    adapter = context.adapter_of(body.model)
    prepared = await prepare_chat(context, body, size, caller.chat_options(adapter=adapter))
    request = prepared.request
    check_logprobs(body, [request])
    if body.kv_transfer_params is not None:
        await plan_transfer(context, body, body.kv_transfer_params, [request])
    check = await make_answer_check(context, body, size, request, prepared.tools)
    fold = ChatFold(context, body, prepared, model, check.found)
    deltas = check.watch(timer.watch(drop_missing_beams(body, generate_chat(context, prepared)), request.params))
    headers = warning_header(request.grammar_warnings)
    return Answer(deltas=deltas, fold=fold, is_streamed=bool(body.stream), interval=body.stream_interval, headers=headers)
