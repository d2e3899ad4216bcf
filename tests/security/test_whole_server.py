"""A whole server, with its own engine and grammar backends, whose clients attack it: each request has its answer, and the next one too."""

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import aiohttp
import pytest

from benchmarks.attacker import INTERNALS
from benchmarks.hostile_attacks import BROKEN_CONSTRAINTS, EMPTY_CONSTRAINTS, ESCAPES, OVERRIDES
from penstock.engine.system.cache import cache_directory
from tests.api.scripted_model.served import ServedScript, served_script, write_script

LINES: list[dict[str, Any]] = [
    {"model": {"name": "scripted", "context_length": 4096}},
    *({"when": {"user": {"equals": f"Say {number}"}}, "content": f"{number} " * 9} for number in range(12)),
    {"content": '{"a": 1}, I say, and the wind over the harbour is light today'},
]
BACKENDS = (None, "llguidance", "outlines_core")
# Exponential for backtracking engines, or in states: some are within the limits of a backend, and some are not.
REGEXES = (
    *("(a+)+b", "(a|a)*b", "(.*a){30}", "(x{1000}){1000}", r"\w{1,400}.{20}", "(" * 5000 + "a" + ")" * 5000),
    *("[", "(?=a)b", "\\", "a{9999999}"),
)
GRAMMARS = (
    *('root ::= root | "a"', 'root ::= a\na ::= b\nb ::= a | "x"', 'root ::= ""*', "start: start", "start: /(a+)+b/"),
    *(" ", "\0", "start: " + "(" * 20_000),
)
SCHEMAS: tuple[Any, ...] = (
    *(
        "",
        "null",
        "[]",
        "[",
        '{"type": NaN}',
        '{"a": 1, "a": 2}',
        '"\\ud800"',
        {"type": "strin"},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/x"},
    ),
    *({"pattern": "(a+)+b", "type": "string"}, {"type": "object", "patternProperties": {"(a|a)*b": {}}}, {"anyOf": []}, {"enum": []}),
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
)
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    *EMPTY_CONSTRAINTS,
    *BROKEN_CONSTRAINTS,
    *({"guided_regex": regex} for regex in REGEXES),
    *({"guided_grammar": grammar} for grammar in GRAMMARS),
    *({"guided_json": schema} for schema in SCHEMAS),
    *({"guided_json": {"type": "object"}, "guided_whitespace_pattern": regex} for regex in ("[", "(a+)+b", "")),
    {"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a+)+b"}}},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedScript]:
    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "cache").mkdir(mode=0o700)
        (folder / "cache" / "native").symlink_to(cache_directory() / "native")  # building the kernels would take half a minute
        patch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
        with served_script(write_script(folder / "answers.jsonl", LINES), "--max-num-seqs", "8") as served:
            yield served


def body_of(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": content}], "max_tokens": 60} | fields


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    async with http.post(f"/v1{path}", json=body, headers=headers) as response:
        return response.status, await response.read()


def content_of(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["message"]["content"])


def attack(server: ServedScript, scenario: Any) -> None:
    """Runs a test's coroutine with a client; then the server is healthy, idle, and says what it always says."""

    async def run() -> None:
        async with aiohttp.ClientSession(server.url.removesuffix("/v1")) as http:
            await scenario(http)
            async with http.get("/health") as response:
                assert response.status == 200
            status, answer = await post(http, "/chat/completions", body_of("Say 7"))
            assert (status, content_of(answer)) == (200, "7 " * 9)

    asyncio.run(asyncio.wait_for(run(), 120))

    async def check() -> None:
        stats = server.context.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        server.context.engine.check_integrity()

    server.call(check())


@pytest.mark.parametrize(
    ("backend", "is_streamed"),
    [(None, False), *(pytest.param(*case, marks=pytest.mark.thorough) for case in product(BACKENDS, (False, True)) if any(case))],
)
def test_no_constraint_is_a_failure_of_the_server(server: ServedScript, backend: str | None, is_streamed: bool) -> None:
    """Empty, broken, recursive, of exponential size: answered as it says, or refused by its field."""

    async def scenario(http: aiohttp.ClientSession) -> None:
        for constraint in CONSTRAINTS:
            fields = constraint | ({"guided_decoding_backend": backend} if backend else {}) | {"stream": is_streamed}
            status, answer = await post(http, "/chat/completions", body_of("Hello", **fields))
            assert status in (200, 400), (constraint, answer)
            if status == 400:
                assert not INTERNALS.search(answer), answer
                assert json.loads(answer)["error"]["message"]
            assert b"InternalServerError" not in answer, (constraint, answer)

    attack(server, scenario)


@pytest.mark.parametrize(
    "path", ["/chat/completions", *(pytest.param(path, marks=pytest.mark.thorough) for path in ("/completions", "/messages", "/responses"))]
)
def test_one_request_id_for_all_mixes_no_answers(server: ServedScript, path: str) -> None:
    """Streamed, so that they run beside each other; the id of a request is its client's word for it, and names nothing here."""

    async def scenario(http: aiohttp.ClientSession) -> None:
        def body(number: int) -> dict[str, Any]:
            said = f"Say {number}"
            if path == "/completions":
                return {"model": "scripted", "prompt": f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 60}
            if path == "/responses":
                return {"model": "scripted", "input": said, "max_output_tokens": 60}
            return body_of(said)

        answers = await asyncio.gather(*(post(http, path, body(number % 12), **{"X-Request-Id": "the-same"}) for number in range(48)))
        for number, (status, answer) in enumerate(answers):
            assert status == 200, answer
            assert f"{number % 12} " * 9 in answer.decode(), answer

    attack(server, scenario)


def test_templates_of_requests_are_refused_unless_the_operator_trusts_them(server: ServedScript) -> None:
    async def scenario(http: aiohttp.ClientSession) -> None:
        for template in ESCAPES:
            for fields in ({"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}):
                for path in ("/v1/chat/completions", "/tokenize"):
                    async with http.post(path, json=body_of("Hello") | fields) as response:
                        answer = await response.read()
                    assert response.status == 400, (path, fields)
                    assert b"uid=" not in answer

    attack(server, scenario)


def test_arguments_of_templates_override_none_of_the_servers_own(server: ServedScript) -> None:
    async def scenario(http: aiohttp.ClientSession) -> None:
        for name, value in product(OVERRIDES, (1, [], True)):
            status, answer = await post(http, "/chat/completions", body_of("Say 3", chat_template_kwargs={name: value}))
            assert status in (200, 400), (name, answer)
            if status == 200:
                assert content_of(answer) == "3 " * 9
            else:
                assert b"chat_template_kwargs" in answer

    attack(server, scenario)


def test_bodies_that_nest_without_end_are_refused(server: ServedScript) -> None:
    async def scenario(http: aiohttp.ClientSession) -> None:
        for opening, path in product((b"[", b'{"a":', b'[{"a":'), ("/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses")):
            async with http.post(path, data=opening * 10**5, headers={"Content-Type": "application/json"}) as response:
                assert response.status == 400, (opening, path)
                assert not INTERNALS.search(await response.read())

    attack(server, scenario)


@pytest.mark.thorough
def test_clients_that_leave_while_their_constraint_compiles_leave_no_thread_behind(server: ServedScript) -> None:
    import psutil  # type: ignore[import-untyped]

    process = psutil.Process()

    async def scenario(http: aiohttp.ClientSession) -> None:
        async def leave(number: int) -> None:
            fields = {"guided_regex": f"(.*a){{{number % 20}}}{number}", "stream": True}
            with_deadline = aiohttp.ClientTimeout(total=0.02 + number % 5 / 100)
            try:
                async with http.post("/v1/chat/completions", json=body_of("Hello", **fields), timeout=with_deadline) as response:
                    await response.read()
            except TimeoutError:
                pass

        await asyncio.gather(*(leave(number) for number in range(20)))
        before = process.num_threads(), len(process.children(recursive=True))
        resident = 0
        for start in range(0, 500, 50):
            await asyncio.gather(*(leave(number) for number in range(start, start + 50)))
            resident = resident or (process.memory_info().rss if start == 200 else 0)
        while server.context.grammar_compiler.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert process.num_threads() <= before[0] + 2
        assert len(process.children(recursive=True)) <= before[1] + 1
        assert process.memory_info().rss - resident < 2**26

    attack(server, scenario)
