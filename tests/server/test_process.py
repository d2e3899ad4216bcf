"""The server as a process: what it prints, what it refuses to start with, and how it ends."""

import asyncio
import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from penstock.cli import COMMANDS
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError, StartFailed, start_error
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.reasoning.formats import FORMATS
from penstock.server import (
    MISCONFIGURED,
    START_FAILED,
    bind,
    loop_factory,
    main,
    outlast_hangups,
    stop_on_signals,
    stopping_line,
    warn_if_open,
)
from penstock.serving.limits import hash_of
from penstock.serving.models.startup import (
    UNLEARNED_THINKING_BUDGET,
    build_chat_template,
    format_evidence,
    knows_marker,
    thinking_budget,
    unlearned_parser,
)
from penstock.serving.templates.rendering import ChatTemplate
from tests.llm.model_directory import write_model

deepseek_r1 = FORMATS["deepseek_r1"]

ROOT = Path(__file__).parents[2]
LONG = 30_000  # tokens


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, over the default model where the flags name no other: its process, and its URL from its line."""
    command = [sys.executable, "server.py", "--port", "0", "--compile", "off", "--kv-cache-memory", "256MiB", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[^ ]+/v1", line)
        assert found is not None, process.communicate()[1]
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is there at once, with room for answers that outlast a test."""
    return str(write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=LONG + 100))


def stream_of(url: str, max_tokens: int, key: str = "none") -> Any:
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "x-api-key": key}
    )
    return urllib.request.urlopen(request)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, code: int = MISCONFIGURED) -> str:
    assert main(list(argv)) == code
    shown = capsys.readouterr().err
    assert re.fullmatch(r"penstock: error: [^\n]+\n", shown)
    return shown


def test_the_event_loop_is_uvloops_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is None
    uvloop = ModuleType("uvloop")
    uvloop.__spec__ = ModuleSpec("uvloop", None)
    monkeypatch.setattr(uvloop, "new_event_loop", object(), raising=False)
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)
    assert loop_factory() is uvloop.new_event_loop


def accepts(url: str, key: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/models", headers={"x-api-key": key})):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def test_signals_have_keys_read_again_and_let_a_running_stream_end_before_the_process(tiny_model_dir: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nhash = "{hash_of("old")}"\n')
    with server("--model", tiny_model_dir, "--keys", str(keys)) as (process, url):
        assert "libtriton" not in Path(f"/proc/{process.pid}/maps").read_text(), "70 MB that a model on the CPU has no use for"
        assert accepts(url, "old")
        keys.write_text(f'[keys.alice]\nhash = "{hash_of("new")}"\n')
        process.send_signal(signal.SIGHUP)
        while not accepts(url, "new"):
            time.sleep(0.01)
        assert not accepts(url, "old")
        with stream_of(url, 200, "new") as stream:
            stream.readline()
            process.send_signal(signal.SIGTERM)
            rest = stream.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in rest
        said = process.communicate()[1]
        assert process.returncode == 0
        assert "shutting down" in said
        assert "leaked" not in said


@pytest.mark.parametrize(("flags", "is_terminal", "is_ignored"), [("", False, True), ("", True, False), ("--keys keys.toml", True, True)])
def test_a_hangup_ends_a_server_on_a_terminal_alone(
    flags: str, is_terminal: bool, is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    try:
        outlast_hangups(parse_arguments(flags.split()))
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == is_ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def signal_twice() -> list[int]:
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        monkeypatch.setattr(logging, "shutdown", lambda: None)
        stop = stop_on_signals()
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        assert codes == []
        os.kill(os.getpid(), signal.SIGTERM)
        while not codes:  # noqa: ASYNC110 - the handler sets no event
            await asyncio.sleep(0)
        return codes

    assert asyncio.run(signal_twice()) == [128 + signal.SIGTERM]


def test_a_second_signal_leaves_a_line_in_the_log(tiny_model_dir: str) -> None:
    with server("--model", tiny_model_dir, "--drain-timeout", "60") as (process, url), stream_of(url, LONG) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "shutting down: up to 60 s for 1 request to end" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "a second signal (SIGTERM): the server ends at once, and what still runs is cut" in said


def test_a_server_that_waits_for_requests_says_how_to_end_it_at_once() -> None:
    assert stopping_line(0, 30) == "shutting down"
    assert stopping_line(1, 30) == "shutting down: up to 30 s for 1 request to end; a second Ctrl-C or SIGTERM ends the server at once"
    assert "2.5 s for 2 requests to end" in stopping_line(2, 2.5)


def serve_here(directory: str, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[str, Any], None], *flags: str) -> int:
    """Runs a server in this process, and in another thread `scenario` with its URL and a stream that has begun; returns the exit code."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    monkeypatch.setattr("penstock.server.bind", lambda *_: listener)

    def run() -> None:
        while listener.fileno() != -1:
            try:
                stream = stream_of(url, LONG)
            except urllib.error.URLError:  # it does not listen yet
                time.sleep(0.01)
                continue
            with stream:
                stream.readline()
                scenario(url, stream)
                return

    with ThreadPoolExecutor(1) as client:
        running = client.submit(run)
        with listener:  # which ends `run`, whatever happens
            code = main(["--compile", "off", "--kv-cache-memory", "256MiB", "--model", directory, *flags])
        running.result()
    return code


def test_without_time_to_drain_a_stream_is_told_why_it_ends(tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = ""

    def scenario(url: str, stream: Any) -> None:
        nonlocal rest
        os.kill(os.getpid(), signal.SIGINT)
        rest = stream.read().decode()

    assert serve_here(tiny_model_dir, monkeypatch, scenario, "--drain-timeout", "0") == 0
    assert '"error":' in rest
    assert '"finish_reason":"length"' not in rest


def test_new_connections_are_told_that_the_server_stops_until_the_last_stream_ends(
    tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []

    def scenario(url: str, stream: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for path in ("ready", "v1/models"):
            while (answer := refusal_of(f"{url.removesuffix('/v1')}/{path}")) is None:
                pass
            answers.append((answer.code, answer.headers["Retry-After"], answer.headers["Connection"]))

    assert serve_here(tiny_model_dir, monkeypatch, scenario) == 0
    assert answers == [(503, "1", "close")] * 2


def refusal_of(url: str) -> urllib.error.HTTPError | None:
    """The answer to a request on a new connection, where it is an error."""
    try:
        urllib.request.urlopen(url).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error
    return None


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refusal(capsys, "--port", str(port), "--model", "/nowhere/at/all", code=START_FAILED)


def test_a_supervisor_starts_again_what_may_start_later_and_not_what_is_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Cannot assign requested address" in refusal(capsys, "--host", "192.0.2.1", "--port", "0", code=START_FAILED)

    def fail(error: Exception) -> Callable[..., int]:
        def serve(*_: object) -> int:
            raise error

        return serve

    for error, code in ((StartFailed("later"), START_FAILED), (ConfigurationError("never"), MISCONFIGURED), (MemoryError(), MISCONFIGURED)):
        monkeypatch.setattr("penstock.server.serve", fail(error))
        refusal(capsys, code=code)
    monkeypatch.setitem(COMMANDS, "keys", fail(StartFailed("a command has its own meaning for 1")))
    refusal(capsys, "keys", code=MISCONFIGURED)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EADDRINUSE, "in use"), StartFailed),
        (OSError(errno.ENOSPC, "full"), StartFailed),
        (socket.gaierror(socket.EAI_AGAIN, "no name server"), StartFailed),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), ConfigurationError),
        (PermissionError(errno.EACCES, "a port below 1024"), ConfigurationError),
    ],
)
def test_the_systems_error_says_whether_another_start_may_succeed(error: OSError, kind: type[ConfigurationError]) -> None:
    assert type(start_error("what", error)) is kind


def test_libraries_are_given_the_models_number_of_threads_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    monkeypatch.setattr("penstock.server.serve", lambda *_: 7)
    assert main(["--threads", "5"]) == 7
    assert (os.environ["OMP_NUM_THREADS"], os.environ["RAYON_NUM_THREADS"]) == ("5", "5")


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot listen at"):
        bind("host.invalid", 0)


def test_a_bound_port_refuses_clients_until_the_model_is_there() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--plugin", "deepseek_r2"], "deepseek_r1"),
        (["--without", "nothing_like_it"], "--without"),
        (["--chat-template", "thinker", "--port", "0"], "chatml, think"),
        (["--model", "/nowhere/at/all.gguf", "--port", "0"], "/nowhere/at/all.gguf"),
    ],
)
def test_a_mistake_of_the_operator_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in refusal(capsys, *argv)


def test_a_start_that_fails_is_an_object_where_the_log_is_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.set_up_logging", lambda *_, **__: None)
    assert main(["--log-format", "json", "--plugin", "deepseek_r2"]) == 2
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"]) == ("critical", "penstock.server")
    assert "deepseek_r1" in entry["message"]


@pytest.mark.parametrize(
    ("flags", "address", "is_warned"), [("", "0.0.0.0", True), ("--api-key k", "0.0.0.0", False), ("", "127.0.0.1", False)]
)
def test_a_server_that_any_machine_may_use_says_so(flags: str, address: str, is_warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with bind(address, 0) as listener, caplog.at_level(logging.WARNING, "penstock"):
        warn_if_open(parse_arguments(flags.split()), listener)
    assert (f"every machine that reaches {address} can use this server" in caplog.text) == is_warned


def test_a_models_own_files_tell_how_it_writes() -> None:
    own = format_evidence(tokenizer_that_knows("<tool_call>", template="{{ '<think>' }}"), "<other>")
    assert own.shows("<tool_call>")
    assert own.shows("<think>")
    assert not own.shows("<other>")


def test_the_operators_template_tells_only_where_the_model_has_none() -> None:
    bare = Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])), {}, {})
    assert format_evidence(bare, "<other>").shows("<other>")
    assert not format_evidence(bare, None).shows("<other>")


def test_what_a_checkpoint_declares_of_its_answers_tells_too() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    declared = Tokenizer(backend, {"response_template": {"fields": {"thinking": {}, "content": {}}}}, {})
    assert format_evidence(declared, None).declared_fields == {"thinking", "content"}


def tokenizer_that_knows(*texts: str, template: str = "{{ messages }}") -> Tokenizer:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_tokens([AddedToken(text, special=False) for text in texts])
    return Tokenizer(backend, {"bos_token": "a"}, {"default": template, "tool_use": "tools"})


def test_a_model_that_knows_the_marker_needs_no_help() -> None:
    assert unlearned_parser(deepseek_r1, tokenizer_that_knows("</think>")) is None
    assert unlearned_parser(deepseek_r1, tokenizer_that_knows(template="{{ x.split('</think>') }}")) is None
    assert unlearned_parser(None, tokenizer_that_knows()) is None


def test_the_budget_is_the_operators_or_one_that_closes_reasoning_the_model_would_not_close(caplog: pytest.LogCaptureFixture) -> None:
    unlearned = unlearned_parser(deepseek_r1, tokenizer_that_knows())
    assert [thinking_budget(asked, None, None) for asked in (None, 7)] == [None, 7]
    assert caplog.records == []
    assert [thinking_budget(asked, unlearned, "{{ messages }}") for asked in (None, 9)] == [UNLEARNED_THINKING_BUDGET, 9]
    assert "'</think>'" in caplog.text


def test_an_operator_whose_template_begins_the_reasoning_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    unlearned = unlearned_parser(deepseek_r1, tokenizer_that_knows())
    with caplog.at_level(logging.INFO):
        thinking_budget(None, unlearned, "<think></think>")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_template_of_a_model_that_never_learned_the_markers_begins_the_reasoning(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}answer: {% endif %}\n"
    tokenizer = tokenizer_that_knows(template=template)
    unlearned = unlearned_parser(deepseek_r1, tokenizer)

    def render(chat_template: ChatTemplate, **kwargs: Any) -> tuple[str, str]:
        messages = [{"role": "user", "content": "Hi"}]
        prompt = chat_template.render(messages, **kwargs)
        return prompt.text, prompt.tail

    with caplog.at_level(logging.INFO):
        chat_template = build_chat_template(None, tokenizer, unlearned)
        thinking_budget(None, unlearned, chat_template.source)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert render(chat_template) == ("Hi answer: <think>\n", "answer: <think>\n")
        closed = render(chat_template, template_kwargs={"enable_thinking": False})
        assert closed == ("Hi answer: <think>\n\n</think>\n\n", "answer: <think>\n\n</think>\n\n")
        assert render(chat_template, add_generation_prompt=False)[0] == "Hi "


def test_an_operators_template_teaches_the_model_nothing() -> None:
    assert not knows_marker("</think>", tokenizer_that_knows("</tool_call>"))


def test_a_marker_that_is_made_of_tokens_is_known() -> None:
    assert knows_marker("<|end|><|start|>assistant", tokenizer_that_knows("<|start|>"))


def test_the_models_own_templates_are_used_unless_the_operator_brings_one() -> None:
    tokenizer: Any = tokenizer_that_knows()
    own = build_chat_template(None, tokenizer)
    assert (own.source, own.tool_source, own.special_tokens) == ("{{ messages }}", "tools", {"bos_token": "a"})
    given = build_chat_template("mine", tokenizer)
    assert (given.source, given.tool_source) == ("mine", None)
