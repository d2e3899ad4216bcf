"""The kernels' own loops over threads: nothing is lost or done twice, however many callers and threads there are."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from penstock.engine.native.runtime import SOURCE, find_compiler, native_library
from penstock.engine.sampling.sampler import greedy_tokens

T = TypeVar("T")

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_callers_at_once_all_get_their_own(num_threads: int) -> None:
    logits_BV = torch.randn(64, 500)
    expected = logits_BV.argmax(-1).tolist()
    failures: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(num_threads)  # of this thread
        rows = slice(number, None)
        if any(greedy_tokens(logits_BV[rows], 500) != expected[rows] for _ in range(200)):
            failures.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loops_go_on_after_a_pause() -> None:
    logits_BV = torch.randn(16, 300)
    expected = logits_BV.argmax(-1).tolist()

    def call() -> None:
        torch.set_num_threads(3)
        for pause in (0.0, 0.005, 0.0, 0.02):  # longer than threads stay awake
            assert greedy_tokens(logits_BV, 300) == expected
            threading.Event().wait(pause)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


JOINING = 200.0  # nanoseconds, as parallel.h has it


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """loops.cpp as a library: a pool without kernels."""
    library = tmp_path_factory.mktemp("loops") / "loops.so"
    compiler = find_compiler()
    assert compiler is not None
    source = str(Path(__file__).with_name("loops.cpp"))
    flags = ("-O1", "-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{SOURCE.parent}")
    subprocess.run([compiler, *flags, "-o", str(library), source], check=True)
    return library


@pytest.fixture
def loops(built: Path, tmp_path: Path) -> ctypes.CDLL:
    """With a pool that has no workers yet."""
    loaded = ctypes.CDLL(str(shutil.copy(built, tmp_path)))
    loaded.threads_for_loop.argtypes = [ctypes.c_int64, ctypes.c_double, ctypes.c_int64]
    loaded.threads_that_meet.argtypes = [ctypes.c_int64, ctypes.c_double, ctypes.c_int64, ctypes.c_int64]
    loaded.place.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return loaded


@pytest.mark.parametrize(
    ("count", "nanoseconds", "num_threads", "expected"),
    [
        (64, 3 * JOINING, 64, 1),
        (64, 4 * JOINING, 64, 2),
        (64, 100 * JOINING, 64, 10),
        (64, 1e9, 64, 64),
        (64, 1e9, 8, 8),
        (3, 1e9, 64, 3),
        (1, 1e9, 64, 1),
        (0, 0.0, 64, 1),
    ],
)
def test_a_loop_gets_as_many_threads_as_its_work_is_worth(
    loops: ctypes.CDLL, count: int, nanoseconds: float, num_threads: int, expected: int
) -> None:
    assert loops.threads_for_loop(count, nanoseconds, num_threads) == expected


@pytest.mark.parametrize(("nanoseconds", "num_threads", "expected"), [(1e9, 6, 6), (9 * JOINING, 6, 3), (1e9, 2, 2), (JOINING, 6, 1)])
def test_as_many_threads_as_that_take_part(loops: ctypes.CDLL, nanoseconds: float, num_threads: int, expected: int) -> None:
    assert in_thread(lambda: loops.threads_that_meet(24, 1e9, 6, 6)) == 6  # all the workers that there may be
    for _ in range(3):
        assert in_thread(lambda: loops.threads_that_meet(24, nanoseconds, num_threads, expected)) == expected


def in_thread(call: Callable[[], T]) -> T:
    """In a new one, whose affinity and number of threads end with it."""
    with ThreadPoolExecutor(1) as caller:
        return caller.submit(call).result()


@dataclass
class Caller:
    """Runs loops with `num_threads` threads in a thread of its own, whose workers are the only ones that come while it does."""

    loops: ctypes.CDLL
    num_threads: int
    before: set[int] = field(default_factory=lambda: set(worker_ids()))

    def cpus_of_workers(self, callers_cpu: int) -> list[set[int]]:
        """Where the workers may run after a loop of a caller that is held to that CPU."""
        os.sched_setaffinity(threading.get_native_id(), {callers_cpu})
        assert self.loops.threads_that_meet(self.num_threads, 1e9, self.num_threads, self.num_threads) == self.num_threads
        return [os.sched_getaffinity(worker) for worker in worker_ids() if worker not in self.before]


def worker_ids() -> list[int]:
    def name(task: Path) -> str:
        try:
            return (task / "comm").read_text()
        except (FileNotFoundError, ProcessLookupError):  # other tests' threads may end meanwhile
            return ""

    return [int(task.name) for task in Path("/proc/self/task").iterdir() if name(task) == "penstock-worker\n"]


def test_workers_leave_their_callers_cpu_to_the_caller(loops: ctypes.CDLL) -> None:
    cpus = os.sched_getaffinity(os.getpid())
    caller = Caller(loops, max(3, len(cpus)))
    moves = sorted(cpus)[:3]
    found = in_thread(lambda: [caller.cpus_of_workers(cpu) for cpu in moves])
    assert found == [[(cpus - {cpu}) or cpus] * (caller.num_threads - 1) for cpu in moves]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU here")
def test_a_pinned_worker_takes_the_cpu_that_the_caller_leaves_for_its_own(loops: ctypes.CDLL) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    caller = Caller(loops, 2)

    def move_about() -> list[list[set[int]]]:
        cpus = (ctypes.c_int32 * 2)(first, second)
        loops.place(cpus, 2, True)
        return [caller.cpus_of_workers(cpu) for cpu in (first, second, second, first)]

    in_first, in_second = [{second}], [{first}]
    assert in_thread(move_about) == [in_first, in_second, in_second, in_first]
