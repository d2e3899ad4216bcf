import asyncio
from collections.abc import Callable, Iterator

import msgspec
import pytest

from benchmarks import hostile_grammars
from benchmarks.client import Recording
from benchmarks.hostile_grammars import Trial, largest_gap
from benchmarks.hostile_inputs import INPUTS, HostileInput
from penstock.api.common_protocol import GenerationFields
from penstock.api.constraints import grammar_spec
from penstock.engine.errors import InvalidRequest, QueueFull
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.grammar_cache import GrammarCompiler
from penstock.plugins.grammars import llguidance, outlines_core
from tests.plugins.grammar_walks import STOPS, VOCABULARY

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
    spec = grammar_spec(body)
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


def test_a_gap_counts_where_it_reaches_into_the_window() -> None:
    recording = Recording(0.0, [(time, b"") for time in (0.0, 1.0, 1.5, 1.6, 4.0, 9.0)])
    assert largest_gap([recording], 1.2, 1.7) == pytest.approx(2400)
    assert largest_gap([recording], 1.1, 1.55) == pytest.approx(500)
    assert largest_gap([Recording(0.0)], 1.0, 3.0) == pytest.approx(2000)  # silence is a gap


def test_the_medians_of_all_trials_are_told() -> None:
    trials = [Trial({"400": 1}, 10.0, gap, 20.0, "refused") for gap in (30.0, 70.0, 50.0)]
    assert hostile_grammars.as_json(trials)["medians"] == {"answer_ms": 10.0, "gap": 50.0, "quiet_gap": 20.0, "excess": 30.0}
    assert hostile_grammars.line("an input", trials).split() == ["an", "input", "400", "10", "50", "20", "30", "refused"]
