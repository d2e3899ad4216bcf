"""What the wire hands to the engine: one prompt, n sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.engine.answer import Answer
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.hooks import LogitsProcessor
from penstock.engine.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class Request:
    """Token ids, how to sample, and how to read what comes out.

    `make_answer` is called once per sequence. `logits_processors` factories likewise: state belongs to one sequence.
    Lower `priority` runs first. `cache_salt` keeps prefix-cache hits within clients that share it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    make_answer: Callable[[], Answer]
    grammar: CompiledGrammar | None = None
    logits_processors: list[Callable[[], LogitsProcessor]] = field(default_factory=list)
    priority: int = 0
    cache_salt: str = ""
