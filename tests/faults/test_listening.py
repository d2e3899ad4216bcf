"""Ports that are taken, and descriptors that run out."""

import asyncio
import resource
import socket

import pytest

from penstock.api import connections
from penstock.engine.errors import ConfigurationError
from penstock.server import START_FAILED, bind, listen, main
from tests.api.running_server import Running, serve


def test_of_two_servers_that_start_at_once_the_second_fails_before_it_loads_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert main(["--port", str(port), "--model", "/nowhere/at/all"]) == START_FAILED
        assert capsys.readouterr().err == f"penstock: error: cannot listen at 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("is_client_gone", [True, False])
def test_a_port_can_be_bound_again_while_it_has_connections_of_a_server_that_has_ended(is_client_gone: bool) -> None:
    with bind("127.0.0.1", 0) as killed:
        listen(killed)
        address = killed.getsockname()
        client = socket.create_connection(address)
        killed.accept()[0].close()  # the side that closes first keeps the port
    if is_client_gone:
        client.close()
    with bind(*address) as restarted:
        with pytest.raises(ConfigurationError):
            bind(*address)
        listen(restarted)
        socket.create_connection(address).close()
    client.close()


def test_a_port_that_another_program_has_taken_meanwhile_is_one_sentence() -> None:
    with socket.socket() as ours, socket.socket() as other:
        for listener in (ours, other):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", 0))
        other.bind(ours.getsockname())
        other.listen()
        with pytest.raises(ConfigurationError, match=r"^cannot listen at 127\.0\.0\.1:\d+: Address already in use$"):
            listen(ours)


def test_without_descriptors_connections_wait_and_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit below all descriptors in use lets the process have no further ones."""
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.001)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario(server: Running) -> None:
        clients = [socket.create_connection(server.listener.address) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await asyncio.sleep(0.05)  # enough for many attempts
            assert server.listener.num_open == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await server.get("/health"))[0] == 200
        assert server.listener.num_open == 4
        for client in clients:
            client.close()

    serve(scenario)
    (record,) = (record for record in caplog.records if record.levelno >= 30)
    assert record.getMessage().startswith("cannot accept connections: Too many open files; raise `ulimit -n`")
