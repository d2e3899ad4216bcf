import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.compile_clock import CompileClock
from penstock.engine.errors import QueueFull
from penstock.plugins.grammars.xgrammar import process as xgrammar_process
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
    with pytest.raises(CompilationFailed, match=r"longer than 0\.3 s|1 MiB|memory") as caught:
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
