"""A prompt that another process has computed comes over torch.distributed, from a process whose files this one does not see."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import exchange, transfer
from penstock.llm.executor import Executor, RequestType, Response
from tests.llm.executor.phases import Line, answers, cases, options, request
from tests.llm.executor.test_adapters import packed
from tests.llm.executor.test_phases import ROOT, num_reused, said
from tests.llm.model_directory import write_model
from tests.tiny_adapters import write_adapter
from tests.tiny_models import tiny_model

NAME = "float32"
MINE = transfer.SHARED_MEMORY_ROOT / f"penstock-kv-{os.geteuid()}"  # which the other process writes to


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("network")
    write_model(directory / NAME)
    weights, config = packed(write_adapter(tiny_model("qwen3", vocab_size=262), directory / "adapter"))
    save_file({"weights": weights.contiguous(), "config": config.contiguous()}, directory / "adapter.safetensors")
    return directory


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process exports is kept elsewhere than what another one does."""
    monkeypatch.setattr(transfer, "SHARED_MEMORY_ROOT", tmp_path)


@contextmanager
def another_process(directory: Path, address: str) -> Iterator[tuple["subprocess.Popen[bytes]", list[Line]]]:
    command = [sys.executable, "-m", "tests.llm.executor.phases", str(directory), address, NAME]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, [msgspec.json.decode(process.stdout.readline(), type=Line) for _ in cases(NAME)]
        finally:
            process.communicate()


def continued(executor: Executor, directory: Path, line: Line) -> list[Response]:
    generation = request(directory, line.case, RequestType.GENERATION_ONLY, line.params)
    generation.output_config.return_perf_metrics = True
    return answers(executor, generation)


def refusal(executor: Executor, directory: Path, line: Line) -> str:
    (response,) = continued(executor, directory, line)
    assert response.error_msg is not None
    return response.error_msg


def file_of(line: Line) -> Path:
    return MINE / f"{json.loads(line.state)['export']}.kvx"


def wait_until_deleted(lines: list[Line]) -> None:
    """The other process deletes what was received."""
    deadline = time.monotonic() + 30
    while any(file_of(line).exists() for line in lines):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def with_state(line: Line, **changes: object) -> Line:
    return msgspec.structs.replace(line, state=json.dumps(json.loads(line.state) | changes).encode())


@pytest.mark.usefixtures("other_files")
def test_another_process_answers_as_one_that_does_both(directory: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = options(directory, NAME, address)
    with Executor(directory / NAME, **settings) as executor, Executor(directory / NAME, **options(directory, NAME)) as alone:
        with another_process(directory, address) as (process, lines):
            last = lines.pop(1)
            for line in lines:
                expected = said(answers(alone, request(directory, line.case, RequestType.CONTEXT_AND_GENERATION)))
                assert file_of(line).exists()
                responses = continued(executor, directory, line)
                assert said(responses) == expected
                assert line.said == [ids[:1] for ids in expected]
                num_tokens = len(request(directory, line.case, RequestType.CONTEXT_ONLY).input_token_ids)
                assert num_reused(responses) == (num_tokens - 1) // 16
            wait_until_deleted(lines)
            assert "no such export: it has been received" in refusal(executor, directory, lines[0])
            assert "in another way" in refusal(alone, directory, last)
            assert "no such export" in refusal(executor, directory, with_state(last, source="0" * 16))
            assert "names no export" in refusal(executor, directory, with_state(last, source="../"))
            monkeypatch.setattr(exchange, "TRANSFER_SECONDS", 2.0)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert "does not answer" in refusal(executor, directory, last)
        executor._context.engine.check_integrity()
        file_of(last).unlink()


@pytest.mark.thorough
@pytest.mark.usefixtures("other_files")
def test_the_others_meet_anew_where_the_process_that_came_first_has_ended(directory: Path, address: str) -> None:
    with ExitStack() as executors:
        with another_process(directory, address) as (process, lines):
            executor = executors.enter_context(Executor(directory / NAME, **options(directory, NAME, address)))
            expected = said(continued(executor, directory, lines[0]))
            process.kill()
            process.wait()
        with another_process(directory, address) as (_, others):
            assert said(continued(executor, directory, others[0])) == expected
            wait_until_deleted(others[:1])
    for line in lines[1:]:
        file_of(line).unlink()


@pytest.mark.parametrize("given", ["tcp://", "tcp://127.0.0.1", "tcp://:29600", "tcp://127.0.0.1:0", "tcp://127.0.0.1:29600/path"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
        transfer.check_transfer_directory(given)


def test_an_address_that_nothing_answers_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MEET_SECONDS", 0.5)
    with pytest.raises(ConfigurationError, match=r"--kv-transfer-dir tcp://192\.0\.2\.1:9: nothing answers there"):
        exchange.meet("192.0.2.1", 9)  # of a network that is for documentation alone
