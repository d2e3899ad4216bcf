import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.attention.cuda import heads_per_tile, paged_attention_cuda
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.batch import StepInputs
from penstock.engine.kernels import references
from penstock.engine.model.cuda_graphs import GraphShape, load, padding
from tests.fakes import block_tables

ROOT = Path(__file__).parents[4]
Launch = Callable[..., Any]

NUM_BLOCKS = 40
BLOCK_SIZE = 16
KEY_SIZE = 64
VALUE_SIZE = 32


def make_arguments(
    context_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    options: AttentionOptions,
    num_padding: int = 0,
    num_heads: int = 6,
    num_kv_heads: int = 2,
) -> dict[str, Any]:
    """The caches hold what came before the new tokens; decodes come first."""
    generator = torch.Generator().manual_seed(sum(context_lens))
    free_blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = [[free_blocks.pop() for _ in range(0, length, BLOCK_SIZE)] for length in context_lens]
    key_cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, KEY_SIZE, generator=generator)
    value_cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, VALUE_SIZE, generator=generator)
    slots = []
    for table, context_len, query_len in zip(tables, context_lens, query_lens, strict=True):
        positions = range(context_len - query_len, context_len)
        slots += [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE if position >= 0 else -1 for position in positions]
    slots += [-1] * num_padding
    metadata = AttentionMetadata.pack(
        slots,
        [sum(query_lens[:index]) for index in range(len(query_lens) + 1)],
        list(context_lens),
        list(range(len(tables))),
        block_tables(tables),
        num_decodes=sum(query_len == 1 for query_len in query_lens),
    )
    return {
        "query_THD": torch.randn(len(slots), num_heads, KEY_SIZE, generator=generator),
        "key_THD": torch.randn(len(slots), num_kv_heads, KEY_SIZE, generator=generator),
        "value_THD": torch.randn(len(slots), num_kv_heads, VALUE_SIZE, generator=generator),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "metadata": metadata,
        "options": options,
    }


def reference(arguments: dict[str, Any]) -> Tensor:
    metadata, options = arguments["metadata"], arguments["options"]
    key_cache, value_cache = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    references.kv_write(arguments["key_THD"], arguments["value_THD"], key_cache, value_cache, metadata.slot_mapping_T)
    return references.varlen_prefill(
        arguments["query_THD"],
        key_cache,
        value_cache,
        metadata.block_tables_PN,
        metadata.table_rows_B,
        metadata.query_start_loc,
        metadata.context_lens_B,
        scaling=options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks_H,
    )


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [((40, 1, 33), (1, 1, 1)), ((50, 17), (50, 9)), ((20, 90, 31, 64), (1, 1, 31, 16))],
    ids=["decodes", "prefills", "mixed"],
)
@pytest.mark.parametrize(
    "options",
    [AttentionOptions(0.125), AttentionOptions(0.2, sliding_window=20, softcap=3.0, sinks_H=torch.linspace(-1, 1, 6))],
    ids=["plain", "everything"],
)
def test_every_kind_of_batch_gives_the_reference(
    launch: Launch, context_lens: tuple[int, ...], query_lens: tuple[int, ...], options: AttentionOptions
) -> None:
    arguments = make_arguments(context_lens, query_lens, options)
    launched = launch(paged_attention_cuda, **arguments)
    torch.testing.assert_close(launched.result, reference(arguments), atol=2e-5, rtol=0)


def test_a_cache_of_8_bits_is_written_and_read(launch: Launch) -> None:
    arguments = make_arguments((20, 90, 31), (1, 1, 31), AttentionOptions(0.125))
    for name in ("key_THD", "value_THD"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn).float()  # the interpreter cannot round to 8 bits
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    launched = launch(paged_attention_cuda, **arguments)
    rounded = arguments | {name: arguments[name].float() for name in ("key_cache", "value_cache")}
    torch.testing.assert_close(launched.result, reference(rounded), atol=2e-5, rtol=0)
    assert launched.arguments["key_cache"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("query_lens", [(1, 1), (1, 1, 7)])
def test_padding_gets_zeros_and_writes_nothing(launch: Launch, query_lens: tuple[int, ...]) -> None:
    num_padding = 0 if query_lens == (1, 1) else 3  # a batch of decodes is padded with decodes
    arguments = make_arguments((30, 0, 7)[: len(query_lens)], query_lens, AttentionOptions(0.125), num_padding)
    launched = launch(paged_attention_cuda, **arguments)
    torch.testing.assert_close(launched.result, reference(arguments), atol=2e-5, rtol=0)
    assert launched.result[1].abs().max() == 0
    assert launched.result[sum(query_lens) :].abs().sum() == 0
    num_written = (launched.arguments["key_cache"] != arguments["key_cache"]).any(-1).any(-1).sum()
    assert num_written == sum(query_lens) - 1


@pytest.mark.parametrize(
    ("shape", "batches"),
    [
        (GraphShape.of_decodes(4), [((130, 33, 70), (1, 1, 1)), ((20, 51), (1, 1))]),
        (GraphShape(40, 5, 3, 8), [((130, 33, 70, 20, 9), (1, 1, 1, 20, 9)), ((20, 90, 31), (1, 20, 11))]),
        (GraphShape(40, 5, 3, 8), [((130, 33, 20), (1, 1, 20)), ((60,), (13,))]),
    ],
    ids=["decodes", "mixed", "prompts"],
)
@pytest.mark.parametrize(
    "options",
    [AttentionOptions(0.125), AttentionOptions(0.2, sliding_window=20, softcap=3.0, sinks_H=torch.linspace(-1, 1, 6))],
    ids=["plain", "everything"],
)
def test_a_graphs_tensors_give_what_the_batch_gives_whatever_was_in_them_before(
    launch: Launch, shape: GraphShape, batches: list[tuple[tuple[int, ...], tuple[int, ...]]], options: AttentionOptions
) -> None:
    tables_PN = torch.zeros(8, 9, dtype=torch.int32)
    own = padding(shape, tables_PN, max_context_len=NUM_BLOCKS * BLOCK_SIZE)
    for context_lens, query_lens in batches:  # the second leaves rows and entries of the first behind
        arguments = make_arguments(context_lens, query_lens, options)
        num_rows, width = arguments["metadata"].block_tables_PN.shape
        tables_PN[:num_rows, :width] = arguments["metadata"].block_tables_PN
        num_tokens = sum(query_lens)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        load(own, StepInputs(ids, arguments["metadata"], ids[None], ids[None], ids[:num_rows], ids[:0].view(3, 0)))
    expected = reference(arguments)
    num_padding = shape.num_tokens - num_tokens
    extra = {name: torch.randn(num_padding, *arguments[name].shape[1:]) for name in ("query_THD", "key_THD", "value_THD")}
    padded = {name: torch.cat([arguments[name], rows]) for name, rows in extra.items()}
    launched = launch(paged_attention_cuda, **arguments | padded | {"metadata": own.attention})
    torch.testing.assert_close(launched.result[:num_tokens], expected, atol=2e-5, rtol=0)
    assert launched.result[num_tokens:].abs().sum() == 0
    assert (launched.arguments["key_cache"] != arguments["key_cache"]).any(-1).any(-1).sum() == num_tokens


def test_states_as_models_give_them_need_not_have_dense_heads(launch: Launch) -> None:
    arguments = make_arguments((20, 31), (1, 31), AttentionOptions(0.125))
    expected = reference(arguments)
    for name in ("query_THD", "key_THD", "value_THD"):
        arguments[name] = arguments[name].transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(launch(paged_attention_cuda, **arguments).result, expected, atol=2e-5, rtol=0)


def test_triton_is_imported_at_the_first_launch_only() -> None:
    modules = ["attention.cuda", "kernels.launch", "kernels.references"]
    known: set[str] = set()
    while modules:
        known.add(module := modules.pop())
        for name in imported_with(module):
            assert name.split(".")[0] != "triton", module
            own = name.removeprefix("penstock.engine.")
            if own not in {name, *known}:
                modules.append(own)
    assert {"attention.interface", "kernels.tuning"} <= known


def imported_with(module: str) -> list[str]:
    """The modules that one of the engine's imports when it is imported itself."""
    tree = ast.parse((ROOT / "engine" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            folder = ROOT / str(node.module).removeprefix("penstock.").replace(".", "/")
            names += [f"{node.module}.{alias.name}" for alias in node.names] if folder.is_dir() else [str(node.module)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


@pytest.mark.parametrize(("num_heads", "num_tiles"), [(1, 1), (16, 1), (20, 2), (40, 4), (128, 8), (17, 17)])
def test_each_tile_over_latents_has_as_many_heads_as_fit(num_heads: int, num_tiles: int) -> None:
    assert num_heads // heads_per_tile(num_heads) == num_tiles


@pytest.mark.parametrize(("context_lens", "query_lens"), [((40, 1), (1, 1)), ((20, 40), (1, 9))], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("key_size", "value_size", "num_heads"), [(288, 256, 20), (40, 32, 4)])
def test_values_of_latents_are_the_beginnings_of_keys(
    launch: Launch, context_lens: tuple[int, ...], query_lens: tuple[int, ...], key_size: int, value_size: int, num_heads: int
) -> None:
    arguments = make_arguments(context_lens, query_lens, AttentionOptions(0.05), num_heads=num_heads, num_kv_heads=1)
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(query_lens)
    arguments["query_THD"] = torch.randn(num_tokens, num_heads, key_size, generator=generator)
    arguments["key_THD"] = torch.randn(num_tokens, 1, key_size, generator=generator)
    arguments["value_THD"] = arguments["key_THD"][..., :value_size]
    arguments["key_cache"] = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 1, key_size, generator=generator)
    with_values = arguments | {"value_cache": arguments["key_cache"][..., :value_size].clone()}
    launched = launch(paged_attention_cuda, **arguments | {"value_cache": None})
    torch.testing.assert_close(launched.result, reference(with_values), atol=2e-5, rtol=2e-5)
    references.kv_write(arguments["key_THD"], None, arguments["key_cache"], None, arguments["metadata"].slot_mapping_T)
    assert torch.equal(launched.arguments["key_cache"], arguments["key_cache"])
