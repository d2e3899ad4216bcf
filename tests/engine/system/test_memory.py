"""Memory of tensors that is returned to the system and filled again in place."""

import mmap
from pathlib import Path

import pytest
import torch

from penstock.engine.kv_cache.tensors import KVCache, LayerKV
from penstock.engine.system import memory
from penstock.engine.system.memory import SpilledRegions, regions_of, resident_bytes, resident_set_size

SIZE = 64 * mmap.PAGESIZE


def filled(num_bytes: int = SIZE) -> torch.Tensor:
    return torch.arange(num_bytes // 8).view(torch.uint8)


def test_released_pages_are_not_resident_and_keep_their_addresses(tmp_path: Path) -> None:
    tensor = filled()
    before, address = tensor.clone(), tensor.data_ptr()
    regions = regions_of([tensor])
    assert SIZE - 2 * mmap.PAGESIZE <= sum(region.num_bytes for region in regions) <= SIZE
    assert resident_bytes(regions) == sum(region.num_bytes for region in regions)
    spilled = SpilledRegions(regions, tmp_path)
    memory.release(regions)
    assert resident_bytes(regions) == 0
    assert tensor.data_ptr() == address
    assert not torch.equal(tensor, before)
    spilled.restore()
    assert torch.equal(tensor, before)
    spilled.close()


def test_a_file_of_weights_has_no_name(tmp_path: Path) -> None:
    spilled = SpilledRegions(regions_of([tensor := filled()]), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert spilled.num_bytes <= tensor.nbytes
    spilled.close()


def test_storage_that_tensors_share_counts_once() -> None:
    whole = filled()
    assert regions_of([whole, whole[: SIZE // 2], whole.view(torch.int64)]) == regions_of([whole])


def test_pages_that_another_tensor_has_a_part_of_are_left_alone() -> None:
    whole = filled()
    odd = torch.from_numpy(whole.numpy()[100 : 100 + 2 * mmap.PAGESIZE])
    assert sum(region.num_bytes for region in regions_of([odd])) <= mmap.PAGESIZE * 2
    assert all(region.start >= odd.data_ptr() and region.stop <= odd.data_ptr() + odd.nbytes for region in regions_of([odd]))


def test_small_tensors_and_mapped_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    mapped = torch.from_file(str(path), shared=False, size=SIZE, dtype=torch.uint8)
    assert regions_of([torch.zeros(10), torch.empty(0), mapped]) == []


def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    tensor = filled()
    spilled = SpilledRegions(regions_of([tensor]), tmp_path)
    spilled._file.truncate(mmap.PAGESIZE)
    with pytest.raises(OSError, match="too short"):
        spilled.restore()
    spilled.close()


def test_the_size_of_the_process_is_the_kernels_count() -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    assert resident_set_size() == pytest.approx(kilobytes * 1024, rel=0.2)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no transparent huge pages")
def test_keys_and_values_lie_in_huge_pages() -> None:
    cache = KVCache([LayerKV(4, 64, 64)], 2048, 16, torch.float32, torch.device("cpu"))
    for tensor in cache.tensors:
        assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)


def flags_at(address: int) -> list[str]:
    """Those of the mapping that holds the address, as the kernel lists them."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first == "VmFlags:" and holds:
            return rest.split()
        if not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            holds = start <= address < stop
    raise AssertionError(f"nothing is mapped at {address:x}")
