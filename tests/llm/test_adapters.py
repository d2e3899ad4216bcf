"""`LoRARequest`: calls of the library with adapters, against peft."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, AsyncLLM, BeamSearchParams, ConfigurationError, InvalidRequest, LoRARequest, SamplingParams, TokensPrompt
from tests.llm.model_directory import SETTINGS
from tests.tiny_adapters import adapted_model, quiet, write_adapter, write_tuned_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    write = {1: write_adapter, 2: write_adapter, 3: write_tuned_prompt}
    return [LoRARequest(f"a{seed}", seed, str(write[seed](load(model_dir), root / str(seed), seed=seed))) for seed in write]


@pytest.fixture(scope="module")
def expected(model_dir: Path, adapters: list[LoRARequest]) -> list[list[int]]:
    """What peft says: without an adapter, then with each."""
    models = [load(model_dir), *(adapted_model(load(model_dir), Path(adapter.lora_path)) for adapter in adapters)]
    ids = torch.tensor([PROMPT])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    with quiet():
        answers = [model.generate(input_ids=ids, **settings)[0, len(PROMPT) :].tolist() for model in models]
    assert len(set(map(tuple, answers))) == len(answers)
    return answers


@pytest.fixture(scope="module")
def adapted(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, enable_lora=True, max_cpu_loras=2, max_loras=1, **SETTINGS) as running:
        yield running


def load(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def said(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_request_has_the_adapter_that_it_names(adapted: LLM, adapters: list[LoRARequest], expected: list[list[int]]) -> None:
    for adapter, answer in zip([None, *adapters, *adapters], [*expected, *expected[1:]], strict=True):  # more than are kept
        assert said(adapted.generate([PROMPT], GREEDY, lora_request=adapter, use_tqdm=False)) == [answer]
    choices = [adapters[1], None, adapters[0]]
    answers = [expected[2], expected[0], expected[1]]
    assert said(adapted.generate([PROMPT] * 3, GREEDY, lora_request=choices, use_tqdm=False)) == answers
    beams = adapted.beam_search(
        [TokensPrompt(prompt_token_ids=PROMPT)], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True), adapters[0]
    )
    assert beams[0].sequences[0].tokens == PROMPT + expected[1]
    first, other = (
        adapted.chat([{"role": "user", "content": "a"}], GREEDY, lora_request=own, use_tqdm=False) for own in (None, adapters[0])
    )
    assert said(first) != said(other)


def test_an_adapter_may_be_given_from_the_start_and_asked_for_later(
    model_dir: Path, adapters: list[LoRARequest], expected: list[list[int]]
) -> None:
    async def main() -> list[int]:
        async with AsyncLLM(model_dir, enable_lora=True, **SETTINGS) as model:
            async for output in model.generate({"prompt_token_ids": PROMPT}, GREEDY, lora_request=adapters[2]):
                token_ids: list[int] = output.outputs[0].token_ids
        return token_ids

    assert asyncio.run(main()) == expected[3]


def test_what_cannot_be_meant_is_refused(adapted: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        (object(), "must be a LoRARequest"),
        ([adapters[0], adapters[1]], "one for each of 1 prompts"),
        (LoRARequest("a1", 7, adapters[1].lora_path), "'a1' is already that of"),
        (LoRARequest("new", 8, str(tmp_path)), "it has no adapter_config.json"),
    ]
    adapted.generate([PROMPT], GREEDY, lora_request=adapters[0], use_tqdm=False)
    for given, reason in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            adapted.generate([PROMPT], GREEDY, lora_request=given, use_tqdm=False)
    for fields in (("", 1, ""), ("a", 0, "b"), ("a", 1, None)):
        with pytest.raises(InvalidRequest):
            LoRARequest(*fields)


def test_without_the_option_adapters_are_refused(llm: LLM, adapters: list[LoRARequest], model_dir: Path) -> None:
    calls: list[Callable[..., Any]] = [llm.generate, llm.beam_search]
    for call in calls:
        with pytest.raises(InvalidRequest, match="built without adapters"):
            call("a", lora_request=adapters[0])
    calls = [llm.encode, llm.embed, llm.classify]
    for call in calls:
        with pytest.raises(InvalidRequest, match="only models that generate text take adapters"):
            call("a", lora_request=adapters[0])
    with pytest.raises(ConfigurationError, match=r"--adapter a=/nowhere: .* there is no directory '/nowhere'"):
        LLM(model_dir, adapter="a=/nowhere", **SETTINGS)
