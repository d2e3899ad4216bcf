import pytest
import torch

from penstock.engine.errors import ConfigurationError
from penstock.engine.model import loader as memory
from penstock.engine.model.loader import CPU_CACHE, CPU_SHARE, CUDA_SHARE, free_memory, num_cache_blocks

GIB = 2**30
CPU = torch.device("cpu")


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
