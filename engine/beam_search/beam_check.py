"""Whether beam search can serve a request, which other rules of the engine it may bring, and what ends its answers."""

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.scheduler import Scheduler

MAX_CANDIDATES = 4096  # that one beam may bring to a step

_NEUTRAL = SamplingParams()
# What is about drawing a token, or about a text that is certain as it comes.
_WITHOUT_MEANING = ("top_p", "min_p", "logprobs", "thinking_token_budget")


def check_beam_request(request: Request, scheduler: Scheduler, stop_token_ids: frozenset[int], max_model_len: int) -> None:
    """Raises `InvalidRequest` with the name of the field that stands in the way. Does nothing where the request asks for no beams."""
    if request.beam is None:
        return
    params, width = request.params, request.beam.beam_width
    if width > scheduler.max_num_seqs:
        limit = f"at most {scheduler.max_num_seqs}, the number of sequences that run at once"
        raise InvalidRequest(f"`beam_width` must be {limit}, got {width}", "beam_width")
    if params.n > width:
        raise InvalidRequest(f"`n` must be at most `beam_width`, {width}, got {params.n}", "n")
    if params.max_tokens == 0:
        raise InvalidRequest("`max_tokens` must be at least 1 with beam search", "max_tokens")
    for name in _WITHOUT_MEANING:
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(f"`{name}` has no meaning in beam search", name)
    if params.top_k > 0:
        raise InvalidRequest("`top_k` has no meaning in beam search", "top_k")
    if num_candidates(width, len(end_token_ids(request, stop_token_ids))) > MAX_CANDIDATES:
        raise InvalidRequest(f"`stop_token_ids` are too many for a `beam_width` of {width}", "stop_token_ids")
    num_prompt = len(request.prompt_token_ids)
    num_tokens = max_model_len if params.max_tokens is None else min(max_model_len, num_prompt + params.max_tokens)
    num_blocks = scheduler.num_blocks_for(num_prompt, num_tokens, width)
    if num_blocks > scheduler.pool.num_blocks:
        sizes = f"{num_blocks * scheduler.block_size} tokens, and the KV cache holds {scheduler.pool.num_blocks * scheduler.block_size}"
        raise InvalidRequest(f"{width} beams of {num_tokens - num_prompt} tokens after this prompt may need {sizes}", "beam_width")


def end_token_ids(request: Request, stop_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end its answers, where `stop_token_ids` are the model's. Where a grammar says when it is over, these always do."""
    ignores = request.params.ignore_eos and request.grammar is None
    return frozenset(request.params.stop_token_ids) | (frozenset() if ignores else stop_token_ids)


def num_candidates(width: int, num_end_tokens: int) -> int:
    """How many continuations a step looks at: enough for `width` beams to go on though every other one ends in each of these ways."""
    return max(2, 1 + num_end_tokens) * width
