"""The load generator: what it sends when, what it makes of connections that break, and what it reads of answers."""

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from benchmarks.load_generator import Attempt, LoadGenerator, without_chunks

SMALL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"5\r\ndata:\r\n3;x=y\r\n{}\n\r\n0\r\n\r\n"


class Server:
    """Answers each request of a connection by `answer(number of the connection, number of the request)`: pieces, None to close it."""

    def __init__(self, answer: Callable[[int, int], list[bytes | None]]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1/chat/completions"

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.num_connections += 1
                threading.Thread(target=self.talk, args=(connection, self.num_connections), daemon=True).start()

    def talk(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            for count in itertools.count():
                data = connection.recv(65536)
                if not data:
                    return
                self.requests.append(data)
                for piece in self.answer(number, count):
                    if piece is None:
                        return
                    connection.sendall(piece)


@contextmanager
def serving(answer: Callable[[int, int], list[bytes | None]]) -> Iterator[tuple[Server, LoadGenerator]]:
    server = Server(answer)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    generator = LoadGenerator(server.url, {"Authorization": "Bearer key"})
    try:
        yield server, generator
    finally:
        generator.close()
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        thread.join()


def send(generator: LoadGenerator, count: int) -> list[Attempt]:
    """So many requests, one after another."""
    for number in range(count):
        now = time.perf_counter()
        requests = deque([(now, generator.request(b"%d" % number))])
        while requests or generator.num_running:
            generator.arrive(requests, time.perf_counter() + 0.02)
            assert time.perf_counter() < now + 60
    return generator.attempts


def test_requests_are_sent_again_on_the_same_connection_and_refusals_are_read() -> None:
    with serving(lambda *_: [SMALL]) as (server, generator):
        attempts = send(generator, 3)
    assert [(attempt.status, attempt.retry_after, attempt.failure) for attempt in attempts] == 3 * [(429, 3.0, None)]
    assert all(attempt.ended is not None and attempt.ended >= attempt.due for attempt in attempts)
    assert (server.num_connections, generator.num_connections) == (1, 1)
    head, _, body = server.requests[-1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert head.endswith(b"Content-Type: application/json\r\nAuthorization: Bearer key\r\nContent-Length: 1")
    assert body == b"2"


def test_a_stream_is_read_wherever_it_was_cut() -> None:
    for cut in range(1, len(STREAM + CHUNKS)):
        check_cut(cut)


def check_cut(cut: int) -> None:
    whole = STREAM + CHUNKS
    attempt = Attempt(0.0, [(1.0, whole[:cut]), (2.0, whole[cut:])], 200, {"transfer-encoding": "chunked"})
    assert b"".join(piece for _, piece in attempt.recording.pieces) == b"data:{}\n"
    assert [at for at, _ in attempt.recording.pieces] == sorted(at for at, _ in attempt.recording.pieces)


def test_chunks_that_arrive_byte_by_byte_have_the_times_of_their_bytes() -> None:
    pieces = without_chunks((float(at), CHUNKS[at : at + 1]) for at in range(len(CHUNKS)))
    assert list(pieces) == [(3.0, b"d"), (4.0, b"a"), (5.0, b"t"), (6.0, b"a"), (7.0, b":"), (17.0, b"{"), (18.0, b"}"), (19.0, b"\n")]


def test_the_end_of_a_stream_is_found_where_it_comes_in_pieces() -> None:
    with serving(lambda *_: [STREAM, CHUNKS[:-7], CHUNKS[-7:-4], CHUNKS[-4:]]) as (server, generator):
        attempts = send(generator, 2)
    assert [attempt.status for attempt in attempts] == [200, 200]
    assert all(attempt.ended is not None for attempt in attempts)
    assert server.num_connections == 1


@pytest.mark.parametrize("pieces", [[None], [STREAM, None], [STREAM + CHUNKS[:10], None], [SMALL[:-1], None]])
def test_a_connection_that_breaks_is_a_failed_request_and_the_next_has_another(pieces: list[bytes | None]) -> None:
    with serving(lambda connection, _: pieces if connection == 1 else [SMALL]) as (server, generator):
        broken, answered = send(generator, 2)
    assert broken.failure is not None
    assert "closed the connection" in broken.failure
    assert (answered.status, answered.failure, server.num_connections) == (429, None, 2)


def test_a_request_that_meets_the_end_of_an_idle_connection_is_sent_again_on_another() -> None:
    with serving(lambda connection, count: [None] if (connection, count) == (1, 1) else [SMALL]) as (server, generator):
        attempts = send(generator, 3)
    assert [(attempt.status, attempt.failure) for attempt in attempts] == 3 * [(429, None)]
    assert server.num_connections == 2
    assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [b"0", b"1", b"1", b"2"]


def test_a_server_that_is_not_there_fails_each_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    generator = LoadGenerator(url, {})
    attempts = send(generator, 2)
    generator.close()
    assert [attempt.status for attempt in attempts] == [None, None]
    assert all(attempt.failure for attempt in attempts)


def test_so_many_requests_are_under_way_at_any_time() -> None:
    with serving(lambda *_: [SMALL]) as (_, generator):
        bodies = (generator.request(b"%d" % number) for number in range(10**6))
        generator.keep_busy(bodies, 3, time.perf_counter() + 0.1)
        assert generator.num_running <= 3
        assert generator.num_connections == 3
        assert sum(attempt.ended is not None for attempt in generator.attempts) > 3
