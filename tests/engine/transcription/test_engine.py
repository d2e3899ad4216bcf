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
from penstock.engine.transcription.model import WindowCache
from penstock.engine.transcription.windows import Segment
from tests import tiny_speech
from tests.tiny_speech import EOS, FIRST_TIMESTAMP, recording


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the model is multilingual."""
    return {
        kind: tiny_speech.speech_directory(tmp_path_factory.mktemp("speech"), seed=3, is_multilingual=kind) for kind in (True, False)
    }


def engine_over(directory: Path, **config: Any) -> TranscriptionEngine:
    options = EngineConfig(**{"num_threads": 1, "model": str(directory)} | config)
    return build_transcription_engine(directory, Tokenizer.load(directory), options)


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
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory).eval()
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
def test_recordings_in_one_batch_have_the_tokens_that_transformers_gives_each(
    is_multilingual: bool, directories: dict[bool, Path]
) -> None:
    directory = directories[is_multilingual]
    engine = engine_over(directory, max_num_seqs=3)
    # Detection wants a whole window, to which transformers does not pad what is shorter.
    lengths = (3.3, 1.0, 2.51)
    jobs = [(engine.model.features(recording(seed, seconds)), params) for seed, seconds in enumerate(lengths) for params in CASES[is_multilingual]]

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
