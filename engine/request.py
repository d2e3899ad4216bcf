"""A request as submitted: token ids, how to sample, and how to read what comes out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.engine.adapters.registry import Adapter
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.contracts.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.contracts.logits_processor import ChosenProcessor
from penstock.engine.contracts.parsing import Turn
from penstock.engine.errors import InvalidRequest
from penstock.engine.kv_cache.blocks import PrefixKey, Retention
from penstock.engine.multimodal.inputs import PromptEmbeds, PromptImage, RopePositions, content_ids, moved
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.speculation.proposers import Prediction
from penstock.engine.text.answer import NO_LIMITS, Answer, CallLimits, PreambleParams
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # these load torch
    from penstock.engine.constraints.closing import AnswerEnd
    from penstock.engine.kv_cache.transfer import ReceivedBlocks
    from penstock.engine.sampling.rows import TokenRules

BACKGROUND = 2**31 - 1  # the lowest priority: computed only while no request of another one is there, however long it has waited


@dataclass(slots=True, kw_only=True)
class Request:
    """Token ids, how to sample, and how to parse the output. An `adapter` changes the model, or the prompt, for this request.

    With a `call_grammar` each answer is tool calls under that one, or content under `grammar`, as the model's own distribution decides: see
    `CallDecision`. `make_answer` is an `AnswerFactory` with a tool parser then. A call is whatever the tool parser recognizes as one or,
    with a `call_opening`, text that starts with it.
    `make_answer` is called once per sequence. So are `logits_processors`, which `logits_processor.choose` makes: state belongs to
    one sequence. They run in their order. Lower `priority` runs first. `cache_salt` keeps prefix-cache hits within clients that share it.
    `client_id` identifies the request for its caller, and `http_id` is the id of the HTTP request, for operators.
    `outputs` are the named model outputs requested for every generated token, and `with_context_outputs` for the prompt's too. At
    `deadline`, in `time.monotonic()`, the request ends with its output so far.
    `block_hashes` are the hashes of the prompt's blocks, as far as they have been computed (`EngineCore.hash_prompt`).
    With `exact`, answers are drawn from the model's distribution given that they are valid.
    `prediction` is what the answer is expected to be: its tokens are proposed as draft tokens.
    `preamble` is the free text that precedes the answer, which has a grammar then. Where it `measures_pressure`, deltas have `pressures`.
    An answer to a grammar that `ends_within` is complete within its `max_tokens`; `EngineCore.find_end` finds its `end` and `call_end`.
    `embeds` take the place of tokens of the prompt, whose ids are placeholders there.
    `bad_sequences` are token ids that the output may not have in a row, and `stop_sequences` those that end it. `retention` applies to its
    blocks in the cache. With `is_exported`, the prompt's full blocks are exported once its sequences have ended. `received` are the blocks
    that another process has exported, and `first_token_ids` the tokens that it has sampled first, one for each of the n sequences,
    whose answers begin with them. `rules` are `token_rules` of the parameters and `bad_sequences`, if computed beforehand.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    make_answer: Callable[[], Answer]
    grammar: CompiledGrammar | None = None
    call_grammar: CompiledGrammar | None = None
    call_opening: str | None = None
    logits_processors: list[ChosenProcessor] = field(default_factory=list)
    priority: int = 0
    cache_salt: str = ""
    client_id: int | str | None = None
    http_id: str | None = None
    outputs: tuple[str, ...] = ()
    with_context_outputs: bool = False
    deadline: float | None = None
    beam: BeamSearchParams | None = None
    exact: bool = False
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    retention: Retention | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    rules: "TokenRules | None" = None
    prediction: Prediction | None = None
    preamble: PreambleParams | None = None
    measures_pressure: bool = False
    ends_within: bool = False
    end: "AnswerEnd | None" = None
    call_end: "AnswerEnd | None" = None
    embeds: tuple[PromptEmbeds | PromptImage, ...] = ()
    adapter: Adapter | None = None
    is_exported: bool = False
    received: "ReceivedBlocks | None" = None
    first_token_ids: tuple[int, ...] = ()

    _content_ids: list[int] | None = field(default=None, init=False, repr=False)
    _rope: RopePositions | None = field(default=None, init=False, repr=False)

    def check_prompt(self, max_model_len: int, vocab_size: int) -> None:
        """Raises `InvalidRequest` for a prompt that the model cannot take."""
        num_prompt = len(self.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty: it must hold at least one token", "prompt")
        if num_prompt > max_model_len or (num_prompt == max_model_len and self.params.max_tokens != 0):
            limit = f"prompt and answer together may have {max_model_len}"
            raise InvalidRequest(f"the prompt has {num_prompt} tokens, and {limit}", "prompt")
        for token_id in (min(self.prompt_token_ids), max(self.prompt_token_ids)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"the prompt holds token id {token_id}, outside the vocabulary of {vocab_size} tokens", "prompt")

    def check_combinations(self) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.preamble is not None and (self.grammar is None or self.beam is not None):
            raise InvalidRequest("a preamble precedes a constrained answer, and beam search has none", "preamble")
        if self.call_grammar is not None and (self.grammar is None or self.beam is not None or self.exact):
            raise InvalidRequest("calls beside content need a grammar of both, and neither beam search nor exact sampling", "call_grammar")
        if self.first_token_ids and (self.beam is not None or len(self.first_token_ids) != self.params.n):
            raise InvalidRequest(f"there are {len(self.first_token_ids)} first tokens for {self.params.n} sequences", "first_token_ids")

    def expanded(self) -> "Request":
        """The request with its adapter's virtual tokens before the prompt, where the adapter is a tuned prompt."""
        if self.adapter is None or self.adapter.prompt is None:
            return self
        prompt = self.adapter.prompt
        number = len(prompt.positions)
        token_ids = [0] * number + self.prompt_token_ids
        embeds = (prompt, *(moved(source, number) for source in self.embeds))
        return replace(self, adapter=None, prompt_token_ids=token_ids, embeds=embeds, block_hashes=[])

    @property
    def content_ids(self) -> list[int]:
        """The prompt's ids as the prefix cache knows them: equal ones stand for equal contents, be they tokens or `embeds`."""
        if not self.embeds:
            return self.prompt_token_ids
        if self._content_ids is None:
            self._content_ids = content_ids(self.prompt_token_ids, self.embeds)
        return self._content_ids

    @property
    def rope(self) -> RopePositions | None:
        """The rotary positions of the prompt, where they are others than the tokens' numbers."""
        grids = [
            (source.positions[0], source.grid) for source in self.embeds if isinstance(source, PromptImage) and source.grid is not None
        ]
        if grids and self._rope is None:
            self._rope = RopePositions.of_prompt(len(self.prompt_token_ids), grids)
        return self._rope

    @property
    def placeholders(self) -> frozenset[int]:
        """The positions of the prompt whose ids mean nothing."""
        return frozenset(position for source in self.embeds for position in source.positions)

    @property
    def num_embed_bytes(self) -> int:
        return sum(source.num_bytes for source in self.embeds)

    @property
    def grammar_warnings(self) -> tuple[str, ...]:
        """What its grammars do not enforce."""
        grammars = (grammar for grammar in (self.grammar, self.call_grammar) if grammar is not None)
        return tuple(dict.fromkeys(warning for grammar in grammars for warning in grammar.warnings))

    @property
    def prefix_key(self) -> PrefixKey:
        """What a cached prefix must have been computed under."""
        return PrefixKey(self.cache_salt, b"" if self.adapter is None else self.adapter.digest)

    @property
    def is_background(self) -> bool:
        return self.priority == BACKGROUND


@dataclass(frozen=True, slots=True)
class AnswerFactory:
    """Makes the answer of a sequence, which reads its tokens. Without parsers the text is the model's own."""

    tokenizer: Tokenizer
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning: ReasoningParserFactory | None = None
    tools: ToolParserFactory | None = None
    turn: Turn = field(default_factory=Turn)
    call_limits: CallLimits = NO_LIMITS

    def __call__(self) -> Answer:
        return Answer(
            Detokenizer(self.tokenizer, self.prompt_token_ids),
            self.reasoning(self.turn) if self.reasoning else None,
            self.tools(self.turn) if self.tools else None,
            self.params.stop,
            self.params.include_stop_str_in_output,
            self.params.skip_special_tokens,
            self.params.min_tokens,
            self.call_limits,
        )


@dataclass(slots=True)
class Deadlines:
    """When which request has to end, in `time.monotonic()`."""

    _by_request: dict[str, float] = field(default_factory=dict)

    def add(self, request_id: str, deadline: float | None) -> None:
        if deadline is not None:
            self._by_request[request_id] = deadline

    def discard(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def take_expired(self) -> list[str]:
        """The requests whose time is over, each once."""
        if not self._by_request:
            return []
        now = time.monotonic()
        expired = [request_id for request_id, deadline in self._by_request.items() if deadline <= now]
        for request_id in expired:
            del self._by_request[request_id]
        return expired

    def seconds_left(self, at_most: float) -> float:
        """Until the next of them, or `at_most`."""
        return max(0.0, min(at_most, min(self._by_request.values(), default=float("inf")) - time.monotonic()))
