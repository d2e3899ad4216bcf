"""Groups of layers, and the blocks that sequences hold in each of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import AutoConfig

from penstock.engine.kv_cache.blocks import (
    BlockPool,
    BlockTable,
    KVCacheManager,
    Retention,
    RetentionRule,
    chain_hashes,
    max_blocks_held,
)
from penstock.engine.kv_cache.tensors import LayerGroup, LayerKV, block_layers, kv_layout, layer_groups
from tests.engines import core_over, loaded_model
from tests.fakes import LETTERS, drive, generate, make_core, make_request, runner_of, tokens
from tests.tiny_models import tiny_model

BLOCK_SIZE = 16
GEMMA_3_27B = AutoConfig.for_model(
    "gemma3_text",
    num_hidden_layers=62,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=1024,
    max_position_embeddings=131072,
)
GPT_OSS_120B = AutoConfig.for_model("gpt_oss")  # the defaults are those of the larger one


def num_tokens_of(layout: list[LayerKV], groups: list[LayerGroup], max_model_len: int) -> int:
    """How many tokens, in contexts of that length, fit in as much memory as a million tokens take in all layers."""
    num_bytes = 10**6 * sum(layer.num_bytes(torch.float16) for layer in layout)
    num_blocks = num_bytes // (BLOCK_SIZE * sum(layer.num_bytes(torch.float16) for layer in block_layers(layout, groups)))
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, [group.sliding_window for group in groups]).num_tokens(max_model_len)


@pytest.mark.parametrize(
    ("config", "sizes", "max_model_len", "ratio"),
    [
        pytest.param(GEMMA_3_27B, (10, 10, 10, 10, 10, 10, 2), 131072, 5.5, marks=pytest.mark.thorough),
        (GEMMA_3_27B, (10, 10, 10, 10, 10, 10, 2), 8192, 3.4),
        pytest.param(GPT_OSS_120B, (18, 18), 131072, 1.99, marks=pytest.mark.thorough),
        (GPT_OSS_120B, (18, 18), 8192, 1.9),
    ],
    ids=["gemma3-128k", "gemma3-8k", "gpt-oss-128k", "gpt-oss-8k"],
)
def test_several_times_as_many_tokens_fit_where_most_layers_have_a_window(
    config: object, sizes: tuple[int, ...], max_model_len: int, ratio: float
) -> None:
    layout = kv_layout(config)  # type: ignore[arg-type]
    groups = layer_groups(layout, max_model_len)
    assert tuple(len(group.layers) for group in groups) == sizes
    assert [group.sliding_window for group in groups] == [None] + [groups[1].sliding_window] * (len(groups) - 1)
    plain = layer_groups(layout, max_model_len, is_hybrid=False)
    assert num_tokens_of(layout, groups, max_model_len) > ratio * num_tokens_of(layout, plain, max_model_len)


LAYER = LayerKV(2, 64, 64)
SLIDING = LayerKV(2, 64, 64, 128)


@given(st.lists(st.sampled_from([None, 5, 128]), min_size=1, max_size=40), st.sampled_from([3, 100, 1000]))
def test_every_layer_is_in_one_group_of_layers_with_its_window(windows: list[int | None], max_model_len: int) -> None:
    layout = [LayerKV(2, 64, 64, window) for window in windows]
    groups = layer_groups(layout, max_model_len)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layout)))
    assert len(groups) <= 8
    effective = [None if window is None or window >= max_model_len else window for window in windows]
    assert all({effective[layer] for layer in group.layers} == {group.sliding_window} for group in groups)
    assert [group.sliding_window or 0 for group in groups] == sorted(group.sliding_window or 0 for group in groups)
    if len(set(effective)) == 1:
        assert len(groups) == 1


@pytest.mark.parametrize("layout", [[LAYER, LAYER], [LAYER, LayerKV(1, 64, 64, 128)], [LAYER, LayerKV(2, 64, 32, 128)]])
def test_layers_without_windows_or_of_several_sizes_are_one_group_that_keeps_everything(layout: list[LayerKV]) -> None:
    assert layer_groups(layout, 1000) == [LayerGroup((0, 1))]


def test_the_option_makes_all_layers_keep_every_block() -> None:
    loaded = loaded_model(tiny_model("gemma2"))
    assert len(core_over(loaded).scheduler.blocks.windows) == 3
    assert core_over(loaded, hybrid_kv_cache=False).scheduler.blocks.windows == (None,)


class Manager(RuleBasedStateMachine):
    """Sequences of two different tokens come, grow, fork and end. What a block holds is remembered as it is written."""

    windows: tuple[int | None, ...] = (None, 5, 5, 9)
    block_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = KVCacheManager(BlockPool(120), self.block_size, self.windows)
        self.sequences: list[tuple[list[int], list[BlockTable], list[bytes]]] = []
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}  # of each block: its group, and the tokens up to its last slot

    def room(self, num_tokens: int) -> bool:
        return self.blocks.pool.num_free >= (-(-num_tokens // self.block_size) + 1) * len(self.windows)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def begin(self, token_ids: list[int]) -> None:
        if not self.room(len(token_ids)):
            return
        hashes: list[bytes] = []
        chain_hashes(token_ids, self.block_size, hashes)
        num_usable = (len(token_ids) - 1) // self.block_size
        found = self.blocks.find(hashes, num_usable)
        num_found = len(found[0])
        assert num_found == max(length for length in range(num_usable + 1) if self.can_begin_with(hashes, length))
        tables = self.blocks.share(found, num_found)
        for group, table in enumerate(tables):
            for place, block in zip(range(table.num_freed, num_found), table.held, strict=True):
                assert self.contents[block] == (group, tuple(token_ids[: (place + 1) * self.block_size]))
        self.sequences.append((token_ids[: num_found * self.block_size], tables, hashes[:num_found]))
        self.compute(len(self.sequences) - 1, token_ids[num_found * self.block_size :])

    def can_begin_with(self, hashes: list[bytes], num_blocks: int) -> bool:
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, num_blocks * self.block_size - window + 1) // self.block_size
            alone = KVCacheManager(self.blocks.pool, self.block_size, (None,))
            keys = [block_hash + bytes([group]) * (group > 0) for block_hash in hashes[first:num_blocks]]
            if len(alone.find(keys, len(keys))[0]) < len(keys):
                return False
        return True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def grow(self, data: st.DataObject, token_ids: list[int]) -> None:
        if self.room(len(token_ids)):
            self.compute(data.draw(st.integers(0, len(self.sequences) - 1)), token_ids)

    def compute(self, number: int, new_ids: list[int]) -> None:
        token_ids, tables, hashes = self.sequences[number]
        position = len(token_ids)
        self.blocks.free_outside_windows(tables, position)
        place = position // self.block_size
        if place < len(tables[0]) and self.blocks.pool.is_shared(tables[0][place]):
            for (source, target), group in zip(self.blocks.copy_on_write(tables, place), range(len(tables)), strict=True):
                self.contents[target] = self.contents[source]
                assert self.contents[source][0] == group
        token_ids += new_ids
        self.blocks.extend(tables, -(-len(token_ids) // self.block_size))
        for group, table in enumerate(tables):
            for touched in range(place, len(table)):
                self.contents[table[touched]] = (group, tuple(token_ids[: (touched + 1) * self.block_size]))
        chain_hashes(token_ids, self.block_size, hashes)
        self.blocks.publish(tables, hashes, place, len(token_ids) // self.block_size)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        token_ids, tables, hashes = data.draw(st.sampled_from(self.sequences))
        self.sequences.append((list(token_ids), self.blocks.share(tables, len(tables[0])), list(hashes)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, tables, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.blocks.free(tables)

    @invariant()
    def what_is_still_seen_is_there(self) -> None:
        self.blocks.check_integrity((tables, len(token_ids)) for token_ids, tables, _ in self.sequences)
        for token_ids, tables, _ in self.sequences:
            for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
                first = 0 if window is None else max(0, len(token_ids) - window + 1) // self.block_size
                for place in range(first, len(table)):
                    assert self.contents[table[place]] == (group, tuple(token_ids[: (place + 1) * self.block_size]))


class SlidingManager(Manager):
    windows = (6, 3)
    block_size = 3


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=50, stateful_step_count=25)
TestSlidingManager = SlidingManager.TestCase
TestSlidingManager.settings = settings(max_examples=50, stateful_step_count=25)


@given(
    windows=st.lists(st.sampled_from([None, 1, 2, 7, 16, 33]), min_size=1, max_size=3).map(lambda ws: sorted(ws, key=lambda w: w or 0)),
    num_tokens=st.integers(1, 90),
    max_step=st.integers(1, 40),
    block_size=st.integers(1, 6),
)
def test_a_sequence_never_holds_more_blocks_than_it_is_said_to(
    windows: list[int | None], num_tokens: int, max_step: int, block_size: int
) -> None:
    limit = max_blocks_held(windows, num_tokens, max_step, block_size)
    blocks = KVCacheManager(BlockPool(limit), block_size, windows)
    tables = [BlockTable() for _ in windows]
    for position in range(0, num_tokens, max_step):
        if blocks.has_windows:
            blocks.free_outside_windows(tables, position - 1)
        blocks.extend(tables, -(-min(position + max_step, num_tokens) // block_size))  # fails where there is no free block
        blocks.check_integrity([(tables, position)])


def test_one_long_context_after_another_runs_in_blocks_for_little_more_than_the_window() -> None:
    core = make_core(
        num_blocks=max_blocks_held((None, 8, 8), 120, 8, 4), block_size=4, max_num_batched_tokens=8, max_model_len=120, windows=(None, 8, 8)
    )
    alone = make_core(num_blocks=64, max_model_len=120)
    for number in range(3):
        prompt = [LETTERS[(number + place) % 7] for place in range(70)]
        assert tokens(generate(core, make_request(str(number), prompt, max_tokens=50))) == tokens(
            generate(alone, make_request(str(number), prompt, max_tokens=50))
        )
    assert core.scheduler.pool.num_blocks < 2 * 120 // 4
    assert core.stats().num_preemptions == 0
    runner_of(core).shutdown()
    runner_of(alone).shutdown()


def test_a_cached_beginning_needs_only_the_last_window_of_layers_that_have_one() -> None:
    core = make_core(num_blocks=200, block_size=4, windows=(None, 8))
    prompt = [LETTERS[place % 5] for place in range(41)]
    generate(core, make_request("first", prompt, max_tokens=1))
    hashes: list[bytes] = []
    chain_hashes(prompt, 4, hashes)
    pool, blocks = core.scheduler.pool, core.scheduler.blocks
    (_, table) = blocks.find(hashes, 10)
    assert (len(table), table.num_freed) == (10, 8)
    early = pool.find([hashes[3] + b"\1"])
    pool.unpublish(early)
    assert [len(found) for found in blocks.find(hashes, 10)] == [10, 10], "a block far before the window is not needed"
    assert [len(found) for found in blocks.find(hashes, 5)] == [3, 3], "a block in the window is"
    late = pool.find([hashes[9] + b"\1"])
    pool.unpublish(late)
    assert [len(found) for found in blocks.find(hashes, 10)] == [9, 9]
    again = generate(core, make_request("again", prompt, max_tokens=1))
    assert again[0].prompt is not None
    assert again[0].prompt.num_cached_tokens == 36
    runner_of(core).shutdown()


def test_other_salts_share_nothing_in_any_group() -> None:
    core = make_core(num_blocks=200, block_size=4, windows=(None, 8))
    cached = []
    for salt in ("", "salt", "salt", ""):
        deltas = generate(core, make_request("r", LETTERS[:13], max_tokens=1, cache_salt=salt))
        assert deltas[0].prompt is not None
        cached.append(deltas[0].prompt.num_cached_tokens)
    runner_of(core).shutdown()
    assert cached == [0, 0, 12, 12]


def test_blocks_that_leave_the_window_are_retained_as_the_request_says() -> None:
    core = make_core(num_blocks=40, block_size=4, max_model_len=60, windows=(None, 8))
    kept = Retention(((0, 16, RetentionRule(90)),))
    prompt = [LETTERS[place % 5] for place in range(33)]
    generate(core, make_request("kept", prompt, max_tokens=1, retention=kept))
    for number in range(4):
        generate(core, make_request(str(number), [LETTERS[5 + number]] * 33, max_tokens=4))
    hashes: list[bytes] = []
    chain_hashes(prompt, 4, hashes)
    found = core.scheduler.blocks.find(hashes, 8)
    runner_of(core).shutdown()
    assert len(found[0]) == 4


def test_a_full_cache_of_windows_is_given_up_and_computed_again() -> None:
    core = make_core(num_blocks=52, block_size=4, max_model_len=60, max_num_batched_tokens=16, windows=(None, 6, 6))
    alone = make_core(num_blocks=200, max_model_len=60, enable_prefix_caching=False)
    for number in range(6):
        core.add(make_request(str(number), [LETTERS[number]] * 20, max_tokens=38))
    said = drive(core)
    assert core.stats().num_preemptions > 0
    for number in range(6):
        assert tokens(said[str(number)]) == tokens(generate(alone, make_request("r", [LETTERS[number]] * 20, max_tokens=38)))
    runner_of(core).shutdown()
    runner_of(alone).shutdown()


def test_the_last_token_can_still_be_computed_again_when_a_step_behind_it_is_scheduled() -> None:
    core = make_core(num_blocks=64, block_size=2, max_model_len=40, windows=(None, 5, 4))
    core.add(make_request(prompt=LETTERS[:3], max_tokens=30))
    while (step := core.schedule()) is not None:
        (sequence,) = step.num_tokens
        for table, window in zip(sequence.other_tables, (5, 4), strict=True):
            assert table.num_freed * 2 <= max(0, sequence.num_computed_tokens - window)
        batch = core.build(step)
        core.update(step, batch, core.runner.launch(batch).collect())
    assert core.stats().num_generation_tokens == 30
    runner_of(core).shutdown()


def most_running(windows: tuple[int | None, ...], num_blocks: int) -> int:
    """How many of eight long requests run at once, where each is admitted only if it will find blocks until its end."""
    core = make_core(num_blocks=num_blocks, block_size=2, max_num_batched_tokens=8, max_model_len=70, windows=windows, reserves=True)
    for number in range(8):
        core.add(make_request(str(number), [LETTERS[number]] * 30, max_tokens=30))
    most = 0
    while core.has_work:
        core.step()
        core.check_integrity()
        most = max(most, core.stats().num_running)
    assert core.stats().num_preemptions == 0
    runner_of(core).shutdown()
    return most


def test_admission_reserves_no_more_than_the_window_for_layers_that_have_one() -> None:
    assert most_running((None,), 70) == 2
    assert most_running((None, 4, 4), 3 * 70) == 6


def test_a_waiting_request_is_admitted_once_a_prompt_has_freed_what_lies_outside_its_window() -> None:
    core = make_core(num_blocks=62, block_size=2, max_num_batched_tokens=48, max_model_len=70, windows=(None, 4))
    core.add(make_request("long", [LETTERS[0]] * 40, max_tokens=30))
    core.add(make_request("short", [LETTERS[1]] * 34, max_tokens=2))
    core.step()
    assert core.stats().num_running == 1, "the prompt's blocks leave no room for the other"
    running = []
    for _ in range(4):
        core.step()
        running.append(core.stats().num_running)
    drive(core)
    runner_of(core).shutdown()
    assert 2 in running
