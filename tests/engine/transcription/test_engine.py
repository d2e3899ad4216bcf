"""The engine of speech models: the tokens that transformers' `generate` gives each recording alone, and the life of a recording."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError, EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.transcription import engine as engine_module
from penstock.engine.transcription.engine import TranscriptionEngine, TranscriptionParams, build_transcription_engine
from penstock.engine.transcription.model import Segment, WindowCache
from tests import tiny_speech
from tests.tiny_speech import EOS, FIRST_TIMESTAMP, recording


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the model is multilingual."""
    return {kind: tiny_speech.speech_directory(tmp_path_factory.mktemp("speech"), seed=3, is_multilingual=kind) for kind in (True, False)}


def engine_over(directory: Path, **config: Any) -> TranscriptionEngine:
    given: dict[str, Any] = {"num_threads": 1, "model": str(directory)} | config
    return build_transcription_engine(directory, Tokenizer.load(directory), EngineConfig(**given))


def run(engine: TranscriptionEngine, scenario: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        await engine.start()
        try:
            await asyncio.wait_for(scenario, 120)
        finally:
            await engine.stop()

    asyncio.run(main())


async def transcribed(engine: TranscriptionEngine, features: Tensor, params: TranscriptionParams) -> list[Segment]:
    return [segment async for delta in engine.transcribe(features, params) for segment in delta.segments]


def of_transformers(directory: Path, features: Tensor, params: TranscriptionParams, previous: list[int]) -> list[tuple[Any, ...]]:
    """Start, end and tokens of each segment. The one before another window keeps the timestamp at which that begins: it is left out."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory)
    model.eval()
    options: dict[str, Any] = {}
    if model.generation_config.is_multilingual:
        options = {"task": params.task, "language": params.language}
    if previous:
        options["prompt_ids"] = torch.tensor([model.generation_config.prev_sot_token_id, *previous])
    answer = model.generate(features[None], return_timestamps=True, return_segments=True, **options)
    segments = []
    for segment in answer["segments"][0]:
        tokens = segment["tokens"].tolist()
        if len(tokens) > 2 and tokens[-1] >= FIRST_TIMESTAMP and tokens[-2] >= FIRST_TIMESTAMP:
            tokens.pop()
        segments.append((round(float(segment["start"]), 2), round(float(segment["end"]), 2), tokens))
    return segments


def shown(segments: list[Segment]) -> list[tuple[Any, ...]]:
    return [(segment.start, segment.end, list(segment.token_ids)) for segment in segments]


CASES = {
    False: [TranscriptionParams(), TranscriptionParams(prompt="before"), TranscriptionParams(language="en")],
    True: [
        TranscriptionParams(language="de"),
        TranscriptionParams(),
        TranscriptionParams(task="translate", language="fr", prompt="a word or two"),
        TranscriptionParams(task="translate"),
    ],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_multilingual", [True, False])
def test_recordings_in_one_batch_have_the_tokens_that_transformers_gives_each(is_multilingual: bool, directories: dict[bool, Path]) -> None:
    directory = directories[is_multilingual]
    engine = engine_over(directory, max_num_seqs=3)
    # Detection wants a whole window, to which transformers does not pad what is shorter.
    lengths = (3.3, 1.0, 2.51)
    jobs = [
        (engine.model.features(recording(seed, seconds)), params)
        for seed, seconds in enumerate(lengths)
        for params in CASES[is_multilingual]
    ]

    async def scenario() -> None:
        answers = await asyncio.gather(*(transcribed(engine, features, params) for features, params in jobs))
        num_texts = num_windows = 0
        for (features, params), segments in zip(jobs, answers, strict=True):
            expected = of_transformers(directory, features, params, engine._previous(params.prompt))
            assert shown(segments) == expected
            num_texts += sum(token < EOS for segment in segments for token in segment.token_ids)
            num_windows += len({segment.seek for segment in segments})
        assert num_windows > 2 * len(jobs)
        assert num_texts > 4 * num_windows  # it is text that was compared
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_steps < stats.num_generation_tokens / 2  # they did run together

    run(engine, scenario())


def test_a_draw_depends_on_the_seed_alone(directories: dict[bool, Path]) -> None:
    engine = engine_over(directories[False], max_num_seqs=4)
    features = engine.model.features(recording(1, 1.6))

    def drawn(seed: int) -> Coroutine[Any, Any, list[Segment]]:
        return transcribed(engine, features, TranscriptionParams(temperature=1.0, seed=seed))

    async def scenario() -> None:
        alone = shown(await drawn(5))
        among = await asyncio.gather(drawn(6), drawn(5), transcribed(engine, features, TranscriptionParams()), drawn(7))
        assert shown(among[1]) == alone
        assert len({str(shown(each)) for each in among}) == 4

    run(engine, scenario())


def test_an_aborted_recording_makes_room_and_leaves_the_others_as_they_are(directories: dict[bool, Path]) -> None:
    engine = engine_over(directories[True], max_num_seqs=2)
    long, short = engine.model.features(recording(2, 30)), engine.model.features(recording(3, 1.5))
    params = TranscriptionParams(language="en")

    async def scenario() -> None:
        alone = await transcribed(engine, short, params)
        async with aclosing(engine.transcribe(long, params)) as deltas:
            await anext(deltas)
            among = asyncio.create_task(transcribed(engine, short, params))
            await anext(deltas)
        assert shown(await among) == shown(alone)
        cancelled = asyncio.create_task(transcribed(engine, long, params))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert shown(await transcribed(engine, short, params)) == shown(alone)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, engine._num_frames_held) == (0, 0, 0)

    run(engine, scenario())


def test_a_failure_ends_the_recordings_in_the_step_and_no_others(directories: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(directories[False])
    features = engine.model.features(recording(1, 1.0))

    async def scenario() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(engine.model, "encode", lambda *_: torch.zeros(1).view(7))
            for _ in range(3):
                with pytest.raises(GenerationFailed):
                    await transcribed(engine, features, TranscriptionParams())
            assert not engine.is_healthy
        assert await transcribed(engine, features, TranscriptionParams())
        assert engine.is_healthy

    run(engine, scenario())
    with pytest.raises(EngineUnavailable):
        engine.check_admission()


def test_what_is_too_much_is_refused(directories: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(directories[True], max_waiting_requests=2, max_num_seqs=1)
    features, params = engine.model.features(recording(1, 8.0)), TranscriptionParams(language="en")

    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match="`language` is 'xx', and this model knows de, en, fr"):
            await transcribed(engine, features, TranscriptionParams(language="xx"))
        async with aclosing(engine.transcribe(features, params)) as running:
            await anext(running)
            waiting = [asyncio.create_task(transcribed(engine, features, params)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull, match=r"2 recordings are waiting, and \d+ seconds of audio are left; try again in \d+ s"):
                await transcribed(engine, features, params)
            with pytest.raises(QueueFull):
                engine.check_admission()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            engine.check_admission()  # those that have left make room
            monkeypatch.setattr(engine_module, "MAX_SECONDS_HELD", 15)
            with pytest.raises(QueueFull):
                await transcribed(engine, features, params)
        monkeypatch.setattr(engine_module, "MAX_SECONDS", 7)
        with pytest.raises(InvalidRequest, match="longer than 7 seconds"):
            await transcribed(engine, features, params)

    run(engine, scenario())


def test_a_shutdown_drains_and_then_ends_what_is_left(directories: dict[bool, Path]) -> None:
    engine = engine_over(directories[False])

    async def scenario() -> None:
        await engine.start()
        short = asyncio.create_task(transcribed(engine, engine.model.features(recording(1, 1.0)), TranscriptionParams()))
        await asyncio.sleep(0)
        await engine.stop(60)
        assert await short
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await transcribed(engine, engine.model.features(recording(1, 1.0)), TranscriptionParams())

    asyncio.run(scenario())
    cut = engine_over(directories[False])

    async def cutting() -> None:
        await cut.start()
        long = asyncio.create_task(transcribed(cut, cut.model.features(recording(1, 60.0)), TranscriptionParams()))
        await asyncio.sleep(0)
        await cut.stop(0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await long

    asyncio.run(cutting())


def test_the_cache_is_as_large_as_the_operator_says(directories: dict[bool, Path]) -> None:
    directory = directories[False]
    model = engine_over(directory).model
    slot = WindowCache.slot_bytes(model.config, model.dtype)
    assert model.num_windows * slot == (model.cache.own.numel() + model.cache.cross.numel()) * 4
    assert not model.cache.own.any()  # what a mask hides must not be NaN
    assert engine_over(directory, kv_cache_memory=3 * slot + 1).model.num_windows == 3
    assert engine_over(directory, kv_cache_memory=3 * slot, max_num_seqs=2).model.num_windows == 2
    with pytest.raises(ConfigurationError, match=f"--kv-cache-memory 7: this model needs {slot} bytes"):
        engine_over(directory, kv_cache_memory=7)
    with pytest.raises(ConfigurationError, match="--quantization int8"):
        engine_over(directory, quantization="int8")
