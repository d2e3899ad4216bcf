import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.compile_clock import CompileClock
from penstock.engine.errors import EngineUnavailable, QueueFull
from penstock.plugins.grammars.xgrammar import process as xgrammar_process
from penstock.plugins.grammars.xgrammar import worker
from penstock.plugins.grammars.xgrammar.process import CompilationFailed, CompilerProcess
from tests.plugins.grammars.grammar_walks import VOCABULARY


@pytest.fixture(scope="module")
def process() -> Iterator[CompilerProcess]:
    process = CompilerProcess(VOCABULARY)
    yield process
    process.close()


def test_a_process_is_used_again_and_replaced_when_it_has_died(process: CompilerProcess) -> None:
    assert process.pid is None
    first, info = process.compile('root ::= "a"')
    pid = process.pid
    assert process.compile('root ::= "a"') == (first, info)
    assert process.pid == pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait()
    assert process.compile('root ::= "a"') == (first, info)
    assert process.pid != pid
    process.close()
    assert process.pid is None


def test_what_takes_too_long_or_too_much_ends_the_process_and_not_the_next_compilation() -> None:
    process = CompilerProcess(VOCABULARY, max_seconds=0.3, max_bytes=2**20)
    with pytest.raises(CompilationFailed, match=r"more than 0\.3 s of CPU time|1 MiB|memory") as caught:
        process.compile("root ::= " + "(" * 60 + "[a-c]" + "{0,99999})" * 60)
    assert len(str(caught.value)) < 200
    assert process.pid is None
    process.close()


def test_nobody_waits_for_long_while_the_process_is_busy(process: CompilerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_process, "MAX_WAIT", 0.01)
    with process._lock, pytest.raises(QueueFull, match="xgrammar"):
        process.compile('root ::= "a"')
    assert process.compile('root ::= "a"')


def test_starting_the_process_counts_for_nobodys_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompilerProcess(VOCABULARY)
    clock = CompileClock()
    start = process._start
    stopped: list[bool] = []

    def watched() -> "subprocess.Popen[bytes]":
        stopped.append(clock.is_stopped)
        return start()

    monkeypatch.setattr(process, "_start", watched)
    with clock:
        assert process.compile('root ::= "a"')
    process.close()
    assert stopped == [True]
    assert not clock.is_stopped


def test_a_process_that_was_prestarted_compiles_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompilerProcess(VOCABULARY)
    start = process._start
    starters: list[str] = []

    def watched() -> "subprocess.Popen[bytes]":
        starters.append(threading.current_thread().name)
        prestarted.set()
        return start()

    prestarted = threading.Event()
    monkeypatch.setattr(process, "_start", watched)
    process.prestart()
    prestarted.wait()
    assert process.compile('root ::= "a"')
    process.close()
    assert starters == ["penstock-xgrammar-start"]


def test_a_busy_machine_neither_fails_the_start_nor_refuses_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(0, 3600)
    monkeypatch.setattr(xgrammar_process, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    process = CompilerProcess(VOCABULARY)
    with pytest.raises(QueueFull, match="too busy"):
        process.compile('root ::= "a"')


def test_the_process_has_a_low_priority_only_once_it_is_up(process: CompilerProcess) -> None:
    with subprocess.Popen([sys.executable, worker.__file__], stdin=subprocess.PIPE) as starting:
        assert starting.stdin is not None
        starting.stdin.write(worker.pack(worker.VOCABULARY, bytes(2**20))[:-1])  # more than a pipe holds: it has begun to read
        assert psutil.Process(starting.pid).nice() == os.nice(0)
        starting.kill()
    process.compile('root ::= "a"')
    assert psutil.Process(process.pid).nice() == worker.NICENESS


def test_a_process_that_ends_at_its_start_is_no_verdict_on_the_grammar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "worker.py"))
    process = CompilerProcess(VOCABULARY)
    process.prestart()
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="does not start"):
            process.compile('root ::= "a"')


def test_whoever_waits_for_the_process_waits_until_it_is_up(process: CompilerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_process, "MAX_WAIT", 0.01)
    answers: list[tuple[str, str]] = []
    with process._lock:
        process._is_up.clear()
        waiting = threading.Thread(target=lambda: answers.append(process.compile('root ::= "a"')))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
    process._is_up.set()
    waiting.join()
    assert answers == [process.compile('root ::= "a"')]


def test_a_refusal_is_one_line_with_the_place_and_keeps_the_process(process: CompilerProcess) -> None:
    with pytest.raises(CompilationFailed) as caught:
        process.compile("root ::= " + "x" * 5000)
    assert "line 1, column 10" in str(caught.value)
    assert len(str(caught.value)) <= 200
    assert process.pid is not None


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import os, sys; from tests.plugins.grammars.grammar_walks import VOCABULARY;"
        "from penstock.plugins.grammars.xgrammar.process import CompilerProcess;"
        "process = CompilerProcess(VOCABULARY); process.compile('root ::= \"a\"'); print(process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_root()) as server:
        assert server.stdout is not None
        worker = psutil.Process(int(server.stdout.readline()))
        server.kill()  # no time to clean up
    worker.wait(timeout=30)
    assert not worker.is_running()


def _root() -> str:
    import tests

    return os.path.dirname(next(iter(tests.__path__)))
