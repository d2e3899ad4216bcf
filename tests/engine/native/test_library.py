import hashlib
import logging
import multiprocessing
import os
import platform
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine.attention.cpu import paged_attention_cpu, write_kv
from penstock.engine.attention.interface import AttentionMetadata, AttentionOptions
from penstock.engine.errors import ConfigurationError
from penstock.engine.native import runtime as module
from penstock.engine.native.runtime import build_ahead, choose_kernels, find_compiler, kernels_in_use, native_library
from penstock.engine.system.cache import cache_directory
from tests.fakes import block_tables

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
KERNELS = module.SOURCE
FUNCTIONS = re.findall(r"library\.(penstock_\w+)\.argtypes", Path(module.__file__).read_text(encoding="utf-8"))
TINY_SOURCE = 'extern "C" {' + "".join(f" void {name}() {{}}" for name in FUNCTIONS) + " }\n"


@pytest.fixture
def own_cache() -> Path:
    return cache_directory()


@pytest.fixture(autouse=True)
def _fresh(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, a source that compiles in no time, and nothing loaded yet."""
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY_SOURCE)
    monkeypatch.setattr(module, "SOURCE", source)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").iterdir())


def fake_compiler(directory: Path, body: str) -> Path:
    path = directory / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def decode_and_prefill() -> torch.Tensor:
    """Attention of a sequence's second token and of another's two tokens, over keys and values that are all ones."""
    keys, values = torch.zeros(2, 2, 4, 1, 8)
    metadata = AttentionMetadata.pack([1, 4, 5], [0, 1, 3], [2, 2], [0, 1], block_tables([[0], [1]]), num_decodes=1)
    for cache in (keys, values):
        cache[0, 0] = 1.0
        write_kv(cache, torch.ones(3, 1, 8), metadata.slot_mapping_T)
    return paged_attention_cpu(torch.ones(3, 2, 8), keys, values, metadata, AttentionOptions(1.0))


@needs_compiler
def test_kernels_that_are_built_ahead_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f'echo built >> {tmp_path}/builds; exec {compiler} "$@"')))
    build_ahead()
    assert native_library() is not None
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join()
    assert (tmp_path / "builds").read_text() == "built\n" * 2  # to an object, and to a library


def test_a_compiler_that_fails_ahead_is_reported_when_the_library_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exit 1")))
    build_ahead()
    assert native_library() is None


@needs_compiler
def test_tiles_that_the_processor_has_but_the_kernels_may_not_use_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module.SOURCE.write_text(TINY_SOURCE.replace("void penstock_choose_tiles() {}", "long penstock_choose_tiles() { return 0; }"))
    monkeypatch.setattr(module, "processor_features", lambda: "flags : sse2 amx_bf16 amx_tile amx_int8")
    assert native_library() is not None
    assert "The processor has tiles of AMX, but the system does not permit them" in caplog.text


def test_without_a_compiler_attention_takes_the_torch_path(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO):
        assert native_library() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "portable code" in caplog.text
    assert "there is no C++ compiler" in caplog.text
    torch.testing.assert_close(decode_and_prefill(), torch.ones(3, 2, 8))


@pytest.mark.parametrize("body", ["echo this is no C++ >&2; exit 1", "exit 0", "kill -9 $$"])
def test_a_compiler_that_fails_is_warned_of_once_and_attention_goes_on(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    assert native_library() is None
    assert native_library() is None
    torch.testing.assert_close(decode_and_prefill(), torch.ones(3, 2, 8))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ("this is no C++" in caplog.text) == ("echo" in body)
    assert cached(tmp_path) == []


def test_a_compiler_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "BUILD_SECONDS", 0.05)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exec sleep 5")))
    assert native_library() is None
    assert "timed out" in caplog.text


def test_a_cache_that_cannot_be_written_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exit 0")))
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert native_library() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@needs_compiler
def test_a_built_library_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_library() is not None
    (path,) = cached(tmp_path)
    written = path.stat().st_mtime_ns, path.stat().st_ino
    native_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # would raise if it were called
    assert native_library() is not None
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written


@needs_compiler
def test_another_source_is_another_library(tmp_path: Path) -> None:
    native_library()
    module.SOURCE.write_text(TINY_SOURCE + "// changed\n")
    native_library.cache_clear()
    assert native_library() is not None
    assert len(cached(tmp_path)) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "text", "flipped", "sealed", "directory"])
def test_a_damaged_library_is_built_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = find_compiler()
    assert compiler is not None
    path = module._build(compiler)  # not loaded: a library in use must not change under the process
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    sealed = b"not a library" + hashlib.sha256(b"not a library").digest()
    if damage == "directory":
        path.unlink()
        (path / "in it").mkdir(parents=True)
    else:
        contents = {"empty": b"", "cut": whole[: len(whole) // 3], "text": b"not a library", "flipped": bytes(flipped), "sealed": sealed}
        path.write_bytes(contents[damage])
    assert native_library() is not None
    assert module._is_whole(path)
    assert cached(tmp_path) == [path]
    assert ("do not load and are built again" in caplog.text) == (damage == "sealed")


@needs_compiler
def test_kernels_that_are_not_wanted_are_neither_built_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_mode", "auto")  # which has it restored after the test
    choose_kernels("none")
    with caplog.at_level(logging.INFO):
        assert native_library() is None
    assert "portable code" in caplog.text
    assert "--native-kernels none" in caplog.text
    assert kernels_in_use() == "portable"
    assert not (tmp_path / "cache").exists()
    choose_kernels("none")
    with pytest.raises(ConfigurationError, match="--native-kernels none before"):
        choose_kernels("auto")


def _load_in_another_process(source: str, barrier: "multiprocessing.synchronize.Barrier", results: "multiprocessing.Queue[bool]") -> None:
    module.SOURCE = Path(source)
    barrier.wait()
    results.put(native_library() is not None)


@pytest.mark.thorough
@needs_compiler
def test_processes_that_build_at_once_all_get_the_library(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module.__name__])  # with torch, which takes seconds
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_load_in_another_process, args=(str(module.SOURCE), barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    loaded = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert loaded == [True, True]
    assert len(cached(tmp_path)) == 1


@needs_compiler
def test_the_compiler_named_in_the_environment_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_compiler()
    mark = tmp_path / "was-called"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f'touch {mark}; exec {real} "$@"')))
    assert native_library() is not None
    assert mark.exists()
    assert shutil.which(os.environ["CXX"]) == find_compiler()


@needs_compiler
def test_instructions_can_be_chosen_and_make_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "arguments"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f'echo "$@" >> {seen}; exec {find_compiler()} "$@"')))
    for chosen in ("", "x86-64-v3" if platform.machine() == "x86_64" else "armv8-a"):
        monkeypatch.setenv("PENSTOCK_MARCH", chosen)
        native_library.cache_clear()
        assert native_library() is not None
    assert len(cached(tmp_path)) == 2
    by_default, _, by_choice, _ = seen.read_text().splitlines()
    assert "=native" in by_default
    assert "=native" not in by_choice


@needs_compiler
def test_the_kernels_themselves_build(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCE", KERNELS)
    monkeypatch.setenv("PENSTOCK_CACHE", str(own_cache))  # where a build of the same sources, by other tests, is used again
    assert native_library() is not None


@pytest.mark.parametrize("source", sorted(KERNELS.parent.glob("*.[ch]*")), ids=lambda path: path.name)
def test_the_kernels_use_no_types_that_common_compilers_lack(source: Path) -> None:
    """g++ knows these in C++ from its versions 12 and 13 on, and clang++ on x86 from 15."""
    assert not re.search(r"\b(_Float16|__fp16|__bf16)\b", source.read_text())
