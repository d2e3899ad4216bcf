"""The kernels for other processors than this one: compiled into a program, run here or in an emulator, and compared with torch."""

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from penstock.engine.attention import cpu
from penstock.engine.attention.cpu import paged_attention_cpu, row_size, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model import native
from penstock.engine.model.form import LAYER_TENSORS
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.native import MAX_DEVIATION, PROMPT_TOKENS, NativeDecoder
from penstock.engine.native.runtime import FLAGS, SOURCE, find_compiler, native_library, processor_features
from penstock.engine.sampling.greedy_head import GreedyHead
from penstock.engine.sampling.rows import draw, padded_width
from penstock.engine.system.cache import cache_directory, make_private
from penstock.engine.weights.experts import quantize_experts
from penstock.engine.weights.float8 import NAN_CODE, pack_float8
from penstock.engine.weights.linear import QuantizedLinear, panels, quantize_linears
from penstock.engine.weights.packed import TYPES, pack
from tests.engine.weights.sample_weights import ALL_TYPES, kernel_result, random_weight
from tests.engines import loaded_model
from tests.fakes import block_tables
from tests.tiny_models import tiny_model

DRIVER = Path(__file__).with_name("driver.cpp")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
INTEGER, FLOAT, POINTER = range(3)
EVERY_SETTING = {"sliding_window": 20, "softcap": 5.0, "sinks_H": torch.linspace(-1, 2, 8)}


@dataclass(frozen=True)
class Target:
    """`features` are those that /proc/cpuinfo lists where the programs run on this processor itself."""

    march: str
    instructions: str
    features: tuple[str, ...] = ()

    @property
    def is_arm(self) -> bool:
        return self.march.startswith("arm")


TARGETS = (
    Target("x86-64-v3", "AVX2", ("avx2", "fma", "f16c", "bmi2")),
    Target("alderlake", "AVX2", ("avx2", "fma", "f16c", "bmi2", "avx_vnni")),
    Target("x86-64-v4", "AVX-512", ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")),
    Target("armv8-a", "NEON"),
    Target("armv8.2-a+dotprod+bf16", "NEON BF16"),
    Target("armv8.6-a", "NEON BF16"),
)
# A build takes ten seconds and more. The kernels of this processor are those that all other tests run.
PARAMETERS = [pytest.param(target, marks=pytest.mark.other_processors) for target in TARGETS]


class Kernels:
    """Calls kernels in a program compiled for a target. Tensors and structures are arguments; tensors hold the results afterwards."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command

    def instructions(self) -> str:
        return self._run([], b"").decode().strip()

    def call(self, name: str, *arguments: object, others: Sequence[object] = ()) -> None:
        """`others` are what structures among the arguments, or among themselves, point to."""
        memory = [each for each in (*arguments, *others) if isinstance(each, Tensor | ctypes.Structure | ctypes.Array)]
        addresses = {_address(each): index for index, each in enumerate(memory)}
        contents = [_content(each) for each in memory]
        pointers = [
            (index, offset, addresses[address])
            for index, each in enumerate(memory)
            if not isinstance(each, Tensor)
            for offset, (address,) in zip(range(0, len(contents[index]), 8), struct.iter_unpack("q", contents[index]), strict=True)
            if address in addresses
        ]
        sent = [struct.pack(f"q{len(contents)}q", len(contents), *map(len, contents)), *contents, struct.pack("q", len(pointers))]
        sent += [struct.pack("3q", *pointer) for pointer in pointers]
        sent.append(struct.pack("q", len(arguments)))
        sent += [_argument(each, addresses) for each in arguments]
        received = self._run([name], b"".join(sent))
        assert len(received) == sum(map(len, contents))
        for each, content in zip(memory, contents, strict=True):
            part, received = received[: len(content)], received[len(content) :]
            if isinstance(each, Tensor) and content:
                each.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def _run(self, arguments: Sequence[str], sent: bytes) -> bytes:
        return subprocess.run([*self.command, *arguments], input=sent, capture_output=True, check=True, timeout=120).stdout


def _address(each: object) -> int:
    return each.data_ptr() if isinstance(each, Tensor) else ctypes.addressof(each)  # type: ignore[arg-type]


def _content(each: object) -> bytes:
    if isinstance(each, Tensor):
        assert each.is_contiguous()
        return each.reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytes(each)  # type: ignore[call-overload, no-any-return]


def _argument(each: object, addresses: dict[int, int]) -> bytes:
    if each is None or isinstance(each, int):
        return struct.pack("qq", INTEGER, each or 0)
    if isinstance(each, float):
        return struct.pack("qf4x", FLOAT, each)
    return struct.pack("qq", POINTER, addresses[_address(each)])


def built(compiler: str, flags: Sequence[str]) -> Path:
    """The program that these flags make of `DRIVER` and the kernels, kept beside the libraries that are made of the same sources."""
    sources = [path.read_bytes() for path in (DRIVER, *sorted(SOURCE.parent.glob("*.[ch]*")))]
    key = hashlib.sha256(b"\0".join([*sources, *map(str.encode, (compiler, *flags))])).hexdigest()[:20]
    program = cache_directory() / "native" / f"driver-{key}"
    make_private(program.parent)
    with FileLock(f"{program}.lock"), tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        if not program.exists():
            subprocess.run([compiler, *flags, "-o", f"{scratch}/driver", str(DRIVER), str(SOURCE.with_name("products.cpp"))], check=True)
            Path(scratch, "driver").replace(program)
    return program


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda target: target.march)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    target = request.param
    compiler = ARM_COMPILER if target.is_arm else find_compiler()
    tools = (ARM_COMPILER, ARM_EMULATOR) if target.is_arm else (compiler,)
    missing = [tool for tool in tools if tool is None or shutil.which(tool) is None]
    if missing or compiler is None:
        pytest.skip(f"there is no {' and no '.join(str(tool or 'C++ compiler') for tool in missing)} here")
    if not all(f" {feature} " in f"{processor_features()} " for feature in target.features):
        pytest.skip(f"this processor does not have the instructions of {target.march}")
    flags = [*(flag for flag in FLAGS if flag not in ("-shared", "-fPIC")), f"-march={target.march}", f'-DKERNELS="{SOURCE}"']
    flags += ["-static"] if target.is_arm else []  # so that the emulator needs no system of that kind
    program = built(compiler, flags)
    kernels = Kernels([ARM_EMULATOR, "-cpu", "max", str(program)] if target.is_arm else [str(program)])
    assert kernels.instructions() == target.instructions
    return kernels


@pytest.mark.parametrize(("num_rows", "outputs", "inputs"), [(1, 16, 2), (3, 48, 30), (7, 96, 64), (25, 80, 96)])
def test_linear_layers_of_bfloat16(kernels: Kernels, num_rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x, weight_OI, bias = (torch.randn(size, dtype=torch.bfloat16) for size in ((num_rows, inputs), (outputs, inputs), (outputs,)))
    packed = panels(weight_OI)

    def multiply(rows: Tensor) -> Tensor:
        out = torch.full((len(rows), outputs), torch.nan, dtype=torch.bfloat16)
        kernels.call("penstock_panel_linear", out, rows, packed, bias, len(rows), inputs, outputs)
        return out

    result = multiply(x)
    torch.testing.assert_close(result.float(), x.float() @ weight_OI.float().T + bias.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(multiply(x[-1:].contiguous()), result[-1:])


@pytest.mark.parametrize(("num_rows", "outputs", "inputs", "scale_columns"), [(1, 16, 2, 2), (2, 96, 320, 128), (25, 80, 96, 96)])
def test_linear_layers_of_8_bit_floats(kernels: Kernels, num_rows: int, outputs: int, inputs: int, scale_columns: int) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(num_rows, inputs, dtype=torch.bfloat16), torch.randn(outputs, dtype=torch.bfloat16)
    codes_OI = torch.arange(outputs * inputs).remainder(256).to(torch.uint8).view(outputs, inputs)
    codes_OI[codes_OI & NAN_CODE == NAN_CODE] = 1
    weight = pack_float8(codes_OI, torch.rand(outputs, -(-inputs // scale_columns)), scale_columns)
    results = []
    for name, operand in (("float8", weight.native()), ("panel", panels(weight.dequantized().bfloat16()))):
        results.append(torch.full((num_rows, outputs), torch.nan, dtype=torch.bfloat16))
        arguments = (results[-1], x, operand, bias, num_rows, inputs, outputs)
        kernels.call(f"penstock_{name}_linear", *arguments, others=[weight.codes, weight.scales])
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_of_few_bits(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = {32: 17, 128: 5, 256: 2}[TYPES[name].columns] * TYPES[name].columns
    weight = random_weight(name, 50, inputs)
    weight.codes_OI[0] = torch.arange(inputs) % 2 * (2**weight.bits - 1)  # the extremes
    layer, x = QuantizedLinear([pack(weight)], None), torch.randn(97, inputs).to(dtype)
    x[0] = 127 * (torch.arange(inputs) % 2 * 2 - 1)
    parts = layer.native_parts()

    def multiply(rows: Tensor) -> Tensor:
        out = torch.full((len(rows), 50), torch.nan, dtype=dtype)
        others = [layer.packed[0].blocks]
        kernels.call("penstock_quantized_linear", out, rows, parts, 1, None, len(rows), inputs, int(dtype == torch.bfloat16), others=others)
        return out

    result = multiply(x)
    assert torch.equal(result, kernel_result(weight, x.float()).to(dtype))
    for num_rows in (1, 2, 3, 5, 14):
        assert torch.equal(multiply(x[-num_rows:].contiguous()), result[-num_rows:]), num_rows
    rows, looked_up = torch.tensor([49, 0, 17]), torch.empty(3, inputs)
    kernels.call("penstock_quantized_rows", looked_up, layer.packed[0].blocks, rows, 3, inputs // 32, weight.type.number)
    assert torch.equal(looked_up, weight.dequantized()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "group"), [(24, 1), (64, 3), (128, 4), (256, 4)])
@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": 20, "softcap": 5.0, "sinks_H": torch.linspace(-1, 2, 8)}], ids=["plain", "all"]
)
def test_attention(
    kernels: Kernels, size: int, group: int, settings: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    options = AttentionOptions(**{"scaling": size**-0.5, **settings})
    query_lens, context_lens, tables = [1, 1, 30], [50, 3, 70], [[3, 0, 8, 5], [1], [2, 9, 4, 6, 7]]
    starts = torch.tensor([0, 1, 2, 32])
    slots = [16 * tables[0][3] + 1, 16 * tables[1][0] + 2, *(16 * tables[2][p // 16] + p % 16 for p in range(40, 70))]
    metadata = AttentionMetadata.pack(slots, starts.tolist(), context_lens, [0, 1, 2], block_tables(tables), num_decodes=2)
    query_THD = torch.randn(sum(query_lens), 2 * group, size).to(dtype)
    caches = torch.full((2, 10, 16, 2, size), torch.nan, dtype=dtype)
    for table, context_len in zip(tables, context_lens, strict=True):
        table_slots = torch.tensor([16 * table[p // 16] + p % 16 for p in range(context_len)])
        for cache in caches:
            write_kv(cache, torch.randn(context_len, 2, size).to(dtype), table_slots)
    sinks = options.sinks_H if options.sinks_H is None else options.sinks_H[: 2 * group].contiguous()
    with monkeypatch.context() as without:
        without.setattr(cpu, "native_library", lambda: None)
        torch_options = AttentionOptions(options.scaling, options.sliding_window, options.softcap, sinks)
        expected = paged_attention_cpu(query_THD, caches[0], caches[1], metadata, torch_options)
    out = torch.zeros_like(query_THD)
    shape = (2 * group, 2, size, size, 16, metadata.block_tables_PN.shape[1], int(dtype == torch.bfloat16), 0)
    last = (*shape, options.scaling, options.sliding_window or 0, options.softcap or 0.0, sinks)
    table_rows, lens = torch.tensor([0, 1, 2]), torch.tensor(context_lens)
    tables_PN = metadata.block_tables_PN.contiguous()
    kernels.call("penstock_paged_decode", out, query_THD, caches[0], caches[1], tables_PN, table_rows, lens, 2, *last)
    prompt = torch.zeros_like(query_THD[2:])
    arguments = (query_THD[2:], caches[0], caches[1], tables_PN, table_rows[2:], starts[2:] - 2, lens[2:], None, 1)
    kernels.call("penstock_paged_prefill", prompt, *arguments, *last)
    out[2:] = prompt
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.bfloat16 and size in native.HEAD_SIZES:
        decoded = torch.zeros_like(query_THD[-1:])
        decode = (query_THD[-1:].clone(), caches[0], caches[1], tables_PN, table_rows[2:].clone(), lens[2:].clone(), 1)
        kernels.call("penstock_paged_decode", decoded, *decode, *last)
        assert torch.equal(decoded, prompt[-1:])


@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("size", [64, 128])
def test_attention_over_a_cache_of_8_bits(kernels: Kernels, size: int) -> None:
    """Compared with this process's kernels, which test_int8_cache.py compares with torch."""
    torch.manual_seed(0)
    slots, tables_PN = torch.tensor([*range(16, 32), *range(3), *range(32, 37)]), block_tables([[1, 0], [2]]).contiguous()
    contexts, starts = [19, 5], torch.tensor([0, 3])
    caches = torch.full((2, 3, 16, 2, row_size(size, torch.int8)), -1, dtype=torch.int8)
    expected = caches.clone()
    for cache, filled in zip(caches, expected, strict=True):
        rows_THD = torch.randn(len(slots), 2, size, dtype=torch.bfloat16)
        rows_THD[2] *= 1e-37
        kernels.call("penstock_quantize_rows", cache, rows_THD, slots, len(slots), 2, size, 16, 2 * size)
        write_kv(filled, rows_THD, slots)
    torch.testing.assert_close(caches, expected, rtol=0, atol=1)
    queries_THD = torch.randn(4, 6, size, dtype=torch.bfloat16)
    metadata = AttentionMetadata.pack([36, 0, 1, 2], [0, 1, 4], contexts[::-1], [1, 0], tables_PN, num_decodes=1)
    by_this_process = paged_attention_cpu(queries_THD, caches[0], caches[1], metadata, AttentionOptions(size**-0.5))
    last = (6, 2, size, size, 16, tables_PN.shape[1], 1, 1, size**-0.5, 0, 0.0, None)
    out, lens, table_rows = torch.zeros_like(queries_THD[:1]), torch.tensor(contexts), torch.tensor([0, 1])
    arguments = (tables_PN, table_rows[1:].clone(), lens[1:].clone(), 1)
    kernels.call("penstock_paged_decode", out, queries_THD[:1].clone(), caches[0].clone(), caches[1].clone(), *arguments, *last)
    prompt = torch.zeros_like(queries_THD[1:])
    rows = (tables_PN, table_rows[:1].clone(), starts, lens[:1].clone(), None, 1)
    kernels.call("penstock_paged_prefill", prompt, queries_THD[1:].clone(), caches[0].clone(), caches[1].clone(), *rows, *last)
    torch.testing.assert_close(torch.cat([out, prompt]), by_this_process, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_tokens(kernels: Kernels, dtype: torch.dtype) -> None:
    logits_BV, token_ids = torch.randn(5, 700).to(dtype), torch.zeros(5, dtype=torch.long)
    kernels.call("penstock_most_probable", token_ids, logits_BV, 5, 700, 700, int(dtype == torch.bfloat16), None, 0, 0)
    assert token_ids.tolist() == logits_BV.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_chosen(kernels: Kernels, dtype: torch.dtype) -> None:
    """Greedy under penalties and a mask, of a nucleus, of the 20 most probable, and of none that is possible."""
    torch.manual_seed(0)
    logits_BV = (4 * torch.randn(6, 700)).to(dtype)
    logits_BV[5, 500] = torch.nan
    words = torch.full((6, 22), -1, dtype=torch.int32)
    words[:, :11] = 0
    banned = logits_BV[0, 352:].float().topk(2).indices + 352
    counted, counts = torch.tensor([352, 400]), torch.tensor([0.0, 2.0])
    integers = torch.tensor([[row, 0, 2 * (row < 3), 0, 2 * (row == 0), -1, 20 * (row > 2)] for row in range(6)])
    uniforms = torch.tensor([0.7, 0.2, 0.9, 0.1], dtype=torch.float64)
    penalties = torch.tensor([1.3, 0.5, 0.1], dtype=torch.float64)
    options = [torch.tensor([float(row > 0), 0.6 if row == 2 else 1.0, 0.01 * (row == 4)], dtype=torch.float64) for row in range(6)]
    reals = torch.stack([torch.cat([penalties, own, uniforms]) for own in options])
    token_ids = torch.zeros(6, dtype=torch.long)
    arguments = (logits_BV, 700, 700, int(dtype == torch.bfloat16), words, 22, 22, integers, reals, 6, 10, counted, counts, banned)
    kernels.call("penstock_choose", token_ids, *arguments)
    edited_BV = logits_BV[:5].float()
    edited_BV[:, :352] = -torch.inf
    edited_BV[0, banned] = -torch.inf
    for row in range(3):
        for token, occurrences in ((352, 0), (400, 2)):
            logit = edited_BV[row, token]
            if logit > -torch.inf:
                repeated = logit / 1.3 if logit > 0 else logit * 1.3
                edited_BV[row, token] = repeated - 0.1 * occurrences - 0.5 * (occurrences > 0)
    for row in (3, 4):
        edited_BV[row, edited_BV[row] < edited_BV[row].topk(20).values[-1]] = -torch.inf
    probs_BV = edited_BV.softmax(-1)
    probs_BV[4, probs_BV[4] < 0.01 * probs_BV[4].max()] = 0
    numbers = [iter(uniforms.tolist()) for _ in range(4)]
    drawn = draw(_padded(probs_BV[1:]), [1.0, 0.6, 1.0, 1.0], [each.__next__ for each in numbers])
    expected = [edited_BV[0].argmax(), *drawn]
    assert token_ids.tolist() == [*map(int, expected), -1]


def _padded(probs_BV: Tensor) -> Tensor:
    return torch.nn.functional.pad(probs_BV, (0, padded_width(probs_BV.shape[1]) - probs_BV.shape[1]))


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_the_most_probable_tokens_by_a_second_output_layer(kernels: Kernels, name: str) -> None:
    torch.manual_seed(0)
    weights = [random_weight(name, 150, 256), random_weight("Q4_1", 150, 256)]
    packed = [pack(weight) for weight in weights]
    errors_V = (weights[0].dequantized() - weights[1].dequantized()).norm(dim=1) * 1.01
    head, hidden_KH = GreedyHead(packed[0], packed[1], errors_V, 140), torch.randn(9, 256).bfloat16()
    token_ids, others = torch.zeros(9, dtype=torch.long), [*(each.blocks for each in packed), head._errors_V]
    drafted = torch.full((9,), -1)
    kernels.call("penstock_most_probable_tokens", token_ids, head._structure, hidden_KH, 9, drafted, others=others)
    assert token_ids.tolist() == kernel_result(weights[0], hidden_KH.float()).bfloat16()[:, :140].argmax(1).tolist()


@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llama", 16),
        ("qwen2", 8),
        ("qwen3", 4),
        ("gemma2", 8),
        ("gemma3_text", 16),
        ("olmo2", 4),
        ("smollm3", 8),
        ("qwen3_moe", 16),
        ("gpt_oss", 4),
        ("glm4", 16),
    ],
)
@torch.inference_mode()
def test_decoders(kernels: Kernels, name: str, bits: int) -> None:
    """A prompt and a decode by all layers, compared with the model's own code."""
    model = tiny_model(name, head_dim=64, hidden_size=64).bfloat16()
    fuse_linears(model)
    if bits < 16:
        quantize_experts(model, bits)
        quantize_linears(model, bits)
    loaded = loaded_model(model)
    cache = KVCache(loaded.kv_layout, 8, 16, loaded.dtype, loaded.device)
    cache.attach(loaded.model)
    decoder = NativeDecoder(loaded, cache)
    tables_PN, num_groups = block_tables([[0], [1, 2]]), len(cache.groups)
    metadata = AttentionMetadata.pack(
        [0, *range(16, 16 + PROMPT_TOKENS)] * num_groups,
        [0, 1, 1 + PROMPT_TOKENS],
        [1, PROMPT_TOKENS],
        [0, 1] * num_groups,
        tables_PN,
        num_decodes=1,
        num_groups=num_groups,
    )
    ids_1T, positions_1T = torch.arange(1 + PROMPT_TOKENS)[None] * 7 % 300, torch.tensor([[0, *range(PROMPT_TOKENS)]])
    _, outputs, _ = native._own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    x_TH, kept = decoder.embed(ids_1T), torch.arange(1 + PROMPT_TOKENS)
    before_TH, out_TH = x_TH.clone(), torch.empty(len(kept), x_TH.shape[1], dtype=torch.bfloat16)
    tables_PN, width = metadata.block_tables_PN.contiguous(), metadata.block_tables_PN.shape[1]
    parts: list[object] = [decoder._layers, decoder.form.final_norm, decoder._ropes, *cache.keys, *cache.values]
    parts += [rope.inverse_frequencies for rope in decoder.form.ropes]
    parts += [mixture for mixture in decoder._mixtures if mixture is not None]
    for layer in decoder.form.layers:
        norms = [getattr(layer, name) for name in LAYER_TENSORS]
        pointed_to = [each for linear in layer.linears for each in (*linear.weights, linear.parts, linear.bias, linear.strides)]
        parts += [part for part in (*norms, *pointed_to) if part is not None]
    arguments = (out_TH, decoder.structure, metadata.packed, tables_PN, x_TH, positions_1T, kept, width, len(kept))
    kernels.call("penstock_run_decoder", *arguments, others=parts)
    assert native._deviation(x_TH, outputs[-1], before_TH) < MAX_DEVIATION
