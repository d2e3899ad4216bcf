"""What is sent and expected, what counts as a gap, and one small attack on a server that answers at once."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from benchmarks import hostile, neighbours
from benchmarks.attacker import Access, Attack, Attacker, chat, label, labels
from benchmarks.client import BadAnswer, Client, Recording
from benchmarks.hostile import Trial, faults
from benchmarks.hostile_attacks import ATTACKS, is_another
from benchmarks.hostile_constraints import INPUTS, HostileInput
from benchmarks.neighbours import Stream, largest_gap
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.errors import InvalidRequest, QueueFull
from penstock.plugins.grammars.llguidance import backend as llguidance
from penstock.plugins.grammars.outlines_core import backend as outlines_core
from penstock.serving.requests import GenerationFields
from penstock.serving.structured_outputs import grammar_spec
from tests.benchmarks.served.fake_server import FakeServer
from tests.plugins.grammars.grammar_walks import STOPS, VOCABULARY

# What is measured or translated for most of a second; the benchmark sends these too.
SLOW = {
    *("nested oneOf", ".*a.{20}", "(a{1,50}){1,50}", "[ab]*a[ab]{12}, outlines_core", "(.*a){30}, outlines_core"),
    *("500 words, outlines_core", "800 overlapping sets", "5,000 properties", "5,000 required properties", "oneOf of 1,000"),
    *("one enum, 4,000 references", "choice of 9,000", "32 of every kind at once", "20 times multipleOf 10,007", "const of 15,000 values"),
    *("9,500 words", "nested if", "200 patternProperties", "3,600 characters in a row"),
}


# These take seconds, too; others of their kinds are smaller.
THOROUGH = {"maxLength 1,000,000", "100 schemas at once", "enum of 9,000"}


class Tokens:
    def vocabulary(self, logits_width: int, stop_token_ids: object) -> object:
        return VOCABULARY


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    factories: dict[str, Callable[..., object]] = {}
    for plugin in (llguidance, outlines_core):
        plugin.register_grammar_backends(lambda name, factory, info=None: factories.update({name: factory}))
    compiler = GrammarCompiler(factories, Tokens(), VOCABULARY.size, STOPS)  # type: ignore[arg-type]
    yield compiler
    compiler.close()


async def outcome(grammars: GrammarCompiler, hostile: HostileInput, salt: int) -> CompiledGrammar:
    body = msgspec.convert(hostile.fields(salt), GenerationFields)
    spec = grammar_spec(body, "closed")
    assert spec is not None
    return await grammars.compile(spec, body.guided_decoding_backend, client="hostile")


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(hostile, id=hostile.name, marks=[pytest.mark.thorough] * (hostile.name in THOROUGH))
        for hostile in INPUTS
        if hostile.name not in SLOW
    ],
)
def test_a_hostile_constraint_is_compiled_or_refused_by_name(hostile: HostileInput, grammars: GrammarCompiler) -> None:
    async def outcomes() -> list[object]:
        tasks = [outcome(grammars, hostile, salt) for salt in range(hostile.num_at_once)]
        results: list[object] = await asyncio.gather(*tasks, return_exceptions=True)
        for _ in iter(lambda: grammars.stats().num_running, 0):  # on a busy machine: what takes too long is still compiled to its end
            await asyncio.sleep(0.01)
        return results

    for result in asyncio.run(outcomes()):
        if isinstance(result, BaseException):
            assert isinstance(result, InvalidRequest | QueueFull)
            assert len(str(result)) < 300
    grammars.check_integrity()


def test_each_salt_makes_another_constraint() -> None:
    for one in INPUTS:
        assert one.fields(1) != one.fields(2)
    assert {one.name for one in INPUTS} >= SLOW


def answer_at(*times: float) -> Recording:
    return Recording(times[0], [(time, b"") for time in times])


def test_a_gap_counts_where_it_reaches_into_the_window() -> None:
    stream = Stream([answer_at(0.0, 1.0, 1.5, 1.6, 4.0, 9.0)])
    assert largest_gap([stream], 1.2, 1.7, 9.0) == pytest.approx(2400)
    assert largest_gap([stream], 1.1, 1.55, 9.0) == pytest.approx(500)


def test_silence_is_a_gap() -> None:
    assert largest_gap([Stream([Recording(0.0)])], 1.0, 3.0, 3.1) == pytest.approx(2000)
    assert largest_gap([Stream([answer_at(0.0, 0.5)], is_between=False)], 1.0, 3.0, 3.1) == pytest.approx(2600)


def test_the_time_between_two_answers_is_not_a_gap() -> None:
    streams = [Stream([answer_at(0.0, 1.0, 1.5), answer_at(4.0, 4.5, 4.6)]), Stream([answer_at(0.0, 0.5), Recording(0.5)])]
    assert largest_gap(streams, 0.0, 5.0, 5.1) == pytest.approx(1000)


def test_an_answer_that_ends_is_followed_by_another() -> None:
    server = FakeServer()

    async def drive(url: str) -> None:
        async with aiohttp.ClientSession() as session, neighbours.streams(Client(session, f"{url}/v1", "fake"), 7) as under_way:
            for _ in range(1000):
                await asyncio.sleep(0.005)
                if min(len(stream.answers) for stream in under_way) >= 3:
                    break
        assert all(recording.pieces for stream in under_way for recording in stream.answers[:2])

    asyncio.run(server.while_up(drive))
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts)


def test_a_stream_that_fails_ends_the_trial() -> None:
    async def drive(url: str) -> None:
        async with aiohttp.ClientSession() as session, neighbours.streams(Client(session, f"{url}/v1", "fake"), 7):
            await asyncio.sleep(60)

    with pytest.raises(BadAnswer, match="out of memory"):
        asyncio.run(FakeServer(fails_after=4).while_up(drive))


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected"),
    [
        (200, {}, b"{}", "200"),
        (503, {"retry-after": "1"}, b"", "503"),
        (503, {}, b"", "503-without-retry-after"),
        (429, {"X": "1"}, b"", "429-without-retry-after"),
        (200, {}, b'data: {"id": 1}\n\ndata: {"error": {"type": "BadRequestError"}}\n\n', "200-then-BadRequestError"),
        (200, {}, b'data: {"error": "broken"}\n\n', "200-then-error"),
        (400, {}, b"x" * 100_000, "400-of-100000-bytes"),
        (400, {}, b"<object at 0x7f3a2b10>", "400-with-internals"),
        (400, {}, b"Template.generate() got multiple values for argument 'self'", "400-with-internals"),
        (200, {}, b"the number 0x7f3a2b10", "200"),
    ],
)
def test_an_answer_is_called_by_its_status_and_what_is_wrong_with_it(
    status: int, headers: dict[str, str], body: bytes, expected: str
) -> None:
    assert label(status, headers, body) == expected


def test_all_answers_of_a_connection_are_read() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nRetry-After: 1\r\n\r\nlaterHTTP/1.1 503 Busy\r\nX: 1\r\n\r\n"
    assert list(labels(data)) == ["100", "503", "503-without-retry-after"]


def test_what_an_attack_may_get_are_its_statuses_and_to_be_told_when_to_try_again() -> None:
    attack = Attack("one", "400 413", chat({}), flags="--max-connections 9", needs="--api-key")
    assert attack.needed == ["--max-connections", "--api-key"]
    assert attack.unexpected({"400": 3, "429": 1, "503": 1}) == []
    assert attack.unexpected({"400": 3, "500": 1, "503-without-retry-after": 1}) == ["500", "503-without-retry-after"]


def test_a_log_has_neither_keys_nor_tracebacks_nor_control_characters() -> None:
    assert faults(b"GET /v1/models 200\n", ["secret"]) == []
    assert faults(b"Bearer secret\nTraceback (most recent call last):\n\x1b[31m", ["secret"]) == [
        *("traceback-logged", "key-logged", "control-characters-logged")
    ]
    assert faults(b"x" * 2**21, []) == ["log-flooded"]


def test_an_answer_is_another_where_it_parts_from_a_token_that_was_clear() -> None:
    alone = [("a", 3.0), ("b", 0.1), ("c", 3.0)]
    assert not is_another(alone, alone)
    assert not is_another([("a", 3.0), ("x", 0.1), ("y", 1.0)], alone)
    assert is_another([("a", 3.0), ("b", 0.1), ("x", 3.0)], alone)
    assert is_another(alone[:2], alone)


def test_names_are_unique_and_groups_hold_every_attack() -> None:
    assert sum(len(attacks) for attacks in hostile.GROUPS.values()) == len(ATTACKS)
    assert [attack.name for attack in hostile.chosen(["prompts", "Expect header", "Expect header"])][-1:] == ["Expect header"]
    assert len(hostile.chosen(None)) == len(ATTACKS)


def test_an_attacker_fills_in_what_a_request_needs() -> None:
    attacker = Attacker(Access("http://127.0.0.1:1", "fake", ("one", "other")), None, salt=2)  # type: ignore[arg-type]
    body = json.loads(attacker.body("/v1/completions", lambda salt: {"max_tokens": salt}, 7))
    assert body == {"model": "fake", "prompt": "Say something.", "max_tokens": 2007, "temperature": 0}
    assert b"Authorization: Bearer one\r\n" in attacker.head("GET", "/health")
    assert attacker.access.authorization(-1) == {"Authorization": "Bearer other"}


def test_the_medians_of_all_trials_are_told() -> None:
    trials = [Trial({"400": 1}, 10.0, gap, 20.0, 7_000_000, 1_000_000, "refused") for gap in (30.0, 70.0, 50.0)]
    attack = Attack("an attack", "400", chat({}))
    whole = hostile.as_json(attack, trials)
    assert whole["medians"] == {"answer_ms": 10.0, "gap": 50.0, "quiet_gap": 20.0, "excess": 30.0, "peak": 7_000_000, "kept": 1_000_000}
    assert hostile.line(attack, trials).split() == ["an", "attack", "ok", "10", "50", "30", "7", "1", "400x3:", "refused"]


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "WINDOW_SECONDS", 0.05)


@pytest.mark.thorough
@pytest.mark.usefixtures("is_quick")
def test_a_server_is_attacked_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one answers whatever it is sent, which is right for some attacks and wrong for others."""
    written = tmp_path / "made" / "results.json"
    names = ("token ids outside the vocabulary", "stop of 1 MB", "slowloris headers", "prefix shared between keys")

    async def drive(url: str) -> None:
        chosen = [part for name in names for part in ("--only", name)]
        assert await asyncio.to_thread(hostile.main, ["--url", url, "--json", str(written), *chosen]) == 1

    asyncio.run(FakeServer().while_up(drive))
    whole: dict[str, Any] = json.loads(written.read_text())
    assert {name: attack["unexpected"] for name, attack in whole["attacks"].items()} == {names[0]: [], names[1]: ["200"]}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("not run: ")[1] for line in lines if "not run: " in line] == ["needs --read-timeout", "needs --api-key"]
