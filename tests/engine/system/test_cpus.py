"""The CPUs of a process, on machines and in containers that are directories here."""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import PinThreads
from penstock.engine.system import cpus as module
from penstock.engine.system.cpus import (
    Cpu,
    choose_placement,
    cpu_quota,
    default_num_threads,
    is_pinning,
    limit_libraries,
    memory_on,
    online_nodes,
    place_memory,
    usable_cpus,
)

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY_V1 = "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
HYBRID_V2 = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def container(root: Path, groups: str, mounts: Sequence[str], limits: dict[str, str]) -> Path:
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts)}
    write(root, files | {f"sys/fs/cgroup/{name}": content for name, content in limits.items()})
    return root


def test_the_least_quota_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    limits = {"cpu.max": "800000 100000", "pods/cpu.max": "250000 100000", "pods/one/cpu.max": "max 100000", "other/cpu.max": "1 100000"}
    assert cpu_quota(container(tmp_path, "0::/pods/one", [V2.format(root="/")], limits)) == 2.5


def test_in_a_cgroup_namespace_the_mount_is_the_processs_own_group(tmp_path: Path) -> None:
    assert cpu_quota(container(tmp_path, "0::/", [V2.format(root="/")], {"cpu.max": "150000 50000"})) == 3.0


def test_only_the_containers_group_may_be_mounted_under_the_hosts_path(tmp_path: Path) -> None:
    limits = {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    groups = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc"
    assert cpu_quota(container(tmp_path, groups, [MEMORY_V1, V1.format(root="/docker/abc")], limits)) == 4.0


def test_a_group_outside_of_the_mount_counts_as_the_mounts_own(tmp_path: Path) -> None:
    assert cpu_quota(container(tmp_path, "0::/../other", [V2.format(root="/")], {"cpu.max": "200000 100000"})) == 2.0


def test_with_both_hierarchies_the_least_counts(tmp_path: Path) -> None:
    limits = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/a/cpu.cfs_quota_us": "600000",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "unified/a/cpu.max": "500000 100000",
    }
    assert cpu_quota(container(tmp_path, "3:cpu,cpuacct:/a\n0::/a", [V1.format(root="/"), HYBRID_V2], limits)) == 5.0


@pytest.mark.parametrize("limits", [{}, {"cpu.max": "max 100000"}, {"cpu.max": "nonsense"}, {"cpu.max": ""}, {"cpu.max": "100000 0"}])
def test_without_a_limit_there_is_no_quota(tmp_path: Path, limits: dict[str, str]) -> None:
    assert cpu_quota(container(tmp_path, "0::/", [V2.format(root="/")], limits)) is None


def test_other_lines_of_the_mount_table_are_passed_over_whatever_they_hold(tmp_path: Path) -> None:
    others = ["31 23 0:27 / /mnt/a rw - tmpfs  rw", "32 23 0:28 / /mnt/\udcff rw - tmpfs tmpfs rw", "no line of this table"]
    root = container(tmp_path, "0::/\nno group", [], {})
    (root / "proc/self/mountinfo").write_text("\n".join([*others, V2.format(root="/")]), errors="surrogateescape")
    write(root, {"sys/fs/cgroup/cpu.max": "300000 100000"})
    assert cpu_quota(root) == 3.0


def test_a_mount_point_may_hold_white_space(tmp_path: Path) -> None:
    root = container(tmp_path, "0::/", [V2.format(root="/").replace("/sys/fs/cgroup", r"/c\040g")], {})
    write(root, {"c g/cpu.max": "200000 100000"})
    assert cpu_quota(root) == 2.0


def test_a_machine_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def machine(root: Path, num_nodes: int, cores_per_node: int, *, threads_per_core: int = 1) -> list[int]:
    """The numbers of its CPUs; as usual, the second hardware threads of all cores come after the first ones."""
    num_cores = num_nodes * cores_per_node
    write(root, {"sys/devices/system/node/online": f"0-{num_nodes - 1}" if num_nodes > 1 else "0"})
    for node in range(num_nodes):
        own = [core + thread * num_cores for thread in range(threads_per_core) for core in cores_of(node, cores_per_node)]
        write(root, {f"sys/devices/system/node/node{node}/cpulist": ",".join(map(str, own))})
    for cpu in range(num_cores * threads_per_core):
        siblings = [cpu % num_cores + thread * num_cores for thread in range(threads_per_core)]
        write(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, siblings))})
    return list(range(num_cores * threads_per_core))


def cores_of(node: int, cores_per_node: int) -> range:
    return range(node * cores_per_node, (node + 1) * cores_per_node)


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the CPUs that the process may use."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda numbers: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers), raising=False)


def test_hardware_threads_of_a_core_are_known_as_such(tmp_path: Path, allow: Any) -> None:
    machine(tmp_path, 2, 2, threads_per_core=2)
    allow([1, 2, 5])
    assert usable_cpus(tmp_path) == [Cpu(1, core=1, node=0), Cpu(2, core=2, node=1), Cpu(5, core=1, node=0)]


def test_a_system_that_describes_nothing_has_one_node_and_a_core_for_each_cpu(tmp_path: Path, allow: Any) -> None:
    allow([3, 4])
    assert usable_cpus(tmp_path) == [Cpu(3, core=3, node=0), Cpu(4, core=4, node=0)]
    assert online_nodes(tmp_path) == [0]


@pytest.mark.parametrize(
    ("quota", "num_threads"), [(None, 8), ("2.5", 2), ("0.5", 1), ("8", 8), ("12", 8)], ids=["none", "2.5", "half", "all", "more"]
)
def test_there_is_a_thread_for_each_core_that_the_quota_has_time_for(
    tmp_path: Path, allow: Any, quota: str | None, num_threads: int
) -> None:
    allow(machine(tmp_path, 1, 8, threads_per_core=2))
    limits = {} if quota is None else {"cpu.max": f"{int(float(quota) * 100_000)} 100000"}
    assert default_num_threads(container(tmp_path, "0::/", [V2.format(root="/")], limits)) == num_threads


def test_the_affinity_bounds_the_threads(tmp_path: Path, allow: Any) -> None:
    machine(tmp_path, 1, 8, threads_per_core=2)
    allow([0, 1, 2, 8, 9])
    assert default_num_threads(tmp_path) == 3


@pytest.mark.parametrize(("asked", "num_threads"), [("3", 3), ("5,2", 5), ("", 4), ("zero", 4), ("0", 4), ("²", 4)])
def test_the_users_own_number_of_openmp_threads_comes_first(
    tmp_path: Path, allow: Any, monkeypatch: pytest.MonkeyPatch, asked: str, num_threads: int
) -> None:
    allow(machine(tmp_path, 1, 4))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_num_threads(tmp_path) == num_threads


def test_libraries_get_the_models_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_num_threads", lambda: 6)
    environment = {"RAYON_NUM_THREADS": "1"}
    limit_libraries(None, environment)
    assert environment == {"OMP_NUM_THREADS": "6", "RAYON_NUM_THREADS": "1"}
    asked = {"OMP_NUM_THREADS": "abc"}  # OpenMP would count the CPUs itself
    limit_libraries(2, asked)
    assert asked == {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"}


def two_nodes(tmp_path: Path, allow: Any) -> list[Cpu]:
    """16 cores on each of two nodes, with two hardware threads each: 0-15 and 32-47, 16-31 and 48-63."""
    allow(machine(tmp_path, 2, 16, threads_per_core=2))
    return usable_cpus(tmp_path)


def test_threads_stay_on_the_node_where_the_process_runs(tmp_path: Path, allow: Any) -> None:
    where = choose_placement(12, "auto", two_nodes(tmp_path, allow), quota=12.0, current=20)
    assert where.nodes == (1,)
    assert where.cpus == (*range(16, 32), *range(48, 64))
    assert not where.is_pinned


def test_threads_that_no_node_has_cores_for_use_both(tmp_path: Path, allow: Any) -> None:
    where = choose_placement(20, "off", two_nodes(tmp_path, allow), quota=None, current=0)
    assert where.nodes == (0, 1)
    assert where.cpus == tuple(range(64))


def test_pinned_threads_get_a_core_each_in_turns_from_the_nodes(tmp_path: Path, allow: Any) -> None:
    where = choose_placement(32, "auto", two_nodes(tmp_path, allow), quota=None, current=18)
    assert where.is_pinned
    assert where.cpus[:4] == (18, 0, 19, 1)
    assert sorted(where.cpus) == list(range(32))


def test_more_threads_than_cores_are_pinned_to_the_second_hardware_threads(tmp_path: Path, allow: Any) -> None:
    where = choose_placement(40, "on", two_nodes(tmp_path, allow), quota=None, current=0)
    assert set(where.cpus[:32]) == set(range(32))
    assert len(set(where.cpus)) == 40


@pytest.mark.parametrize(
    ("num_threads", "pin", "quota", "expected"),
    [
        (8, "auto", None, True),
        (8, "auto", 16.0, True),
        (8, "auto", 8.0, False),  # of 16 CPUs: others run on them too
        (7, "auto", None, False),
        (2, "on", 2.0, True),
        (1, "on", None, False),
        (17, "on", None, False),
        (16, "off", None, False),
    ],
)
def test_threads_are_pinned_where_the_cpus_are_the_processs_own(
    num_threads: int, pin: PinThreads, quota: float | None, expected: bool
) -> None:
    assert is_pinning(num_threads, pin, 16, quota) == expected


class Kernel:
    """Records system calls. The process has the memory policy `policy`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.policy = policy
        self.result = 0
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno=False: self)

    def syscall(self, *arguments: Any) -> int:
        if arguments[0].value == GET_MEMPOLICY:
            arguments[1]._obj.value = self.policy
            return 0
        self.calls.append(tuple(list(each) if isinstance(each, ctypes.Array) else getattr(each, "value", each) for each in arguments))
        return self.result


MBIND, SET_MEMPOLICY, GET_MEMPOLICY, DEFAULT = 237, 238, 239, (238, 0, None, 0)


def test_memory_of_several_nodes_is_interleaved_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, 4, 1)
    kernel = Kernel(monkeypatch)
    with memory_on((0, 2), tmp_path):
        assert kernel.calls == [(SET_MEMPOLICY, module.INTERLEAVE, [0b101], 65)]
    assert kernel.calls[1:] == [DEFAULT]


def test_memory_of_one_node_of_several_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, 70, 1)
    kernel = Kernel(monkeypatch)
    with pytest.raises(ZeroDivisionError), memory_on((65,), tmp_path):
        raise ZeroDivisionError
    assert kernel.calls == [(SET_MEMPOLICY, module.PREFERRED, [0, 0b10], 129), DEFAULT]


def test_whole_pages_of_a_cache_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, 2, 1)
    kernel = Kernel(monkeypatch)
    page = os.sysconf("SC_PAGE_SIZE")
    place_memory(10 * page + 64, 3 * page, (0, 1), tmp_path)
    assert kernel.calls == [(MBIND, 11 * page, 2 * page, module.INTERLEAVE, [0b11], 65, module.MOVE)]
    place_memory(10 * page + 64, page, (0, 1), tmp_path)
    assert len(kernel.calls) == 1


def test_a_machine_with_one_node_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, 1, 4)
    kernel = Kernel(monkeypatch)
    with memory_on((0,), tmp_path):
        place_memory(0, 2**20, (0,), tmp_path)
    assert kernel.calls == []


def test_a_policy_that_the_process_was_started_with_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, 2, 1)
    kernel = Kernel(monkeypatch, policy=module.INTERLEAVE)
    with memory_on((0, 1), tmp_path):
        place_memory(0, 2**20, (0, 1), tmp_path)
    assert kernel.calls == []


def test_a_container_that_forbids_it_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(tmp_path, 2, 1)
    kernel = Kernel(monkeypatch)
    kernel.result = -1
    caplog.set_level("INFO", logger=module.__name__)
    with memory_on((0, 1), tmp_path):
        pass
    assert "set_mempolicy" in caplog.text
