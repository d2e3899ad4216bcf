"""The engine's request: one prompt, n sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.engine.block_pool import Retention
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.logits_processor import ChosenProcessor
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.text.answer import Answer


@dataclass(slots=True, kw_only=True)
class Request:
    """Token ids, how to sample, and how to read what comes out.

    `make_answer` is called once per sequence. So are `logits_processors`, which `logits_processor.choose` makes: state belongs to
    one sequence. They run in their order. Lower `priority` runs first. `cache_salt` keeps prefix-cache hits within clients that share it.
    `client_id` is whatever the caller tells its requests apart by. `outputs` are the named model outputs that are wanted of every generated
    token, and of the prompt's where `with_context_outputs`. At `deadline`, in `time.monotonic()`, the request ends with what it has said.
    `bad_sequences` are token ids that the output may not have in a row, and `stop_sequences` those that end it. `retention` is for what it
    leaves in the cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    make_answer: Callable[[], Answer]
    grammar: CompiledGrammar | None = None
    logits_processors: list[ChosenProcessor] = field(default_factory=list)
    priority: int = 0
    cache_salt: str = ""
    client_id: int | str | None = None
    outputs: tuple[str, ...] = ()
    with_context_outputs: bool = False
    deadline: float | None = None
    beam: BeamSearchParams | None = None
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    retention: Retention | None = None
