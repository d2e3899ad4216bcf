"""Models with recurrent layers say what transformers says, however requests are batched, cut, cached, preempted or forked."""

from typing import Any

import pytest
import torch

from penstock.engine.sampling.params import BeamSearchParams
from tests.engine.beam_search.test_search import answers_of, expected
from tests.engine.beam_search.test_search import assert_same as assert_same_answers
from tests.engine.test_equivalence import BLOCK_SIZE, assert_same, engine, run_all, subject
from tests.engines import Run, loaded_model
from tests.fakes import VOCAB_SIZE, beam_request, drive
from tests.tiny_models import RECURRENT_ARCHITECTURES, tiny_model

# By default one with convolutions alone and one with recurrences alone.
QUICK = ("lfm2", "mamba2")
every_architecture = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in RECURRENT_ARCHITECTURES]
)
TOLERANCE = 2e-4  # transformers computes a prompt in chunks, and the same in one more step after another


@every_architecture
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": False}, id="batched"),
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 7, "enable_prefix_caching": False}, id="chunks"),
        pytest.param({"num_blocks": 16, "max_num_batched_tokens": 30}, id="preemption"),
        pytest.param({"num_blocks": 16, "max_num_batched_tokens": 30, "num_slots": 8}, id="no snapshots"),
    ],
)
def test_a_request_gets_what_transformers_gives(name: str, settings: dict[str, Any]) -> None:
    model = subject(name)
    with engine(model.loaded, **settings) as core:
        assert_same(run_all(core, model.prompts, stagger=3), model.references, TOLERANCE)
        assert (core.stats().num_preemptions > 0) == ("num_blocks" in settings)


@every_architecture
def test_a_cached_beginning_changes_nothing(name: str) -> None:
    model = subject(name)
    with engine(model.loaded, num_slots=24) as core:
        assert_same(run_all(core, model.prompts, stagger=1), model.references, TOLERANCE)
        again = run_all(core, model.prompts)
    assert_same(again, model.references, TOLERANCE)
    for result, prompt in zip(again, model.prompts, strict=True):  # there is a snapshot at the end of each
        assert result.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@every_architecture
def test_forks_part_ways_without_seeing_each_other(name: str) -> None:
    model = subject(name)
    plain = tiny_model(name, seed=model.seed)
    with engine(model.loaded) as core:
        runs = run_all(core, model.prompts, n=3, temperature=1.0, seed=3)
    for number, prompt in enumerate(model.prompts):
        assert_own_logits(plain, prompt, runs[3 * number : 3 * number + 3])


def assert_own_logits(plain: Any, prompt: list[int], forks: list[Run]) -> None:
    token_ids = torch.tensor([prompt + fork.token_ids[:-1] for fork in forks])
    with torch.inference_mode():
        expected_FTV = plain(token_ids, use_cache=False).logits[:, len(prompt) - 1 :, :VOCAB_SIZE]
    torch.testing.assert_close(
        torch.stack([fork.logits_TV for fork in forks]), expected_FTV, rtol=0, atol=4 * TOLERANCE
    )  # recurrences round otherwise than chunks
    assert len({tuple(fork.token_ids) for fork in forks}) == len(forks)


@every_architecture
@pytest.mark.parametrize("num_blocks", [None, 10])
def test_beams_are_those_of_transformers(name: str, num_blocks: int | None) -> None:
    """Those that are preempted part, when they resume, from where they last had a token in common."""
    model = subject(name)
    plain = tiny_model(name, seed=model.seed, vocab_size=VOCAB_SIZE)
    beam = BeamSearchParams(3, 12, ignore_eos=True)
    prompts = model.prompts[1:5]
    with engine(loaded_model(tiny_model(name, seed=model.seed, vocab_size=VOCAB_SIZE)), num_blocks=num_blocks) as core:
        for number, prompt in enumerate(prompts):
            core.add(beam_request(str(number), prompt, beam))
        said = drive(core)
        assert (core.stats().num_preemptions > 0) == (num_blocks is not None)
    for number, prompt in enumerate(prompts):
        assert_same_answers(answers_of(said[str(number)]), expected(plain, prompt, beam))
