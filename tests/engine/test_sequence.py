"""Every token's outputs come once and in their place, whatever happens to the sequence."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.deltas import FinishReason
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.sequence import RowBuffer, SequenceOutputs
from tests.engine.scheduling.test_overlap import MAX_MODEL_LEN, Plan, letter_or_end, plans, run
from tests.fakes import make_core, tokens


def rows(first: int, stop: int) -> dict[str, Tensor]:
    return {"a": torch.arange(first, stop)[:, None], "b": torch.arange(first, stop) * 10}


@dataclass
class Watched(Plan):
    names: tuple[str, ...] = ()
    with_context: bool = False
    width: int = 1

    def make(self, name: str) -> Any:
        request = super().make(name)
        request.beam = BeamSearchParams(self.width) if self.width > 1 else None
        request.outputs, request.with_context_outputs = self.names, self.with_context and bool(self.names)
        return request


@st.composite
def watched_plans(draw: st.DrawFn) -> Watched:
    plan = draw(plans())
    width = draw(st.sampled_from([1, 1, 1, 3]))
    if width > 1:
        plan.options = {name: plan.options[name] for name in ("prompt", "n", "priority")} | {"max_tokens": draw(st.integers(1, 9))}
    names = draw(st.sampled_from([(), ("inputs",), ("logits",), ("inputs", "logits")]))
    return Watched(plan.begins_at, plan.leaves_at, plan.options, names=names, with_context=draw(st.booleans()), width=width)


def assert_rows(outputs: dict[str, Tensor], names: tuple[str, ...], token_ids: list[int], first: int) -> None:
    """They are those of `token_ids[first:]`, with the others before them."""
    assert set(outputs) == set(names)
    if "inputs" in names:
        assert outputs["inputs"].tolist() == [[first + place, token_id] for place, token_id in enumerate(token_ids[first:])]
    if "logits" in names:
        expected = [letter_or_end(token_ids[: stop + 1]) for stop in range(first, len(token_ids))]
        assert outputs["logits"].argmax(-1).tolist() == expected


@given(
    plan=st.lists(watched_plans(), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    num_spare_blocks=st.integers(0, 30),
    max_num_batched_tokens=st.sampled_from([3, 9, 200]),
    enable_prefix_caching=st.booleans(),
    rows_for_weights=st.sampled_from([None, 20.0]),
    is_async=st.booleans(),
    fails_at=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(max_examples=25)
def test_rows_are_those_of_the_tokens_in_order_and_each_once(
    plan: list[Watched],
    block_size: int,
    num_spare_blocks: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    rows_for_weights: float | None,
    is_async: bool,
    fails_at: int | None,
) -> None:
    core = make_core(
        letter_or_end,
        block_size=block_size,
        num_blocks=-(-MAX_MODEL_LEN // block_size) * max(one.width for one in plan) + num_spare_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=enable_prefix_caching,
        rows_for_weights=rows_for_weights,
        is_async=is_async,
    )
    run(core, list(plan), fails_at)
    core.runner.shutdown()
    for one in plan:
        prompt = list(one.options["prompt"])
        for index in range(one.n):
            deltas = [delta for delta in one.deltas if delta.index == index]
            for delta in deltas:
                assert all(len(part) == len(delta.token_ids) for part in delta.outputs.values())
            prompts = [delta.prompt for delta in deltas if delta.prompt is not None]
            if prompts:
                names = one.names if one.with_context else ()
                assert_rows(prompts[0].outputs, names, prompt, prompts[0].first_output_token)
                assert prompts[0].first_output_token == (prompts[0].num_cached_tokens if names else 0)
            said = [delta for delta in deltas if delta.finish_reason is not FinishReason.ERROR and delta.token_ids]
            if said:
                joined = {name: torch.cat([delta.outputs[name] for delta in said]) for name in one.names}
                assert_rows(joined, one.names, (prompt + tokens(said, index))[:-1], len(prompt) - 1)


@pytest.mark.parametrize("chunks", [[(0, 3), (3, 9)], [(0, 5), (2, 7), (0, 9)], [(4, 6), (4, 9)]])
def test_what_is_computed_again_is_passed_over(chunks: list[tuple[int, int]]) -> None:
    buffer = RowBuffer(chunks[0][0], stop=9)
    for first, stop in chunks:
        buffer.add(first, rows(first, stop))
    assert buffer.is_whole
    assert buffer.joined()["a"][:, 0].tolist() == list(range(chunks[0][0], 9))


def test_sequences_of_a_request_share_the_prompts_rows_and_have_their_own_after_it() -> None:
    one, other = SequenceOutputs.for_all(2, 6, with_context=True)
    assert (one.next_position, one.num_reusable_tokens) == (0, 5)
    for member in (one, other):
        member.add(2, rows(2, 4))
    assert (one.next_position, one.num_reusable_tokens) == (4, 4)
    for member in (one, other):
        member.add(4, rows(4, 6))
    one.add(6, rows(6, 8))
    assert (one.next_position, other.next_position) == (8, 6)
    assert one.context is other.context
    assert one.context is not None
    assert one.context.first_token == 2
    assert one.context.rows.joined()["b"].tolist() == [20, 30, 40, 50]
    assert one.take(2)["a"][:, 0].tolist() == [5, 6]
    assert one.take(2)["a"][:, 0].tolist() == [7]  # the other one's row is still to come
    one.add(8, rows(8, 9))
    assert one.take(0)["a"][:, 0].tolist() == [8]
    assert other.take(1)["a"][:, 0].tolist() == [5]


def test_a_fork_goes_on_by_itself() -> None:
    (one,) = SequenceOutputs.for_all(1, 3, with_context=False)
    one.add(2, rows(2, 3))
    other = one.fork()
    one.add(3, rows(3, 4))
    assert one.take(5)["a"][:, 0].tolist() == [2, 3]
    assert other.take(5)["a"][:, 0].tolist() == [2]
