"""The kinds of requests that a soak sends: those of real clients, mistakes, hostile constraints, and clients that are slow or gone."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.attacker import CHAT, COMPLETIONS, Attacker, Fields
from benchmarks.hostile_attacks import BROKEN_CONSTRAINTS, EMPTY_CONSTRAINTS
from benchmarks.hostile_server import Server
from benchmarks.soak_probes import EMBEDDINGS, TOKENIZE, WORDS, Probes

NUM_SCHEMAS = 8
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
FILES, BATCHES, RESPONSES, MESSAGES = "/v1/files", "/v1/batches", "/v1/responses", "/v1/messages"
BATCH_SECONDS = 300.0
READ_SECONDS = 0.2  # between two pieces that a slow client reads


@dataclass(slots=True)
class Client:
    """One of a soak's clients at one server."""

    server: Server
    rng: random.Random
    probes: Probes

    @property
    def attacker(self) -> Attacker:
        return Attacker(self.server.access, self.server.client.session, 0)

    async def post(self, path: str, fields: Fields) -> tuple[str, Any]:
        """Status, and the decoded body of an answer that is not streamed."""
        return await self.request("POST", path, self.attacker.body(path, fields))

    async def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[str, Any]:
        status, answer = await self.attacker.request(method, path, body, headers)
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer

    def said(self) -> Fields:
        """A question of any length, mostly short."""
        num_words = self.rng.choice((3, 10, 30, 30, 100, 400))
        content = " ".join(self.rng.choices(WORDS, k=num_words))
        return {"messages": [{"role": "user", "content": content}], "max_tokens": self.rng.randint(4, 16)}


Send = Callable[[Client], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and one in `weight` of the sum of all weights. `expected` are the statuses that it may get, beside a 429 or 503
    that says when to try again.

    `needs` is a path that a server without this kind of request answers with 404, or the name of an adapter that it may lack.
    """

    name: str
    weight: int
    send: Send
    expected: tuple[str, ...] = ("200",)
    needs: str = ""

    def is_expected(self, status: str) -> bool:
        return status in (*self.expected, "429", "503")


def posted(path: str, fields: Callable[[Client], Fields]) -> Send:
    async def send(client: Client) -> str:
        return (await client.post(path, fields(client)))[0]

    return send


def chat(fields: Callable[[Client], Fields]) -> Send:
    return posted(CHAT, lambda client: client.said() | fields(client))


def named(number: int) -> Fields:
    """A schema of which each number has another."""
    return {"guided_json": {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}}


async def probe(client: Client) -> str:
    chosen = client.rng.choice(client.probes.all)
    status, answer = await client.attacker.request("POST", chosen.path, chosen.body)
    if status == "200":
        client.probes.compare("probe", chosen, answer)
    return status


async def batch(client: Client) -> str:
    """A file of probes, whose answers are compared; everything of it is deleted in the end."""
    probes = client.rng.choices(client.probes.all, k=6)
    lines = [{"custom_id": str(number), "method": "POST", "url": CHAT, "body": probe.asked} for number, probe in enumerate(probes)]
    status, file = await upload(client, "\n".join(map(json.dumps, lines)))
    if status != "200":
        return status
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    status, state = await client.request("POST", BATCHES, json.dumps(asked).encode())
    deadline = asyncio.get_running_loop().time() + BATCH_SECONDS
    while status == "200" and state["status"] in ("validating", "in_progress", "finalizing"):
        if asyncio.get_running_loop().time() > deadline:
            return "batch-not-finished"
        await asyncio.sleep(0.5)
        status, state = await client.request("GET", f"{BATCHES}/{state['id']}")
    if status != "200" or state["status"] != "completed":
        return f"batch-{state.get('status', status)}"
    _, content = await client.attacker.request("GET", f"{FILES}/{state['output_file_id']}/content")
    for line in map(json.loads, content.splitlines()):
        client.probes.compare("batch", probes[int(line["custom_id"])], line["response"]["body"])
    for file_id in (state["output_file_id"], file["id"]):
        await client.request("DELETE", f"{FILES}/{file_id}")
    return "200"


async def upload(client: Client, content: str) -> tuple[str, Any]:
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n{content}\r\n--b--\r\n'
    )
    return await client.request("POST", FILES, form.encode(), {"Content-Type": "multipart/form-data; boundary=b"})


async def conversation(client: Client) -> str:
    """Stored responses, one after another, of which the first is read, and all are deleted."""
    previous: list[str] = []
    for _ in range(3):
        asked: Fields = {"input": " ".join(client.rng.choices(WORDS, k=9)), "max_output_tokens": 16}
        status, answer = await client.post(RESPONSES, asked | ({"previous_response_id": previous[-1]} if previous else {}))
        if status != "200":
            break
        previous.append(answer["id"])
    if previous:
        found, _ = await client.request("GET", f"{RESPONSES}/{previous[0]}")
        status = status if found == "200" else found
    for response_id in previous:
        await client.request("DELETE", f"{RESPONSES}/{response_id}")
    return status


async def valid_schema(client: Client) -> str:
    """An answer that has ended is JSON of its schema."""
    number = client.rng.randrange(NUM_SCHEMAS)
    status, answer = await client.post(CHAT, client.said() | named(number) | {"max_tokens": 40})
    if status == "200" and (choice := answer["choices"][0])["finish_reason"] == "stop":
        with suppress(ValueError):
            return status if isinstance(json.loads(choice["message"]["content"])[f"p{number}"], int) else "not-of-its-schema"
        client.probes.mismatches.append(f"schema: {choice['message']['content']!r:.200}")
    return status


# Clients that go, or are slow.


async def leave(client: Client) -> str:
    """In the middle of a stream, or before its first byte."""
    body = client.attacker.body(CHAT, client.said() | {"stream": True, "max_tokens": 200, "ignore_eos": True})
    headers = client.server.access.authorization() | {"Content-Type": "application/json"}
    async with client.server.client.session.post(client.server.access.url + CHAT, data=body, headers=headers) as response:
        for _ in range(client.rng.randrange(4)):
            await response.content.readany()
    return str(response.status)


async def break_off(client: Client) -> str:
    """With RST, after any part of a request."""
    reader, writer = await client.attacker.connect()
    sent = sent_bytes(client, {"stream": True, "n": 3, "max_tokens": 100})
    writer.write(sent[: client.rng.choice((client.rng.randrange(len(sent)), len(sent)))])
    with suppress(TimeoutError, OSError):
        await asyncio.wait_for(reader.read(100), client.rng.random())
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    return "cut"


async def read_slowly(client: Client) -> str:
    """A few bytes at a time, for some seconds: the server keeps what is unread, up to its bound."""
    reader, writer = await client.attacker.connect(4096)
    writer.write(sent_bytes(client, {"stream": True, "n": 4, "max_tokens": 400, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}))
    with suppress(TimeoutError, OSError):
        for _ in range(client.rng.randrange(40)):
            await asyncio.wait_for(reader.read(64), 5)
            await asyncio.sleep(READ_SECONDS)
    writer.close()
    return "cut"


def sent_bytes(client: Client, fields: Fields) -> bytes:
    body = client.attacker.body(CHAT, client.said() | fields)
    head = client.attacker.head("POST", CHAT, f"Content-Length: {len(body)}", "Content-Type: application/json", "Connection: close")
    return head + body


def odd_numbers(client: Client) -> Fields:
    return {"n": -client.rng.randrange(1, 9)}


async def broken_body(client: Client) -> str:
    body = client.attacker.body(CHAT, client.said())
    return (await client.request("POST", CHAT, body[: client.rng.randrange(len(body) - 1)]))[0]


def own_regex(client: Client) -> Fields:
    return {"guided_regex": f"[a-z]{{1,9}}{client.rng.randrange(10**9)}"}


def sampled(client: Client) -> Fields:
    return {"temperature": 1.0, "seed": client.rng.randrange(99), "n": client.rng.randint(1, 3)}


def long_prompt(client: Client) -> Fields:
    """Of which a few fill the cache, so that sequences are preempted."""
    words = client.rng.choices(WORDS, k=client.rng.randint(500, 900))
    length = {"n": client.rng.randint(1, 4), "max_tokens": client.rng.randint(60, 240), "ignore_eos": True}
    return {"messages": [{"role": "user", "content": " ".join(words)}]} | length


def own_template(client: Client) -> Fields:
    """Rendered in a process of its own, where the operator lets requests bring templates."""
    return {"chat_template": "{{ messages[0].content }}" + str(client.rng.randrange(10**6))}


GENERATION = [
    Kind("probe", 20, probe),
    Kind("chat", 12, chat(lambda client: {})),
    Kind("sampled", 8, chat(sampled)),
    Kind("stream", 12, chat(lambda client: {"stream": True})),
    Kind("log probabilities", 3, chat(lambda client: {"logprobs": True, "top_logprobs": 5})),
    Kind("completion", 6, posted(COMPLETIONS, lambda client: {"prompt": " ".join(client.rng.choices(WORDS, k=20)), "max_tokens": 9})),
    Kind("message", 5, posted(MESSAGES, lambda client: client.said()), needs=MESSAGES),
    Kind("conversation", 3, conversation, needs=RESPONSES),
    Kind("tools", 5, chat(lambda client: {"tools": [TOOL], "tool_choice": client.rng.choice(("auto", "required"))})),
    Kind("reasoning", 5, chat(lambda client: {"model": "thinking", "max_tokens": 60}), needs="thinking"),
    Kind("schema of a few", 6, valid_schema),
    Kind("schema of its own", 3, chat(lambda client: named(client.rng.randrange(10**9)))),
    Kind("regex of its own", 2, chat(own_regex)),
    Kind("batch", 1, batch, needs=FILES),
    Kind("long prompt", 5, chat(long_prompt)),
    Kind("tokenize", 3, posted(TOKENIZE, lambda client: {"prompt": " ".join(client.rng.choices(WORDS, k=200))})),
    Kind("template", 2, chat(own_template), ("200", "400")),
    Kind("hostile constraint", 2, chat(lambda client: client.rng.choice((*EMPTY_CONSTRAINTS, *BROKEN_CONSTRAINTS))), ("200", "400")),
    Kind("odd number", 2, chat(odd_numbers), ("400",)),
    Kind("image", 1, chat(lambda client: {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), ("400",)),
    Kind("broken body", 2, broken_body, ("400",)),
    Kind("unknown model", 1, chat(lambda client: {"model": f"m{client.rng.randrange(10**9)}"}), ("404",)),
    Kind("client that goes", 6, leave),
    Kind("client that breaks off", 3, break_off, ("cut",)),
    Kind("client that reads slowly", 2, read_slowly, ("cut",)),
]
POOLING = [
    Kind("probe", 8, probe),
    Kind("texts", 3, posted(EMBEDDINGS, lambda client: {"input": [" ".join(client.rng.choices(WORDS, k=9)) for _ in range(16)]})),
    Kind("long text", 2, posted(EMBEDDINGS, lambda client: {"input": " ".join(client.rng.choices(WORDS, k=200))})),
    Kind("odd number", 1, posted(EMBEDDINGS, lambda client: {"input": "a", "dimensions": -1}), ("400",)),
]
