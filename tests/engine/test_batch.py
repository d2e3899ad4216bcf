from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.batch import Batch, PendingTokens, placeholder, slots_of
from penstock.engine.core import EngineCore
from tests.fakes import LETTERS, make_core, make_request, num_calls


def first_batch(core: EngineCore, *requests: dict[str, Any]) -> Batch:
    for number, options in enumerate(requests):
        core.add(make_request(str(number), **options))
    step = core.schedule()
    assert step is not None
    return core.build(step)


@given(table=st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True), block_size=st.integers(1, 5), data=st.data())
def test_slots_are_the_blocks_of_the_table_unrolled(table: list[int], block_size: int, data: st.DataObject) -> None:
    whole = [block * block_size + offset for block in table for offset in range(block_size)]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert slots_of(table, start, stop, block_size) == whole[start:stop]


def test_a_batch_is_flat_with_few_tokens_first_each_on_its_own() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:9]}, {"prompt": LETTERS[3:4]}, {"prompt": LETTERS[4:7]})
    assert batch.inputs.input_ids_1T.tolist() == [[LETTERS[3], *LETTERS[4:7], *LETTERS[:9]]]
    assert batch.inputs.positions_1T.tolist() == [[0, 0, 1, 2, *range(9)]]
    assert batch.inputs.attention.query_start_loc.tolist() == [0, 1, 2, 3, 4, 13]
    assert batch.inputs.attention.context_lens_B.tolist() == [1, 1, 2, 3, 9]
    assert batch.inputs.attention.table_rows_B.tolist() == [1, 2, 2, 2, 0]
    assert batch.inputs.attention.num_decodes == 4
    assert batch.inputs.kept_T.tolist() == [0, 3, 12]
    assert batch.logits_rows == [0, 1, 2]
    assert batch.masks is None


def test_a_batch_of_one_token_is_padded_with_one_of_no_sequence() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:1]})
    assert batch.inputs.input_ids_1T.shape == batch.inputs.positions_1T.shape == (1, 2)
    assert (batch.inputs.attention.slot_mapping_T < 0).tolist() == [False, True]
    assert batch.inputs.attention.query_start_loc.tolist() == [0, 1]
    assert batch.inputs.kept_T.tolist() == [0]


def test_a_chunk_that_ends_before_its_prompt_does_keeps_nothing() -> None:
    batch = first_batch(make_core(max_num_seqs=1, max_num_batched_tokens=5), {"prompt": LETTERS[:9]})
    assert batch.inputs.input_ids_1T.shape == (1, 5)
    assert batch.inputs.kept_T.shape == (0,)
    assert batch.inputs.kept_T.dtype == torch.long
    assert batch.logits_rows == []
    assert batch.sampler_rows == []


def test_forks_sample_from_the_row_that_their_parent_computes() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:3], "n": 3}, {"prompt": LETTERS[3:5]})
    assert batch.inputs.kept_T.tolist() == [2, 4]
    assert batch.logits_rows == [0, 0, 0, 1]
    assert [(row.sequence.request.request_id, row.sequence.index) for row in batch.sampler_rows] == [("0", 0), ("0", 1), ("0", 2), ("1", 0)]


@given(num_prompt=st.integers(1, 20), budget=st.integers(1, 8))
def test_over_its_chunks_a_prompt_is_scored_once_per_token_but_the_first(num_prompt: int, budget: int) -> None:
    core = make_core(max_num_seqs=1, max_num_batched_tokens=budget)
    core.add(make_request(prompt=LETTERS[:1] * num_prompt, prompt_logprobs=0, max_tokens=1))
    scored: list[int] = []
    while (step := core.schedule()) is not None:
        batch = core.build(step)
        for rows in batch.prompts:
            count = rows.stop - rows.start
            scored += range(rows.first_token, rows.first_token + count)
            positions = batch.inputs.positions_1T[0, batch.inputs.kept_T[rows.start : rows.stop]]
            assert (positions + 1).tolist() == list(range(rows.first_token, rows.first_token + count))
        assert (len(batch.sampler_rows) == 1) == (batch.inputs.kept_T.numel() > sum(rows.stop - rows.start for rows in batch.prompts))
        core.update(step, batch, core.runner.launch(batch).collect())
    core.runner.shutdown()
    assert scored == list(range(1, num_prompt))


def test_what_crosses_to_the_device_is_all_of_the_tensors() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:3]}, {"prompt": LETTERS[3:5]})
    meta = torch.device("meta")
    sent = batch.on(meta)
    given, there = batch.inputs, sent.inputs
    for name in ("packed", "input_ids_1T", "positions_1T", "kept_T", "table_updates_3U"):
        assert getattr(there, name).device == meta
        assert getattr(there, name).shape == getattr(given, name).shape
    for name in ("slot_mapping_T", "query_start_loc", "context_lens_B", "table_rows_B"):
        assert getattr(there.attention, name).shape == getattr(given.attention, name).shape
    assert (there.attention.num_decodes, there.attention.max_query_len) == (given.attention.num_decodes, given.attention.max_query_len)
    assert sent.sampler_rows is batch.sampler_rows
    assert batch.on(torch.device("cpu")) is batch


VOCAB_SIZE = 50
CPU = torch.device("cpu")


@given(sampled=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6), data=st.data())
def test_placeholders_become_the_tokens_of_their_rows_and_known_tokens_stay(sampled: list[int], data: st.DataObject) -> None:
    known = st.integers(0, VOCAB_SIZE - 1).map(lambda token_id: (token_id, token_id))
    pending = st.integers(0, len(sampled) - 1).map(lambda row: (placeholder(row), sampled[row]))
    pairs = data.draw(st.lists(known | pending, min_size=1, max_size=9))
    tokens = PendingTokens(VOCAB_SIZE, CPU)
    tokens.keep(sampled if data.draw(st.booleans()) else torch.tensor(sampled))
    input_ids_1T = torch.tensor([[before for before, _ in pairs]])
    tokens.fill_in(input_ids_1T)
    assert input_ids_1T.tolist() == [[after for _, after in pairs]]


def test_a_row_without_a_token_gives_one_that_can_be_embedded() -> None:
    tokens = PendingTokens(VOCAB_SIZE, CPU)
    tokens.keep([-7, VOCAB_SIZE + 200])
    input_ids_1T = torch.tensor([[placeholder(0), placeholder(1)]])
    tokens.fill_in(input_ids_1T)
    assert input_ids_1T.tolist() == [[0, VOCAB_SIZE - 1]]


def test_after_a_step_that_failed_there_are_none() -> None:
    tokens = PendingTokens(VOCAB_SIZE, CPU)
    tokens.keep([1])
    tokens.clear()
    with pytest.raises(RuntimeError, match="the previous step failed"):
        tokens.fill_in(torch.tensor([[placeholder(0)]]))


def test_a_step_is_sent_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        copied.append(tensor)
        return tensor.to(device)

    batch = first_batch(make_core(), {"prompt": LETTERS[:3]}, {"prompt": LETTERS[3:5], "n": 2})
    monkeypatch.setattr("penstock.engine.batch.to_device", copy)
    batch.on(torch.device("meta"))
    assert copied == [batch.inputs.packed]


def test_only_new_blocks_are_sent_and_however_long_the_others_are() -> None:
    core = make_core(num_blocks=200, max_num_batched_tokens=2000, max_model_len=600, enable_prefix_caching=False)
    core.add(make_request("long", LETTERS * 32, max_tokens=30))
    for number in range(3):
        core.add(make_request(str(number), LETTERS[: 5 + number], max_tokens=30))
    num_sent, num_built = [], []
    while (step := core.schedule()) is not None:
        batch = core.build(step)
        num_sent.append(batch.inputs.table_updates_3U.shape[1])
        num_built.append(len(batch.inputs.packed))
        known = {row: sequence.block_table for sequence in step.num_tokens if (row := sequence.table_row) is not None}
        core.update(step, batch, core.runner.launch(batch).collect())
        for row, table in known.items():
            assert core.runner.cache.block_tables_PN[row, : len(table)].tolist() == table
    core.runner.shutdown()
    assert num_sent[0] == 128 + 2 + 2 + 2
    assert sum(num_sent[1:]) == (512 + 29 + 3) // 4 - 128 + sum((length + 29 + 3) // 4 - 2 for length in (5, 6, 7))
    assert max(num_built[1:]) < 50


def test_a_block_that_is_copied_before_it_is_written_is_sent_again() -> None:
    core = make_core(lambda token_ids: LETTERS[len(token_ids) % 7], block_size=4)
    core.add(make_request("forks", LETTERS[:6], n=2, max_tokens=6))
    num_copied = 0
    while (step := core.schedule()) is not None:
        batch = core.build(step)
        updates = batch.inputs.table_updates_3U.T.tolist()
        for _, target in batch.copies:
            num_copied += 1
            assert target in [block for _, _, block in updates]
        core.update(step, batch, core.runner.launch(batch).collect())
    core.runner.shutdown()
    assert num_copied == 1


@pytest.mark.parametrize("is_async", [True, False])
def test_a_decode_takes_the_host_few_calls(is_async: bool) -> None:
    def of_step(num_rows: int) -> int:
        core = make_core(
            num_blocks=num_rows * 4,
            block_size=16,
            max_num_seqs=num_rows,
            max_num_batched_tokens=1000,
            max_model_len=40,
            is_async=is_async,
        )
        for number in range(num_rows):
            core.add(make_request(str(number), LETTERS[: 4 + number % 4], ignore_eos=True))
        for _ in range(2):
            core.step()
        step = core.schedule()
        assert step is not None
        batch = core.build(step)

        def next_step() -> None:
            follower = core.schedule_ahead(step, batch) if is_async else core.schedule()
            assert follower is not None
            assert len(core.build(follower).sampler_rows) == num_rows

        if not is_async:
            core.update(step, batch, core.runner.launch(batch).collect())
        core.runner.shutdown()
        return num_calls(next_step)

    assert (of_step(72) - of_step(8)) / 64 < 5
