"""/v1/audio/transcriptions and /v1/audio/translations over a tiny model, through the official client and plain forms."""

import asyncio
import hashlib
import io
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import soundfile  # type: ignore[import-untyped]
from openai import AsyncOpenAI
from torch import Tensor

from penstock.api.app import build_app
from penstock.engine.config import EngineConfig
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.transcription.engine import TranscriptionEngine, build_transcription_engine
from penstock.serving.audio import REFUSED, TranscriptionRequest
from penstock.serving.context import SpeechContext, Workers
from penstock.serving.limits import KeyRing
from penstock.serving.options import ServerOptions
from penstock.serving.requests import FieldsWithoutEffect
from penstock.serving.templates.rendering import ChatTemplate
from tests import tiny_speech
from tests.api.listening import listening
from tests.tiny_speech import recording

MODEL = "tiny"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
PAGE = (Path(__file__).parents[3] / "docs" / "audio.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class SpeechServer:
    url: str
    engine: TranscriptionEngine
    http: aiohttp.ClientSession
    client: AsyncOpenAI

    async def post(self, path: str, *fields: tuple[str, Any], **options: Any) -> tuple[int, str]:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in fields:
            form.add_field(name, io.BytesIO(value) if isinstance(value, bytes) else value)
        async with self.http.post(self.url + path, data=form, **options) as response:
            return response.status, await response.text()

    async def refusal(self, path: str, *fields: tuple[str, Any]) -> tuple[int, str | None, str]:
        status, text = await self.post(path, *fields)
        error = json.loads(text)["error"]
        return status, error["param"], error["message"]


Scenario = Callable[[SpeechServer], Coroutine[Any, Any, None]]


@asynccontextmanager
async def speech_server(directory: Path, options: ServerOptions | None = None, **config: Any) -> AsyncIterator[SpeechServer]:
    """A server over the model in `directory`. Asserts that nothing is left in the engine."""
    given: dict[str, Any] = {"num_threads": 1, "model": str(directory)} | config
    engine = build_transcription_engine(directory, Tokenizer.load(directory), EngineConfig(**given))
    with Workers() as workers:
        context = SpeechContext(
            engine=engine,
            tokenizer=engine.tokenizer,
            chat_template=ChatTemplate(None),
            model_names=(MODEL, "alias"),
            max_model_len=engine.model.max_length,
            vocab_size=tiny_speech.VOCAB_SIZE,
            workers=workers,
            options=options or ServerOptions(),
        )
        await engine.start()
        try:
            async with listening(build_app(context)) as url:
                async with aiohttp.ClientSession() as http, AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
                    yield SpeechServer(url, engine, http, client)
                for _ in range(500):  # what its client has left ends with the step
                    if not engine.stats().num_running:
                        break
                    await asyncio.sleep(0.01)
                stats = engine.stats()
                assert (stats.num_running, stats.num_waiting) == (0, 0)
        finally:
            await engine.stop()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the model is multilingual."""
    return {kind: tiny_speech.speech_directory(tmp_path_factory.mktemp("speech"), seed=3, is_multilingual=kind) for kind in (True, False)}


def serve(scenario: Scenario, directory: Path, options: ServerOptions | None = None, **config: Any) -> None:
    async def run() -> None:
        async with speech_server(directory, options, **config) as server:
            await asyncio.wait_for(scenario(server), 60)

    asyncio.run(run())


def wav(seed: int, seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, recording(seed, seconds).numpy(), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_the_official_client_reads_every_format(directories: dict[bool, Path]) -> None:
    file = ("speech.wav", wav(1, 2.6))

    async def scenario(server: SpeechServer) -> None:
        ask: Any = server.client.audio.transcriptions.create
        verbose = await ask(model=MODEL, file=file, language="de", response_format="verbose_json", timestamp_granularities=["segment"])
        assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "german", 2.6)
        assert len(verbose.segments) > 2
        assert "".join(segment.text for segment in verbose.segments).lstrip() == verbose.text
        assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
        for segment in verbose.segments:
            assert 0 <= segment.start <= segment.end <= 3
            assert segment.avg_logprob < 0 < segment.compression_ratio
            assert 0 < segment.no_speech_prob < 1
        plain = await ask(model=MODEL, file=file, language="german")
        assert plain.text == verbose.text
        assert (plain.usage.type, plain.usage.seconds) == ("duration", 3)
        assert await ask(model=MODEL, file=file, language="de", response_format="text") == f"{verbose.text}\n"
        cues = [(segment.start, segment.end, segment.text.strip()) for segment in verbose.segments]
        subtitles = await ask(model=MODEL, file=file, language="de", response_format="srt")
        assert times(subtitles, ",") == [(start, end) for start, end, _ in cues]
        assert subtitles.startswith("1\n00:00:0")
        tracks = await ask(model=MODEL, file=file, language="de", response_format="vtt")
        assert tracks.startswith("WEBVTT\n\n00:00:0")
        assert times(tracks, ".") == times(subtitles, ",")
        translated = await server.client.audio.translations.create(model=MODEL, file=file)
        assert translated.text != verbose.text

    serve(scenario, directories[True])


def times(text: str, separator: str) -> list[tuple[float, float]]:
    found = re.findall(rf"(\d\d):(\d\d):(\d\d){re.escape(separator)}(\d\d\d)", text)
    seconds = [int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in found]
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def test_a_stream_comes_to_the_whole_text(directories: dict[bool, Path]) -> None:
    async def scenario(server: SpeechServer) -> None:
        ask: Any = server.client.audio.transcriptions.create
        for seed, seconds in ((1, 3.4), (2, 0.4), (5, 1.0)):
            whole = await ask(model=MODEL, file=("a.wav", wav(seed, seconds)), prompt="before")
            events = [event async for event in await ask(model=MODEL, file=("a.wav", wav(seed, seconds)), prompt="before", stream=True)]
            *deltas, done = events
            assert [event.type for event in events] == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]
            assert "".join(delta.delta for delta in deltas) == done.text == whole.text
            usage = done.usage
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            assert usage.input_tokens > 50 * seconds
        assert "penstock:generation_tokens_total" in await (await server.http.get(f"{server.url}/metrics")).text()

    serve(scenario, directories[False])


def test_requests_at_the_same_time_are_answered_as_they_are_alone(directories: dict[bool, Path]) -> None:
    files = [wav(seed, 0.8 + seed / 2) for seed in range(5)]

    async def scenario(server: SpeechServer) -> None:
        alone = [await server.post(TRANSCRIPTIONS, ("file", file)) for file in files]
        steps = server.engine.stats().num_steps
        assert await asyncio.gather(*(server.post(TRANSCRIPTIONS, ("file", file)) for file in files)) == alone
        assert {status for status, _ in alone} == {200}
        assert server.engine.stats().num_steps < 2 * steps

    serve(scenario, directories[True])


def test_what_cannot_be_done_is_refused_by_name(directories: dict[bool, Path]) -> None:
    file = ("file", wav(1, 0.5))
    refused: list[tuple[str, tuple[tuple[str, Any], ...], str | None, str]] = [
        (TRANSCRIPTIONS, (), "file", "the form has no `file`"),
        (TRANSCRIPTIONS, (("file", b"no audio"),), "file", "is no audio"),
        (TRANSCRIPTIONS, (("file", wav(1, 0.5)[:-3] + b"abc"), ("language", "de")), "language", "knows English alone"),
        (TRANSCRIPTIONS, (file, ("language", "klingon")), "language", "knows English alone"),
        (TRANSCRIPTIONS, (file, ("temperature", "1.5")), "temperature", "<= 1.0"),
        (TRANSCRIPTIONS, (file, ("temperature", "warm")), "temperature", "Expected `float`"),
        (TRANSCRIPTIONS, (file, ("response_format", "diarized_json")), "response_format", "Invalid enum value 'diarized_json'"),
        (TRANSCRIPTIONS, (file, ("stream", "true"), ("response_format", "srt")), "response_format", "srt cannot be streamed"),
        (TRANSCRIPTIONS, (file, ("timestamp_granularities[]", "word")), "timestamp_granularities", "words have no timestamps"),
        (TRANSCRIPTIONS, (file, ("timestamp_granularities[]", "segment")), "timestamp_granularities", "verbose_json"),
        (TRANSCRIPTIONS, (file, ("langauge", "en")), "langauge", "did you mean `language`"),
        (TRANSCRIPTIONS, (file, file), "file", "there twice"),
        (TRANSCRIPTIONS, (file, ("model", "other")), "model", "does not exist"),
        (TRANSCRIPTIONS, (file, ("prompt", "a" * 70_000)), "prompt", "longer than 65536 bytes"),
        (TRANSLATIONS, (file,), "model", "translates nothing"),
        (TRANSLATIONS, (file, ("language", "en")), "language", "unknown field"),
        *((TRANSCRIPTIONS, (file, (name, "1")), name.removesuffix("[]"), "") for name in REFUSED),
    ]

    async def scenario(server: SpeechServer) -> None:
        for path, fields, param, message in refused:
            status, found, said = await server.refusal(path, *fields)
            assert (status, found) == (404 if message == "does not exist" else 400, param), said
            assert message in said
        status, text = await server.post(TRANSCRIPTIONS, file, ("user", "me"), ("language", ""), ("timeout", "50"))
        assert status == 200, text
        async with server.http.post(server.url + TRANSCRIPTIONS, json={"file": "x"}) as response:
            assert response.status == 400
            assert "multipart/form-data" in await response.text()

    serve(scenario, directories[False])


def test_other_routes_name_those_that_serve_the_model(directories: dict[bool, Path]) -> None:
    async def scenario(server: SpeechServer) -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"):
            async with server.http.post(server.url + path, json={}) as response:
                assert response.status == 400
                assert "`tiny` is a model that turns speech into text; it is served by /v1/audio/transcriptions" in await response.text()
        async with server.http.get(f"{server.url}/v1/models") as response:
            models = (await response.json())["data"]
            assert [(model["id"], model["tasks"]) for model in models] == [
                (name, ["transcription", "translation"]) for name in (MODEL, "alias")
            ]
        async with server.http.get(f"{server.url}/openapi.json") as response:
            document = await response.json()
            assert {TRANSCRIPTIONS, TRANSLATIONS} <= set(document["paths"])
            form = document["paths"][TRANSCRIPTIONS]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
            schema = document["components"]["schemas"][form["$ref"].rpartition("/")[2]]
            assert {"file", "language", "timestamp_granularities[]"} <= set(schema["properties"])
        for path in ("/health", "/ready"):
            assert (await server.http.get(server.url + path)).status == 200
        async with server.http.post(f"{server.url}/tokenize", json={"prompt": "ab"}) as response:
            assert (await response.json())["count"] == 2

    serve(scenario, directories[True])


def test_a_client_that_goes_away_takes_its_recording_with_it(directories: dict[bool, Path]) -> None:
    async def scenario(server: SpeechServer) -> None:
        encode = server.engine.model.encode
        may_begin = [threading.Event() for _ in range(5)]  # each window waits for one
        reached = [asyncio.Event() for _ in may_begin]
        loop, num_encoded = asyncio.get_running_loop(), 0

        def gated(windows: Sequence[Tensor], slots: Sequence[int]) -> None:
            nonlocal num_encoded
            place, num_encoded = num_encoded, num_encoded + 1
            loop.call_soon_threadsafe(reached[place].set)
            assert may_begin[place].wait(50)
            encode(windows, slots)

        server.engine.model.encode = gated  # type: ignore[method-assign]
        may_begin[0].set()
        stream: Any = await server.client.audio.transcriptions.create(model=MODEL, file=("a.wav", wav(2, 9)), stream=True)
        await anext(aiter(stream))
        await reached[1].wait()
        await stream.close()
        await ended(server.engine)
        may_begin[1].set()
        whole = asyncio.create_task(server.post(TRANSCRIPTIONS, ("file", wav(3, 9))))
        await reached[2].wait()
        whole.cancel()
        await asyncio.gather(whole, return_exceptions=True)
        await ended(server.engine)
        may_begin[2].set()
        status, text = await server.post(TRANSCRIPTIONS, ("file", wav(3, 9)), headers={"x-request-timeout": "0.3"})
        assert (status, json.loads(text)["error"]["code"]) == (504, "timeout")
        may_begin[3].set()
        await ended(server.engine)
        assert num_encoded <= 4  # no second window of any but the first, which was streamed

    serve(scenario, directories[False])


async def ended(engine: TranscriptionEngine) -> None:
    """Waits until the engine holds no recording that anyone waits for."""
    for _ in range(3000):
        if not engine._num_frames_held:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a recording is still there")


def test_keys_and_limits_hold(directories: dict[bool, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f'[keys.a]\nhash = "sha256:{digest}"\nmodels = ["{MODEL}"]\nrequests_per_minute = 2\n')
    keys.chmod(0o600)
    options = ServerOptions(keys_file=str(keys), max_body_size=60_000)

    async def scenario(server: SpeechServer) -> None:
        with_key = {"headers": {"Authorization": "Bearer secret"}}
        assert (await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.2))))[0] == 401
        status, text = await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.2)), ("model", "alias"), **with_key)
        assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
        status, text = await server.post(TRANSCRIPTIONS, ("file", wav(1, 1.0)), **with_key)
        assert status == 413
        assert "--max-body-size" in text
        assert (await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.2)), **with_key))[0] == 200
        status, text = await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.2)), **with_key)
        assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")

    assert KeyRing.of(options).is_required
    serve(scenario, directories[False], options)


def test_the_page_has_every_field() -> None:
    own = set(TranscriptionRequest.__struct_encode_fields__) - set(FieldsWithoutEffect.__struct_fields__)
    assert {*own, "file", *REFUSED} <= set(re.findall(r"`([\w\[\]]+)`", PAGE))


def test_batches_of_files_ask_other_models(directories: dict[bool, Path], tmp_path: Path) -> None:
    async def scenario(server: SpeechServer) -> None:
        for endpoint in (TRANSCRIPTIONS, "/v1/chat/completions"):
            body = {"input_file_id": "file-x", "endpoint": endpoint, "completion_window": "24h"}
            async with server.http.post(f"{server.url}/v1/batches", json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, "endpoint")
                assert error["message"] == f"a batch on this server asks nothing, not '{endpoint}'"

    serve(scenario, directories[False], ServerOptions(files_dir=str(tmp_path)))


def test_how_recordings_ended_is_counted(directories: dict[bool, Path]) -> None:
    async def scenario(server: SpeechServer) -> None:
        assert (await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.5))))[0] == 200
        encode = server.engine.model.encode
        server.engine.model.encode = broken  # type: ignore[method-assign]
        status, text = await server.post(TRANSCRIPTIONS, ("file", wav(1, 0.5)))
        assert (status, "the model failed" in text) == (500, True)
        server.engine.model.encode = encode  # type: ignore[method-assign]
        async with server.http.get(f"{server.url}/metrics") as response:
            counts = dict(re.findall(r'request_success_total{finished_reason="(\w+)",[^}]*} (\d+)', await response.text()))
        assert (counts["stop"], counts["error"], counts["abort"]) == ("1", "1", "0")

    serve(scenario, directories[False])


def broken(windows: Sequence[Tensor], slots: Sequence[int]) -> None:
    raise RuntimeError("a defect")
