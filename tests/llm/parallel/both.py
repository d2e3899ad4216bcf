"""What is asked of a model in one process and of the same one in two, which have to say the same."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from penstock import LLM, BeamSearchParams, EngineUnavailable, SamplingParams

LONG = "the quick brown fox jumps over the lazy dog and then it goes home to sleep "  # more tokens than a step may have
PROMPTS = [LONG, LONG + "again", "hello", "a", LONG[5:] + LONG[:20], *(f"{number} pens" for number in range(6))]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Prompts are computed in chunks.
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 160, "enable_prompt_embeds": True}


def admitting(llm: LLM) -> LLM:
    """The same, with an engine that admits what fits now, so that sequences are preempted."""
    llm._model.rest.awake().scheduler.lengths = None
    return llm


def said(llm: LLM, prompts: Any, params: SamplingParams, **others: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **others)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def check_what_has_happened(*llms: LLM) -> None:
    """Of requests to each of them before: prefixes were found, sequences preempted, drafts made."""
    for llm in llms:
        said(llm, [LONG] * 2, SamplingParams(**GREEDY))
        stats = llm._model.rest.awake().stats()
        assert stats.num_prefix_cache_hits > 0
        assert stats.num_preemptions > 0
        assert stats.num_draft_tokens > 0


def check_logprobs(one: LLM, two: LLM) -> None:
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2)
    mine, theirs = (_logprobs_of(llm.generate(LONG, params, use_tqdm=False)[0]) for llm in (two, one))
    for own, other in zip(mine, theirs, strict=True):
        assert own.keys() == other.keys()
        assert all(abs(own[token].logprob - other[token].logprob) < 1e-4 for token in own)


def _logprobs_of(output: Any) -> list[Any]:
    return [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]


def check_beams(one: LLM, two: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    mine, theirs = (llm.beam_search(["the rain", "in Spain"], params) for llm in (two, one))
    assert [[each.tokens for each in output.sequences] for output in mine] == [
        [each.tokens for each in output.sequences] for output in theirs
    ]


def check_vectors(one: LLM, two: LLM) -> None:
    vectors = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    prompts = [{"prompt_embeds": rows} for rows in vectors]
    answers = [said(llm, [*prompts, "hello"], SamplingParams(**GREEDY)) for llm in (two, one)]
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def check_end_of_a_rank(two: LLM) -> None:
    group: Any = two._model.rest.awake().runner.group
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(two.generate, [LONG] * 4, SamplingParams(**{**GREEDY, "max_tokens": 70}), use_tqdm=False)
        os.kill(group._processes[1].pid, signal.SIGKILL)
        assert {output.outputs[0].finish_reason for output in running.result(timeout=60)} == {"error"}
    assert group._reason == "rank 1: its process has ended by signal 9"
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        two.generate("hello", SamplingParams(**GREEDY), use_tqdm=False)
