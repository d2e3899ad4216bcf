"""A real model with a real draft model: `scripts/test -m real_model tests/llm/speculation/test_draft_pair.py`.

It fetches 1.6 GB once.
"""

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.llm.outputs import Counter

pytestmark = pytest.mark.real_model
MODEL, DRAFT = "qwen-coder-1.5b", "qwen-coder"
QUESTIONS = (
    "Write a Python function that says whether a number is prime.",
    "Write a Python class for a stack with push, pop and peek.",
    "List the numbers from 1 to 20, separated by commas.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def answers(llm: LLM) -> list[list[int]]:
    """Of each question on its own, then of all at once."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = [output for conversation in conversations for output in llm.chat(conversation, GREEDY, use_tqdm=False)]
    return [output.outputs[0].token_ids for output in [*outputs, *llm.chat(conversations, GREEDY, use_tqdm=False)]]


def counted(llm: LLM, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if isinstance(metric, Counter) and metric.name.endswith(name))


def test_the_draft_model_changes_no_answer_and_most_of_its_tokens_are_accepted() -> None:
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "256MiB"}
    with LLM(MODEL, speculation="none", **settings) as llm:
        expected = answers(llm)
    with LLM(MODEL, draft_model=DRAFT, speculation="draft", **settings) as llm:
        assert answers(llm) == expected
        drafted = counted(llm, "spec_decode_num_draft_tokens")
        accepted = counted(llm, "spec_decode_num_accepted_tokens")
    assert accepted > 0.5 * drafted > 0
