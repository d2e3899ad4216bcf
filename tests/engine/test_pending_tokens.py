import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch import PendingTokens, placeholder

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
