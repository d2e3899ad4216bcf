"""`penstock admin`: its words, its address, and what it prints."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.api.admin.app import build_admin_app
from penstock.api.admin.routes import ADMIN_ROUTES, Administration
from penstock.api.admin.sockets import bound
from penstock.cli.admin import ACTIONS, build_admin_parser, parse_admin_arguments
from penstock.cli.flags import parse_arguments
from penstock.engine.control import sleep
from penstock.engine.errors import ConfigurationError
from penstock.server import main
from penstock.serving.options import AdminAddress
from tests.fakes import letter_after, make_core
from tests.llm.executors import context_over

KEY = "secret"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the admin interface of an engine on an event loop in another thread."""
    directory = tmp_path_factory.mktemp("admin")
    loop, context = asyncio.new_event_loop(), context_over(make_core(letter_after, num_blocks=2048))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    where = f"unix:{directory / 'admin.sock'}"

    def call(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def start() -> None:
        assert listener is not None
        await context.engine.start()
        await runner.setup()
        await web.SockSite(runner, listener).start()

    async def stop() -> None:
        await runner.cleanup()
        await context.engine.stop()

    with pytest.MonkeyPatch.context() as patch, bound(AdminAddress.read(where)) as listener:
        patch.setattr(sleep, "spill_directory", lambda: directory)
        runner = web.AppRunner(build_admin_app(Administration(context), "", KEY))
        call(start())
        try:
            yield where
        finally:
            call(stop())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            context.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", KEY)
    monkeypatch.delenv("PENSTOCK_ADMIN", raising=False)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["admin", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_an_operator_needs_no_curl(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN", address)
    assert said(capsys, "list").split() == ["ID", "HTTP_ID", "STATE", "MODEL", "CLIENT", "AGE", "PROMPT", "CACHED", "OUTPUT", "BLOCKS"]
    assert said(capsys, "abort", "--all") == "aborted: 0\n"
    assert said(capsys, "reset-prefix-cache") == "forgotten: 0 blocks in memory, 0 on disk\n"
    assert "requests are refused until it is woken" in said(capsys, "sleep", "--level", "2", "--mode", "keep", "--timeout", "5")
    assert said(capsys, "status").startswith("asleep at level 2 for 0 s\nfreed: ")
    assert said(capsys, "models") == "fake: asleep, 200 tokens\n"
    assert said(capsys, "wake") == "awake for 0 s\n"
    assert "thread MainThread" in said(capsys, "threads")
    assert json.loads(said(capsys, "stats"))["engines"]["fake"]["counters"]["num_running"] == 0
    assert json.loads(said(capsys, "list", "--json")) == {"requests": []}


def test_the_memory_of_an_unloaded_model_is_what_it_took_or_is_expected_to_take() -> None:
    def shown(state: str, num_bytes: int, num_loads: int = 1) -> list[str]:
        model = {"names": ["a", "b"], "state": state, "max_model_len": None, "num_bytes": num_bytes, "num_loads": num_loads}
        rest = {"num_users": 1, "num_waiting": 0, "is_pinned": False, "adapters": {}}
        return list(ACTIONS["models"].show({"models": [model | rest]}))

    assert shown("loaded", 3 << 20) == ["a, b: loaded, 3.0 MiB, 1 requests, 0 waiting"]
    assert shown("unloaded", 3 << 20) == ["a, b: unloaded, 3.0 MiB when it was loaded, 1 requests, 0 waiting"]
    assert shown("unloaded", 3 << 20, 0) == ["a, b: unloaded, about 3.0 MiB once it is loaded, 1 requests, 0 waiting"]
    assert shown("unloaded", 0, 0) == ["a, b: unloaded, 1 requests, 0 waiting"]


def test_the_level_of_the_log_is_shown_and_set(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = said(capsys, "--address", address, "log-level")
    assert said(capsys, "log-level", "error", "--address", address) == "error\n"
    assert said(capsys, "log-level", before.strip(), "--address", address) == before


def test_a_profile_is_written_to_a_file(address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    words = ("profile", "--steps", "3", "--timeout", "0.01", "--address", address, "--output")
    assert said(capsys, *words, str(output)) == f"0 steps are in {output}: open it at ui.perfetto.dev or chrome://tracing\n"
    assert json.loads(output.read_text(encoding="utf-8"))["penstock"] == {"steps": 0}


def test_a_profile_that_could_not_be_written_is_not_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No server is at the address: none has been asked."""
    nowhere = f"unix:{tmp_path / 'no.sock'}"
    for output in (tmp_path, tmp_path / "no" / "trace.json"):
        complaint = said(capsys, "profile", "--address", nowhere, "--output", str(output), code=2)
        assert f"{output} cannot be written" in complaint
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    for output in (old, new):
        assert "there is no admin interface" in said(capsys, "profile", "--address", nowhere, "--output", str(output), code=2)
    assert old.read_text() == "old"
    assert not new.exists()


def test_an_abort_of_nothing_exits_with_1(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "abort", "a", "b", "--address", address]) == 1
    assert capsys.readouterr().out == "aborted: 0\nnot open: a\nnot open: b\n"
    assert not ACTIONS["abort"].is_futile({"aborted": ["a"], "unknown": ["b"]})


def test_the_ids_of_a_request_are_shown() -> None:
    numbers = dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_blocks"), 3)
    one = {"id": "cmpl-1", "http_id": "mine", "state": "running", "model": "m", "client": None, "age": 1.0, **numbers}
    _, first, second = ACTIONS["list"].show({"requests": [one, one | {"http_id": None}]})
    assert first.split()[:3] == ["cmpl-1", "mine", "running"]
    assert second.split()[:3] == ["cmpl-1", "-", "running"]


def test_what_the_server_refuses_is_said_and_exits_with_1(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "abort", "--address", address, code=1) == "penstock admin: give either `ids` or `all: true`\n"
    assert "no adapter is loaded as 'a'" in said(capsys, "unload-adapter", "a", "--address", address, code=1)
    assert said(capsys, "load-adapter", "a", "/nowhere", "--replace", "--address", address, code=1)


def test_a_wrong_key_is_said(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "other")
    assert said(capsys, "list", "--address", address, code=1) == "penstock admin: the admin key is wrong\n"
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY")
    shown = said(capsys, "list", "--address", address, code=1)
    assert shown == "penstock admin: send the admin key as `Authorization: Bearer KEY`; PENSTOCK_ADMIN_KEY is not set\n"


@pytest.mark.parametrize("address", ["unix:/nowhere/admin.sock", "127.0.0.1:1"])
def test_where_no_server_answers_that_is_said(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "list", "--address", address, code=2)
    assert shown.startswith(f"penstock: error: there is no admin interface at {address}: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list"], "say where the server's admin interface is"),
        (["--address", "nowhere", "list"], "is not HOST:PORT"),
        (["--address", "tcp://a", "list"], "'tcp://a' is not HOST:PORT, [HOST]:PORT or unix:PATH"),
        (["--address", "unix:x"], "ACTION"),
        (["--address", "unix:x", "nap"], "nap"),
        (["--address", "unix:x", "sleep", "--levl", "2"], "did you mean --level?"),
        (["--adress", "unix:x", "list"], "did you mean --address?"),
        (["--address", "unix:x", "sleep", "--level", "3"], "invalid choice"),
        (["--address", "unix:x", "profile", "--steps", "0"], "integer of 1 or more"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_admin_arguments(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_action_is_a_route_and_every_route_an_action() -> None:
    routes = {(route.method, route.path) for route in ADMIN_ROUTES}
    asked = {(action.method, action.path) for action in ACTIONS.values()} | {("POST", "/log-level")}
    assert asked <= routes
    assert routes - asked == {("GET", "/is_sleeping")}
    assert set(build_admin_parser().actions) == set(ACTIONS)


@pytest.mark.parametrize(
    ("text", "address", "is_own"),
    [
        ("127.0.0.1:9000", AdminAddress("127.0.0.1", 9000), True),
        ("localhost:0", AdminAddress("localhost", 0), True),
        ("[::1]:9000", AdminAddress("::1", 9000), True),
        ("0.0.0.0:9000", AdminAddress("0.0.0.0", 9000), False),
        ("[::]:1", AdminAddress("::", 1), False),
        ("example.com:1", AdminAddress("example.com", 1), False),
        ("unix:/run/admin.sock", AdminAddress(path="/run/admin.sock"), True),
    ],
)
def test_addresses_are_read_and_shown(text: str, address: AdminAddress, is_own: bool) -> None:
    assert AdminAddress.read(text) == address
    assert str(address) == text
    assert address.is_own == is_own


@pytest.mark.parametrize("text", ["", "9000", ":9000", "::1:9000", "host:", "host:x", "host:65536", "unix:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        AdminAddress.read(text)


def test_an_address_that_others_can_reach_takes_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY")
    with pytest.raises(ConfigurationError, match="takes --admin-key"):
        parse_arguments(["--admin", "0.0.0.0:9000"])
    with pytest.raises(ConfigurationError, match="empty"):
        parse_arguments(["--admin-key", " "])
    assert parse_arguments(["--admin", "0.0.0.0:9000", "--admin-key", "k"]).admin_key == "k"
    assert parse_arguments(["--admin", "127.0.0.1:0"]).admin_key is None
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "from the environment")
    assert parse_arguments(["--admin", "0.0.0.0:9000"]).admin_key == "from the environment"
