"""Prepared models: they compute the same, fit what they were made from, and are made again where they cannot be used."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.flags import parse_arguments
from penstock.engine.build import load
from penstock.engine.config import EngineConfig, QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.native import NativeDecoder
from penstock.engine.model.prepared import DESCRIPTION, WEIGHTS, PreparedFiles
from penstock.engine.native.runtime import native_library
from penstock.engine.system.cache import cache_directory
from tests.engine.model.test_native import OF_THIS_FORM, PROMPTS, needs_kernels
from tests.engines import core_over, run
from tests.tiny_models import tiny_model

CONFIG = EngineConfig(kv_cache_memory=2**20)
RECOMMENDED = {"temperature": 0.25}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, but for the kernels, which would be compiled anew."""
    kernels, directory = cache_directory() / "native", tmp_path / "cache"
    native_library()
    directory.mkdir()
    (directory / "native").symlink_to(kernels)
    monkeypatch.setenv("PENSTOCK_CACHE", str(directory))
    return directory


def save(directory: Path, name: str = "llama", **settings: Any) -> Path:
    tiny_model(name, head_dim=64, hidden_size=64, **settings).save_pretrained(directory)
    return directory


def prepare(directory: Path, config: EngineConfig = CONFIG) -> tuple[PreparedFiles, torch.Tensor]:
    """The files, and the logits of the model that they were made of."""
    loaded = load(directory, config)
    core = core_over(loaded, enable_prefix_caching=False)
    files = PreparedFiles.of(directory, config)
    assert files is not None
    files.write(loaded, RECOMMENDED)
    logits = run(core, PROMPTS[:2], max_tokens=4, temperature=0.0)[1].logits_TV
    core.runner.shutdown()
    return files, logits


@needs_kernels
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", OF_THIS_FORM)
def test_a_prepared_model_computes_the_same_to_the_bit(tmp_path: Path, name: str, quantization: QuantizationMode) -> None:
    config = replace(CONFIG, quantization=quantization)
    files, expected = prepare(save(tmp_path / "model", name, tie_word_embeddings=name in ("llama", "qwen2")), config)
    description = files.read()
    assert description is not None
    assert description.generation_config == RECOMMENDED
    loaded = files.load(description)
    assert loaded is not None
    core = core_over(loaded, enable_prefix_caching=False)
    assert isinstance(loaded.model.forward, NativeDecoder)
    logits = run(core, PROMPTS[:2], max_tokens=4, temperature=0.0)[1].logits_TV
    core.runner.shutdown()
    assert torch.equal(logits, expected)


@needs_kernels
def test_what_a_tied_embedding_shares_with_the_head_is_shared_again(tmp_path: Path) -> None:
    files, _ = prepare(save(tmp_path / "model", tie_word_embeddings=True), replace(CONFIG, quantization="int8"))
    description = files.read()
    assert description is not None
    loaded = files.load(description)
    assert loaded is not None
    model: Any = loaded.model
    (of_embedding,), (of_head,) = model.get_input_embeddings().buffers(), model.get_output_embeddings().buffers()
    assert of_embedding.data_ptr() == of_head.data_ptr()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@needs_kernels
@pytest.mark.parametrize("name", [DESCRIPTION, WEIGHTS, "manifest.json"])
@pytest.mark.parametrize("damage", [cut, overwrite, Path.unlink])
def test_damaged_files_are_logged_and_removed(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    files, _ = prepare(save(tmp_path / "model"))
    damage(files.directory / name)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert files.read() is None
    assert "cannot be used and is made again" in caplog.text
    assert not files.directory.exists()


@needs_kernels
def test_weights_that_lack_a_tensor_are_not_used(tmp_path: Path) -> None:
    files, _ = prepare(save(tmp_path / "model"))
    description = files.read()
    assert description is not None
    description.final_norm = "t999"
    assert files.load(description) is None
    assert not files.directory.exists()


@needs_kernels
def test_files_that_others_can_write_are_refused(tmp_path: Path) -> None:
    files, _ = prepare(save(tmp_path / "model"))
    (files.directory / WEIGHTS).chmod(0o666)
    with pytest.raises(ConfigurationError, match="can be written by other users"):
        files.read()


@needs_kernels
def test_another_version_of_what_it_was_made_from_has_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "model")
    files, _ = prepare(directory)
    (directory / "config.json").write_text(json.dumps(json.loads((directory / "config.json").read_text()) | {"rms_norm_eps": 0.5}))
    changed = PreparedFiles.of(directory, CONFIG)
    assert changed is not None
    assert changed.read() is None
    monkeypatch.setattr("penstock.engine.model.prepared.__version__", "999")
    upgraded = PreparedFiles.of(directory, CONFIG)
    assert upgraded is not None
    assert len({files.directory, changed.directory, upgraded.directory}) == 3


@needs_kernels
def test_what_was_made_of_an_earlier_version_is_removed_and_nothing_else(tmp_path: Path) -> None:
    directory = save(tmp_path / "model")
    old, _ = prepare(directory)
    other, _ = prepare(save(tmp_path / "other"))
    rounded, _ = prepare(directory, replace(CONFIG, quantization="int8"))
    (directory / "generation_config.json").write_text("{}")
    new, _ = prepare(directory)
    assert not old.directory.exists()
    assert all(files.directory.exists() for files in (other, rounded, new))


@needs_kernels
def test_a_model_that_runs_otherwise_is_not_prepared(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "cohere2")
    files, _ = prepare(directory)
    assert not files.directory.exists()


@needs_kernels
def test_a_cache_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "prepared").write_text("a file where the directory would be")
    with caplog.at_level(logging.INFO, "penstock"):
        files, _ = prepare(save(tmp_path / "model"))
    assert not files.directory.exists()
    assert "The model is not prepared for the next start" in caplog.text


@needs_kernels
@pytest.mark.parametrize(
    ("options", "is_prepared"),
    [
        ({"max_num_seqs": 3, "kv_cache_memory": 2**21, "num_threads": 1, "speculation": "none", "seed": 1}, True),
        ({"quantization": "int8", "dtype": "bfloat16", "max_model_len": 64, "device": "cpu"}, True),
        ({"compile": "on"}, False),
        ({"kv_cache_dir": "/somewhere"}, False),
        ({"trust_remote_code": True}, False),
        ({"enable_lora": True}, False),
        ({"kv_cache_dtype": "fp8"}, False),
    ],
)
def test_options_that_take_the_models_own_layers_leave_it_out(tmp_path: Path, options: dict[str, Any], is_prepared: bool) -> None:
    assert (PreparedFiles.of(save(tmp_path / "model"), EngineConfig(**options)) is not None) == is_prepared


START = """
import sys
from penstock.cli.flags import parse_arguments
from penstock.assembly import assemble
from penstock.plugins.manager import Plugins

assembled = assemble(parse_arguments(sys.argv[1:]), Plugins.start(["none"]), is_prepared=True)
assembled.context.warm_up()
print(*({"transformers", "torch._dynamo"} & sys.modules.keys()), "|", assembled.summary)
"""


@pytest.mark.thorough
@needs_kernels
def test_a_start_of_a_prepared_model_imports_no_transformers(default_model_dir: Path) -> None:
    words = ["--model", str(default_model_dir), "--max-model-len", "64", "--kv-cache-memory", "8MiB", "--threads", "1"]
    files, _ = prepare(default_model_dir, parse_arguments(words).engine)
    assert files.directory.exists()
    shown = subprocess.run([sys.executable, "-c", START, *words], check=True, capture_output=True, text=True).stdout
    imported, _, summary = shown.partition("|")
    assert imported.strip() == ""
    assert "120 layers in " in summary
