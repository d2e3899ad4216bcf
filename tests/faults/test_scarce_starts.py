"""What a start says that has less than it wants: too little memory, no native kernels, no chat template."""

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.assembly import Assembled, assemble
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.loader import free_memory
from penstock.engine.native.runtime import native_library
from penstock.engine.system.process import memory_shortage_refused
from penstock.plugins.manager import Plugins
from tests.llm.model_directory import write_model

ROOT = Path(__file__).parent.parent.parent
LIMIT = TOO_MUCH = 2 * 2**30


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
        ImportError("library.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
        ConfigurationError("/model cannot be loaded: DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_a_shortage_of_memory_is_one_sentence_whatever_reports_it(error: Exception) -> None:
    with pytest.raises(ConfigurationError, match="not enough memory to load the model"), memory_shortage_refused():
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), memory_shortage_refused():
        raise RuntimeError("something else")


@pytest.mark.thorough
def test_a_server_without_room_for_its_model_ends_in_one_line(tmp_path: Path) -> None:
    import torch

    if free_memory(torch.device("cpu")) < TOO_MUCH:
        pytest.skip("the machine itself has too little memory, which is refused earlier")
    write_model(tmp_path)
    command = [sys.executable, "server.py", "--port", "0", "--model", str(tmp_path), "--compile", "off", "--kv-cache-memory", str(TOO_MUCH)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    assert ended.returncode == 2, ended.stderr
    assert "not enough memory to load the model" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.fixture
def undecided_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not chosen its kernels yet."""
    monkeypatch.setattr("penstock.engine.native.runtime._mode", "auto")  # which has it restored after the test
    native_library.cache_clear()
    yield
    native_library.cache_clear()


@pytest.mark.usefixtures("undecided_kernels")
def test_the_portable_code_is_chosen_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path)
    settings: dict[str, Any] = {"native_kernels": "none", "compile": "off", "kv_cache_memory": "4MiB"}
    with caplog.at_level(logging.INFO), LLM(str(tmp_path), **settings) as llm:
        [answer] = llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 3
    assert "portable code, which is slower than the native kernels and rounds differently: --native-kernels none" in caplog.text
    assert "kernels: portable" in caplog.text


def test_a_model_without_templates_and_defaults_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    settings: dict[str, Any] = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: settings[name] for name in settings if name != "chat_template"}))
    words = ["--model", str(tmp_path), "--device", "cpu", "--compile", "off", "--kv-cache-memory", "4MiB"]
    with caplog.at_level(logging.INFO):
        assembled = assemble(parse_arguments(words), Plugins.start(("none",), ()))
    assert isinstance(assembled, Assembled)
    assembled.core.runner.shutdown()
    assembled.context.close()
    assert "no chat template: chat requests are refused; --chat-template" in caplog.text
    assert "no generation_config.json" in caplog.text
