"""Quantized checkpoints, recurrent layers and latents on a GPU, shown on a fake one: they say what they say on the CPU, in CUDA graphs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.build import build_core, core_over_blocks, load
from penstock.engine.core import EngineCore
from penstock.engine.model.loader import LoadedModel
from penstock.engine.recurrent.layout import RecurrentLayer, StateShape
from penstock.engine.recurrent.states import RecurrentStates, StateRows
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.weights.quantization import quantized_layers
from tests import encoders
from tests.engine.attention.test_latent import FAMILIES as LATENT_FAMILIES
from tests.engine.weights.checkpoints import FORMATS, write_checkpoint
from tests.engine.weights.test_checkpoints import small_model
from tests.engine.weights.test_experts import write_mxfp4_experts
from tests.engine.weights.test_quantization import STORED, save_stored
from tests.engines import loaded_model, run
from tests.fakes import byte_tokenizer, tokens
from tests.gpu.fake_cuda import DEVICE, fake_cuda
from tests.gpu.test_on_a_gpu import COMPLETION, NUM_BLOCKS, NUM_TOKENS, RESULTS, engine_config, make, serve, serve_http
from tests.tiny_adapters import write_adapter
from tests.tiny_models import RECURRENT_ARCHITECTURES, tiny_model

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")
SHORT = [9, 8, 7]


def said(core: EngineCore) -> list[list[int]]:
    return [tokens(deltas) for deltas in serve(core, [make("long"), make("short", SHORT)])]


def core_of(loaded: LoadedModel, **settings: Any) -> EngineCore:
    core = core_over_blocks(loaded, byte_tokenizer(), engine_config(speculation="none", max_num_seqs=2, **settings), NUM_BLOCKS)
    core.runner.capture_graphs()
    return core


def load_checkpoint(directory: Path, device: str, quantization: str = "auto") -> LoadedModel:
    return load(directory, engine_config(dtype="float32", device=device, quantization=quantization, max_model_len=128))


def assert_same_from_codes(directory: Path, expected_types: dict[str, int]) -> None:
    """What the dequantized model says on the CPU, the quantized one says on the GPU, where it has its codes alone."""
    plain = load_checkpoint(directory, "cpu", "none")
    said_on_cpu = said(core_of(plain, compile="off"))
    with fake_cuda() as cuda:
        loaded = load_checkpoint(directory, "cuda")
        assert quantized_layers(loaded.model) == expected_types
        assert {tensor.device for tensor in (*loaded.model.parameters(), *loaded.model.buffers())} == {DEVICE}
        core = core_of(loaded)
        cuda.clear()
        assert said(core) == said_on_cpu
        assert cuda.waits == {RESULTS: core.stats().num_steps}, cuda.lines
        assert cuda.num_replays == core.stats().num_steps, "every step runs as a graph"
        assert cuda.launches["quantized_linear_kernel"] + cuda.launches["float8_linear_kernel"] == 0, "graphs launch no kernel by itself"


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """All names; the tests of those that are not chosen are thorough."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name not in chosen)) for name in names]


@pytest.mark.parametrize("name", quick(FORMATS, "gptq-order", "fp8-deepseek"))
def test_a_checkpoint_is_computed_from_its_codes(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS[name])
    (kind,) = FORMATS[name].types
    num_fused = 2  # queries, keys and values; gates
    assert_same_from_codes(tmp_path, {kind: 2 * (7 - 3) if kind == "FP8" else 2 * (num_fused + 2)})


def test_a_gguf_files_matrices_and_embedding_are_computed_from_their_codes(tmp_path: Path) -> None:
    save_stored(tmp_path, tiny_model("qwen2", tie_word_embeddings=True), STORED)
    assert_same_from_codes(tmp_path, {"Q4_1": 1, "Q8_0": 2})


def test_experts_in_mxfp4_are_computed_from_their_codes(tmp_path: Path) -> None:
    write_mxfp4_experts(tmp_path)
    assert_same_from_codes(tmp_path, {"MXFP4": 3 * 2 * 4})


def test_adapters_change_what_quantized_layers_compute(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", small_model(), FORMATS["awq"])
    write_adapter(torch.nn.Module.to(small_model(), torch.float32), tmp_path / "adapter")

    def said_with_adapter(device: str, **settings: Any) -> list[list[int]]:
        loaded = load_checkpoint(tmp_path / "model", device, "auto" if device == "cuda" else "none")
        core = core_of(loaded, enable_lora=True, **settings)
        assert core.runner.adapted is not None
        adapter = core.runner.adapted.reader.read("adapter", tmp_path / "adapter")
        return [tokens(deltas) for deltas in serve(core, [make("adapted", adapter=adapter), make("plain")])]

    expected = said_with_adapter("cpu", compile="off")
    with fake_cuda():
        assert said_with_adapter("cuda") == expected
    assert expected[0] != expected[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_attention_over_latents_says_the_same_in_graphs(name: str) -> None:
    said_on_cpu = said(core_of(loaded_model(tiny_model(name)), compile="off"))
    with fake_cuda() as cuda:
        core = core_of(loaded_model(torch.nn.Module.to(tiny_model(name), DEVICE)))
        cuda.clear()
        assert said(core) == said_on_cpu
        num_steps = core.stats().num_steps
        assert cuda.waits == {RESULTS: num_steps}, cuda.lines
        assert cuda.num_replays == num_steps


def test_latents_may_be_kept_in_8_bits() -> None:
    with fake_cuda():
        core = core_of(loaded_model(torch.nn.Module.to(tiny_model("deepseek_v3"), DEVICE)), kv_cache_dtype="fp8")
        assert {tuple(cache.shape[2:]) for cache in core.runner.cache.keys} == {(1, 40)}
        assert core.runner.cache.num_bytes == NUM_BLOCKS * 16 * 3 * 40
        assert [len(each) for each in said(core)] == [NUM_TOKENS] * 2


@pytest.fixture
def said_on_cpu(name: str) -> list[list[int]]:
    return said(recurrent_core(loaded_model(tiny_model(name))))


def recurrent_core(loaded: LoadedModel) -> EngineCore:
    core = build_core(loaded, byte_tokenizer(), engine_config(max_num_seqs=2, kv_cache_memory=2**22))
    core.runner.capture_graphs()
    return core


@pytest.mark.parametrize("name", quick(RECURRENT_ARCHITECTURES, "lfm2", "mamba2"))
def test_recurrent_layers_say_the_same_and_their_decodes_run_as_graphs(said_on_cpu: list[list[int]], name: str) -> None:
    with fake_cuda() as cuda:
        core = recurrent_core(loaded_model(torch.nn.Module.to(tiny_model(name), DEVICE)))
        before = cuda.num_replays
        cuda.clear()
        assert said(core) == said_on_cpu
        num_steps = core.stats().num_steps
        assert cuda.waits == {RESULTS: num_steps}, cuda.lines
        assert cuda.num_replays - before == num_steps - 2, "the prompts take two steps"


PROMPTS = [list(range(3, 60)), [*range(3, 45), 7, 9], [5] * 20]
KERNELS = {"qwen3_next": "gated_delta_kernel", "granitemoehybrid": "state_space_kernel", "lfm2": None}


def said_in_every_way(core: EngineCore) -> tuple[list[list[int]], list[int], int]:
    """Tokens of prompts that are preempted, go on from snapshots, fork and run as beams; how many were cached; preemptions."""
    runs = [run(core, PROMPTS, stagger=stagger, max_tokens=6, temperature=0.0, n=n) for stagger, n in ((1, 1), (0, 1), (0, 2))]
    num_cached = [each.num_cached_tokens for each in runs[1]]
    beams = serve(core, [make("beams", PROMPTS[1], beam=BeamSearchParams(beam_width=3, max_tokens=5))])
    said = [each.token_ids for each in (*runs[0], *runs[1], *runs[2])]
    return [*said, *(tokens(beams[0], number) for number in range(3))], num_cached, core.stats().num_preemptions


@pytest.mark.parametrize("name", quick(KERNELS, "qwen3_next"))
def test_states_are_kept_through_snapshots_preemptions_forks_and_beams(name: str) -> None:
    def core_over_few_blocks(device: torch.device, **settings: Any) -> EngineCore:
        loaded = loaded_model(torch.nn.Module.to(tiny_model(name), device))
        config = engine_config(max_num_seqs=6, max_num_batched_tokens=30, speculation="none", **settings)
        core = core_over_blocks(loaded, byte_tokenizer(), config, 9, num_slots=20)
        core.scheduler.lengths = None  # admits whatever fits
        core.runner.capture_graphs()
        return core

    expected = said_in_every_way(core_over_few_blocks(torch.device("cpu"), compile="off"))
    with fake_cuda() as cuda:
        core = core_over_few_blocks(DEVICE)
        kernel = KERNELS[name]
        assert kernel is None or cuda.launches[kernel] > 0
        assert said_in_every_way(core) == expected
    assert expected[1][:2] == [48, 32]
    assert expected[2] > 0


def test_a_step_of_decodes_takes_its_snapshots_behind_it_and_no_other_does() -> None:
    layer = RecurrentLayer("mixer", (StateShape("convolution", 0, (2, 3)), StateShape("recurrence", 0, (4,))))
    with fake_cuda() as cuda:
        states = RecurrentStates([layer], 6, torch.bfloat16, DEVICE, max_num_rows=4)
        for slot in range(6):
            states.copy(None, slot)
            for memory in states.memory:
                memory[slot] += slot
        cuda.clear()
        states.begin([StateRows(0, 1, 2, ((1, 5),)), StateRows(1, 1, 3), StateRows(2, 1, 1, ((1, 0),))])
        assert states.is_decode
        (group,) = states.groups(4)
        assert isinstance(group.slots, torch.Tensor)
        slots = group.slots.clone()
        states.finish()
        states.begin([StateRows(0, 1, 1, ((1, 2),))])  # of a step that fails
        states.begin([StateRows(0, 2, 4, ((1, 3),))])
        assert not states.is_decode
        states.finish()
        assert not cuda.waits
        assert slots.tolist() == [2, 3, 1, 6]  # of which the last is padding's
        for memory in states.memory:
            assert memory[:, 0].tolist() == [1, 1, 2, 3, 4, 2, 0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda directory: write_checkpoint(directory, small_model(), FORMATS["awq"]), id="quantized"),
        pytest.param(lambda directory: tiny_model("qwen3_next").save_pretrained(directory), id="hybrid"),
        pytest.param(lambda directory: tiny_model("deepseek_v3").save_pretrained(directory), id="latents"),
    ],
)
def test_a_server_with_default_flags_streams_its_first_answer(write: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path)
    encoders.byte_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    lines: list[str] = []
    with fake_cuda():
        assert serve_http(tmp_path, lambda ask: lines.append(ask(*COMPLETION))) == 0
    assert lines[0].startswith("data: {")
