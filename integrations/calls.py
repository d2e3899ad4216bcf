"""What actors send each other in place of HTTP: a request as it came, and how its answer begins."""

from dataclasses import dataclass

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade"})
REWRITTEN = HOP_BY_HOP | {"content-length", "expect", "te", "trailer"}  # of the request: what the new connection says itself
END_OF_HEAD = b"\r\n\r\n"
REPLICA_HEADER = "x-replica"  # which one has answered, by Serve's name for it

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came over HTTP. `target` has the path and the query."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""

    def encode(self) -> bytes:
        """HTTP/1.0, so that the answer ends with the connection and no chunk has a length of its own."""
        lines = [f"{self.method} {self.target} HTTP/1.0", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers if name.lower() not in REWRITTEN]
        assert not any("\r" in line or "\n" in line for line in lines), "whatever has read the request refuses them"
        return "\r\n".join(lines).encode("latin-1") + END_OF_HEAD + self.body


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Headers

    @classmethod
    def decode(cls, content: bytes) -> "Head":
        first, *lines = content.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(int(first.split(" ", 2)[1]), [(name, value.strip()) for name, _, value in pairs if name.lower() not in HOP_BY_HOP])
