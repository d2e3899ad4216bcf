"""Blocks of the KV cache in a directory: found by a second process, by nothing else, and in no step's way."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.build import load
from penstock.engine.config import EngineConfig
from penstock.engine.constraints import masks
from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import block_files, persistence
from penstock.engine.kv_cache.block_files import BlockFiles, BlockFormat
from penstock.engine.kv_cache.blocks import Retention, RetentionRule, chain_hashes
from penstock.engine.kv_cache.persistence import PersistenceStats
from penstock.engine.kv_cache.tensors import KVCache, LayerGroup, LayerKV
from tests.engines import core_over, loaded_model, run
from tests.fakes import LETTERS, drive, generate, make_core, make_request, tokens
from tests.tiny_models import tiny_model

PROMPT = (LETTERS * 3)[:42]  # ten full blocks of four tokens, and two tokens
NUM_USABLE = 40


def ask(core: EngineCore, prompt: list[int] = PROMPT, request_id: str = "r", **options: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    deltas = generate(core, make_request(request_id, prompt, **({"max_tokens": 6, "ignore_eos": True} | options)))
    prompt_info = deltas[0].prompt
    assert prompt_info is not None
    return tokens(deltas), prompt_info.num_cached_tokens


def end(core: EngineCore) -> PersistenceStats:
    """Has written what is to be written, and stops the engine."""
    core.close()
    core.runner.shutdown()
    return stats(core)


def stats(core: EngineCore) -> PersistenceStats:
    counted = core.stats().persistence
    assert counted is not None
    return counted


def fill(directory: Path, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    """The answer of an engine that has left its blocks in the directory."""
    core = make_core(kv_cache_dir=directory)
    answer, _ = ask(core, prompt, **options)
    end(core)
    return answer


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*/*.kv"))


@pytest.mark.parametrize("windows", [(None,), (None, 9, 5)])
@pytest.mark.parametrize("options", [{}, {"is_async": True}, {"rows_for_weights": 6.0}])
def test_a_second_engine_finds_the_blocks_of_the_first(tmp_path: Path, windows: tuple[int | None, ...], options: dict[str, Any]) -> None:
    said = []
    for expected in (0, NUM_USABLE):
        core = make_core(kv_cache_dir=tmp_path, windows=windows, num_blocks=100, **options)
        answer, num_cached = ask(core)
        said.append(answer)
        assert num_cached == expected
        assert core.stats().num_prefix_cache_hits == expected
        assert (stats(core).num_hits > 0) == (expected > 0)
        end(core)
    assert said[0] == said[1]


def test_blocks_of_the_answer_are_found_as_well(tmp_path: Path) -> None:
    answer = fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    assert ask(core, [*PROMPT, *answer, 0])[1] == (len(PROMPT) + len(answer) - 1) // 4 * 4
    end(core)


@pytest.mark.parametrize("other", [{"model": "another"}, {"windows": (None, None)}, {"block_size": 8}])
def test_blocks_of_another_model_or_layout_are_not_found(tmp_path: Path, other: dict[str, Any]) -> None:
    fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path, num_blocks=100, **other)
    assert ask(core)[1] == 0
    end(core)


def test_blocks_of_another_salt_are_not_found(tmp_path: Path) -> None:
    fill(tmp_path, cache_salt="one")
    core = make_core(kv_cache_dir=tmp_path)
    assert [ask(core, cache_salt=salt)[1] for salt in ("", "two", "one")] == [0, 0, NUM_USABLE]
    end(core)


def test_blocks_that_are_evicted_first_are_not_written(tmp_path: Path) -> None:
    low, high = RetentionRule(1), RetentionRule(90)
    fill(tmp_path, retention=Retention(((0, 8, high), (8, None, low)), output=low))
    assert len(files(tmp_path)) == 2


def file_of_block(directory: Path, number: int) -> Path:
    hashes: list[bytes] = []
    chain_hashes(PROMPT, 4, hashes)
    (path,) = directory.glob(f"*/*/{hashes[number].hex()}.kv")
    return path


def with_changed(place: Callable[[bytearray], int]) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[place(data)] ^= 1
        return data

    return change


DAMAGES: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda data: bytearray(),
    "cut short": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "version": with_changed(lambda data: 8),
    "fingerprint": with_changed(lambda data: 40),
    "contents": with_changed(lambda data: len(data) - 40),
    "checksum": with_changed(lambda data: len(data) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_deleted_and_its_block_computed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    path = file_of_block(tmp_path, 5)
    path.write_bytes(DAMAGES[damage](bytearray(path.read_bytes())))
    assert ask(core) == (expected, 20)
    assert stats(core).files.num_rejected == 1
    assert str(path) in caplog.text
    end(core)
    assert path.exists(), "it has been computed and written anew"
    again = make_core(kv_cache_dir=tmp_path)
    assert ask(again) == (expected, NUM_USABLE)
    end(again)


def test_a_file_of_another_block_under_this_name_is_not_used(tmp_path: Path) -> None:
    expected = fill(tmp_path)
    shutil.copy(file_of_block(tmp_path, 2), file_of_block(tmp_path, 5))
    core = make_core(kv_cache_dir=tmp_path)
    assert ask(core) == (expected, 20)
    end(core)


def test_a_file_that_other_users_may_write_is_not_used(tmp_path: Path) -> None:
    expected = fill(tmp_path)
    file_of_block(tmp_path, 5).chmod(0o666)
    core = make_core(kv_cache_dir=tmp_path)
    assert ask(core) == (expected, 20)
    end(core)


def test_an_unfinished_file_of_a_process_that_was_killed_is_ignored_and_deleted_later(tmp_path: Path) -> None:
    expected = fill(tmp_path)
    path = file_of_block(tmp_path, 0)
    scratch = path.with_name(f"{block_files.SCRATCH_PREFIX}1")
    path.rename(scratch)
    os.utime(scratch, (0, 0))
    core = make_core(kv_cache_dir=tmp_path)
    assert ask(core) == (expected, 0)
    end(core)
    assert not scratch.exists()


def test_files_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fill(tmp_path / "deep" / "kv")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "deep").rglob("*")}
    assert modes == {0o700, 0o600}
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path / "deep" / "kv")} == {0o600}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_that_other_users_may_write_is_refused(tmp_path: Path, depth: int) -> None:
    fill(tmp_path)
    exposed = [tmp_path, files(tmp_path)[0].parent.parent][depth]
    exposed.chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"--kv-cache-dir {exposed} can be written by other users"):
        make_core(kv_cache_dir=tmp_path)


def test_a_directory_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    core = make_core(kv_cache_dir=directory)
    ask(core)
    core.close()
    written = files(directory)
    core = make_core(kv_cache_dir=directory)
    shutil.rmtree(directory)
    assert ask(core)[1] == 0
    end(core)
    assert files(directory) == written
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_serving_goes_on_where_the_disk_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    expected = fill(tmp_path / "elsewhere")
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(persistence, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(persistence, "WRITE_BYTES", 1)  # block by block
    core = make_core(kv_cache_dir=tmp_path / "full", num_blocks=64)
    assert ask(core) == (expected, 0)
    assert len(ask(core, PROMPT[1:], "other")[0]) == 6
    counted = end(core)
    assert counted.files.num_write_errors > 1
    assert counted.num_dropped > 0
    assert counted.files.num_written == 0
    assert caplog.text.count(os.strerror(number)) == 1


def test_the_least_recently_used_blocks_are_deleted(tmp_path: Path) -> None:
    fill(tmp_path)
    num_bytes = sum(path.stat().st_size for path in files(tmp_path))
    for age, path in enumerate([file_of_block(tmp_path, number) for number in range(10)]):
        os.utime(path, (age, age))
    core = make_core(kv_cache_dir=tmp_path, kv_cache_dir_size=num_bytes)
    ask(core, PROMPT[:10], "hit")  # the first two blocks are the most recently used ones now
    ask(core, LETTERS[::-1], "more")
    assert end(core).files.num_evicted > 2
    assert sum(path.stat().st_size for path in files(tmp_path)) <= num_bytes
    assert file_of_block(tmp_path, 0).exists()
    assert file_of_block(tmp_path, 1).exists()
    with pytest.raises(ValueError, match="not enough values"):
        file_of_block(tmp_path, 2)


def test_a_file_can_be_read_by_what_its_format_says(tmp_path: Path) -> None:
    """docs/kv-cache.md has the format."""
    fill(tmp_path, cache_salt="s")
    key = hashlib.blake2b(b"s", digest_size=16).digest()
    for place in range(3):
        token_ids = PROMPT[4 * place : 4 * place + 4]
        key = hashlib.blake2b(key + struct.pack("<4q", *token_ids), digest_size=16).digest()
    (path,) = tmp_path.glob(f"*/{key.hex()[:2]}/{key.hex()}.kv")
    data = path.read_bytes()
    magic, version, header_bytes = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"PNSTKKV\0", 1)
    header = json.loads(data[16 : 16 + header_bytes])
    assert header == {
        "fingerprint": path.parent.parent.name,
        "key": key.hex(),
        "group": 0,
        "block_size": 4,
        "dtype": "int64",
        "layers": [[0, 1, 1, 1]],
        "payload_bytes": 64,
    }
    assert struct.unpack_from("<8q", data, 16 + header_bytes) == (*token_ids, 8, 9, 10, 11)  # this model's values are positions
    assert data[16 + header_bytes + 64 :] == zlib.crc32(data[:-4]).to_bytes(4, "little")


def test_a_prefix_that_is_found_in_memory_counts_as_used(tmp_path: Path) -> None:
    core = make_core(kv_cache_dir=tmp_path)
    ask(core)
    wait_until(lambda: len(files(tmp_path)) == 11)
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    assert ask(core)[1] == NUM_USABLE
    wait_until(lambda: all(file_of_block(tmp_path, number).stat().st_mtime for number in range(10)))
    end(core)


def test_two_servers_write_and_read_one_directory_at_once(tmp_path: Path) -> None:
    layout = [LayerKV(2, 16, 16)]
    block_format = BlockFormat.of(layout, [LayerGroup((0,))], block_size=16, dtype=torch.int64, model="m")
    num_bytes = block_format.payload_bytes(0)
    contents = {bytes([number]) * 16: os.urandom(num_bytes) for number in range(16)}

    def work(_: int) -> int:
        own = BlockFiles(tmp_path, block_format, 10 * num_bytes)
        num_found = 0
        for _ in range(6):
            for key, payload in contents.items():
                own.write(key, memoryview(payload))
                found = own.read(key)
                assert found in (None, payload)
                num_found += found is not None
        assert own.stats.num_rejected == 0
        return num_found

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(work, range(2))) > 0


def test_a_block_that_is_overwritten_before_it_is_copied_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read_blocks = threading.Event(), KVCache.read_blocks

    def read_late(cache: KVCache, group: int, blocks: Sequence[int]) -> torch.Tensor:
        assert gate.wait(60)
        return read_blocks(cache, group, blocks)

    monkeypatch.setattr(KVCache, "read_blocks", read_late)
    core = make_core(kv_cache_dir=tmp_path, num_blocks=16, max_model_len=64)
    expected, _ = ask(core)
    other, _ = ask(core, LETTERS[::-1] * 2, "other", max_tokens=20)
    gate.set()
    assert end(core).num_dropped > 0
    core = make_core(kv_cache_dir=tmp_path)
    assert ask(core)[0] == expected
    assert ask(core, LETTERS[::-1] * 2, "other", max_tokens=20) == (other, 28)
    end(core)


def test_other_requests_run_while_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    gate, read = threading.Event(), BlockFiles.read

    def read_slowly(own: BlockFiles, key: bytes) -> memoryview | None:
        assert gate.wait(60)
        return read(own, key)

    monkeypatch.setattr(BlockFiles, "read", read_slowly)
    core.add(make_request("loading", PROMPT, max_tokens=6, ignore_eos=True))
    core.add(make_request("other", LETTERS[::-1], max_tokens=20, ignore_eos=True))
    said: dict[str, list[SequenceDelta]] = {}
    while len(tokens(said.get("other", []))) < 20:
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        core.check_integrity()
    assert "loading" not in said
    assert core.stats().num_waiting == 1
    gate.set()
    assert tokens(drive(core)["loading"]) == expected
    assert core.stats().num_prefix_cache_hits == NUM_USABLE
    end(core)


def test_a_prompt_is_computed_where_the_disk_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    expected = fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    monkeypatch.setattr(Path, "open", fail)
    assert ask(core) == (expected, 0)
    assert len(ask(core, LETTERS, "other")[0]) == 6
    assert end(core).files.num_read_errors == 1
    assert caplog.text.count(os.strerror(errno.EIO)) == 1


def test_any_number_of_prompts_may_wait_for_one_load(tmp_path: Path) -> None:
    fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    assert core.scheduler.persistence is not None
    hashes: list[bytes] = []
    chain_hashes(PROMPT, 4, hashes)
    loads = [core.scheduler.persistence.loader.begin(hashes, 10) for _ in range(sys.getrecursionlimit())]
    while not all(load is None or load.is_over for load in loads):
        core.masks.wait()
        core.schedule()
    assert stats(core).files.num_read == stats(core).num_hits == 10
    end(core)


def test_a_prompt_is_computed_where_the_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path)
    gate = threading.Event()
    monkeypatch.setattr(BlockFiles, "has", lambda own, key: gate.wait(60) and False)
    monkeypatch.setattr(persistence, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(masks, "PATIENCE", 0.01)
    assert ask(core) == (expected, 0)
    assert ask(core, PROMPT[1:])[1] == 0, "the next one does not wait at all"
    gate.set()
    end(core)


def test_a_request_that_is_aborted_while_it_loads_holds_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(persistence, "LOAD_BYTES", 128)
    core = make_core(kv_cache_dir=tmp_path)
    pool = core.scheduler.pool
    core.add(make_request("loading", PROMPT, max_tokens=6, ignore_eos=True))
    while pool.num_free == pool.num_blocks:
        assert core.schedule() is None
        core.masks.wait()
    core.abort("loading")
    assert len(ask(core, LETTERS, "other")[0]) == 6
    while pool.num_free < pool.num_blocks:
        core.schedule()
    core.check_integrity()
    end(core)


def test_a_running_sequence_takes_the_blocks_of_a_load_before_it_is_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    core = make_core(kv_cache_dir=tmp_path, num_blocks=16, max_model_len=64)
    core.add(make_request("running", LETTERS[::-1], max_tokens=44, ignore_eos=True))
    core.step()
    monkeypatch.setattr(persistence, "LOAD_BYTES", 256)  # four blocks
    gate, read, reads = threading.Event(), BlockFiles.read, itertools.count()

    def read_slowly(own: BlockFiles, key: bytes) -> memoryview | None:
        if next(reads) == 4:
            assert gate.wait(60)
        return read(own, key)

    monkeypatch.setattr(BlockFiles, "read", read_slowly)
    core.add(make_request("loading", PROMPT, max_tokens=6, ignore_eos=True))
    said: dict[str, list[SequenceDelta]] = {}
    has_held = False
    while len(tokens(said.get("running", []))) < 43:
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        has_held = has_held or len(core.scheduler.persistence.loader.blocks_held) == 4  # type: ignore[union-attr]
        core.check_integrity()
    assert has_held
    assert core.stats().num_preemptions == 0
    gate.set()
    drive(core)
    end(core)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_says_the_same_on_blocks_from_disk(tmp_path: Path, name: str) -> None:
    prompt = [(7 * place) % 250 + 3 for place in range(100)]

    def answer(seed: int = 0, weights_digest: str | None = None, **options: Any) -> tuple[list[int], int]:
        model = tiny_model(name, seed=seed)
        digest = weights_digest or block_files.weights_digest(model)
        core = core_over(replace(loaded_model(model), weights_digest=digest), kv_cache_dir=str(tmp_path), **options)
        (run_,) = run(core, [prompt], max_tokens=8)
        end(core)
        return run_.token_ids, run_.num_cached_tokens

    cold, num_cached = answer()
    assert num_cached == 0
    assert answer() == (cold, 96)
    assert answer(hybrid_kv_cache=False)[1] == (0 if name == "gemma2" else 96), "the blocks of other groups of layers are others"
    assert answer(seed=1)[1] == 0


def test_a_digest_depends_on_every_weight_and_its_place() -> None:
    model = torch.nn.Linear(300, 200)
    digests = [block_files.weights_digest(model)]
    with torch.no_grad():
        model.weight[17, 3] += 1e-3
        digests.append(block_files.weights_digest(model))
        model.bias.copy_(model.bias.flip(0))
    digests += [block_files.weights_digest(model), block_files.weights_digest(model.to(torch.bfloat16))]
    assert len(set(digests)) == 4
    assert block_files.weights_digest(model) == digests[-1]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"kv_cache_dir_size": 2**30}, "--kv-cache-dir-size: there is no --kv-cache-dir"),
        ({"kv_cache_dir": "kv", "enable_prefix_caching": False}, "--no-prefix-caching switches that off"),
        ({"kv_cache_dir": __file__}, "--kv-cache-dir .* is not a directory"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load(tmp_path, EngineConfig(**config))
    assert not Path("kv").exists()


Arrival = tuple[int, int, str]
ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.sampled_from(["", "salt"])), min_size=1, max_size=4)


@given(
    batches=st.lists(ARRIVALS, min_size=2, max_size=3),
    num_blocks=st.sampled_from([15, 20, 60]),
    windows=st.sampled_from([(None,), (None, 9)]),
)
@settings(max_examples=7, deadline=None)
def test_answers_are_the_same_with_and_without_a_directory_also_under_preemption(
    batches: list[list[Arrival]], num_blocks: int, windows: tuple[int | None, ...]
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistence, "LOAD_BYTES", 200)
        for batch in batches:
            said = []
            for kv_cache_dir in (None, Path(directory)):
                core = make_core(windows=windows, num_blocks=num_blocks * len(windows), max_model_len=55, kv_cache_dir=kv_cache_dir)
                for number, (first, length, salt) in enumerate(batch):
                    prompt = (LETTERS * 4)[first : first + length]
                    core.add(make_request(str(number), prompt, max_tokens=14, ignore_eos=True, cache_salt=salt))
                said.append({request_id: tokens(deltas) for request_id, deltas in drive(core).items()})
                core.close()
                core.runner.shutdown()
            assert said[0] == said[1]
