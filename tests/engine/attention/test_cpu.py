import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.engine.attention import cpu
from penstock.engine.attention.cpu import QUERY_BLOCK, paged_attention_cpu, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.batch import slots_of
from penstock.engine.native.runtime import native_library
from tests.fakes import block_tables

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_size: int = 16
    value_size: int = 16


@pytest.fixture(params=["native", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to decode and to write. Where there is no compiler, both are the torch one."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_library", lambda: None)
    return str(request.param)


class Paged:
    """Sequences of random keys and values in scattered blocks of a cache that holds NaN everywhere else.

    Sequence i has `context_lens[i]` tokens in all, of which the last `query_lens[i]` are new in this step.
    """

    def __init__(self, query_lens: Sequence[int], context_lens: Sequence[int], shape: Shape, dtype: torch.dtype, num_padding: int) -> None:
        self.query_lens, self.context_lens, self.shape, self.dtype, self.num_padding = query_lens, context_lens, shape, dtype, num_padding
        self.key_stops: dict[int, int] = {}  # by flat row
        generator = torch.Generator().manual_seed(sum(context_lens))

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.queries = [draw(length, shape.num_heads, shape.key_size) for length in query_lens]
        self.keys = [draw(length, shape.num_kv_heads, shape.key_size) for length in context_lens]
        self.values = [draw(length, shape.num_kv_heads, shape.value_size) for length in context_lens]
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in context_lens) + 3
        free = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in context_lens]
        self.key_cache = torch.full((num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.key_size), torch.nan, dtype=dtype)
        self.value_cache = torch.full((num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.value_size), torch.nan, dtype=dtype)

    @property
    def slots(self) -> list[int]:
        """Of the new tokens."""
        return [
            slot
            for table, query_len, length in zip(self.tables, self.query_lens, self.context_lens, strict=True)
            for slot in slots_of(table, length - query_len, length, BLOCK_SIZE)
        ]

    @property
    def metadata(self) -> AttentionMetadata:
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return AttentionMetadata.pack(
            self.slots + [-1] * self.num_padding,
            starts,
            list(self.context_lens),
            list(range(len(self.tables)))[::-1],
            block_tables(self.tables[::-1]),
            num_decodes=sum(length == 1 for length in self.query_lens),
            key_stops=self.key_stops,
        )

    def first_of(self, num_sequences: int) -> "Paged":
        """The same with fewer sequences."""
        fewer = copy.copy(self)
        for name in ("query_lens", "context_lens", "queries", "keys", "values", "tables"):
            setattr(fewer, name, getattr(self, name)[:num_sequences])
        return fewer

    def run(self, options: AttentionOptions) -> Tensor:
        """Puts earlier tokens into the cache, writes the new ones as a step does, and attends. Rows of padding hold NaN."""
        for keys, values, table, query_len in zip(self.keys, self.values, self.tables, self.query_lens, strict=True):
            old = torch.tensor(slots_of(table, 0, len(keys) - query_len, BLOCK_SIZE), dtype=torch.long)
            self.key_cache.view(-1, *keys.shape[1:])[old] = keys[: len(old)]
            self.value_cache.view(-1, *values.shape[1:])[old] = values[: len(old)]
        metadata = self.metadata
        for cache, rows in ((self.key_cache, self.keys), (self.value_cache, self.values)):
            new = self.as_the_model_gives(
                [sequence[len(sequence) - query_len :] for sequence, query_len in zip(rows, self.query_lens, strict=True)]
            )
            write_kv(cache, new, metadata.slot_mapping_T)
        return paged_attention_cpu(self.as_the_model_gives(self.queries), self.key_cache, self.value_cache, metadata, options)

    def as_the_model_gives(self, rows: Sequence[Tensor]) -> Tensor:
        """Flat [T, H, D], not contiguous as it was [1, H, T, D] before, with NaN in the rows of padding."""
        padding = torch.full((self.num_padding, *rows[0].shape[1:]), torch.nan, dtype=self.dtype)
        return torch.cat([*rows, padding]).transpose(0, 1).contiguous().transpose(0, 1)

    def expected(self, options: AttentionOptions) -> Tensor:
        rows = []
        first = 0
        for query, keys, values in zip(self.queries, self.keys, self.values, strict=True):
            stops = [self.key_stops.get(row, 0) for row in range(first, first + len(query))]
            rows.append(naive(query, keys, values, options, stops))
            first += len(query)
        return torch.cat([*rows, torch.zeros(self.num_padding, self.shape.num_heads, self.shape.value_size)])


def naive(query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, options: AttentionOptions, key_stops: Sequence[int]) -> Tensor:
    """Attention as one writes it down, in float32, one query and one head at a time."""
    group = query_THD.shape[1] // key_SKD.shape[1]
    offset = len(key_SKD) - len(query_THD)
    out = torch.empty(*query_THD.shape[:2], value_SKD.shape[2])
    for t in range(len(query_THD)):
        last = max(offset + t, key_stops[t] - 1)
        first = 0 if options.sliding_window is None else max(0, offset + t - options.sliding_window + 1)
        for head in range(query_THD.shape[1]):
            scores = key_SKD[first : last + 1, head // group].float() @ query_THD[t, head].float() * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks_H is not None:
                scores = torch.cat([scores, options.sinks_H[head : head + 1].float()])
            weights = scores.softmax(0)[: last + 1 - first]
            out[t, head] = weights @ value_SKD[first : last + 1, head // group].float()
    return out


def check(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shape: Shape = Shape(),
    dtype: torch.dtype = torch.float32,
    num_padding: int = 0,
    **options: object,
) -> None:
    paged = Paged(query_lens, context_lens, shape, dtype, num_padding)
    chosen = AttentionOptions(**{"scaling": shape.key_size**-0.5, **options})
    torch.testing.assert_close(paged.run(chosen).float(), paged.expected(chosen), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def sinks(num_heads: int) -> Tensor:
    return torch.linspace(-2, 4, num_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.usefixtures("kernel")
def test_every_head_size_and_ratio_of_heads_is_attended(group: int, size: int, dtype: torch.dtype) -> None:
    shape = Shape(2 * group, 2, size, size)
    check([1, 1, 1, 5, 18], [1, 17, 40, 5, 33], shape, dtype)


@pytest.mark.parametrize(("key_size", "value_size"), [(24, 16), (64, 128), (128, 64), (16, 80)])
@pytest.mark.usefixtures("kernel")
def test_keys_and_values_may_differ_in_size(key_size: int, value_size: int) -> None:
    check([1, 1, 7], [20, 16, 23], Shape(6, 3, key_size, value_size))


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
@pytest.mark.usefixtures("kernel")
def test_contexts_end_anywhere_around_a_block_with_any_window(window: int | None) -> None:
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49]
    check([1] * len(lengths), lengths, sliding_window=window)


@pytest.mark.parametrize("window", [None, 1, 12, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 100])
@pytest.mark.parametrize("num_queries", [2, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 3])
def test_prompts_of_any_number_of_query_blocks_with_any_window(num_queries: int, window: int | None) -> None:
    check([num_queries, num_queries], [num_queries, num_queries + 21], sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.usefixtures("kernel")
def test_windows_soft_caps_and_sinks_combine(has_sinks: bool, softcap: float | None, window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(8, 2, 64, 64)
    sinks_H = sinks(8).to(dtype) if has_sinks else None
    check([1, 1, 20, 3], [33, 5, 20, 40], shape, dtype, sliding_window=window, softcap=softcap, sinks_H=sinks_H, scaling=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 12, 40, 130])
@pytest.mark.usefixtures("kernel")
def test_tokens_of_an_image_see_all_of_it_and_no_more_than_the_window_before_them(window: int | None, dtype: torch.dtype) -> None:
    paged = Paged([1, 3, 170, 70], [33, 5, 170, 90], Shape(4, 2, 64, 64), dtype, 2)
    # By sequence: its first row, the position of that, and images. The first of the last one was computed in part before.
    for first_row, first, spans in ((1, 2, [(2, 4)]), (4, 0, [(3, 40), (60, 130), (131, 170)]), (174, 20, [(20, 30), (50, 90)])):
        for start, stop in spans:
            paged.key_stops |= dict.fromkeys(range(first_row + start - first, first_row + stop - first), stop)
    options = AttentionOptions(0.125, sliding_window=window)
    torch.testing.assert_close(paged.run(options).float(), paged.expected(options), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 8000, 12_000])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prompts_in_long_contexts_are_attended_some_thousands_of_keys_at_a_time(has_sinks: bool, window: int | None) -> None:
    check([60, 3, 5], [16_450, 8193, 70], Shape(2, 1), sliding_window=window, sinks_H=sinks(2) if has_sinks else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 700, 1030])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_contexts_are_attended_part_by_part(has_sinks: bool, window: int | None, dtype: torch.dtype) -> None:
    lengths = [1, 1023, 1024, 1025, 2049, 3500]
    check([1] * len(lengths), lengths, Shape(6, 2, 64, 64), dtype, sliding_window=window, sinks_H=sinks(6) if has_sinks else None)


def test_what_is_decoded_with_a_sequence_does_not_change_it() -> None:
    shape, options = Shape(6, 2, 64, 64), AttentionOptions(0.125)
    paged = Paged([1] * 9, [2500] * 9, shape, torch.bfloat16, 0)
    together = paged.run(options)
    alone = paged.first_of(1).run(options)
    assert torch.equal(alone[0], together[0])


@pytest.mark.usefixtures("kernel")
def test_float16_is_attended_without_a_kernel_of_its_own() -> None:
    check([1, 1, 20], [33, 5, 25], dtype=torch.float16)


@pytest.mark.parametrize("query_lens", [[1], [1, 1], [4], [1, 4]])
@pytest.mark.usefixtures("kernel")
def test_rows_of_padding_come_out_zero_and_write_nothing(query_lens: list[int]) -> None:
    lens = [length + 10 for length in query_lens]
    check(query_lens, lens, num_padding=3)
    paged = Paged(query_lens, lens, Shape(), torch.float32, 3)
    paged.run(AttentionOptions(0.25))
    num_written = paged.key_cache.isfinite().flatten(2).all(-1).sum()
    assert num_written == sum(lens)


def in_chunks(whole: Paged, cuts: Sequence[int], options: AttentionOptions) -> Tensor:
    """The only sequence, computed from one cut to the next."""
    whole.key_cache.fill_(torch.nan)
    whole.value_cache.fill_(torch.nan)
    rows = []
    for start, stop in itertools.pairwise(cuts):
        chunk = Paged([stop - start], [stop], whole.shape, whole.dtype, 0)
        chunk.tables, chunk.key_cache, chunk.value_cache = [whole.tables[0][: -(-stop // BLOCK_SIZE)]], whole.key_cache, whole.value_cache
        write_kv(chunk.key_cache, whole.keys[0][start:stop], chunk.metadata.slot_mapping_T)
        write_kv(chunk.value_cache, whole.values[0][start:stop], chunk.metadata.slot_mapping_T)
        rows.append(paged_attention_cpu(whole.queries[0][start:stop], chunk.key_cache, chunk.value_cache, chunk.metadata, options))
    return torch.cat(rows)


@pytest.mark.usefixtures("kernel")
def test_a_prompt_in_chunks_comes_out_as_it_does_whole() -> None:
    length = 90
    options = AttentionOptions(0.25, sliding_window=20)
    whole = Paged([length], [length], Shape(), torch.float32, 0)
    expected = whole.run(options)
    for cuts in ([0, 1, 16, 17, 64, 90], [0, 89, 90], list(range(91))):
        torch.testing.assert_close(in_chunks(whole, cuts, options), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "length", "cuts"),
    [
        (Shape(7, 1, 64, 64), 200, range(201)),
        (Shape(6, 2, 128, 128), 130, [0, 1, 2, 16, 65, 66, 128, 129, 130]),
        (Shape(3, 1, 64, 64), 2200, [0, 1000, 1023, 1024, 1025, 1030, 2047, 2048, 2049, 2198, 2199, 2200]),
        pytest.param(Shape(2, 1, 64, 64), 8300, [0, 8190, 8191, 8192, 8193, 8199, 8299, 8300], marks=pytest.mark.thorough),
        (Shape(16, 1, 64, 64), 80, [0, 1, 2, 79, 80]),
        (Shape(8, 2, 256, 256), 130, [0, 1, 2, 65, 66, 129, 130]),
    ],
)
@pytest.mark.parametrize("window", [None, 50, 1100])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (None, True), (3.0, False)])
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
def test_in_bfloat16_a_token_gets_the_same_bits_in_whatever_step_it_is_computed(
    shape: Shape, length: int, cuts: Sequence[int], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    """Decoded alone, as a draft to verify, or in any part of a prompt: no choice depends on what was cached or proposed."""
    sinks_H = sinks(shape.num_heads) if has_sinks else None
    options = AttentionOptions(shape.key_size**-0.5, sliding_window=window, softcap=softcap, sinks_H=sinks_H)
    whole = Paged([length], [length], shape, torch.bfloat16, 0)
    assert torch.equal(in_chunks(whole, cuts, options), in_chunks(whole, [0, length], options))


@pytest.mark.usefixtures("kernel")
def test_large_scores_do_not_overflow() -> None:
    check([1, 9], [40, 40], scaling=60.0)


@pytest.mark.usefixtures("kernel")
def test_what_is_not_a_number_in_one_sequence_stays_there() -> None:
    paged = Paged([1, 1, 6, 6], [30, 21, 30, 21], Shape(), torch.float32, 0)
    options = AttentionOptions(0.25)
    expected = paged.expected(options)
    for sick in (0, 2):
        paged.keys[sick][3] = torch.nan
        paged.values[sick][5] = torch.nan
    out = paged.run(options)
    assert out[0].isnan().all()
    assert out[2:8].isnan().all()
    torch.testing.assert_close(out[1], expected[1])
    torch.testing.assert_close(out[8:], expected[8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 12, 16, 40, 100])
@pytest.mark.usefixtures("kernel")
def test_nothing_is_taken_from_blocks_that_have_left_the_window(window: int, dtype: torch.dtype) -> None:
    query_lens, context_lens = [1, 1, 6, 70, 70], [300, 33, 300, 300, 70]
    paged = Paged(query_lens, context_lens, Shape(8, 2, 64, 64), dtype, 0)
    for keys, values, query_len in zip(paged.keys, paged.values, query_lens, strict=True):
        num_gone = max(0, len(keys) - query_len - window + 1) // BLOCK_SIZE * BLOCK_SIZE
        keys[:num_gone] = values[:num_gone] = torch.nan
    options = AttentionOptions(0.125, sliding_window=window)
    torch.testing.assert_close(paged.run(options).float(), paged.expected(options), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("kernel")
def test_rows_of_any_layout_are_written_where_they_belong() -> None:
    rows_THD = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)
    slots = torch.tensor([5, -1, 0, 33])
    for given in (rows_THD, rows_THD.transpose(0, 1).contiguous().transpose(0, 1), rows_THD.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        cache = torch.zeros(3, BLOCK_SIZE, 2, 3)
        write_kv(cache, given, slots)
        flat = cache.view(-1, 2, 3)
        assert torch.equal(flat[[5, 0, 33]], rows_THD[[0, 2, 3]])
        assert flat.count_nonzero() == rows_THD[[0, 2, 3]].count_nonzero()
    write_kv(cache, rows_THD[:0], slots[:0])


def test_a_cache_of_another_type_is_never_written() -> None:
    with pytest.raises(AssertionError, match="bfloat16"):
        write_kv(torch.zeros(1, BLOCK_SIZE, 2, 3), torch.zeros(1, 2, 3, dtype=torch.bfloat16), torch.tensor([0]))


def test_native_and_torch_decodes_agree_closer_than_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = Shape(8, 2, 64, 64), AttentionOptions(0.125)
    native = Paged([1, 1], [70, 33], shape, torch.float32, 0).run(options)
    monkeypatch.setattr(cpu, "native_library", lambda: None)
    plain = Paged([1, 1], [70, 33], shape, torch.float32, 0).run(options)
    torch.testing.assert_close(native, plain, rtol=1e-5, atol=1e-6)


def test_loading_the_kernels_leaves_arithmetic_alone() -> None:
    native_library()
    tiny = torch.tensor([1e-40])
    assert (tiny * 1.0).item() > 0, "subnormal numbers became zero"
    assert math.ldexp(1.0, -1074) > 0.0
