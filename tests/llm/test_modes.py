"""Modes of structured outputs in the library, and pressure against the model's own probabilities."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, CompletionOutput, InvalidRequest, RequestOutput, SamplingParams, StructuredOutputsParams
from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.sampling.rows import apply_bitmask_with_torch
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.serving.constraints.pressure import FieldPressure
from penstock.serving.requests import Mode
from tests.llm.model_directory import SETTINGS

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xx", "xyz"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def asking(mode: Mode | None = None, temperature: float = 0.0, max_tokens: int = 60, n: int = 1, **how: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(json=SCHEMA, mode=mode, **how)
    return SamplingParams(temperature=temperature, seed=7, max_tokens=max_tokens, n=n, structured_outputs=outputs)


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    (output,) = outputs
    return output.outputs[0]


def test_free_text_precedes_an_answer(llm: LLM) -> None:
    params = asking("draft", preamble_tokens=12, cue=" so: ", include_preamble=True)
    tokenizer = llm.get_tokenizer()
    for output in (only(llm.generate("hello", params, use_tqdm=False)), only(llm.chat(HELLO, params, use_tqdm=False))):
        assert json.loads(output.text).keys() == {"a", "n"}
        assert output.preamble
        assert 1 <= tokenizer.decode(output.token_ids).index(" so: ") <= 12 * 9
        assert output.token_ids[-len(output.text) :] != output.token_ids[: len(output.text)]


def test_each_answer_has_its_own_free_text(llm: LLM) -> None:
    params = asking("draft", temperature=1.0, n=4, preamble_tokens=8, include_preamble=True)
    [output] = llm.generate("hello", params, use_tqdm=False)
    assert len({answer.preamble for answer in output.outputs}) > 1
    assert all(json.loads(answer.text)["a"] in ("xx", "xyz") for answer in output.outputs)


def test_an_answer_is_that_of_its_prompt_with_the_free_text(llm: LLM) -> None:
    """The constrained part of the same tokens as a request of their own: what precedes it, is its prompt."""
    prompt = llm.get_tokenizer().encode("hello")
    cue = llm.get_tokenizer().encode(" so: ")
    drafted = only(llm.generate({"prompt_token_ids": prompt}, asking("draft", preamble_tokens=9, cue=" so: "), use_tqdm=False))
    start = next(place for place in range(len(drafted.token_ids)) if drafted.token_ids[place : place + len(cue)] == cue) + len(cue)
    alone = only(llm.generate({"prompt_token_ids": prompt + drafted.token_ids[:start]}, asking(), use_tqdm=False))
    assert drafted.token_ids[start:] == alone.token_ids
    assert drafted.text == alone.text


def test_a_mode_needs_a_constraint(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(mode="draft"))
    with pytest.raises(InvalidRequest):
        llm.generate("hello", params, use_tqdm=False)
    with pytest.raises(InvalidRequest):
        llm.chat(HELLO, params, use_tqdm=False)


@functools.cache
def reference(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.train(False)


def pressure_of(directory: Path, prompt: list[int], answer: list[int]) -> float:
    """By brute force: of each token of the answer -log of the sum, in float64, of the probabilities that its mask left."""
    tokenizer = Tokenizer.load(directory)
    model = reference(directory)
    size = model.config.vocab_size
    stop_ids = set(tokenizer.eos_token_ids)
    matcher = (
        LlguidanceBackend(tokenizer.vocabulary(size, stop_ids)).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))).matcher()
    )
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + answer])).logits[0].double()
    total = 0.0
    for place, token_id in enumerate(answer):
        if matcher.finished:
            break
        row_1W = allocate_bitmask(1, size)
        matcher.fill_bitmask(row_1W[0])
        allowed_1V = torch.zeros(1, size, dtype=torch.float32)
        apply_bitmask_with_torch(allowed_1V, row_1W, [0])
        probs_V = logits_TV[len(prompt) + place - 1].softmax(-1)
        total -= float(probs_V[allowed_1V[0] == 0].sum().log())
        if token_id in stop_ids:
            break
        assert matcher.advance(token_id)
    return total


@pytest.mark.parametrize(("temperature", "speculation"), [(0.0, "none"), (0.7, "ngram")])
def test_pressure_is_what_the_model_says_of_its_masks(model_dir: Path, temperature: float, speculation: str) -> None:
    with LLM(model_dir, speculation=speculation, **SETTINGS) as llm:
        [output] = llm.generate("hello", asking(temperature=temperature, n=2, pressure=True), use_tqdm=False)
        [plain] = llm.generate("hello", asking(temperature=temperature, n=2), use_tqdm=False)
    for answer in output.outputs:
        assert answer.pressure is not None
        assert answer.pressure.nats > 1
        assert answer.pressure.nats == pytest.approx(pressure_of(model_dir, output.prompt_token_ids, answer.token_ids), abs=1e-3)
        assert isinstance(answer.pressure.worst, FieldPressure)
        assert answer.pressure.worst.path in ("$", "$.a", "$.n")
    assert all(answer.pressure is None for answer in plain.outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_whole_within_its_max_tokens(llm: LLM, temperature: float) -> None:
    endless = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    for max_tokens in (8, 17, 30):
        outputs = StructuredOutputsParams(json=endless, within_max_tokens=True)
        params = SamplingParams(temperature=temperature, seed=3, n=2, max_tokens=max_tokens, structured_outputs=outputs)
        [output] = llm.generate("hello", params, use_tqdm=False)
        for answer in output.outputs:
            assert json.loads(answer.text)
            assert answer.finish_reason == "stop"
            assert len(answer.token_ids) <= max_tokens
            assert answer.closed is not None
    [plain] = llm.generate("hello", asking(), use_tqdm=False)
    assert plain.outputs[0].closed is None
