"""Slots and snapshots of states as the engine uses them, and requests of other kinds to models with recurrent layers."""

from pathlib import Path

import pytest
import torch

from penstock.engine.core import EngineCore
from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.vectors import embeds_at
from penstock.engine.scheduling.states import WORTH_WAITING
from tests.engine.adapters.test_engine import NUM_NEW_TOKENS, greedy, read
from tests.engines import core_over, loaded_model
from tests.fakes import LETTERS, drive, generate, make_core, make_request, runner_of, tokens
from tests.tiny_adapters import adapted_model, write_adapter
from tests.tiny_models import tiny_model

PROMPT = LETTERS * 20


def recurrent_core(num_spare_slots: int = 20, *, grid: int = 64) -> EngineCore:
    core = make_core(num_blocks=1000, max_num_batched_tokens=1000, max_num_seqs=4, num_slots=4 + num_spare_slots, grid=grid)
    core.max_model_len = 2000
    return core


def num_cached(core: EngineCore, prompt: list[int]) -> int:
    deltas = generate(core, make_request(prompt=prompt, max_tokens=1))
    assert deltas[0].prompt is not None
    return deltas[0].prompt.num_cached_tokens


def test_a_prompt_goes_on_from_the_last_snapshot_that_it_shares() -> None:
    core = recurrent_core()
    assert num_cached(core, PROMPT[:310]) == 0
    assert num_cached(core, PROMPT[:310] + LETTERS) == 308  # where it ends
    other = PROMPT[:230] + LETTERS[::-1] * 5
    assert num_cached(core, other) == 192  # on the grid
    assert num_cached(core, PROMPT[:230] + LETTERS[3:] * 5) == 228  # where the one before had parted
    runner_of(core).shutdown()


def test_a_long_prompt_leaves_its_snapshots_farther_apart() -> None:
    core = recurrent_core()
    prompt = PROMPT * 3
    generate(core, make_request(prompt=prompt, max_tokens=1))
    assert core.scheduler.states is not None
    hashes = make_request(prompt=prompt)
    core.hash_prompt(hashes)
    found = [place for place, block_hash in enumerate(hashes.block_hashes, start=1) if core.scheduler.states.pool.has(block_hash)]
    assert [4 * place for place in found] == [128, 256, 384, 512, 640, 768, 896, 956]
    runner_of(core).shutdown()


def test_snapshots_that_are_not_used_make_room_for_others() -> None:
    core = recurrent_core(1, grid=1000)
    prompts = [[*PROMPT[:40], letter] for letter in LETTERS[:6]]
    for prompt in prompts:
        assert num_cached(core, prompt[::-1]) == 0
    assert [num_cached(core, prompt[::-1]) > 0 for prompt in (*prompts[-3:], prompts[0])] == [True, True, True, False]
    runner_of(core).shutdown()


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_a_prompt_waits_for_a_snapshot_that_saves_much(is_worth_it: bool) -> None:
    core = recurrent_core()
    prompt = LETTERS * 20 if is_worth_it else LETTERS * (WORTH_WAITING // len(LETTERS) - 1)
    for name in ("first", "second"):
        core.add(make_request(name, prompt, max_tokens=2))
    said = drive(core)
    assert tokens(said["first"]) == tokens(said["second"])
    assert runner_of(core).num_tokens_per_step[0] == (len(prompt) if is_worth_it else 2 * len(prompt))
    runner_of(core).shutdown()


def test_without_prefix_caching_there_are_no_snapshots() -> None:
    core = make_core(enable_prefix_caching=False, num_slots=8)
    generate(core, make_request(prompt=PROMPT[:60]))
    generate(core, make_request(prompt=PROMPT[:60]))
    assert runner_of(core).state_slots[1:] == [[-1]] * 7
    runner_of(core).shutdown()


def test_adapters_change_the_other_layers_alone(tmp_path: Path) -> None:
    changed = ["q_proj", "k_proj", "v_proj", "w1", "w2", "w3"]
    directory = write_adapter(tiny_model("lfm2"), tmp_path / "good", target_modules=changed)
    recurrent = write_adapter(tiny_model("lfm2"), tmp_path / "recurrent", target_modules=["in_proj"])
    core = core_over(loaded_model(tiny_model("lfm2")), enable_lora=True)
    with pytest.raises(InvalidRequest, match=r"in_proj.*recurrent layers cannot be changed"):
        read(core, recurrent)
    adapter, prompts = read(core, directory), [PROMPT[:45], PROMPT[:9]]
    for number, prompt in enumerate(prompts):
        core.add(make_request(f"with {number}", prompt, adapter=adapter, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
        core.add(make_request(f"without {number}", prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True))
    said = drive(core)
    core.runner.shutdown()
    for number, prompt in enumerate(prompts):
        assert tokens(said[f"with {number}"]) == greedy(adapted_model(tiny_model("lfm2"), directory), prompt)
        assert tokens(said[f"without {number}"]) == greedy(tiny_model("lfm2"), prompt)


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_vectors_in_place_of_tokens_are_computed_alike(name: str) -> None:
    model = tiny_model(name)
    prompt = PROMPT[:20]
    vectors = embeds_at(range(3, 9), model.get_input_embeddings()(torch.tensor(prompt[3:9])).detach().clone())
    core = core_over(loaded_model(model))
    with_ids, with_vectors = (
        tokens(generate(core, make_request(prompt=prompt, embeds=embeds, max_tokens=8, ignore_eos=True))) for embeds in ((), (vectors,))
    )
    assert with_ids == with_vectors
    core.runner.shutdown()
