"""What runs in a sandbox is bounded, and says nothing about any other job."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.errors import EngineUnavailable, InvalidRequest, JobLimitExceeded, QueueFull
from penstock.engine.system.process import CompileClock
from penstock.engine.system.sandbox import Limits, Sandbox
from tests.engine.system import sandbox_jobs as jobs

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox("testing", Limits(cpu_seconds=0.5, memory_bytes=2**26, result_bytes=2**20, niceness=3))
    yield sandbox
    sandbox.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Sandbox]]:
    """Sandboxes that are closed at the end of the test."""
    with ExitStack() as stack:

        def make(**options: object) -> Sandbox:
            sandbox = Sandbox("testing", **options)  # type: ignore[arg-type]
            stack.callback(sandbox.close)
            return sandbox

        yield make


def written(path: Path) -> int:
    while not (path.exists() and path.read_text()):
        time.sleep(0.005)
    return int(path.read_text())


def test_a_process_runs_one_job_after_another(sandbox: Sandbox) -> None:
    assert sandbox.run_blocking(jobs.double, 21) == 42
    assert asyncio.run(sandbox.run(jobs.double, number=4)) == 8
    assert sandbox.pids == [sandbox.run_blocking(jobs.pid)]
    assert sandbox.run_blocking(jobs.noisy, b"\x00\xff" * 100_000) == b"\x00\xff" * 100_000


def test_a_job_refuses_as_it_would_anywhere(sandbox: Sandbox) -> None:
    pid = sandbox.run_blocking(jobs.pid)
    with pytest.raises(InvalidRequest, match="not so") as refusal:
        sandbox.run_blocking(jobs.refuse, "not so \ud800", "messages[0]")
    assert refusal.value.param == "messages[0]"
    assert sandbox.pids == [pid]


def test_a_job_that_fails_is_our_own_bug_and_its_message_stays_inside(sandbox: Sandbox) -> None:
    with pytest.raises(RuntimeError, match=r"fail failed in its sandbox: LookupError in fail, .*sandbox_jobs\.py") as failure:
        sandbox.run_blocking(jobs.fail, "a client's words")
    assert "client" not in str(failure.value)


def test_a_result_of_another_type_than_the_function_says_is_not_believed(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="Expected `int`"):
        sandbox.run_blocking(jobs.lie)


@pytest.mark.parametrize(
    ("job", "args", "reason"),
    [
        (jobs.hang_in_a_regex, (), r"^testing took more than 0\.5 s of CPU time$"),
        (jobs.take_memory, (2**28,), "more than 64 MiB of memory"),
        (jobs.answer_at_length, (2**21,), "testing gave more than 1 MiB"),
        (jobs.end_by, (signal.SIGSEGV,), "ended its process"),
        (jobs.end_by, (signal.SIGABRT,), "ended its process"),
    ],
)
def test_a_job_beyond_a_limit_is_refused_and_the_next_one_runs(
    sandbox: Sandbox, job: Callable[..., object], args: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(JobLimitExceeded, match=reason):
        sandbox.run_blocking(job, *args)
    assert sandbox.run_blocking(jobs.double, 1) == 2


def test_memory_within_the_limit_is_there_whatever_the_process_had_at_its_start(sandbox: Sandbox) -> None:
    for _ in range(3):
        assert sandbox.run_blocking(jobs.take_memory, 40 * 2**20) == 40 * 2**20


def test_a_process_that_has_kept_memory_serves_no_further_job(sandbox: Sandbox) -> None:
    pid = sandbox.run_blocking(jobs.keep_memory, 36 * 2**20)
    assert sandbox.run_blocking(jobs.take_memory, 40 * 2**20)
    assert sandbox.run_blocking(jobs.pid) != pid


def test_a_process_leaves_no_core_and_has_its_niceness_once_it_is_up(sandbox: Sandbox) -> None:
    assert sandbox.run_blocking(jobs.core_limit) == 0
    assert sandbox.run_blocking(jobs.niceness) == os.nice(0) + 3


def test_an_initializer_runs_once_in_each_process(make: Callable[..., Sandbox]) -> None:
    sandbox = make(initializer=jobs.load, initargs=("one", "two"))
    for _ in range(2):
        assert sandbox.run_blocking(jobs.words) == ["one", "two"]


def test_a_process_killed_between_two_jobs_is_replaced(sandbox: Sandbox) -> None:
    pid = sandbox.run_blocking(jobs.pid)
    os.kill(pid, signal.SIGKILL)
    assert sandbox.run_blocking(jobs.pid) != pid


def test_a_job_whose_process_was_killed_from_outside_runs_once_more(sandbox: Sandbox, tmp_path: Path) -> None:
    assert sandbox.run_blocking(jobs.end_once, str(tmp_path / "mark")) == "done"


def test_a_job_whose_process_is_killed_again_is_not_blamed(sandbox: Sandbox) -> None:
    with pytest.raises(EngineUnavailable, match="ended from outside"):
        sandbox.run_blocking(jobs.end_by, signal.SIGKILL)
    assert sandbox.run_blocking(jobs.double, 1) == 2


def test_a_job_that_gets_no_cpu_time_is_not_blamed(make: Callable[..., Sandbox]) -> None:
    sandbox = make(limits=Limits(wall_seconds=0.1))
    with pytest.raises(EngineUnavailable, match="too busy"):
        sandbox.run_blocking(jobs.sleep)
    assert sandbox.pids == []


def test_a_process_that_ends_at_its_start_is_no_verdict_on_the_job(make: Callable[..., Sandbox]) -> None:
    sandbox = make(initializer=jobs.end_at_start)
    sandbox.prestart()
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="does not start"):
            sandbox.run_blocking(jobs.double, 1)


def test_a_job_that_is_no_longer_waited_for_is_killed_and_the_loop_stays_free(sandbox: Sandbox, tmp_path: Path) -> None:
    async def scenario() -> None:
        hanging = asyncio.create_task(sandbox.run(jobs.sleep))
        queued = asyncio.create_task(sandbox.run(jobs.end_once, str(tmp_path / "mark")))
        while not any(child.process is not None for child in sandbox._children):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        hanging.cancel()
        assert await queued == "done"

    asyncio.run(scenario())


def test_a_job_that_is_cancelled_while_it_waits_never_begins(sandbox: Sandbox, tmp_path: Path) -> None:
    async def scenario() -> None:
        hanging, queued = (
            asyncio.create_task(sandbox.run(job, *args)) for job, args in ((jobs.sleep, ()), (jobs.end_once, (str(tmp_path / "mark"),)))
        )
        await asyncio.sleep(0.01)
        queued.cancel()
        hanging.cancel()
        assert await sandbox.run(jobs.double, 1) == 2

    asyncio.run(scenario())
    assert not (tmp_path / "mark").exists()


def test_several_processes_run_several_jobs_at_once(make: Callable[..., Sandbox], tmp_path: Path) -> None:
    sandbox = make(num_processes=2, limits=Limits(cpu_seconds=60))

    async def scenario() -> None:
        hanging = asyncio.create_task(sandbox.run(jobs.sleep))
        for _ in range(3):
            assert await sandbox.run(jobs.double, 1) == 2
        hanging.cancel()

    asyncio.run(scenario())


def test_a_job_waits_so_long_and_not_longer(make: Callable[..., Sandbox], tmp_path: Path) -> None:
    sandbox = make(max_wait=0.01)
    with ThreadPoolExecutor() as threads:
        hanging = threads.submit(sandbox.run_blocking, jobs.hang_after_announcing, str(tmp_path / "pid"))
        pid = written(tmp_path / "pid")
        with pytest.raises(QueueFull, match="wait for testing"):
            sandbox.run_blocking(jobs.double, 1)
        sandbox.close()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            hanging.result()
    assert not psutil.pid_exists(pid)


def test_a_start_counts_for_no_compilation_and_no_wait(make: Callable[..., Sandbox]) -> None:
    sandbox = make(max_wait=0.01)
    clock = CompileClock()
    results: list[int] = []
    sandbox._idle.clear()
    child = sandbox._children[0]
    child.is_starting = True

    def wait() -> None:
        with clock:
            results.append(sandbox.run_blocking(jobs.double, 1))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not clock.is_stopped:
        time.sleep(0.001)
    time.sleep(0.05)
    assert waiting.is_alive()
    child.is_starting = False
    sandbox._started_at = time.monotonic()
    sandbox._release(child)
    waiting.join()
    assert results == [2]
    assert not clock.is_stopped


def test_prestarting_returns_at_once_and_the_first_job_finds_the_process(make: Callable[..., Sandbox]) -> None:
    sandbox = make(num_processes=2)
    sandbox.prestart()
    while len(pids := set(sandbox.pids)) < 2 or any(child.is_starting for child in sandbox._children):
        time.sleep(0.005)
    assert sandbox.run_blocking(jobs.pid) in pids


def test_a_closed_sandbox_has_no_process_and_takes_no_job(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    pid = sandbox.run_blocking(jobs.pid)
    sandbox.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        sandbox.run_blocking(jobs.double, 1)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        asyncio.run(sandbox.run(jobs.double, 1))


def test_closing_fails_the_jobs_that_run_and_those_that_wait(make: Callable[..., Sandbox], tmp_path: Path) -> None:
    sandbox = make(limits=Limits(cpu_seconds=600))

    async def scenario() -> None:
        running, waiting = (asyncio.create_task(sandbox.run(job)) for job in (jobs.sleep, jobs.sleep))
        while not sandbox.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        sandbox.close()
        outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineUnavailable, EngineUnavailable]

    asyncio.run(scenario())
    assert sandbox.pids == []


def test_descriptors_beyond_a_thousand_are_no_obstacle(make: Callable[..., Sandbox]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert make().run_blocking(jobs.double, 1) == 2
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_ends_with_the_server_also_at_its_start_and_in_the_middle_of_a_job(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from penstock.engine.system.sandbox import Limits, Sandbox;"
        "from tests.engine.system import sandbox_jobs as jobs;"
        "sandbox = Sandbox('testing', Limits(cpu_seconds=600), num_processes=2); sandbox.run_blocking(jobs.pid);"
        "starting = Sandbox('testing', initializer=jobs.hang_after_announcing, initargs=(sys.argv[2],)); starting.prestart();"
        "threading.Thread(target=lambda: sandbox.run_blocking(jobs.hang_after_announcing, sys.argv[1])).start();"
        "print(sandbox.run_blocking(jobs.pid), flush=True); sys.stdin.read()"
    )
    announced = [tmp_path / "busy", tmp_path / "starting"]
    with subprocess.Popen([sys.executable, "-c", program, *announced], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        pids = {int(server.stdout.readline()), *map(written, announced)}
        assert len(pids) == 3
        watched = [psutil.Process(pid) for pid in pids]
        server.kill()  # no time to clean up
    for process in watched:
        process.wait(timeout=60)


def test_a_server_that_ends_while_a_process_starts_says_nothing_of_it() -> None:
    program = (
        "from penstock.engine.system.sandbox import Sandbox; from tests.engine.system import sandbox_jobs as jobs; import time;"
        "sandbox = Sandbox('testing', initializer=jobs.sleep); sandbox.prestart();"
        "exec('while not sandbox.pids: time.sleep(0.001)'); print(sandbox.pids[0])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(timeout=60)
