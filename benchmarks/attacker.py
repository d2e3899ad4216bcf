"""How attacks are sent, and what their answers are called. They are sent from another process than the one that measures gaps."""

import asyncio
import io
import json
import re
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]
ANSWER_TOKENS = 8
PATIENCE_SECONDS = 120.0  # for an answer over HTTP
RAW_PATIENCE_SECONDS = 2.0  # for an answer on a socket, and for what may follow it
NEIGHBOUR_SECONDS = 10.0
MAX_ERROR_BYTES = 65536
STREAM_ERROR = re.compile(rb'data: {"error":(?:.*?"type": ?"(\w+)")?')
INTERNALS = re.compile(
    rb"0x[0-9a-f]{6}|object at|Traceback|__\w+__\(\)|unexpected keyword argument|multiple values for|/site-packages/|/home/"
)

Fields = dict[str, Any]
Send = Callable[["Attacker"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Access:
    """Where a server is and what opens it. The first key is the attacker's, the last one that of its neighbours."""

    url: str  # without /v1
    model: str
    keys: tuple[str, ...] = ()

    def authorization(self, position: int = 0) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[position]}"} if self.keys else {}


@dataclass(frozen=True, slots=True)
class Attack:
    """What `send` sends may be answered by the statuses that `expected` names, and by a 429 or 503 that says when to try again.

    `flags` are what the server is started with for it. A server that does not know those, or the flag `needs`, is not attacked so.
    Where `control` is set, the control period has a chat request with these fields for every 200 that the attack got.
    """

    name: str
    expected: str
    send: Send
    flags: str = ""
    needs: str = ""
    control: Fields | None = None

    @property
    def needed(self) -> list[str]:
        return [word for word in f"{self.flags} {self.needs}".split() if word.startswith("--")]

    def unexpected(self, statuses: Mapping[str, int]) -> list[str]:
        return sorted(set(statuses) - {*self.expected.split(), "429", "503"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are by `time.perf_counter()`, which all processes share on Linux."""

    statuses: dict[str, int]
    started: float
    ended: float
    error: str


def label(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """The status, and what is wrong with the answer beside it."""
    if status in (429, 503) and "retry-after" not in {name.lower() for name in headers}:
        return f"{status}-without-retry-after"
    if status == 200 and (broken := STREAM_ERROR.search(body)):
        return f"200-then-{(broken[1] or b'error').decode()}"
    if status >= 400 and len(body) > MAX_ERROR_BYTES:
        return f"{status}-of-{len(body)}-bytes"
    return f"{status}-with-internals" if status >= 400 and INTERNALS.search(body) else str(status)


def labels(data: bytes) -> Iterator[str]:
    """Of all answers that came over one connection."""
    for answer in re.split(rb"(?=HTTP/1\.[01] \d{3} )", data):
        if found := re.match(rb"HTTP/1\.[01] (\d{3}) ", answer):
            head, _, body = answer.partition(b"\r\n\r\n")
            headers = dict.fromkeys((line.partition(b":")[0].decode("latin-1") for line in head.split(b"\r\n")[1:]), "")
            yield label(int(found[1]), headers, body)


@dataclass(slots=True)
class Attacker:
    """One attack under way. Another `salt` makes other bodies, which no cache has seen."""

    access: Access
    session: aiohttp.ClientSession
    salt: int
    statuses: Counter[str] = field(default_factory=Counter)
    started: float | None = None  # when the first byte went out
    error: str = ""

    def begin(self) -> None:
        self.started = self.started or time.perf_counter()

    def note(self, status: str, error: str = "") -> None:
        self.statuses[status] += 1
        self.error = self.error or error

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[str, bytes]:
        """The label of the answer and its body. A large body goes out in pieces."""
        sent_headers = self.access.authorization() | {"Content-Type": "application/json"} | dict(headers or {})
        self.begin()
        try:
            data = None if body is None else io.BytesIO(body)
            async with self.session.request(method, self.access.url + path, data=data, headers=sent_headers) as response:
                answer = await response.read()
            return label(response.status, response.headers, answer), answer
        except TimeoutError:
            return "no-answer", b""
        except aiohttp.ClientError as error:
            return "closed", str(error).encode()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """Notes how a request is answered."""
        status, answer = await self.request("POST", path, body, headers)
        self.note(status, "" if status == "200" else message(answer))
        return answer

    async def connect(self, receive_bytes: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.access.url.removeprefix("http://").partition(":")
        connection = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        self.begin()
        await asyncio.get_running_loop().sock_connect(connection, (host.strip("[]"), int(port)))
        return await asyncio.open_connection(sock=connection, limit=2**12 if receive_bytes else 2**16)

    def body(self, path: str, fields: Fields | Callable[[int], Fields], number: int = 0) -> bytes:
        """What is said completed to a request for a short answer."""
        given = fields(self.salt * 1000 + number) if callable(fields) else fields
        default: Fields = {"model": self.access.model}
        if path == CHAT:
            default |= {"messages": MESSAGES, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        elif path == COMPLETIONS:
            default |= {"prompt": "Say something.", "max_tokens": ANSWER_TOKENS, "temperature": 0}
        return json.dumps(default | given).encode()

    def head(self, method: str, path: str, *lines: str) -> bytes:
        """Of a request over a socket, with the attacker's key."""
        key = [f"Authorization: Bearer {self.access.keys[0]}"] if self.access.keys else []
        return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *key, *lines, "", ""]).encode()


def message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])[:150]
    except (ValueError, KeyError, TypeError):
        return answer[:150].decode(errors="replace")


def run_attack(attack: Attack, access: Access, salt: int) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))

    async def run() -> Outcome:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as session:
            attacker = Attacker(access, session, salt)
            await attack.send(attacker)
            ended = time.perf_counter()
        return Outcome(dict(attacker.statuses), attacker.started or ended, ended, attacker.error)

    return asyncio.run(run())


def post(path: str, fields: Fields | Callable[[int], Fields], num_at_once: int = 1, headers: Mapping[str, str] | None = None) -> Send:
    async def send(attacker: Attacker) -> None:
        bodies = [attacker.body(path, fields, number) for number in range(num_at_once)]
        await asyncio.gather(*(attacker.post(path, body, headers) for body in bodies))

    return send


def chat(fields: Fields | Callable[[int], Fields], num_at_once: int = 1, headers: Mapping[str, str] | None = None) -> Send:
    return post(CHAT, fields, num_at_once, headers)


def each(path: str, *variants: Fields) -> Send:
    """One request after another."""

    async def send(attacker: Attacker) -> None:
        for variant in variants:
            await attacker.post(path, attacker.body(path, variant))

    return send


def encoded(path: str, body: Callable[[], bytes], **headers: str) -> Send:
    """A body that is not JSON, sent unchanged."""

    async def send(attacker: Attacker) -> None:
        await attacker.post(path, body(), {name.replace("_", "-"): value for name, value in headers.items()})

    return send


def raw(*requests: str, has_key: bool = True) -> Send:
    """Each on a connection of its own, sent byte by byte, with `{key}` for a header that has the key or none."""

    async def send(attacker: Attacker) -> None:
        key = f"Authorization: Bearer {attacker.access.keys[0]}\r\n" if has_key and attacker.access.keys else ""
        for request in requests:
            reader, writer = await attacker.connect()
            writer.write(request.replace("{key}", key).encode("latin-1"))
            for status in await answers(reader):
                attacker.note(status)
            writer.close()

    return send


async def answers(reader: asyncio.StreamReader, seconds: float = RAW_PATIENCE_SECONDS) -> list[str]:
    """The labels of all answers until the connection is closed or silent for so long; `closed` or `open` if there was no answer."""
    data = b""
    is_open = True
    try:
        while piece := await asyncio.wait_for(reader.read(2**16), seconds):
            data += piece
        is_open = False
    except TimeoutError:
        pass
    except OSError:
        is_open = False
    return list(labels(data)) or ["open" if is_open else "closed"]


def slow(beginning: Callable[[Attacker], bytes], seconds: float, num_at_once: int) -> Send:
    """Connections on which a request begins, and a byte comes every second."""

    async def send_one(attacker: Attacker) -> None:
        try:
            reader, writer = await attacker.connect()
        except OSError:
            attacker.note("closed")
            return
        writer.write(beginning(attacker))
        reading = asyncio.create_task(answers(reader, seconds))
        until = time.perf_counter() + seconds
        while not reading.done() and time.perf_counter() < until:
            await asyncio.wait([reading], timeout=1)
            if not reading.done() and beginning(attacker):
                writer.write(b"a")
        for status in await reading:
            attacker.note(status)
        writer.close()

    async def send(attacker: Attacker) -> None:
        await asyncio.gather(*(send_one(attacker) for _ in range(num_at_once)))

    return send


def cut(fields: Fields | Callable[[int], Fields], times: int, num_at_once: int = 16, is_reset: bool = False) -> Send:
    """Chat requests whose client goes away: after nothing, after the body, and at later and later times of the answer."""

    async def send_one(attacker: Attacker, number: int) -> None:
        body = attacker.body(CHAT, fields, number)
        _, writer = await attacker.connect()
        whole = attacker.head("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(body)}") + body
        writer.write(whole if number % 8 else whole[:-1])
        await asyncio.sleep(number % 8 * 0.02)
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 3:
            writer.close()
        else:
            with suppress(OSError):
                writer.write_eof()
            await asyncio.sleep(0.1)
            writer.close()
        attacker.note("cut")

    async def send(attacker: Attacker) -> None:
        for start in range(0, times, num_at_once):
            await asyncio.gather(*(send_one(attacker, number) for number in range(start, min(start + num_at_once, times))))

    return send


def unread(fields: Fields, seconds: float) -> Send:
    """A stream that nothing reads for so long. What comes then is `whole`, or was `cut` by the server."""

    async def send(attacker: Attacker) -> None:
        body = attacker.body(CHAT, fields | {"stream": True})
        reader, writer = await attacker.connect(receive_bytes=4096)
        writer.write(attacker.head("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(seconds)  # asyncio reads a few kilobytes by itself
        data = b""
        with suppress(OSError):
            while piece := await asyncio.wait_for(reader.read(2**16), PATIENCE_SECONDS):
                data = (data + piece)[-64:]
        attacker.note("whole" if b"[DONE]" in data else "cut")
        writer.close()

    return send


def beside(attack: Send, path: str = CHAT, fields: Fields | None = None, times: int = 3) -> Send:
    """The attack, and ordinary requests of another client meanwhile. Noted are those that are not served, as `neighbour-`status."""

    async def neighbour(attacker: Attacker, number: int) -> str:
        body = attacker.body(path, {**(fields or {}), "user": f"neighbour {number}"})
        while True:
            status, _ = await attacker.request("POST", path, body, attacker.access.authorization(-1))
            if status not in ("429", "503"):
                return status
            await asyncio.sleep(0.2)

    async def send(attacker: Attacker) -> None:
        attacking = asyncio.create_task(attack(attacker))
        for number in range(times):
            await asyncio.sleep(0.2)
            try:
                status = await asyncio.wait_for(neighbour(attacker, number), NEIGHBOUR_SECONDS)
            except TimeoutError:
                status = "starved"
            if status != "200":
                attacker.note(f"neighbour-{status}")
        await attacking

    return send
