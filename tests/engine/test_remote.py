"""An engine at the other end of a socket gives what it gives in the same process."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from penstock.engine import errors
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.logits_processor import choose, per_sequence
from penstock.engine.contracts.parsing import Event, Reasoning, Text, Turn
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, TextUntil, Value
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, InvalidRequest, PenstockError, QueueFull, UnsupportedGrammar
from penstock.engine.loop import Engine
from penstock.engine.remote import messages, server
from penstock.engine.remote.client import RemoteEngine
from penstock.engine.remote.messages import Hello, error_from_wire, error_to_wire, spec_from_wire, spec_to_wire
from penstock.engine.remote.server import Connection, EngineServer, RequestReader
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.text.answer import PreambleParams
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.context import TextEngine
from tests.engine.running import run, settled, until
from tests.fakes import (
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    beam_request,
    content,
    ids,
    letter_after,
    make_core,
    make_request,
    saying,
    tokens,
    undecided,
)

THINKS = FORMATS["deepseek_r1"]
PROCESSORS = {"double": per_sequence(lambda factor=2.0: lambda token_ids, logits: logits * factor)}


async def collect(engine: TextEngine, request: Request) -> list[SequenceDelta]:
    return [delta async for delta in engine.generate(request)]


@dataclass(frozen=True)
class Remote:
    """Both ends."""

    engine: RemoteEngine
    connection: Connection
    served: Engine
    server: EngineServer
    core: EngineCore


@asynccontextmanager
async def remote(core: EngineCore) -> AsyncIterator[Remote]:
    """A started engine behind a socket; at the end nothing may be held."""
    compiler = GrammarCompiler({"llguidance": LlguidanceBackend}, TOKENIZER, VOCAB_SIZE, [EOS])
    engine = Engine(core)
    await engine.start()
    reader = RequestReader(tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, processors=PROCESSORS, reasoning_parser=THINKS, tool_parser=HERMES)
    served = EngineServer(engine, compiler, reader, b"+".join, Hello("", 200, VOCAB_SIZE, frozenset({EOS})))
    async with connected(served) as (client, connection):
        yield Remote(client, connection, engine, served, core)
        await settled(core)
    connection.check_integrity()
    await engine.stop()
    engine.check_integrity()
    compiler.close()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


@asynccontextmanager
async def connected(served: EngineServer) -> AsyncIterator[tuple[RemoteEngine, Connection]]:
    ours, theirs = socket.socketpair()
    connection = await served.connect(ours)
    client = RemoteEngine(theirs, PROCESSORS)
    await client.start()
    try:
        yield client, connection
    finally:
        await client.stop()
        await connection.ended.wait()


def whole(deltas: list[SequenceDelta]) -> dict[int, Any]:
    """Each sequence's answer, however it came in parts."""
    answers: dict[int, Any] = {}
    for delta in deltas:
        answer = answers.setdefault(delta.index, {"token_ids": [], "events": [], "logprobs": []})
        answer["token_ids"] += delta.token_ids
        answer["events"] = joined([*answer["events"], *delta.events])
        answer["logprobs"] += delta.logprobs
        if delta.prompt is not None:
            answer["prompt"] = replace(delta.prompt, queue_seconds=0.0, prefill_seconds=0.0, num_cached_tokens=0)
        if delta.finish_reason is not None:
            answer["end"] = (delta.finish_reason, delta.stop_reason, delta.num_reasoning_tokens, delta.error, type(delta.error))
            answer["scores"] = (delta.cumulative_logprob, delta.beam_score)
    return answers


def joined(events: list[Event]) -> list[Event]:
    text: list[Any] = []
    for event in events:
        if text and isinstance(event, Text | Reasoning) and type(text[-1]) is type(event):
            text[-1] = type(event)(text[-1].text + event.text)
        else:
            text.append(event)
    return text


ANSWERS: dict[str, Callable[[str], Request]] = {
    "plain": lambda name: make_request(name, "a question", max_tokens=30, ignore_eos=True),
    "sampled": lambda name: make_request(name, "a question", n=3, temperature=1.0, seed=3, max_tokens=30),
    "stop string": lambda name: make_request(name, "a question", n=2, temperature=1.0, seed=4, stop=["ab", "p", "cd"], max_tokens=60),
    "stop string shown": lambda name: make_request(name, "why", stop=["o", "f"], include_stop_str_in_output=True, min_tokens=4),
    "stop id": lambda name: make_request(name, "why", stop_token_ids=ids("f"), ignore_eos=True, max_tokens=60),
    "stop id shown": lambda name: make_request(
        name, "why", stop_token_ids=ids("f"), ignore_eos=True, max_tokens=60, include_stop_str_in_output=True
    ),
    "logprobs": lambda name: make_request(name, "why", logprobs=2, prompt_logprobs=1, max_tokens=9),
    "reasoning": lambda name: make_request(name, "why", parser=THINKS, tail="<think>", logprobs=0, max_tokens=40),
    "budget": lambda name: make_request(name, "why", parser=THINKS, tail="<think>", thinking_token_budget=5, logprobs=0, max_tokens=20),
    "stop tokens": lambda name: make_request(name, "why", stop_sequences=((ids("a")[0],), (ids("f")[0],)), max_tokens=60),
    "bad words": lambda name: make_request(name, "why", bad_words=["a", "bc"], logit_bias={ids("d")[0]: -3.0}, max_tokens=30),
    "only the prompt": lambda name: make_request(name, "why", max_tokens=0, prompt_logprobs=0),
    "processor": lambda name: make_request(name, "why", logits_processors=[choose(PROCESSORS["double"], {"factor": -1.0})], max_tokens=20),
    "beams": lambda name: beam_request(name, "why", BeamSearchParams(beam_width=3, max_tokens=6, n=2)),
}


@pytest.mark.parametrize("drafts", [None, 8.0], ids=["no drafts", "drafts"])
def test_answers_are_those_of_an_engine_in_the_same_process(drafts: float | None) -> None:
    async def test() -> None:
        options: Any = {"max_num_seqs": 40, "num_blocks": 900, "is_async": True, "rows_for_weights": drafts}
        engine = Engine(make_core(undecided, **options))
        await engine.start()
        expected = {name: whole(await collect(engine, make(name))) for name, make in ANSWERS.items()}
        await engine.stop()
        async with remote(make_core(undecided, **options)) as ends:
            answers = await asyncio.gather(*(collect(ends.engine, make(name)) for name, make in ANSWERS.items()))
            for (name, answer), deltas in zip(expected.items(), answers, strict=True):
                assert whole(deltas) == answer, name
            assert expected["stop string"][0]["end"][1] in ("ab", "p", "cd")

    run(test)


def test_the_draft_tokens_of_a_prediction_are_counted_alike() -> None:
    text = "the answer that was expected, or all but its end"
    options: Any = {"num_blocks": 150, "is_async": True, "rows_for_weights": 12.0}

    async def counts(engine: TextEngine) -> tuple[int, int]:
        deltas = await collect(engine, make_request("predicted", prediction=ids(text.replace("expected", "foreseen"))))
        return sum(delta.num_predicted for delta in deltas), sum(delta.num_predicted_right for delta in deltas)

    async def test() -> None:
        engine = Engine(make_core(saying(text), **options))
        await engine.start()
        num_predicted, num_right = await counts(engine)
        await engine.stop()
        assert num_predicted > num_right > 0
        async with remote(make_core(saying(text), **options)) as ends:
            assert await counts(ends.engine) == (num_predicted, num_right)

    run(test)


def test_a_step_is_one_frame_however_many_streams_it_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []

    async def test() -> None:
        async with remote(make_core()) as ends:
            requests = [make_request(str(number), "?", max_tokens=20) for number in range(8)]
            encode = messages.encode

            def counted(message: Any) -> bytes:
                frames.extend([len(message.deltas)] if isinstance(message, messages.Deltas) else [])
                return encode(message)

            monkeypatch.setattr(messages, "encode", counted)
            await asyncio.gather(*(collect(ends.engine, request) for request in requests))

    run(test)
    assert frames == [8] * 20


def test_text_that_ends_a_sequence_ends_it_in_the_engine_and_what_lies_beyond_does_not_count() -> None:
    async def test() -> None:
        async with remote(make_core(saying("one two three four five six seven"), is_async=True)) as ends:
            deltas = await collect(ends.engine, make_request(stop=["two"], max_tokens=30))
            assert whole(deltas)[0]["token_ids"] == ids("one two")
            await until(lambda: not ends.core.has_work)
            assert ends.core.stats().num_generation_tokens == len(ids("one two"))

    run(test)


def test_a_client_that_is_gone_aborts_and_so_does_a_server() -> None:
    async def test() -> None:
        async with remote(make_core(num_blocks=400, max_model_len=1000)) as ends:
            async with aclosing(ends.engine.generate(make_request("left", max_tokens=900))) as stream:
                await anext(stream)
            await until(lambda: not ends.core.has_work)
            async with connected(ends.server) as (other, connection):
                dying = other.generate(make_request("dead", max_tokens=900))
                await anext(dying)
                connection.close()
                rest = [delta async for delta in dying]
            assert (rest[-1].finish_reason, rest[-1].error) == (FinishReason.ERROR, ENGINE_FAILED)
            await until(lambda: not ends.core.has_work)
            with pytest.raises(EngineUnavailable):
                other.check_admission()
            assert not other.is_healthy
            assert ends.engine.is_healthy

    run(test)


def test_what_the_engine_refuses_is_refused_with_the_same_exception() -> None:
    async def test() -> None:
        async with remote(make_core(max_waiting=1, max_num_seqs=1)) as ends:
            with pytest.raises(InvalidRequest, match="empty") as caught:
                await collect(ends.engine, make_request("empty", []))
            assert caught.value.param == "prompt"
            with pytest.raises(InvalidRequest, match="not available with several API servers"):
                await collect(ends.engine, replace(make_request(), outputs=("logits",)))
            stranger = choose(per_sequence(lambda: lambda token_ids, logits: logits), {})
            with pytest.raises(InvalidRequest, match="registered under no name"):
                await collect(ends.engine, make_request(logits_processors=[stranger]))
            streams = [ends.engine.generate(make_request(str(number), max_tokens=150)) for number in range(2)]
            await anext(streams[0])
            waiting = asyncio.create_task(anext(streams[1]))
            await until(lambda: refuses(ends.engine))
            with pytest.raises(QueueFull):  # also where the state that was sent last is an older one
                await collect(ends.engine, make_request("third"))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            await until(lambda: not refuses(ends.engine))

    run(test)


def refuses(engine: RemoteEngine) -> bool:
    try:
        engine.check_admission()
    except QueueFull:
        return True
    return False


@pytest.mark.parametrize("drafts", [None, 8.0], ids=["no drafts", "drafts"])
def test_free_text_before_an_answer_and_its_pressure_arrive(drafts: float | None) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "[a-c]{5}")
    options: Any = {"num_blocks": 150, "rows_for_weights": drafts}

    async def told(engine: TextEngine, grammar: Any) -> tuple[Any, ...]:
        request = make_request(
            grammar=grammar, preamble=PreambleParams(7, tuple(ids("so"))), measures_pressure=True, logprobs=0, max_tokens=30
        )
        deltas = await collect(engine, request)
        return whole(deltas), [nats for delta in deltas for _, nats in delta.pressures], deltas[-1].num_preamble_tokens

    async def test() -> None:
        core = make_core(undecided, **options)
        engine = Engine(core)
        await engine.start()
        backend = LlguidanceBackend(TOKENIZER.vocabulary(VOCAB_SIZE, {EOS}))
        expected = await told(engine, backend.compile(spec))
        await engine.stop()
        assert expected[2] >= len("so")
        assert len(expected[1]) >= 5
        async with remote(make_core(undecided, **options)) as ends:
            assert await told(ends.engine, await ends.engine.compile(spec)) == expected

    run(test)


def test_calls_or_content_are_decided_on_in_the_engine_s_process() -> None:
    def asking(name: str, grammars: Any) -> Request:
        params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20)
        make_answer = AnswerFactory(TOKENIZER, ids("?"), params, tools=HERMES, turn=Turn(tools=[{}], tool_choice="auto"))
        request = make_request(name, make_answer=make_answer, grammar=grammars[0], temperature=1.0, seed=5, n=3, max_tokens=20)
        return replace(request, call_grammar=grammars[1], call_opening="b")

    specs = [GrammarSpec(GrammarKind.REGEX, pattern) for pattern in ("[f-h]{3}", "b[0-9]{3}")]

    async def test() -> None:
        engine = Engine(make_core(undecided))
        await engine.start()
        backend = LlguidanceBackend(TOKENIZER.vocabulary(VOCAB_SIZE, {EOS}))
        here = [backend.compile(spec) for spec in specs]
        expected = [whole(await collect(engine, asking(str(number), here))) for number in range(4)]
        await engine.stop()
        async with remote(make_core(undecided)) as ends:
            there = [await ends.engine.compile(spec) for spec in specs]
            assert [whole(await collect(ends.engine, asking(str(number), there))) for number in range(4)] == expected
        texts = {TOKENIZER.decode(answer["token_ids"]) for answers in expected for answer in answers.values()}
        assert all(set(text) <= set("fgh") or set(text[1:]) <= set("0123456789") for text in texts), texts

    run(test)


def test_an_answer_that_ends_within_its_max_tokens_arrives_and_so_does_the_refusal() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "[a-p]+!!!")

    async def test() -> None:
        async with remote(make_core(letter_after)) as ends:
            grammar = await ends.engine.compile(spec)
            deltas = await collect(ends.engine, make_request(grammar=grammar, ends_within=True, max_tokens=20))
            assert len(tokens(deltas)) == 20
            assert content(deltas).endswith("!!!")
            assert (deltas[-1].finish_reason, deltas[-1].is_closed) == (FinishReason.STOP, True)
            with pytest.raises(InvalidRequest, match="takes 4") as refused:
                await collect(ends.engine, make_request("other", grammar=grammar, ends_within=True, max_tokens=3))
            assert refused.value.param == "max_tokens"

    run(test)


def test_a_constraint_is_compiled_in_the_engine_s_process_and_kept_while_it_is_used() -> None:
    async def test() -> None:
        async with remote(make_core(undecided)) as ends:
            grammar = await ends.engine.compile(GrammarSpec(GrammarKind.REGEX, "[a-c]{5}"))
            deltas = await collect(ends.engine, make_request(grammar=grammar, max_tokens=30))
            assert set(TOKENIZER.decode(whole(deltas)[0]["token_ids"][:5])) <= set("abc")
            assert len(ends.connection._grammars) == 1
            del grammar, deltas
            gc.collect()
            await until(lambda: not ends.connection._grammars)
            with pytest.raises(UnsupportedGrammar) as caught:
                await ends.engine.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "no such type"}', "response_format.schema"))
            assert (caught.value.param or "").startswith("response_format.schema")

    run(test)


def test_metrics_are_those_of_all_servers_also_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REPORT_SECONDS", 0.01)

    async def test() -> None:
        async with remote(make_core()) as ends:
            ends.engine.report = lambda: b"one"
            async with connected(ends.server) as (other, _):
                other.report = lambda: b"two"
                assert sorted((await ends.engine.merged_metrics()).split(b"+")) == [b"one", b"two"]
            assert sorted((await ends.engine.merged_metrics()).split(b"+")) == [b"one", b"two"]

    run(test)


def test_every_exception_arrives_as_it_was_raised() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]
    for kind in kinds:
        error = kind("why", "a.b") if issubclass(kind, InvalidRequest) else kind("why")
        arrived = error_from_wire(msgspec.msgpack.decode(messages.encode(error_to_wire(error)), type=messages.WireError))
        assert type(arrived) is kind
        assert (str(arrived), vars(arrived)) == ("why", vars(error))
    assert str(error_from_wire(error_to_wire(KeyError("x")))) == "KeyError in the engine's process: 'x'"


def test_every_part_of_a_constraint_arrives_as_it_was() -> None:
    schema = GrammarSpec(GrammarKind.JSON_SCHEMA, "{}", "tools", is_lenient=True, as_written=GrammarSpec(GrammarKind.REGEX, "a"))
    parts = (
        Literal("a"),
        Marker("<b>"),
        TextUntil("<c>", ("<d>",)),
        Value(schema),
        Repeat(Either((Literal("e"),)), 1, 4),
        FreeText(("f",)),
    )
    spec = GrammarSpec(GrammarKind.STRUCTURE, "", structure=Sequence(parts))
    assert spec_from_wire(msgspec.msgpack.decode(messages.encode(spec_to_wire(spec)))) == spec
