import asyncio
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
import pytest

from benchmarks import hostile_grammars
from benchmarks.client import BadAnswer, Client, Recording
from benchmarks.hostile_grammars import Stream, Trial, largest_gap
from benchmarks.hostile_inputs import INPUTS, HostileInput
from penstock.api.common_protocol import GenerationFields
from penstock.api.constraints.constraints import grammar_spec
from penstock.engine.errors import InvalidRequest, QueueFull
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.grammars.grammar_cache import GrammarCompiler
from penstock.plugins.grammars.llguidance import backend as llguidance
from penstock.plugins.grammars.outlines_core import backend as outlines_core
from tests.benchmarks.fake_server import FakeServer
from tests.plugins.grammars.grammar_walks import STOPS, VOCABULARY

# What is measured or translated for most of a second; the benchmark sends these too.
SLOW = {
    *("nested oneOf", ".*a.{20}", "(a{1,50}){1,50}", "[ab]*a[ab]{12}, outlines_core", "(.*a){30}, outlines_core"),
    *("500 words, outlines_core", "800 overlapping sets", "5,000 properties", "5,000 required properties", "oneOf of 1,000"),
    *("one enum, 4,000 references", "choice of 9,000", "32 of every kind at once", "20 times multipleOf 10,007", "const of 15,000 values"),
    *("9,500 words", "nested if", "200 patternProperties", "3,600 characters in a row"),
}


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


@pytest.mark.parametrize("hostile", [hostile for hostile in INPUTS if hostile.name not in SLOW], ids=lambda hostile: hostile.name)
def test_a_hostile_constraint_is_compiled_or_refused_by_name(hostile: HostileInput, grammars: GrammarCompiler) -> None:
    async def outcomes() -> list[object]:
        tasks = [outcome(grammars, hostile, salt) for salt in range(hostile.num_at_once)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    for result in asyncio.run(outcomes()):
        if isinstance(result, BaseException):
            assert isinstance(result, InvalidRequest | QueueFull)
            assert len(str(result)) < 300
    grammars.check_integrity()


def test_each_salt_makes_another_constraint() -> None:
    for hostile in INPUTS:
        assert hostile.fields(1) != hostile.fields(2)
    assert {hostile.name for hostile in INPUTS} >= SLOW


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
        async with aiohttp.ClientSession() as session, hostile_grammars.streams(Client(session, f"{url}/v1", "fake"), 7) as under_way:
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
        async with aiohttp.ClientSession() as session, hostile_grammars.streams(Client(session, f"{url}/v1", "fake"), 7):
            await asyncio.sleep(60)

    with pytest.raises(BadAnswer, match="out of memory"):
        asyncio.run(FakeServer(fails_after=4).while_up(drive))


def test_the_medians_of_all_trials_are_told() -> None:
    trials = [Trial({"400": 1}, 10.0, gap, 20.0, "refused") for gap in (30.0, 70.0, 50.0)]
    assert hostile_grammars.as_json(trials)["medians"] == {"answer_ms": 10.0, "gap": 50.0, "quiet_gap": 20.0, "excess": 30.0}
    assert hostile_grammars.line("an input", trials).split() == ["an", "input", "400", "10", "50", "20", "30", "refused"]
