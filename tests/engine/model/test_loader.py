import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils
from transformers.utils import logging as transformers_logging

from penstock.engine.attention.interface import IMPLEMENTATION
from penstock.engine.config import Dtype, QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.model import loader as memory
from penstock.engine.model.loader import (
    CPU_CACHE,
    CPU_SHARE,
    CUDA_SHARE,
    free_memory,
    load_model,
    num_cache_blocks,
    resolve_device,
    resolve_dtype,
)
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path)
    return tmp_path


def test_loaded_model_computes_what_was_saved(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")
    tokens = torch.arange(3, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(tokens).logits, tiny_model("qwen3")(tokens).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_loaded_model_tells_what_the_engine_needs(default_model_dir: Path) -> None:
    loaded = load_model(default_model_dir, "bfloat16", "cpu", quantization="none", attn_implementation="sdpa")
    assert loaded.kv_layout == [LayerKV(num_kv_heads=3, key_size=64, value_size=64)] * 30
    assert loaded.eos_token_ids == {2}
    assert loaded.max_model_len == 8192
    assert loaded.vocab_size == 49152
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {loaded.dtype} == {torch.bfloat16}
    assert loaded.model.get_parameter("lm_head.weight").data_ptr() == loaded.model.get_parameter("model.embed_tokens.weight").data_ptr()


@pytest.mark.parametrize("quantization", ["auto", pytest.param("none", marks=pytest.mark.thorough)])
def test_the_default_model_speaks(default_model_dir: Path, quantization: QuantizationMode) -> None:
    from transformers import AutoTokenizer

    loaded = load_model(default_model_dir, "float32", "cpu", quantization=quantization, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    question = [{"role": "user", "content": "Tell me the capital of France."}]
    prompt: Any = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = loaded.model
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False, repetition_penalty=1.0)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1].item() in loaded.eos_token_ids


def test_progress_bars_are_for_terminals(tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        load_model(tiny_dir, "float32", "cpu")
        assert capsys.readouterr().err == ""
        assert transformers_logging.is_progress_bar_enabled()
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        load_model(tiny_dir, "float32", "cpu")
        assert "Loading weights" in capsys.readouterr().err
    finally:
        if not was_enabled:
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def test_the_engines_own_attention_is_the_default(tiny_dir: Path) -> None:
    assert load_model(tiny_dir, "float32", "cpu").model.config._attn_implementation == IMPLEMENTATION


def test_end_tokens_of_both_configs_count(tiny_dir: Path) -> None:
    (tiny_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(tiny_dir, "float32", "cpu", attn_implementation="eager").eos_token_ids == {2, 7, 9}


def test_a_shorter_context_can_be_asked_for(tiny_dir: Path) -> None:
    assert load_model(tiny_dir, "float32", "cpu", max_len=64, attn_implementation="eager").max_model_len == 64
    with pytest.raises(ConfigurationError, match="--max-model-len 513"):
        load_model(tiny_dir, "float32", "cpu", max_len=513, attn_implementation="eager")


def test_a_missing_weight_file_is_named(tiny_dir: Path) -> None:
    (tiny_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"lacks model\.safetensors"):
        load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")


def test_a_missing_shard_is_named(tiny_dir: Path) -> None:
    (tiny_dir / "model.safetensors").rename(tiny_dir / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tiny_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": null}}']
)
def test_an_index_that_is_none_is_refused_by_name(tiny_dir: Path, content: str) -> None:
    (tiny_dir / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors\.index\.json is not an index of weight files"):
        load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")


def test_missing_weights_are_an_error_not_random_numbers(tiny_dir: Path) -> None:
    weights = load_file(tiny_dir / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lacks 1 of the model's weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")


def test_broken_weights_are_an_error_that_names_the_directory(tiny_dir: Path) -> None:
    (tiny_dir / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigurationError, match=tiny_dir.name):
        load_model(tiny_dir, "float32", "cpu", attn_implementation="eager")


def test_what_cannot_be_served_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(ConfigurationError, match="BertModel cannot be served"):
        load_model(tmp_path, attn_implementation="eager")


@pytest.mark.parametrize(
    ("capabilities", "has_kernels", "served"),
    [
        ({"avx512_bf16": True}, False, torch.bfloat16),
        ({"avx2": True}, True, torch.bfloat16),
        ({"avx2": True, "bf16": False}, False, torch.float32),
    ],
)
def test_dtype_on_a_cpu_is_one_that_is_quick_there(
    capabilities: dict[str, bool], has_kernels: bool, served: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(memory, "native_library", lambda: object() if has_kernels else None)
    assert resolve_dtype("auto", CPU, torch.float16) == served
    assert resolve_dtype("float16", CPU, torch.bfloat16) == torch.float16


@pytest.mark.parametrize(
    ("stored", "capability", "served"),
    [
        (torch.bfloat16, (9, 0), torch.bfloat16),
        (torch.float16, (9, 0), torch.float16),
        (torch.float32, (9, 0), torch.bfloat16),
        (None, (9, 0), torch.bfloat16),
        (torch.bfloat16, (7, 5), torch.float16),
        (torch.float32, (7, 5), torch.float16),
    ],
)
def test_a_gpu_serves_16_bits_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype | None, capability: tuple[int, int], served: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 0)
    assert resolve_dtype("auto", gpu, stored) == served
    assert resolve_dtype("float32", gpu, stored) == torch.float32


@pytest.mark.parametrize("device", ["nonsense", "mps", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--device {device}"):
        resolve_device(device)


GIB = 2**30


@pytest.fixture
def free_gib(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memory, "free_memory", lambda device: 16 * GIB)
    return 16


def blocks(wanted: int | None, device: torch.device = CPU, blocks_per_sequence: int = 10, block_bytes: int = 2**20) -> int:
    return num_cache_blocks(wanted, block_bytes=block_bytes, blocks_per_sequence=blocks_per_sequence, device=device)


def test_some_memory_is_free_on_this_machine() -> None:
    assert 2**20 < free_memory(CPU) < 2**50


def test_what_is_asked_for_is_reserved(free_gib: int) -> None:
    assert blocks(GIB + 5) == 1024


def test_a_cpu_gets_a_modest_cache(free_gib: int) -> None:
    assert blocks(None) == CPU_CACHE // 2**20


def test_a_cpu_gets_more_where_one_long_sequence_needs_it(free_gib: int) -> None:
    assert blocks(None, blocks_per_sequence=3000) == 3000


def test_a_cpu_cache_never_takes_more_than_its_share(free_gib: int) -> None:
    with pytest.raises(ConfigurationError, match="lower --max-model-len"):
        blocks(None, blocks_per_sequence=int(free_gib * CPU_SHARE * 1024) + 1)


def test_a_gpu_gets_nearly_all(free_gib: int) -> None:
    assert blocks(None, torch.device("cuda")) == int(free_gib * GIB * CUDA_SHARE) // 2**20


def test_more_than_is_free_is_refused(free_gib: int) -> None:
    with pytest.raises(ConfigurationError, match=r"asks for 17\.0 GiB, and 16\.0 GiB are free"):
        blocks(17 * GIB)


@pytest.mark.parametrize("wanted", [0, -1, 9 * 2**20])
def test_less_than_one_whole_sequence_is_refused(free_gib: int, wanted: int) -> None:
    with pytest.raises(ConfigurationError, match="cannot hold one sequence of the full length"):
        blocks(wanted)


@pytest.mark.parametrize(("asked", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_an_index_which_torch_needs_to_make_it_current(monkeypatch: pytest.MonkeyPatch, asked: str, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = resolve_device(asked)
    made_current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    torch.cuda.set_device(device)
    assert (device, made_current) == (torch.device("cuda", index), [index])


def test_one_model_is_made_at_a_time_for_what_changes_torchs_default_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model's modules would have the type of another one that another thread loads, and so would the process afterwards."""
    under_way: list[torch.dtype] = []
    most = []
    local_torch_dtype = modeling_utils.local_torch_dtype

    @contextmanager
    def slow(dtype: torch.dtype, *args: Any) -> Iterator[None]:
        under_way.append(dtype)
        most.append(len(under_way))
        with local_torch_dtype(dtype, *args):
            time.sleep(0.05)
            yield
        under_way.remove(dtype)

    monkeypatch.setattr(modeling_utils, "local_torch_dtype", slow)
    for family in ("qwen3", "llama"):
        tiny_model(family).save_pretrained(tmp_path / family)
    with ThreadPoolExecutor(4) as threads:
        asked: list[tuple[str, Dtype]] = [(family, dtype) for family in ("qwen3", "llama") for dtype in ("float32", "bfloat16")]
        loaded = threads.map(lambda one: load_model(tmp_path / one[0], one[1], "cpu"), asked)
        types = [{parameter.dtype for parameter in one.model.parameters()} for one in loaded]
    assert types == [{torch.float32}, {torch.bfloat16}] * 2
    assert set(most) == {1}
    assert torch.get_default_dtype() == torch.float32
