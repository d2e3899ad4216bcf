"""The kernels' own loops over threads: nothing is lost or done twice, however many callers and threads there are."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.engine.native.library import native_library
from penstock.engine.sampling.choice import greedy_tokens

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


def worker_ids() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text() == "penstock-worker\n"]


def cores_of_workers(callers_core: int, logits_BV: torch.Tensor) -> tuple[list[int] | None, list[set[int]]]:
    """What is most probable, found by a caller who is held to that core, and where its workers may run after that."""
    torch.set_num_threads(3)
    os.sched_setaffinity(threading.get_native_id(), {callers_core})
    return greedy_tokens(logits_BV, logits_BV.shape[1]), [os.sched_getaffinity(worker_id) for worker_id in worker_ids()]


def test_workers_leave_their_callers_core_to_the_caller() -> None:
    cores = os.sched_getaffinity(os.getpid())
    logits_BV = torch.randn(40, 5_000)
    for core in sorted(cores)[:3]:
        with ThreadPoolExecutor(1) as caller:
            token_ids, allowed = caller.submit(cores_of_workers, core, logits_BV).result()
        assert token_ids == logits_BV.argmax(1).tolist()
        assert len(allowed) >= 2
        assert all(cores_of_worker == ((cores - {core}) or cores) for cores_of_worker in allowed)
