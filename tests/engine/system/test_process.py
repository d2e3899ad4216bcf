import contextvars
import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import thread_time

import pytest

from penstock.engine.system.process import (
    SWITCH_SECONDS,
    YOUNG_OBJECTS,
    CompileClock,
    LockHandover,
    collector_paused,
    notify_supervisor,
    settled_heap,
    thread_seconds,
    triton_left_out,
    uncounted,
)


def test_the_interval_is_short_until_the_last_has_left() -> None:
    before = sys.getswitchinterval()
    handover = LockHandover()
    with handover:
        with handover, pytest.raises(ZeroDivisionError), handover:
            raise ZeroDivisionError
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_already_stays() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(SWITCH_SECONDS / 10)
        with LockHandover():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS / 10)
    finally:
        sys.setswitchinterval(before)


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("penstock.engine.system.process.time.monotonic", lambda: self.now)

    def fail(self) -> None:
        self.now += 5
        raise TimeoutError


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_what_is_uncounted_counts_for_no_clock_that_was_entered(time: Time) -> None:
    outer, other = CompileClock(), CompileClock()
    time.now += 1
    with outer, CompileClock() as inner:
        time.now += 2
        with uncounted():
            time.now += 40
            assert (outer.seconds, inner.seconds, other.seconds) == (3, 2, 43)
        time.now += 4
    with uncounted():
        time.now += 8
    assert (outer.seconds, inner.seconds, other.seconds) == (15, 14, 55)


def test_a_clock_goes_on_after_what_failed(time: Time) -> None:
    with CompileClock() as clock:
        with pytest.raises(TimeoutError), uncounted():
            time.fail()
        time.now += 1
    assert clock.seconds == 1


def test_another_threads_clock_does_not_stop(time: Time) -> None:
    clock = CompileClock()
    with clock:
        stranger = contextvars.Context()
        waiting = uncounted()
        stranger.run(waiting.__enter__)
        time.now += 5
        stranger.run(waiting.__exit__, None, None, None)
    assert clock.seconds == 5


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of another thread is known on Linux only")
def test_the_cpu_time_of_another_thread_is_known_until_it_ends() -> None:
    used: list[float] = []
    is_done, may_end = threading.Event(), threading.Event()

    def work() -> None:
        while thread_time() < 0.02:
            pass
        used.append(thread_time())
        is_done.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_done.wait()
    assert thread.native_id is not None
    seconds = thread_seconds(thread.native_id)
    assert seconds is not None
    assert seconds >= used[0]
    may_end.set()
    thread.join()
    assert thread_seconds(2**22 + 1) is None  # more than Linux gives out


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_a_server_on_the_cpu_does_not_import_triton_and_still_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch and transformers do without it shows in the process of a server: see tests/server/test_process.py."""
    pytest.importorskip("triton")
    monkeypatch.delitem(sys.modules, "triton")
    with triton_left_out("cuda:0"):
        assert "triton" not in sys.modules
    with triton_left_out("cpu"), pytest.raises(ImportError):
        importlib.import_module("triton")
    assert importlib.util.find_spec("triton") is not None


def test_the_collector_pauses_for_as_long_as_the_outermost_context() -> None:
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_loaded_is_out_of_the_collectors_sight_while_the_process_serves() -> None:
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > num_frozen
        assert gc.get_threshold() == (YOUNG_OBJECTS, *thresholds[1:])
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)


HANGING = """
import os, sys
from penstock.engine.system.process import end_after_parent

end_after_parent(int(sys.argv[1]) or os.getppid(), 0.1)
print("begun", flush=True)
while True:
    pass
"""
PARENT = """
import subprocess, sys

child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "0"], stdout=subprocess.PIPE)
child.stdout.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another kernel tells no process of its parent's end")
def test_a_process_that_hangs_does_not_outlive_its_parent_for_long() -> None:
    subprocess.run([sys.executable, "-c", PARENT, HANGING], stderr=subprocess.PIPE, check=True, timeout=60)  # until both have closed it


@pytest.mark.skipif(sys.platform != "linux", reason="another kernel tells no process of its parent's end")
def test_nor_where_its_parent_has_ended_before_it_asked() -> None:
    strangers = str(os.getpid() + 1)
    assert subprocess.run([sys.executable, "-c", HANGING, strangers], stdout=subprocess.DEVNULL, timeout=60).returncode == -signal.SIGALRM


FIRST_USES = """
import sys, threading
import msgspec
from penstock.engine.system.process import examined

sys.setswitchinterval(1e-6)

def convert_at_once(kind):
    barrier = threading.Barrier(4)
    def convert():
        barrier.wait()
        msgspec.convert({"inner": [{"names": ["a"]}]}, examined(kind))
    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for _ in range(500):
    class Inner(msgspec.Struct):
        names: list[str]
        ranges: dict[str, list[tuple[int, float]]] | None = None
    class Outer(msgspec.Struct):
        inner: list[Inner]
        other: dict[str, list[int]] | None = None
    convert_at_once(Outer)
"""


def test_several_threads_may_be_the_first_to_convert_to_a_type() -> None:
    assert subprocess.run([sys.executable, "-c", FIRST_USES], check=False).returncode == 0


@pytest.mark.parametrize("address", ["{folder}/notify", "@{folder}/notify"])
def test_systemd_is_notified_at_the_address_that_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    address = address.format(folder=tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify_supervisor("READY=1")
        assert supervisor.recv(100) == b"READY=1"


def test_a_supervisor_that_is_gone_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_supervisor("READY=1")
    assert caplog.messages == []
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_supervisor("READY=1")
    assert len(caplog.messages) == 1
