"""Beam search for callers of the library."""

import math
import uuid

from penstock.api.context import ServerContext
from penstock.api.preparing import answer_reader
from penstock.engine.request import Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.llm.preparing import Prepared, check_params, token_ids_of
from penstock.llm.prompts import PromptSource
from penstock.llm.request_output import BeamSearchOutput, BeamSearchSequence, RequestOutput
from penstock.llm.sampling_params import SamplingParams


async def prepare_beams(context: ServerContext, source: PromptSource, params: BeamSearchParams) -> Prepared:
    """Raises `InvalidRequest`."""
    token_ids = await token_ids_of(context, source)
    sampling = params.sampling_params()
    own = SamplingParams(**{name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__})
    check_params(context, own, len(token_ids), source.path)
    request = Request(
        request_id=f"beam-{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        params=own,
        make_answer=answer_reader(context.tokenizer, token_ids, own),
        cache_salt=source.cache_salt,
        beam=params,
    )
    return Prepared(request, own, source.path, source.text)


def beam_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """vLLM's shape, in which every answer begins with its prompt."""
    prompt = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                output.prompt_token_ids + answer.token_ids,
                prompt + answer.text,
                answer.cumulative_logprob if answer.cumulative_logprob is not None else 0.0,
                answer.beam_score if answer.beam_score is not None else 0.0,
                answer.finish_reason,
                answer.stop_reason,
            )
            for answer in output.outputs
            if answer.beam_score != -math.inf  # fewer were found than were asked for
        ]
    )
