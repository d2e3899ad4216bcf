"""Opens streams of one server and reads them until it is stopped: the client of `host.py`, in a process of its own that imports little.

python benchmarks/stream_reader.py PORT STREAMS < BODY
"""

import asyncio
import sys


async def read_all(port: int, num_streams: int, body: bytes) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        while await reader.read(2**16):
            pass

    await asyncio.gather(*(read_one() for _ in range(num_streams)))


if __name__ == "__main__":
    asyncio.run(read_all(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.read()))
