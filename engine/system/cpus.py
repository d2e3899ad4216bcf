"""The CPUs of this process: how many threads of a model they have time for, where these run, and whose node's memory they use."""

import contextlib
import ctypes
import functools
import itertools
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.engine.config import PinThreads

logger = logging.getLogger(__name__)

ROOT = Path("/")
# Fewer threads are not pinned by default: they need most of the CPUs that the rest of the process runs on too.
MIN_PINNED_THREADS = 8
# How long OpenMP's idle threads keep a core busy, about 0.1 ms: by its own choice they would be in the way of the kernels' threads and of
# the loop for most of a step. It is read when torch is loaded, as $GOMP_SPINCOUNT.
SPIN_COUNT = "10000"


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU. Those of one physical core, its hardware threads, agree on `core`: the lowest number among them."""

    number: int
    core: int
    node: int


def usable_cpus(root: Path = ROOT) -> list[Cpu]:
    """The CPUs in this process's affinity, in ascending order."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    nodes = {number: node for node in online_nodes(root) for number in _numbers(root / f"sys/devices/system/node/node{node}/cpulist")}
    return [
        Cpu(
            number,
            core=min(_numbers(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"), default=number),
            node=nodes.get(number, 0),
        )
        for number in sorted(allowed)
    ]


def online_nodes(root: Path = ROOT) -> list[int]:
    """The machine's NUMA nodes; a machine that does not say has one."""
    return _numbers(root / "sys/devices/system/node/online") or [0]


def _numbers(path: Path) -> list[int]:
    """Those of a list such as `0-3,8`, as the kernel writes it; none where the file is missing."""
    ranges = [part.partition("-") for part in _text(path).strip().split(",") if part]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")  # mount points may be any bytes
    except OSError:
        return ""


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' time the cgroups of this process may use: the least quota of its own group and those above it. None: no limit."""
    return min(itertools.chain.from_iterable(map(_quotas, _group_directories(root))), default=None)


def _group_directories(root: Path) -> Iterator[Path]:
    """The process's group and those above it as far as they are mounted, in every hierarchy that limits CPU time: cgroup v1, v2 or both."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    groups = {controller: PurePosixPath(path) for _, controllers, path in lines for controller in controllers.split(",")}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields = mount.split(" ")[3:5], filesystem.split(" ")[:3]  # not by white space: a source may be empty
        if list(map(len, fields)) != [2, 3]:
            continue
        (mount_root, mount_point), (kind, _, options) = ([_unescaped(field) for field in several] for several in fields)
        if kind == "cgroup2":
            group = groups.get("")
        elif kind == "cgroup" and "cpu" in options.split(","):
            group = groups.get("cpu")
        else:
            continue
        top = root / mount_point.removeprefix("/")
        # In a container the group's path may be the host's while only the container's own group is mounted.
        is_below = group is not None and group.is_relative_to(mount_root) and ".." not in group.parts
        directory = top / group.relative_to(mount_root) if group is not None and is_below else top
        yield directory
        while directory != top:
            directory = directory.parent
            yield directory


def _unescaped(field: str) -> str:
    """A field of the mount table: white space and backslashes are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _quotas(group: Path) -> Iterator[float]:
    """The group's own quota, in CPUs, if it has one."""
    limits = _text(group / "cpu.max").split() or [_text(group / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period")]
    if len(limits) == 2 and all(limit.isdecimal() and int(limit) for limit in limits):  # without a limit, v2 says "max" and v1 -1
        yield int(limits[0]) / int(limits[1])


def default_num_threads(root: Path = ROOT) -> int:
    """`$OMP_NUM_THREADS`, else one thread per physical core of the affinity, but no more than the cgroups' quota has time for.

    A second hardware thread of a core adds nothing to kernels that wait for memory or fill the core's vector units. A quota is rounded
    down: a process that uses more than its quota is stopped altogether until the next period, whichever of its threads used it.
    """
    asked = _asked_by(os.environ)
    if asked is not None:
        return asked
    num_cores = len({cpu.core for cpu in usable_cpus(root)})
    quota = cpu_quota(root)
    return num_cores if quota is None else min(num_cores, max(1, math.floor(quota)))


def _asked_by(environment: Mapping[str, str], variable: str = "OMP_NUM_THREADS") -> int | None:
    """The number of threads that a variable asks for; None where it asks for none, or for no number that there can be."""
    asked = environment.get(variable, "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else None


def limit_libraries(num_threads: int | None, environment: MutableMapping[str, str]) -> None:
    """Makes libraries that count the machine's CPUs, OpenMP's and Rust's, use as many threads as the model. What the user set stays.

    They read it when they are loaded.
    """
    for variable in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        if _asked_by(environment, variable) is None:
            environment[variable] = str(num_threads or default_num_threads())


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's threads run: on `cpus`, of these memory `nodes`. Pinned ones run on one of the CPUs each, and on different ones."""

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    is_pinned: bool = False


def choose_placement(num_threads: int, pin: PinThreads, cpus: Sequence[Cpu], quota: float | None, current: int) -> Placement:
    """Places threads on as few nodes as have a physical core for each, beginning with that of the CPU `current`.

    Pinned threads get a physical core each as long as there are some, in turns from all these nodes. Beginning with the current CPU keeps
    several servers on one machine from all choosing the first ones.
    """
    here = next((cpu for cpu in cpus if cpu.number == current), cpus[0])
    cores: dict[int, dict[int, list[int]]] = {}  # CPUs by node and core, of the current node first
    for cpu in sorted(cpus, key=lambda cpu: (cpu.node != here.node, cpu.node, cpu.core < here.core, cpu.number)):
        cores.setdefault(cpu.node, {}).setdefault(cpu.core, []).append(cpu.number)
    roomy = next((node for node in cores if len(cores[node]) >= num_threads), None)
    nodes = [roomy] if roomy is not None else _first_with_room(cores, num_threads)
    if not is_pinning(num_threads, pin, len(cpus), quota):
        return Placement(tuple(cpu.number for cpu in cpus if cpu.node in nodes), tuple(sorted(nodes)))
    in_turns = [core for several in itertools.zip_longest(*(cores[node].values() for node in nodes)) for core in several if core]
    by_sibling = [number for numbers in itertools.zip_longest(*in_turns) for number in numbers if number is not None]
    return Placement(tuple(by_sibling[:num_threads]), tuple(sorted(nodes)), is_pinned=True)


def _first_with_room(cores: dict[int, dict[int, list[int]]], num_threads: int) -> list[int]:
    """The first nodes that have so many cores together; all where all have fewer."""
    room = 0
    for count, node in enumerate(cores, 1):
        room += len(cores[node])
        if room >= num_threads:
            return list(cores)[:count]
    return list(cores)


def is_pinning(num_threads: int, pin: PinThreads, num_cpus: int, quota: float | None) -> bool:
    """Whether so many threads are pinned to the CPUs of an affinity.

    A quota below their number says that others run on them too: a pinned thread would wait for its CPU while another one is idle.
    """
    if pin == "off" or not 1 < num_threads <= num_cpus:
        return False
    return pin == "on" or (num_threads >= MIN_PINNED_THREADS and (quota is None or quota >= num_cpus))


@functools.cache
def placement(num_threads: int, pin: PinThreads) -> Placement:
    """The one of this process, by which a model's weights are placed as well as its threads."""
    current = ctypes.CDLL(None).sched_getcpu() if sys.platform == "linux" else 0
    return choose_placement(num_threads, pin, usable_cpus(), cpu_quota(), current)


# Of <linux/mempolicy.h>; the C library has no functions for these calls.
PREFERRED, INTERLEAVE = 1, 3
MOVE = 2
SYSTEM_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237},
}


@contextlib.contextmanager
def memory_on(nodes: Sequence[int], root: Path = ROOT) -> Iterator[None]:
    """Memory that this thread touches first, and threads that it starts meanwhile, is on these nodes, page by page in turns.

    Nothing changes on a machine with one node, or where the process was started with a policy of its own.
    """
    if not _can_choose_nodes(root):
        yield
        return
    _system_call("set_mempolicy", _policy(nodes), *_mask(nodes))
    try:
        yield
    finally:
        _system_call("set_mempolicy", 0, None, 0)


def place_memory(address: int, num_bytes: int, nodes: Sequence[int], root: Path = ROOT) -> None:
    """As `memory_on`, of whole pages in a range of addresses, whichever thread touches them."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, end = -(-address // page) * page, (address + num_bytes) // page * page
    if first < end and _can_choose_nodes(root):
        _system_call("mbind", first, end - first, _policy(nodes), *_mask(nodes), MOVE)


def _can_choose_nodes(root: Path) -> bool:
    policy = ctypes.c_int(0)
    return len(online_nodes(root)) > 1 and _system_call("get_mempolicy", ctypes.byref(policy), None, 0, None, 0) and policy.value == 0


def _policy(nodes: Sequence[int]) -> int:
    return INTERLEAVE if len(nodes) > 1 else PREFERRED


def _mask(nodes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
    """A bit for each node, and one more than the number of bits, which is how the kernel counts them."""
    num_words = max(nodes) // 64 + 1
    bits = sum(1 << node for node in nodes)
    return (ctypes.c_uint64 * num_words)(*(bits >> 64 * word & 2**64 - 1 for word in range(num_words))), 64 * num_words + 1


def _system_call(name: str, *arguments: object) -> bool:
    """Whether it succeeded."""
    number = SYSTEM_CALLS.get(platform.machine(), {}).get(name)
    if number is None or sys.platform != "linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    if call(*converted) != 0:  # containers often forbid it
        logger.info("The model's memory stays where threads first touch it: %s: %s", name, os.strerror(ctypes.get_errno()))
        return False
    return True
