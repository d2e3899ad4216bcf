"""The engine says what transformers says, and says it however requests are batched, cut, cached, pushed out or forked."""

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.core import EngineCore
from penstock.engine.model.loader import LoadedModel, load_model
from penstock.engine.speculation.proposers import SequenceNgrams
from penstock.engine.text.tokenizer import Tokenizer
from tests.engines import Run, core_over, loaded_model, run
from tests.fakes import VOCAB_SIZE, byte_tokenizer, drive, make_request, tokens
from tests.tiny_models import ARCHITECTURES, FORMS, WINDOW, tiny_model

NUM_NEW_TOKENS = 16  # more than the window and than a block
TOLERANCE = 5e-5  # float32 logits of models whose logits are about 1; they differ by up to 1e-5
CLEAR_MARGIN = 20 * TOLERANCE
BLOCK_SIZE = 8
# Around a block, around the window, and beyond both.
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, WINDOW + 1, 2 * BLOCK_SIZE + 1, 45)


@dataclass(frozen=True)
class Reference:
    """What transformers does with one prompt on its own: greedy tokens, the logits of each, and those after each prompt token.

    `margin` is by how much the least clear choice was made.
    """

    prompt: list[int]
    token_ids: list[int]
    logits_TV: Tensor
    prompt_logits_TV: Tensor
    margin: float


def reference(model: PreTrainedModel, prompt: list[int], vocab_size: int = VOCAB_SIZE, repetition_penalty: float = 1.0) -> Reference:
    input_ids = torch.tensor([prompt])
    beyond = list(range(vocab_size, model.config.vocab_size))
    generate: Any = model.generate
    with torch.inference_mode():
        output = generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            suppress_tokens=beyond or None,
            repetition_penalty=repetition_penalty,
        )
        prompt_logits_TV = model(input_ids).logits[0, :, :vocab_size]
    best_T2 = torch.cat(output.scores).topk(2).values
    margin = float((best_T2[:, 0] - best_T2[:, 1]).min())
    logits_TV = torch.cat(output.logits)[:, :vocab_size]
    return Reference(prompt, output.sequences[0, len(prompt) :].tolist(), logits_TV, prompt_logits_TV, margin)


@dataclass(frozen=True)
class Subject:
    """A model in the engine's hands, and what transformers had done with it before. The prompts share beginnings."""

    loaded: LoadedModel
    references: list[Reference]
    seed: int = 0

    @property
    def prompts(self) -> list[list[int]]:
        return [entry.prompt for entry in self.references]


@functools.cache
def subject(name: str, repetition_penalty: float = 1.0) -> Subject:
    """With the first weights whose greedy choices are clear, so that rounding cannot change them."""
    generator = random.Random(name)
    text = [generator.randrange(VOCAB_SIZE) for _ in range(max(PROMPT_LENGTHS))]
    prompts = [text[:length] for length in PROMPT_LENGTHS]
    prompts += [text[: 2 * BLOCK_SIZE + 3] + [generator.randrange(VOCAB_SIZE) for _ in range(9)]]
    for seed in range(100):
        model = tiny_model(name, seed=seed)
        references = []
        for prompt in prompts:
            references.append(reference(model, prompt, repetition_penalty=repetition_penalty))
            if references[-1].margin < CLEAR_MARGIN:
                break
        else:
            return Subject(loaded_model(model), references, seed)
    raise AssertionError("every model hesitates")


@contextmanager
def engine(model: LoadedModel, tokenizer: Tokenizer | None = None, **settings: Any) -> Iterator[EngineCore]:
    core = core_over(model, tokenizer, **{"block_size": BLOCK_SIZE} | settings)
    try:
        yield core
    finally:
        core.runner.shutdown()


def run_all(core: EngineCore, prompts: Sequence[list[int]], **params: Any) -> list[Run]:
    return run(core, prompts, max_tokens=NUM_NEW_TOKENS, **params)


def assert_same(runs: Sequence[Run], references: Sequence[Reference], tolerance: float = TOLERANCE) -> None:
    for result, expected in zip(runs, references, strict=True):
        assert result.token_ids == expected.token_ids
        torch.testing.assert_close(result.logits_TV, expected.logits_TV, rtol=0, atol=tolerance)


every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
# The others of a form are requests alone by default.
every_form = pytest.mark.parametrize("name", FORMS)
# How prompts are cut, cached and forked is a matter of attention alone, of which each of these has a form of its own.
ATTENTION = ("llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3")
WITH_LATENTS = ("deepseek_v2", "glm4_moe_lite", "youtu", "minicpm3")


def every_attention_with(*values: object, relatives: Sequence[str] = WITH_LATENTS) -> list[Any]:
    names = [*ARCHITECTURES, *relatives]
    return [pytest.param(name, *values, marks=[pytest.mark.thorough] * (name not in ATTENTION)) for name in names]


every_attention = pytest.mark.parametrize("name", every_attention_with())


@every_architecture
def test_a_request_alone_gets_what_transformers_gives(name: str) -> None:
    model = subject(name)
    with engine(model.loaded, enable_prefix_caching=False) as core:
        for expected in model.references[::2]:  # the others, of lengths between these, are in all batches below
            assert_same(run_all(core, [expected.prompt]), [expected])


@every_form
def test_a_request_in_a_batch_gets_what_it_gets_alone(name: str) -> None:
    model = subject(name)
    with engine(model.loaded, enable_prefix_caching=False) as core:
        assert_same(run_all(core, model.prompts, stagger=3), model.references)


@every_attention
def test_a_prompt_in_chunks_gets_what_it_gets_whole(name: str) -> None:
    model = subject(name)
    budget = 7
    with engine(model.loaded, max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=False) as core:
        assert_same(run_all(core, model.prompts), model.references)
        assert core.stats().num_steps > sum(map(len, model.prompts)) / budget


@every_attention
def test_a_cached_beginning_changes_nothing(name: str) -> None:
    model = subject(name)
    with engine(model.loaded) as core:
        assert_same(run_all(core, model.prompts, stagger=1), model.references)
        again = run_all(core, model.prompts)
    assert_same(again, model.references)
    for result, prompt in zip(again, model.prompts, strict=True):
        assert result.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(("name", "enable_prefix_caching"), [("llama", False), *every_attention_with(True)])
def test_a_preempted_request_resumes_as_if_nothing_had_happened(name: str, enable_prefix_caching: bool) -> None:
    model = subject(name)
    with engine(model.loaded, num_blocks=16, max_num_batched_tokens=30, enable_prefix_caching=enable_prefix_caching) as core:
        assert_same(run_all(core, model.prompts), model.references)
        assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(("name", "num_blocks"), [("llama", None), *every_attention_with(20)])
def test_forks_part_ways_without_seeing_each_other(name: str, num_blocks: int | None) -> None:
    model = subject(name)
    plain = tiny_model(name, seed=model.seed)
    with engine(model.loaded, num_blocks=num_blocks) as core:
        runs = run_all(core, model.prompts, n=3, temperature=1.0, seed=3)
        assert (core.stats().num_preemptions > 0) == (num_blocks is not None)
    for number, prompt in enumerate(model.prompts):
        forks = runs[3 * number : 3 * number + 3]
        token_ids = torch.tensor([prompt + fork.token_ids[:-1] for fork in forks])
        with torch.inference_mode():
            expected_FTV = plain(token_ids).logits[:, len(prompt) - 1 :, :VOCAB_SIZE]
        torch.testing.assert_close(torch.stack([fork.logits_TV for fork in forks]), expected_FTV, rtol=0, atol=TOLERANCE)
        assert len({tuple(fork.token_ids) for fork in forks}) == 3


@every_attention
def test_log_probabilities_are_those_of_the_models_logits(name: str) -> None:
    model = subject(name)
    with engine(model.loaded, max_num_batched_tokens=30) as core:
        runs = run_all(core, model.prompts, logprobs=5, prompt_logprobs=5)
    for result, expected in zip(runs, model.references, strict=True):
        rows = [expected.prompt_logits_TV[:-1], expected.logits_TV]
        logprobs_TV = torch.cat(rows).log_softmax(-1)
        entries = [*result.prompt_logprobs, *result.logprobs]
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:] if entry] == [*expected.prompt[1:], *expected.token_ids]
        for entry, logprobs_V in zip(entries[1:], logprobs_TV, strict=True):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(logprobs_V[entry.token_id]), abs=TOLERANCE)
            assert [value for _, value in entry.top] == pytest.approx(logprobs_V.topk(5).values.tolist(), abs=TOLERANCE)
            assert all(value == pytest.approx(float(logprobs_V[token_id]), abs=TOLERANCE) for token_id, value in entry.top)


def test_the_repetition_penalty_is_transformers_own() -> None:
    model = subject("llama", 1.5)
    with engine(model.loaded) as core:
        assert_same(run_all(core, model.prompts, repetition_penalty=1.5), model.references)
        without = run_all(core, model.prompts)
    assert [result.token_ids for result in without] != [expected.token_ids for expected in model.references]


def test_a_seed_draws_the_same_alone_and_in_a_batch() -> None:
    model = subject("llama")
    params: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    with engine(model.loaded) as core:
        alone = [result.token_ids for prompt in model.prompts for result in run_all(core, [prompt], n=2, **params)]
        together = [result.token_ids for result in run_all(core, model.prompts, n=2, **params)]
    assert together == alone
    assert all(first != second for first, second in zip(alone[::2], alone[1::2], strict=True))


def guess_well(self: SequenceNgrams, num_tokens: int, *, answers: dict[tuple[int, ...], list[int]]) -> list[int]:
    """What transformers says, but for every seventh token. Of prompts that begin alike, the longest come first."""
    known = len(self._token_ids)
    whole = next([*prompt, *answer] for prompt, answer in answers.items() if self._token_ids[: len(prompt)] == list(prompt))
    return [(token_id + (place % 7 == 0)) % VOCAB_SIZE for place, token_id in enumerate(whole[known : known + num_tokens], start=known)]


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("llama", None), ("llama", 18), ("gemma2", None), ("gpt_oss", None), ("deepseek_v3", None)]
)
def test_tokens_tried_ahead_are_those_of_the_model_or_are_dropped(
    name: str, num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = subject(name)
    answers = {tuple(entry.prompt): entry.token_ids for entry in sorted(model.references, key=lambda entry: -len(entry.prompt))}
    monkeypatch.setattr(SequenceNgrams, "accuracy", property(lambda self: 0.9, lambda self, value: None), raising=False)
    monkeypatch.setattr(SequenceNgrams, "propose", functools.partialmethod(guess_well, answers=answers))
    with engine(model.loaded, num_blocks=num_blocks, speculation="ngram") as core:
        for number, entry in enumerate(model.references):
            core.add(make_request(str(number), entry.prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
        said = drive(core)
        stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_blocks is not None)
    assert [tokens(said[str(number)]) for number in range(len(said))] == [entry.token_ids for entry in model.references]


def test_the_torch_path_says_what_the_native_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "gpt_oss", "gemma2", "deepseek_v3"):
        model = subject(name)
        monkeypatch.setattr("penstock.engine.attention.cpu.native_library", lambda: None)
        with engine(model.loaded) as core:
            assert_same(run_all(core, model.prompts), model.references)


def errors_of_16_bits(model: PreTrainedModel, references: Sequence[Reference], tokenizer: Tokenizer) -> tuple[float, float]:
    """Root mean square errors of a 16-bit model's logits over answers known beforehand: in the engine, and in transformers."""
    theirs, ours = [], []
    for expected in references:
        token_ids = torch.tensor([expected.prompt + expected.token_ids[:-1]])
        with torch.inference_mode():
            logits_TV = model(token_ids).logits[0, len(expected.prompt) - 1 :, : expected.logits_TV.shape[1]]
        theirs.append(logits_TV - expected.logits_TV)
    with engine(loaded_model(model), tokenizer) as core:
        for expected in references:
            (result,) = run_all(core, [expected.prompt], forced=expected.token_ids)
            assert result.token_ids == expected.token_ids
            ours.append(result.logits_TV - expected.logits_TV)
    return float(torch.cat(ours).square().mean().sqrt()), float(torch.cat(theirs).square().mean().sqrt())


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float16), *every_attention_with(torch.bfloat16, relatives=())])
def test_sixteen_bits_are_no_less_exact_than_in_transformers(name: str, dtype: torch.dtype) -> None:
    model = subject(name)
    half: PreTrainedModel = torch.nn.Module.to(tiny_model(name, seed=model.seed), dtype)
    ours, theirs = errors_of_16_bits(half, model.references, byte_tokenizer())
    assert ours < 1.25 * theirs


QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle, and say what the letter tells of the sea.",
    "List the first ten prime numbers, then explain in one sentence why there are infinitely many of them, as Euclid did.",
)
REAL_TOLERANCE = 2e-3  # its logits are about 10


@pytest.fixture(scope="module")
def real_tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(default_model_dir)


def real_model(directory: Path) -> PreTrainedModel:
    model = load_model(directory, "float32", "cpu", quantization="none", attn_implementation="sdpa").model
    model.generation_config.eos_token_id = None  # answers are of the same length
    return model


@pytest.fixture(scope="module")
def real(default_model_dir: Path, real_tokenizer: Tokenizer) -> Subject:
    """The default model over questions as its chat template writes them."""
    model = real_model(default_model_dir)
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [real_tokenizer.encode(text, add_special_tokens=False) for text in texts]
    vocab_size = min(model.config.vocab_size, real_tokenizer.vocab_size)
    references = [reference(model, prompt, vocab_size) for prompt in prompts]
    assert min(expected.margin for expected in references) > 2 * REAL_TOLERANCE
    return Subject(loaded_model(model), references)


@pytest.mark.thorough  # by default those are the tiny models of each form
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": False}, id="whole"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 11}, id="chunks"),
        pytest.param({"num_blocks": 16, "max_num_batched_tokens": 40}, id="preemption"),
    ],
)
def test_the_default_model_says_what_transformers_says(settings: dict[str, Any], real: Subject, real_tokenizer: Tokenizer) -> None:
    with engine(real.loaded, real_tokenizer, **settings) as core:
        for _ in range(2):
            assert_same(run_all(core, real.prompts, stagger=1), real.references, REAL_TOLERANCE)
        assert (core.stats().num_preemptions > 0) == ("num_blocks" in settings)
        assert (core.stats().num_prefix_cache_hits > 0) == ("enable_prefix_caching" not in settings)


@pytest.mark.thorough
def test_the_default_model_in_bfloat16_is_no_less_exact_than_in_transformers(
    default_model_dir: Path, real: Subject, real_tokenizer: Tokenizer
) -> None:
    model: PreTrainedModel = torch.nn.Module.to(real_model(default_model_dir), torch.bfloat16)
    ours, theirs = errors_of_16_bits(model, real.references, real_tokenizer)
    assert ours < 1.5 * theirs
