"""From the bytes of an audio file to samples: its format is checked by its first bytes, its length before and while it is decoded."""

import importlib.util
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.transcription.engine import MAX_SECONDS
from penstock.engine.transcription.model import SAMPLING_RATE

LIBRARIES = ("soundfile", "soxr")
MAX_CHANNELS = 8
SAMPLING_RATES = range(4000, 192_001)
MIN_SECONDS = 0.1  # as in OpenAI's API
BLOCK = 2**16  # frames that are decoded at a time
FORMATS = "WAV, FLAC, Ogg (Vorbis or Opus) and MP3"


def check_libraries() -> None:
    """Raises `ConfigurationError` where what decodes audio is not installed."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"serving a model of speech takes {' and '.join(missing)}: run `pip install 'penstock[audio]'`")


def decode_audio(data: bytes, param: str) -> Tensor:
    """Float32 samples [N] of one channel at `SAMPLING_RATE`: channels are averaged. Takes some 20 ms for a minute of audio.

    Raises `InvalidRequest`, with `param` as its path, for what is no audio in one of the formats, too long, or damaged.
    """
    import soundfile  # type: ignore[import-untyped]

    if not _is_known(data):
        raise InvalidRequest(f"`{param}` is no audio in one of the formats {FORMATS}", param)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, param)
            samples = _read(file, param)
    except (soundfile.SoundFileError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"`{param}` is damaged audio, or of a kind that is not supported: {str(error)[:200]}", param) from None
    if len(samples) < MIN_SECONDS * SAMPLING_RATE:
        raise InvalidRequest(f"`{param}` is shorter than {MIN_SECONDS:g} seconds", param)
    if not np.isfinite(samples).all():
        raise InvalidRequest(f"`{param}` has samples that are no finite numbers", param)
    return torch.from_numpy(samples)


def _is_known(data: bytes) -> bool:
    """By its first bytes: the library reads many formats more, which nothing here is tested with."""
    if data[:4] in (b"RIFF", b"RF64"):
        return data[8:12] == b"WAVE"
    is_mpeg_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # layer III
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or is_mpeg_frame


def _check_header(file: Any, param: str) -> None:
    if file.channels > MAX_CHANNELS:
        raise InvalidRequest(f"`{param}` has {file.channels} channels, and may have {MAX_CHANNELS}", param)
    if file.samplerate not in SAMPLING_RATES:
        span = f"{SAMPLING_RATES.start} to {SAMPLING_RATES.stop - 1}"
        raise InvalidRequest(f"`{param}` has {file.samplerate} samples a second, and may have {span}", param)
    if file.frames > MAX_SECONDS * file.samplerate:
        raise _too_long(param)


def _read(file: Any, param: str) -> Any:
    import soxr  # type: ignore[import-untyped]

    resampler = soxr.ResampleStream(file.samplerate, SAMPLING_RATE, 1, dtype="float32")
    parts, num_left = [], MAX_SECONDS * file.samplerate
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        num_left -= len(block)
        if num_left < 0:  # the header of a stream may not say how long that is
            raise _too_long(param)
        mono = np.ascontiguousarray(block.mean(axis=1))
        parts.append(mono if file.samplerate == SAMPLING_RATE else resampler.resample_chunk(mono))
    if file.samplerate != SAMPLING_RATE:
        parts.append(resampler.resample_chunk(np.zeros(0, dtype=np.float32), last=True))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _too_long(param: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}` is longer than {MAX_SECONDS} seconds: send it in parts", param)
