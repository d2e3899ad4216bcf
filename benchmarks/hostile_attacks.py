"""The attacks: what has hurt a server like this one, here or elsewhere, each with the statuses that it may get."""

import asyncio
import contextlib
import gzip
import json
import re
import zlib
from functools import partial
from itertools import product
from typing import Any

from benchmarks.attacker import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    Access,
    Attack,
    Attacker,
    Fields,
    Outcome,
    Send,
    beside,
    chat,
    cut,
    each,
    encoded,
    post,
    raw,
    run_attack,
    slow,
    unread,
)
from benchmarks.hostile_constraints import INPUTS, HostileInput

MILLION = 10**6
CLEAR_NATS = 0.2
NUMBERS: tuple[Any, ...] = (-(2**63), -1, 0, 2**31, 2**63, 10**308, 1e308, 5e-324, -0.0, 1.5, True, "5", None, [], {})
NUMERIC_FIELDS = (
    *("n", "best_of", "max_tokens", "min_tokens", "top_logprobs", "logprobs", "seed", "priority", "top_k", "temperature", "top_p"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "thinking_token_budget", "timeout"),
    *("truncate_prompt_tokens", "prompt_logprobs", "beam_width"),
)
TOKEN_IDS = (49151, 49152, 49215, 49216, -1, 2**31 - 1)  # the default model has 49152
TOKEN_ID_FIELDS: tuple[Fields, ...] = (
    *({"allowed_token_ids": [token]} for token in TOKEN_IDS),
    *({"stop_token_ids": [token]} for token in TOKEN_IDS),
    *({"logit_bias": {str(token): 1}} for token in TOKEN_IDS),
)
PROCESSORS: tuple[Fields, ...] = tuple(
    {"logits_processors": [{"name": "no_repeat_ngram", "arguments": arguments}]} for arguments in ({"x": 1}, {"size": "a"}, {"self": 1})
)
MODEL_NAMES = ("../../etc/passwd", "a\nb", "\x1b[31m", "%s%n")
TEMPLATES = {
    "of a long list": "{{ ['a'*1000000]*2000 }}",
    "of a dict of lists": "{% set x = {'a':['b'*1000000]*2000} %}{{ x }}",
    "that indents": "{{ ('a\\n'*3000000)|indent(1000) }}",
    "of wide fields": "{{ ('{:9999999}'*300).format(*([1]*300)) }}",
    "of one field often": "{{ ('{0}'*2000).format('a'*1000000) }}",
    "of a percent format": "{{ ('%9999999d'*300) % ((1,)*300) }}",
    "of a date": "{{ strftime_now('%255Y'*1000000) }}",
    "that adds lists": "{{ ([[1]*1000000]*300)|sum(start=[]) }}",
    "of JSON": "{{ (['b'*1000000]*2000)|tojson }}",
    "that loops": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "of a power": "{{ 9**(9**9) }}",
}
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ self._TemplateReference__context }}",
    "{% import 'os' as os %}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages|map('upper') }}",
    "{{ raise_exception }}",
)
OVERRIDES = ("chat_template", "tokenize", "add_generation_prompt", "conversation", "messages", "tools", "documents", "self", "__class__")
PATHS_AROUND_THE_KEY = (
    "//v1/models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/v1/models;/health",
    "/%76%31/models",
    "/v1/models?/health",
    "/v1/models#/health",
    "/./v1/models",
    "/v1//models",
    "/health%00/../v1/models",
    "/ping/../v1/models",
    "http://x/v1/models",
    "/V1/models",
)
HEADERS_AROUND_THE_KEY = (
    "Host: a/health?",
    "X-Forwarded-Prefix: /health",
    "X-Original-URL: /health",
    "X-Rewrite-URL: /health",
    "X-HTTP-Method-Override: OPTIONS",
    "Authorization: Basic a2V5",
    "Authorization: Bearer",
    "Authorization: Bearer wrong",
    "Authorization: bearer  ",
    "X-Api-Key: wrong",
)
ROUTES = (
    *("/v1/models", "/v1/models/x", "/version", "/metrics", CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank"),
    *("/openai/models", "/openai/deployments/x/chat/completions", "/score", "/pooling", "/classify", "/v1/responses", "/none"),
)
EMPTY_CONSTRAINTS: tuple[Fields, ...] = (
    *({"guided_regex": ""}, {"guided_choice": []}, {"guided_choice": [""]}, {"guided_json": ""}, {"guided_json": []}),
    *({"guided_grammar": " "}, {"structural_tag": {}}, {"structured_outputs": {}}, {"response_format": {}}),
)
BROKEN_CONSTRAINTS: tuple[Fields, ...] = (
    *({"guided_json": {"type": "strin"}}, {"guided_regex": "["}, {"guided_json": {"$ref": "http://127.0.0.1:9/x"}}),
    *({"guided_json": {"$ref": "#"}}, {"guided_json": {"$ref": "file:///etc/passwd"}}, {"guided_json": '{"type": NaN}'}),
    {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
)
POOLING = "--model minilm"
TRUSTING = "--trust-request-chat-template"


def words(num_characters: int) -> str:
    return "abc de " * (num_characters // 7)


def request(path: str, *lines: str, body: str = "", method: str = "POST") -> str:
    """A request over a socket; the key is put in for `{key}`."""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{{key}}" + "".join(f"{line}\r\n" for line in lines) + f"\r\n{body}"


def numbered(num_keys: int) -> dict[str, int]:
    return {f"k{i}": 1 for i in range(num_keys)}


def zeros(wbits: int) -> bytes:
    """Half a gigabyte of them, compressed."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, wbits)
    return b"".join([*(compressor.compress(bytes(2**20)) for _ in range(512)), compressor.flush()])


def constraint(hostile: HostileInput) -> Attack:
    return Attack(hostile.name, "200 400 413", chat(hostile.fields, hostile.num_at_once), control={})


async def without_a_key(attacker: Attacker) -> None:
    methods = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
    for route, method in product(ROUTES, methods):
        for key in ("", "Bearer wrong", "Basic a2V5", "Bearer " + "x" * 4000):
            status, _ = await attacker.request(method, route, headers={"Authorization": key})
            attacker.note(status)


async def cached_by_another_key(attacker: Attacker) -> None:
    """A prompt that another client has just sent: the usage tells whether it was computed before."""
    body = attacker.body(CHAT, {"messages": [{"role": "user", "content": f"{attacker.salt} " + words(2000)}]})
    for key in (-1, 0):
        status, answer = await attacker.request("POST", CHAT, body, attacker.access.authorization(key))
        usage: Any = json.loads(answer)["usage"] if status == "200" else {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
        is_shared = usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2  # less is the template's own beginning
        attacker.note("shared-prefix" if is_shared else status)


async def one_request_id(attacker: Attacker) -> None:
    await churn(attacker, {"X-Request-Id": "the-same"}, [])


async def recycled_slots(attacker: Attacker) -> None:
    """Plain requests among short ones of all kinds, which come and go."""
    kinds: list[Fields] = [
        *({"allowed_token_ids": [5, 6, 7]}, {"guided_regex": "[0-9]+"}, {"logit_bias": {"5": 100}}, {"repetition_penalty": 1.9}),
        *({"temperature": 1.5, "seed": 3}, {"n": 3, "temperature": 1.0}, {"min_tokens": 1}, {"bad_words": ["the"]}),
    ]
    await churn(attacker, {}, kinds)


async def churn(attacker: Attacker, headers: dict[str, str], kinds: list[Fields]) -> None:
    """Answers that differ from what the same request gets alone are noted as `differs`."""
    asked: Fields = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    plain = [attacker.body(CHAT, asked | {"messages": [{"role": "user", "content": f"Count from {i}."}]}) for i in range(8)]
    alone = [tokens(await attacker.post(CHAT, body)) for body in plain]
    others = [attacker.body(CHAT, kind | {"max_tokens": 1 + i % 7}) for i, kind in enumerate(kinds * 12)]

    async def compare(number: int) -> None:
        said, expected = tokens(await attacker.post(CHAT, plain[number % len(plain)], headers)), alone[number % len(plain)]
        if said and is_another(said, expected):
            attacker.note("differs", f"{''.join(token for token, _ in said)!r}, alone {''.join(token for token, _ in expected)!r}")

    await asyncio.gather(*(compare(number) for number in range(96)), *(attacker.post(CHAT, body, headers) for body in others))


def tokens(answer: bytes) -> list[tuple[str, float]]:
    """Each token with how much likelier it was than the next, in nats."""
    with contextlib.suppress(ValueError, LookupError):
        logprobs = json.loads(answer)["choices"][0]["logprobs"]
        entries = [*(logprobs.get("reasoning_content") or []), *logprobs["content"]]
        sampled = [entry for entry in entries if entry["top_logprobs"]]  # others end the reasoning
        return [(entry["token"], entry["top_logprobs"][0]["logprob"] - entry["top_logprobs"][1]["logprob"]) for entry in sampled]
    return []


def is_another(said: list[tuple[str, float]], expected: list[tuple[str, float]]) -> bool:
    """Where they part, `expected` was clear: rounding depends on what else is in a step, and may decide between two likely tokens."""
    parted = next((margin for (ours, _), (theirs, margin) in zip(said, expected, strict=False) if ours != theirs), None)
    return len(said) != len(expected) if parted is None else parted > CLEAR_NATS


async def memory_addresses(attacker: Attacker) -> None:
    """What a template writes of objects that are no text, as `/tokenize` shows it."""
    for template in ESCAPES[6:]:
        fields: Fields = {"messages": MESSAGES, "chat_template": template, "return_token_strs": True}
        answer = await attacker.post("/tokenize", attacker.body("/tokenize", fields))
        with contextlib.suppress(ValueError, LookupError):
            if re.search("0x[0-9a-f]{6}", "".join(json.loads(answer)["token_strs"])):
                attacker.note("address-in-prompt")


async def many_labels(attacker: Attacker) -> None:
    """What `/metrics` shows must not grow with the paths, models and methods that were asked for."""
    _, before = await attacker.request("GET", "/metrics")
    for number in range(300):
        for method, path, fields in (("GET", f"/p{number}", None), ("PURGE", "/", None), ("POST", CHAT, {"model": f"m{number}"})):
            body = attacker.body(path, fields) if fields else None
            attacker.note((await attacker.request(method, path, body))[0])
    _, after = await attacker.request("GET", "/metrics")
    num_lines = len(after.splitlines()) - len(before.splitlines())
    if num_lines > 40:  # the statuses above, once each
        attacker.note("metrics-grow", f"{num_lines} more lines")


async def fetched(attacker: Attacker) -> None:
    """Addresses in requests. A connection to one of them is noted as `fetched`."""

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attacker.note("fetched")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/x.png", f"http://localhost:{port}/", "file:///etc/passwd", "//etc/passwd"):
        parts = [{"type": kind, kind: {"url": url}} for kind in ("image_url", "video_url", "audio_url")]
        for part in parts:
            await attacker.post(CHAT, attacker.body(CHAT, {"messages": [{"role": "user", "content": [part]}]}))
        await attacker.post(CHAT, attacker.body(CHAT, {"guided_json": {"$ref": url}}))
        await attacker.post(CHAT, attacker.body(CHAT, {"model": url}))
    server.close()


async def names_its_software(attacker: Attacker) -> None:
    async with attacker.session.get(attacker.access.url + "/health") as response:
        attacker.begin()
        attacker.note("names-its-software" if "/" in response.headers.get("Server", "") else str(response.status))


def starving(seconds: float) -> Send:
    """Requests of the highest priority, one after another."""

    async def client(attacker: Attacker) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await attacker.post(CHAT, attacker.body(CHAT, {"n": 16, "priority": -(2**31), "max_tokens": 64, "temperature": 1}))
            await asyncio.sleep(0.1)

    async def send(attacker: Attacker) -> None:
        await asyncio.gather(*(client(attacker) for _ in range(8)))

    return send


def chunk_head(attacker: Attacker) -> bytes:
    return attacker.head("POST", CHAT, "Transfer-Encoding: chunked") + b"5\r\n"


def length_head(attacker: Attacker) -> bytes:
    return attacker.head("POST", CHAT, "Content-Length: 100000", "Content-Type: application/json")


def begun_head(attacker: Attacker) -> bytes:
    return attacker.head("POST", CHAT)[:-2] + b"X-Slow: "


BODIES = [
    Attack("numbers out of range", "400", each(CHAT, *({"n": 10**9}, {"best_of": 10**9}, {"top_logprobs": 10**9}, {"max_tokens": -1}))),
    Attack(
        "numeric fields", "200 400 504", each(CHAT, *({"max_tokens": 2, name: value} for name, value in product(NUMERIC_FIELDS, NUMBERS)))
    ),
    Attack("stop of 1 MB", "400", chat(lambda salt: {"stop": ["x" * MILLION]})),
    Attack("tokenize 15 MB", "400 413", beside(post("/tokenize", lambda salt: {"prompt": words(15 * MILLION)}))),
    Attack("tokenize one word of 16 MB", "400 413", beside(post("/tokenize", lambda salt: {"prompt": "x" * (16 * MILLION)}))),
    Attack("8 times tokenize 15 MB", "200 400 413", beside(post("/tokenize", lambda salt: {"prompt": words(15 * MILLION)}, 8))),
    Attack("tokenize 4 MB with strings", "400", post("/tokenize", lambda salt: {"prompt": words(4 * MILLION), "return_token_strs": True})),
    Attack("detokenize 5,000,000 ids", "400 413", post("/detokenize", lambda salt: {"tokens": [5] * (5 * MILLION)})),
    Attack("2,048 prompts", "200 400", post(COMPLETIONS, lambda salt: {"prompt": ["Hello"] * 2048, "max_tokens": 1})),
    Attack("1,000,000 prompts", "400", post(COMPLETIONS, lambda salt: {"prompt": ["a"] * MILLION})),
    Attack("prompt of 5,000,000 ids", "400", post(COMPLETIONS, lambda salt: {"prompt": [5] * (5 * MILLION)})),
    Attack("metadata of 1,000,000 keys", "200 400", chat(lambda salt: {"metadata": numbered(MILLION)})),
    Attack("metadata of 3,000,000 strings", "200 400", chat(lambda salt: {"metadata": {"a": ["x"] * (3 * MILLION)}})),
    Attack("metadata of 2,500,000 floats", "200 400", chat(lambda salt: {"metadata": {"a": [1.5] * (5 * MILLION // 2)}})),
    Attack("logit_bias of 1,000,000 keys", "400", chat(lambda salt: {"logit_bias": {str(i): 1 for i in range(MILLION)}})),
    Attack("120,000 messages", "400", beside(chat(lambda salt: {"messages": [{"role": "user", "content": ""}] * 120_000}))),
    Attack("8 times 249,990 messages", "400", beside(chat(lambda salt: {"messages": [{"role": "user", "content": ""}] * 249_990}, 8))),
    Attack("249,990 lists in a schema", "400", chat(lambda salt: {"guided_json": {"const": [[]] * 249_990}})),
    Attack("262,144 allowed tokens", "200 400", chat(lambda salt: {"allowed_token_ids": [5] * 2**18})),
    Attack("1,000,000 stop ids", "400", chat(lambda salt: {"stop_token_ids": [5] * MILLION})),
    Attack("16 MB in one message", "400 413", chat(lambda salt: {"messages": [{"role": "user", "content": "x" * (16 * MILLION)}]})),
    Attack("249,000 brackets", "400", encoded(CHAT, lambda: b'{"messages": ' + b"[" * 249_000)),
    Attack("model's name of 10 MB", "400 404", chat(lambda salt: {"model": "m" * (10 * MILLION)})),
    Attack("gzip bomb", "413", encoded(CHAT, partial(zeros, 31), Content_Encoding="gzip")),
    Attack("deflate bomb", "413", encoded(CHAT, partial(zeros, 15), Content_Encoding="deflate")),
    Attack("gzip twice", "400 413 415", encoded(CHAT, lambda: gzip.compress(zeros(31)), Content_Encoding="gzip, gzip")),
    Attack("token ids outside the vocabulary", "200 400", each(CHAT, *TOKEN_ID_FIELDS)),
    Attack("prompts outside the vocabulary", "200 400", each(COMPLETIONS, *({"prompt": [token]} for token in TOKEN_IDS))),
    Attack("path traversal in model names", "400 404", each(CHAT, *({"model": name} for name in MODEL_NAMES))),
    Attack("SSRF", "400 404", fetched),
    Attack("logits processor arguments", "400", each(CHAT, *PROCESSORS)),
]

CONSTRAINTS = [
    Attack("empty constraints", "200 400", each(CHAT, *EMPTY_CONSTRAINTS)),
    Attack("broken constraints", "200 400", each(CHAT, *BROKEN_CONSTRAINTS)),
    Attack(
        "regex beyond the lexer's limit",
        "200 400",
        chat(lambda salt: {"guided_regex": f"(.{{0,20}}a.{{0,20}}|.{{0,20}}b.{{0,20}}){{4}}|{salt}"}),
    ),
    Attack(
        "regex beyond the lexer's limit, streamed",
        "200 400 200-then-BadRequestError",
        chat(lambda salt: {"guided_regex": f"(.{{0,20}}a.{{0,20}}|.{{0,20}}b.{{0,20}}){{4}}|{salt}", "stream": True}),
    ),
    Attack(
        "25 times multipleOf 131,071",
        "200 400",
        chat(lambda salt: {"guided_json": {"type": "object", "properties": {f"n{salt}": {"type": "integer", "multipleOf": 131_071}}}}, 25),
        control={},
    ),
    Attack(
        "200 schemas, no two the same",
        "200 400",
        chat(lambda salt: {"guided_json": {"type": "object", "properties": {f"n{salt}": {"type": "string"}}}, "max_tokens": 1}, 200),
        control={},
    ),
    Attack(
        "disconnects while compiling",
        "cut",
        cut(
            lambda salt: {"guided_json": {"type": "array", "items": {"type": "string", "pattern": f".*a{salt}.{{20}}"}, "maxItems": 9}}, 128
        ),
    ),
    *map(constraint, INPUTS),
]

PROMPTS = [
    Attack("untrusted templates", "400", each(CHAT, *({"chat_template": template} for template in ESCAPES))),
    Attack("untrusted template to tokenize", "400", each("/tokenize", {"messages": MESSAGES, "chat_template": ESCAPES[0]})),
    Attack("chat_template_kwargs overrides", "200 400", each(CHAT, *({"chat_template_kwargs": {name: 1}} for name in OVERRIDES))),
    Attack("template sandbox escapes", "400", each(CHAT, *({"chat_template": template} for template in ESCAPES[:6])), TRUSTING),
    Attack("memory addresses by templates", "200 400", memory_addresses, TRUSTING),
    *(
        Attack(f"template {name}", "400", beside(chat({"chat_template": template}), times=1), TRUSTING)
        for name, template in TEMPLATES.items()
    ),
]

CLIENTS = [
    Attack("routes without a key", "401 400 405", without_a_key, needs="--api-key"),
    Attack(
        "key bypass by path",
        "401 400 404",
        raw(*(request(path, "Connection: close", method="GET") for path in PATHS_AROUND_THE_KEY), has_key=False),
    ),
    Attack(
        "key bypass by header",
        "401 400",
        raw(*(request("/v1/models", line, "Connection: close", method="GET") for line in HEADERS_AROUND_THE_KEY), has_key=False),
    ),
    Attack(
        "request smuggling",
        "400 401 closed",
        raw(
            request(CHAT, "Content-Length: 2", "Content-Length: 40", body="{}" + "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"),
            request(CHAT, "Content-Length: 2", "Transfer-Encoding: chunked", body="0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"),
            request(CHAT, "Transfer-Encoding: chunked, identity", body="0\r\n\r\n"),
        ),
    ),
    Attack(
        "malformed HTTP",
        "400 401 closed",
        raw(
            "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
            "GET\r\n\r\n",
            "GET /v1/models HTTP/9.9\r\n\r\n",
            "G\x00T / HTTP/1.1\r\n\r\n",
            request("/v1/models", "Na me: x", method="GET"),
            request("/v1/models", "X: \x00", method="GET"),
            "GET /v1/models HTTP/1.1\nAuthorization: Bearer second\nHost: x\n\n",
            request("/v1/models", "X: " + "y" * 70000, method="GET"),
            request(CHAT, "Content-Encoding: zstd", "Content-Length: 2", "Connection: close", body="{}"),
        ),
    ),
    Attack(
        "Expect header",
        "100 400 401 417",
        raw(
            request(CHAT, "Expect: 100-continue", "Content-Length: 2", "Connection: close"),
            request(CHAT, "Expect: x", "Content-Length: 0"),
            has_key=False,
        ),
    ),
    Attack(
        "request ids",
        "200 400 closed",
        raw(
            *(
                request("/v1/models", f"X-Request-Id: {name}", "Connection: close", method="GET")
                for name in ("a\x1b[31m", "x" * 7000, "\xf0\x9f\x98\x80", "a\rb")
            )
        ),
    ),
    Attack(
        "cross-origin post",
        "400 403 415",
        chat({}, headers={"Origin": "http://evil.example", "Content-Type": "text/plain"}),
        flags="--allowed-hosts penstock.example",
    ),
    Attack("DNS rebinding", "400 403 421", chat({}, headers={"Host": "evil.example:8000"}), flags="--allowed-hosts penstock.example"),
    Attack("priority flood", "200 400", beside(starving(20))),
    Attack("prefix shared between keys", "200", cached_by_another_key, needs="--api-key"),
    Attack("one request id", "200", one_request_id),
    Attack("recycled batch slots", "200", recycled_slots),
    Attack("metric label explosion", "404 405", many_labels),
    Attack("Server header", "200", names_its_software),
    Attack("2,000 at once", "200", chat({"max_tokens": 2}, 2000)),
    Attack("disconnects", "cut", cut({"stream": True, "max_tokens": 200}, 256)),
    Attack("connection resets", "cut", cut({"stream": True, "n": 4, "max_tokens": 200}, 256, is_reset=True)),
    Attack(
        "unread stream",
        "cut",
        unread({"n": 32, "logprobs": True, "top_logprobs": 20, "max_tokens": 400, "ignore_eos": True}, 8),
        "--write-timeout 2",
    ),
    Attack("1,500 idle connections", "closed open 408", beside(slow(lambda attacker: b"", 5, 1500))),
    Attack("slowloris headers", "408 closed 400", beside(slow(begun_head, 12, 400)), "--read-timeout 3"),
    Attack("slowloris bodies", "408 closed 400", beside(slow(length_head, 12, 400)), "--read-timeout 3"),
    Attack("slowloris chunks", "408 closed 400", beside(slow(chunk_head, 12, 400)), "--read-timeout 3"),
    Attack("more connections than allowed", "408 closed open", slow(begun_head, 12, 300), "--max-connections 100 --read-timeout 3"),
]

EMBEDDINGS = [
    Attack(
        "rerank of 4 times 15 MB",
        "200 400 413",
        post("/v2/rerank", lambda salt: {"query": "q", "documents": [words(15 * MILLION)], "max_tokens_per_doc": 4}, 4),
        POOLING,
    ),
    Attack(
        "15 MB cut to one token",
        "200 400 413",
        post("/v1/embeddings", lambda salt: {"input": words(15 * MILLION), "truncate_prompt_tokens": 1}),
        POOLING,
    ),
    Attack("1,000,000 texts", "400 413", post("/v1/embeddings", lambda salt: {"input": ["a"] * MILLION}), POOLING),
    Attack(
        "dimensions out of range", "400", each("/v1/embeddings", *({"input": "a", "dimensions": i} for i in (-1, 0, 10**9, "x"))), POOLING
    ),
]

ATTACKS = {attack.name: attack for attack in (*BODIES, *CONSTRAINTS, *PROMPTS, *CLIENTS, *EMBEDDINGS)}


def run(name: str, access: Access, salt: int) -> Outcome:
    return run_attack(ATTACKS[name], access, salt)
