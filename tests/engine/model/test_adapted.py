"""Adapters in a model's layers: which layers there are, and that native code adds what torch adds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.registry import Adapter
from penstock.engine.build import core_over_blocks
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.model.adapted import AdaptedLayers, NativeAdapters, stack_bytes
from penstock.engine.model.native import NativeDecoder
from tests.engine.model.test_native import bfloat16_model, needs_kernels
from tests.engines import core_over, loaded_model
from tests.fakes import byte_tokenizer, drive, make_request, tokens
from tests.gpu.fake_cuda import DEVICE, fake_cuda
from tests.tiny_adapters import write_adapter
from tests.tiny_models import tiny_model

PROMPTS = [[7, 8, 9], list(range(40, 90)), [5], list(range(100, 117))]
CONFIGS: tuple[dict[str, Any], ...] = (
    {"r": 8},
    {"r": 5, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1, 2]},
    {"r": 16, "target_modules": ["o_proj", "gate_proj"], "rank_pattern": {".*0.*o_proj": 1}},
)


OF_ATTENTION: tuple[dict[str, Any], ...] = (  # of a model with experts, which adapters do not change
    {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 5, "target_modules": ["v_proj", "o_proj"], "layers_to_transform": [1, 2]},
    {"r": 16, "target_modules": ["v_proj", "o_proj"]},
)


def logprobs(core: EngineCore, adapters: list[Adapter | None], forced: list[list[int]] | None = None) -> list[Any]:
    """Those of the prompts and of eight tokens after each, of all prompts with all adapters at once."""
    number = 0
    for adapter in adapters:
        for prompt in PROMPTS:
            settings: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
            core.add(make_request(str(number), prompt if forced is None else prompt + forced[number], adapter=adapter, **settings))
            number += 1
    said = drive(core)
    answers = [said[str(each)] for each in range(number)]
    prompts = [delta.prompt.logprobs for deltas in answers for delta in deltas if delta.prompt is not None]
    return [
        ([0.0 if entry is None else entry.logprob for entry in prompt or ()], tokens(deltas))
        for prompt, deltas in zip(prompts, answers, strict=True)
    ]


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "qwen3_moe"])
def test_native_code_adds_what_the_models_own_modules_add(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"head_dim": 64, "hidden_size": 64, "intermediate_size": 80}
    loaded = loaded_model(tiny_model(name, **shape).bfloat16())
    configs = OF_ATTENTION if name == "qwen3_moe" else CONFIGS
    directories = [
        write_adapter(tiny_model(name, **shape), tmp_path / str(seed), seed=seed, **config) for seed, config in enumerate(configs)
    ]
    with monkeypatch.context() as without:
        without.setattr("penstock.engine.build.install_native_decoder", lambda *_: False)
        core = core_over(loaded, enable_lora=True, enable_prefix_caching=False)
        assert core.runner.adapted is not None
        adapters = [None, *(core.runner.adapted.reader.read(str(path), path) for path in directories)]
        answers = [token_ids for _, token_ids in logprobs(core, adapters)]
        expected = torch.tensor([value for values, _ in logprobs(core, adapters, answers) for value in values])
        plain = torch.tensor([value for values, _ in logprobs(core, [None] * len(adapters), answers) for value in values])
        core.runner.shutdown()
    core = core_over(loaded, enable_lora=True, enable_prefix_caching=False, max_num_batched_tokens=70)
    assert isinstance(loaded.model.forward, NativeDecoder)
    got = torch.tensor([value for values, _ in logprobs(core, adapters, answers) for value in values])
    core.runner.shutdown()
    changed = (plain - expected).abs().mean()
    assert (got - expected).abs().mean() < 0.03 * changed
    assert changed > 0.5


@needs_kernels
def test_steps_without_adapters_run_no_code_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bfloat16_model("llama")
    directory = write_adapter(tiny_model("llama", head_dim=64, hidden_size=64), tmp_path)
    core = core_over(loaded, enable_lora=True)
    assert core.runner.adapted is not None
    adapter = core.runner.adapted.reader.read("a", directory)
    core.add(make_request(prompt=PROMPTS[1], adapter=adapter, max_tokens=3, ignore_eos=True))
    drive(core)  # it keeps its slot

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("no row has an adapter")

    for name in ("load", "installed", "add"):
        monkeypatch.setattr(AdaptedLayers, name, never)
    monkeypatch.setattr(NativeAdapters, "runs", never)
    core.add(make_request(prompt=PROMPTS[1], max_tokens=3, ignore_eos=True))
    drive(core)
    decoder = loaded.model.forward
    assert isinstance(decoder, NativeDecoder)
    assert decoder.structure.adapters is None  # so that native code branches around them as well
    core.runner.shutdown()


GPU = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")


@GPU
@pytest.mark.parametrize("compile_mode", ["auto", pytest.param("off", marks=pytest.mark.thorough)])
def test_a_gpu_says_what_the_cpu_says_in_graphs_and_without(tmp_path: Path, compile_mode: str) -> None:
    directories = [write_adapter(tiny_model("llama"), tmp_path / str(seed), seed=seed, **config) for seed, config in enumerate(CONFIGS)]

    def answers(core: EngineCore, order: list[int]) -> dict[int, list[list[int]]]:
        assert core.runner.adapted is not None
        adapters = [None, *(core.runner.adapted.reader.read(str(path), path) for path in directories)]
        for number in order:
            for place, prompt in enumerate(PROMPTS):
                core.add(make_request(f"{number} {place}", prompt, adapter=adapters[number], max_tokens=6, ignore_eos=True))
        said = drive(core)
        core.check_integrity()
        return {number: [tokens(said[f"{number} {place}"]) for place in range(len(PROMPTS))] for number in order}

    core = core_over(loaded_model(tiny_model("llama")), enable_lora=True, speculation="none")
    expected = answers(core, [0, 1, 2, 3])
    core.runner.shutdown()
    assert len({str(answer) for answer in expected.values()}) == 4
    with fake_cuda() as cuda:
        loaded = loaded_model(torch.nn.Module.to(tiny_model("llama"), DEVICE))
        settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_threads": 1, "speculation": "none"}
        config = EngineConfig(enable_lora=True, max_loras=2, compile=compile_mode, **settings)  # type: ignore[arg-type]
        core = core_over_blocks(loaded, byte_tokenizer(), config, 64)
        core.runner.capture_graphs()
        cuda.clear()
        got = answers(core, [0, 1, 2, 3]) | answers(core, [3, 1])  # slots have had others in between
        assert got == expected
        plain, adapted = core.runner.graphs, core.runner.passes.adapted_graphs
        if compile_mode == "off":
            assert plain is adapted is None
            assert cuda.launches["shrink_kernel"] == cuda.launches["expand_kernel"] > 0
        else:
            assert plain is not None
            assert adapted is not None
            assert all(has_graph for graphs in (plain, adapted) for (_, has_graph) in graphs.num_steps)
            assert {kind for kind, _ in adapted.num_steps} == {"decode", "mixed"}
        core.close()
        core.runner.shutdown()


@GPU
def test_the_stacks_of_slots_take_what_is_left_free_for_them() -> None:
    with fake_cuda():
        loaded = loaded_model(torch.nn.Module.to(tiny_model("llama"), DEVICE))
        adapted = AdaptedLayers(loaded, num_slots=3, max_rank=20, max_rows=8)
        stacks = adapted._stacks
        assert stacks is not None
        assert sum(tensor.nbytes for pair in stacks._stacks.values() for tensor in pair) == stack_bytes(loaded, 3, 20)
