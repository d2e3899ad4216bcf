"""Pages in a browser on the server's machine reach it as far as the operator lets them."""

import pytest

from penstock.api.middleware import is_allowed_host
from penstock.cli.flags import parse_arguments
from penstock.serving.models.startup import allowed_hosts
from penstock.serving.options import ServerOptions
from tests.api.running_server import CHAT, Running, serve


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:80", True),
        ("app.localhost:1", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3:8000", True),
        ("[::1]:8000", True),
        ("api.example.com", True),
        ("API.example.com:443", True),
        ("a.b.example.org", True),
        ("example.org", False),
        ("evilexample.org", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("", False),
    ],
)
def test_hosts_are_the_machines_own_names_addresses_and_those_that_are_named(host: str, is_allowed: bool) -> None:
    assert is_allowed_host(host, ("api.example.com", "*.example.org")) == is_allowed
    assert is_allowed_host(host, ("*",))


def test_a_host_that_is_not_the_servers_is_refused_with_the_flag_that_would_allow_it() -> None:
    async def scenario(server: Running) -> None:
        assert (await server.get("/health"))[0] == 200
        status, body = await server.get("/v1/models", headers={"Host": "evil.example:8000"})
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
        assert "--allowed-hosts" in body["error"]["message"]
        assert (await server.get("/v1/models", headers={"Host": "box"}))[0] == 200

    serve(scenario, ServerOptions(allowed_hosts=("box",)))


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ([], ("127.0.0.1",)),
        (["--host", "localhost"], ("localhost",)),
        (["--host", "::1"], ("::1",)),
        (["--host", "0.0.0.0"], ("*",)),
        (["--host", "::"], ("*",)),
        (["--api-key", "k"], ("*",)),
        (["--allowed-hosts", "a", "*.B"], ("a", "*.b", "127.0.0.1")),
        (["--host", "Box", "--allowed-hosts", "a"], ("a", "box")),
    ],
)
def test_any_host_will_do_unless_a_loopback_address_is_all_the_protection(
    words: list[str], hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert allowed_hosts(parse_arguments(words)) == hosts


PAGE = {"Origin": "http://evil.example"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
TEXT = {"Content-Type": "text/plain"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (FORM, 200),
        (TEXT | {"Sec-Fetch-Site": "same-origin"}, 200),
        (PAGE | JSON, 200),
        (PAGE | TEXT, 415),
        (PAGE | FORM, 415),
        (TEXT | {"Origin": "null"}, 415),
        (TEXT | {"Sec-Fetch-Site": "cross-site"}, 415),
        (TEXT | {"Origin": "http://good"}, 200),
    ],
)
def test_what_a_page_may_send_without_asking_is_refused(headers: dict[str, str], status: int) -> None:
    async def scenario(server: Running) -> None:
        assert (await server.post("/v1/chat/completions", CHAT, headers=headers))[0] == status

    serve(scenario, ServerOptions(allowed_origins=("http://good",)))
