"""Products by the tiles of AMX, with a model of its instructions in their place, so that all else about them runs on any processor."""

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.runtime import (
    FLAGS,
    SOURCE,
    TILE_MODES,
    find_compiler,
    kernels_in_use,
    native_library,
    processor_features,
)
from penstock.engine.weights.experts import GroupedPanelLinear, quantize_experts
from penstock.engine.weights.linear import QuantizedLinear, panel_linear, panels, quantize_linears
from penstock.engine.weights.packed import pack
from tests.engine.native.test_instructions import EVERY_SETTING
from tests.engine.weights.sample_weights import ALL_TYPES, random_weight
from tests.engines import core_over, loaded_model, run
from tests.fakes import block_tables
from tests.tiny_models import tiny_model

NEVER, ALWAYS, FASTER = (TILE_MODES[mode] for mode in ("never", "always", "auto"))
REAL_TILES = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tilezero", "tdpbf16ps", "tdpbsud")

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
emulation = pytest.mark.other_processors  # a library with emulated tiles takes half a minute to build


@pytest.fixture(scope="module")
def emulated() -> Iterator[ctypes.CDLL]:
    """The library of this process until the module's tests are over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_TILES", "emulated")
        native_library.cache_clear()
        library = native_library()
        assert library is not None
        yield library
    native_library.cache_clear()


@pytest.fixture
def tiles(emulated: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    emulated.penstock_choose_tiles(ALWAYS)
    yield emulated
    emulated.penstock_choose_tiles(ALWAYS)


@needs_compiler
@emulation
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 32, 47, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (80, 96), (96, 62)])
def test_linear_layers_of_bfloat16(tiles: ctypes.CDLL, num_rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x, weight_OI, bias = (torch.randn(size, dtype=torch.bfloat16) for size in ((num_rows, inputs), (outputs, inputs), (outputs,)))
    packed = panels(weight_OI)
    result = panel_linear(x, packed, bias, outputs)
    torch.testing.assert_close(result.float(), x.float() @ weight_OI.float().T + bias.float(), rtol=1e-2, atol=1e-2)
    for count in {1, min(num_rows, 18)}:
        assert torch.equal(panel_linear(x[-count:], packed, bias, outputs), result[-count:]), "a row's result depends on the others"


@needs_compiler
@emulation
def test_products_are_added_up_as_the_manual_says(tiles: ctypes.CDLL) -> None:
    x, weight_OI = torch.ones(1, 32, dtype=torch.bfloat16), torch.zeros(16, 32, dtype=torch.bfloat16)
    weight_OI[0, 0::2], weight_OI[0, 0], weight_OI[0, 1] = 1, 2.0**30, -(2.0**30)
    weight_OI[1, 0], weight_OI[1, 1] = 2.0**-130, 1
    weight_OI[2, 0] = 2.0**-130
    results = {}
    for mode in (ALWAYS, NEVER):
        tiles.penstock_choose_tiles(mode)
        results[mode] = panel_linear(x, panels(weight_OI), None, 16)[0, :3].tolist()
    assert results[ALWAYS] == [0, 1, 0], "even and odd products apart, and numbers without a normal exponent as zeros"
    assert results[NEVER][0] == 15


@needs_compiler
@emulation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize(("num_rows", "inputs"), [(16, 256), (17, 512), (45, 256), (130, 512)])
def test_linear_layers_of_few_bits(tiles: ctypes.CDLL, num_rows: int, inputs: int, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(name, 50, inputs)
    weight.codes_OI[0] = torch.arange(inputs) % 2 * (2**weight.bits - 1)  # the extremes
    x, bias = torch.randn(num_rows, inputs).to(dtype), torch.randn(67).to(dtype)
    multiply = QuantizedLinear([pack(weight), pack(random_weight("Q6_K", 17, inputs))], bias)

    by_tiles, alone = multiply(x), multiply(x[-1:])
    tiles.penstock_choose_tiles(NEVER)
    by_vectors = multiply(x)
    if tiles.penstock_instructions().startswith(b"AVX-512"):
        assert torch.equal(by_tiles, by_vectors)
        assert torch.equal(alone, by_tiles[-1:])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(by_tiles, by_vectors, rtol=tolerance, atol=tolerance)


@needs_compiler
@emulation
@pytest.mark.parametrize(("size", "group"), [(64, 1), (64, 3), (128, 4), (80, 2)])
@pytest.mark.parametrize(("num_queries", "context_len"), [(1, 1), (5, 70), (16, 16), (49, 49), (100, 333)])
@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["plain", "all"])
def test_a_prompts_attention(
    tiles: ctypes.CDLL, settings: dict[str, object], num_queries: int, context_len: int, size: int, group: int
) -> None:
    torch.manual_seed(0)
    options = AttentionOptions(**{"scaling": size**-0.5, **settings})
    if options.sinks_H is not None:
        options = AttentionOptions(options.scaling, options.sliding_window, options.softcap, options.sinks_H[: 2 * group])
    num_blocks = -(-context_len // 16)
    caches = torch.full((2, num_blocks, 16, 2, size), torch.nan, dtype=torch.bfloat16)
    slots = list(range(context_len))
    for cache in caches:
        write_kv(cache, torch.randn(context_len, 2, size, dtype=torch.bfloat16), torch.tensor(slots))
    tables_PN = block_tables([list(range(num_blocks))])
    queries = slots[-num_queries:]
    metadata = AttentionMetadata.pack(queries, [0, num_queries], [context_len], [0], tables_PN, num_decodes=0)
    query_THD = torch.randn(num_queries, 2 * group, size, dtype=torch.bfloat16)

    def attend() -> Tensor:
        return paged_attention_cpu(query_THD, caches[0], caches[1], metadata, options)

    by_tiles = attend()
    tiles.penstock_choose_tiles(NEVER)
    torch.testing.assert_close(by_tiles, attend(), rtol=2e-2, atol=2e-2)


@needs_compiler
@emulation
def test_the_rows_of_experts(tiles: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    weight_EOI, bias_EO = torch.randn(4, 48, 64).bfloat16(), torch.randn(4, 48).bfloat16()
    starts_E, x_SI = torch.tensor([0, 1, 1, 38, 300]), torch.randn(300, 64).bfloat16()
    grouped = GroupedPanelLinear(weight_EOI, bias_EO)
    by_tiles = grouped(x_SI, starts_E)
    for expert, (first, stop) in enumerate(itertools.pairwise(starts_E.tolist())):
        alone = panel_linear(x_SI[first:stop], panels(weight_EOI[expert]), bias_EO[expert], 48)
        assert torch.equal(by_tiles[first:stop], alone)
    tiles.penstock_choose_tiles(NEVER)
    torch.testing.assert_close(by_tiles, grouped(x_SI, starts_E), rtol=2e-2, atol=2e-2)


@needs_compiler
@emulation
@pytest.mark.parametrize(("name", "bits"), [("llama", 16), ("qwen2", 4), ("qwen3", 8), ("gpt_oss", 4)])
def test_a_whole_decoder_gives_the_same_tokens(tiles: ctypes.CDLL, name: str, bits: int) -> None:
    model = tiny_model(name, head_dim=64, hidden_size=64).bfloat16()
    if bits < 16:
        fuse_linears(model)
        quantize_experts(model, bits)
        quantize_linears(model, bits)
    loaded = loaded_model(model)
    prompts = [[7, 8, 9], list(range(40, 90)), [5], list(range(100, 117))]

    def tokens(mode: int) -> list[list[int]]:
        tiles.penstock_choose_tiles(mode)
        core = core_over(loaded)
        assert isinstance(loaded.model.forward, NativeDecoder)
        found = [each.token_ids for each in run(core, prompts, max_tokens=8, temperature=0.0)]
        core.runner.shutdown()
        return found

    assert tokens(ALWAYS) == tokens(NEVER)


@needs_compiler
@emulation
def test_the_faster_of_tiles_and_vectors_is_taken_at_the_start(tiles: ctypes.CDLL) -> None:
    assert "AMX tiles for bfloat16 from 1 row, few bits from 16 rows" in kernels_in_use()
    assert tiles.penstock_choose_tiles(FASTER)
    assert "tiles" not in kernels_in_use(), "emulated ones are a hundred times as slow"


@needs_compiler
def test_tiles_are_not_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TILES", "maybe")
    native_library.cache_clear()
    with pytest.raises(ConfigurationError, match="PENSTOCK_TILES=maybe: it is one of never, always, emulated, auto"):
        native_library()
    if " amx_tile " not in f"{processor_features()} ":
        monkeypatch.setenv("PENSTOCK_TILES", "always")
        with pytest.raises(ConfigurationError, match="this processor has no tiles of AMX"):
            native_library()
    monkeypatch.undo()
    native_library.cache_clear()


@needs_compiler
@emulation
def test_the_instructions_themselves_compile(tmp_path: Path) -> None:
    """Where the system permits no tiles, a library that has them runs without."""
    compiler, assembly, library = find_compiler(), tmp_path / "kernels.s", tmp_path / "kernels.so"
    assert compiler is not None
    flags = [*FLAGS, "-march=native", *REAL_TILES]
    options = [flag for flag in flags if flag != "-shared"]
    if subprocess.run([compiler, *REAL_TILES, "-E", "-x", "c++", "/dev/null"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no instructions of AMX")
    subprocess.run([compiler, *options, "-S", "-o", str(assembly), str(SOURCE)], check=True)
    text = assembly.read_text()
    assert [name for name in INSTRUCTIONS if f"\t{name}" not in text] == []
    subprocess.run([compiler, *flags, "-o", str(library), str(assembly), str(SOURCE.with_name("products.cpp"))], check=True)
    kernels = ctypes.CDLL(str(library))
    has_tiles = " amx_tile " in f"{processor_features()} "
    assert bool(kernels.penstock_choose_tiles(FASTER)) is has_tiles
    assert kernels.penstock_tile_rows(0) == -1 or has_tiles
