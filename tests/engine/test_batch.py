from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch import Batch, PendingTokens, placeholder, slots_of
from penstock.engine.core import EngineCore
from tests.fakes import LETTERS, make_core, make_request


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
    assert batch.input_ids_1T.tolist() == [[LETTERS[3], *LETTERS[4:7], *LETTERS[:9]]]
    assert batch.positions_1T.tolist() == [[0, 0, 1, 2, *range(9)]]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 2, 3, 4, 13]
    assert batch.attention.context_lens_B.tolist() == [1, 1, 2, 3, 9]
    assert batch.attention.block_table_BN[1:4].tolist() == batch.attention.block_table_BN[[1]].tolist() * 3
    assert batch.attention.num_decodes == 4
    assert batch.kept_T.tolist() == [0, 3, 12]
    assert batch.sample_rows == [0, 1, 2]
    assert batch.masks is None


def test_a_batch_of_one_token_is_padded_with_one_of_nobody() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:1]})
    assert batch.input_ids_1T.shape == batch.positions_1T.shape == (1, 2)
    assert (batch.attention.slot_mapping_T < 0).tolist() == [False, True]
    assert batch.attention.query_start_loc.tolist() == [0, 1]
    assert batch.kept_T.tolist() == [0]


def test_a_chunk_that_ends_before_its_prompt_does_keeps_nothing() -> None:
    batch = first_batch(make_core(max_num_seqs=1, max_num_batched_tokens=5), {"prompt": LETTERS[:9]})
    assert batch.input_ids_1T.shape == (1, 5)
    assert batch.kept_T.shape == (0,)
    assert batch.kept_T.dtype == torch.long
    assert batch.sample_rows == []
    assert batch.samplers == []


def test_forks_sample_from_the_row_that_their_parent_computes() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:3], "n": 3}, {"prompt": LETTERS[3:5]})
    assert batch.kept_T.tolist() == [2, 4]
    assert batch.sample_rows == [0, 0, 0, 1]
    assert [(row.sequence.request.request_id, row.sequence.index) for row in batch.samplers] == [("0", 0), ("0", 1), ("0", 2), ("1", 0)]


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
            positions = batch.positions_1T[0, batch.kept_T[rows.start : rows.stop]]
            assert (positions + 1).tolist() == list(range(rows.first_token, rows.first_token + count))
        assert (len(batch.samplers) == 1) == (batch.kept_T.numel() > sum(rows.stop - rows.start for rows in batch.prompts))
        core.update(step, batch, core.runner.launch(batch).collect())
    core.runner.shutdown()
    assert scored == list(range(1, num_prompt))


def test_what_crosses_to_the_device_is_all_of_the_tensors() -> None:
    batch = first_batch(make_core(), {"prompt": LETTERS[:3]}, {"prompt": LETTERS[3:5]})
    meta = torch.device("meta")
    sent = batch.on(meta)
    assert {tensor.device for tensor in (sent.input_ids_1T, sent.positions_1T, sent.kept_T, sent.attention.packed)} == {meta}
    for name in ("slot_mapping_T", "query_start_loc", "context_lens_B", "block_table_BN"):
        assert getattr(sent.attention, name).shape == getattr(batch.attention, name).shape
    assert (sent.attention.num_decodes, sent.attention.max_query_len) == (batch.attention.num_decodes, batch.attention.max_query_len)
    assert sent.samplers is batch.samplers
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
