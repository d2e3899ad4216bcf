"""Recordings: from the bytes of a file to samples, requests for transcriptions, the text of segments in the formats that they are asked for
in, and metrics.

The format of a file is checked by its first bytes, its length before and while it is decoded.
"""

import importlib.util
import io
import math
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import UNSET, Meta, Struct, UnsetType, field
from torch import Tensor

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.transcription.engine import (
    FRAMES_PER_SECOND,
    MAX_SECONDS,
    SpeechTask,
    TranscriptionDelta,
    TranscriptionEngine,
    TranscriptionParams,
)
from penstock.engine.transcription.model import SAMPLING_RATE, Segment
from penstock.serving.observability.metrics import RequestMetrics
from penstock.serving.requests import Int32, RequestFields

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


ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
MAX_PROMPT = 2**14  # characters


class SpeechFields(RequestFields, kw_only=True):
    """Those of transcriptions and translations. At a `temperature` of 0 the most probable tokens are taken."""

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] = ""
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Int32 | None = None


class TranscriptionRequest(SpeechFields, kw_only=True, forbid_unknown_fields=True):
    """`language` is a code such as `en`, or its English name; without one the model detects it."""

    language: str | None = None
    stream: bool = False
    timestamp_granularities: list[str] = field(name="timestamp_granularities[]", default_factory=list)


class TranslationRequest(SpeechFields, kw_only=True, forbid_unknown_fields=True):
    """All its fields are those of transcriptions too. The text is English."""


# Fields of OpenAI's and vLLM's references that would change the answer.
REFUSED = {
    "chunking_strategy": "`chunking_strategy` is not supported: windows of 30 seconds follow each other by the model's timestamps",
    "include[]": "`include` is not supported: transcriptions have no logprobs",
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
    "max_completion_tokens": "`max_completion_tokens` is not supported: a recording is transcribed to its end",
    "to_language": "`to_language` is not supported: translations are English",
    "top_p": "`top_p` is not supported: set `temperature`",
    "top_k": "`top_k` is not supported: set `temperature`",
    "use_beam_search": "`use_beam_search` is not supported",
}


def check_fields(body: SpeechFields) -> None:
    """Raises `InvalidRequest` for what is known and not supported."""
    if not isinstance(body, TranscriptionRequest):
        return
    for granularity in body.timestamp_granularities:
        if granularity != "segment":
            what = "words have no timestamps here" if granularity == "word" else f"{granularity!r} is none"
            raise InvalidRequest(f"`timestamp_granularities` may hold `segment`: {what}", "timestamp_granularities")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidRequest("`timestamp_granularities` takes `response_format` verbose_json", "timestamp_granularities")
    if body.stream and body.response_format not in ("json", "text"):
        raise InvalidRequest(f"`response_format` {body.response_format} cannot be streamed", "response_format")


def params_of(body: SpeechFields, task: SpeechTask) -> TranscriptionParams:
    language = body.language if isinstance(body, TranscriptionRequest) else None
    code = None if not language else language_code(language)
    return TranscriptionParams(task, code, body.prompt, body.temperature, body.seed)


def language_code(language: str) -> str:
    """The code of a language that is given by it, by a tag such as `en-GB`, or by its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.strip().lower()
    return TO_LANGUAGE_CODE.get(name) or name.partition("-")[0]


def language_name(code: str | None) -> str:
    """As OpenAI's API names it: in English. Empty where it is unknown, as of no audio at all."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return "" if code is None else LANGUAGES.get(code, code)


class DurationUsage(Struct):
    """`seconds` are those of the recording, rounded up."""

    seconds: int
    type: Literal["duration"] = "duration"


class TokenUsage(Struct):
    """`input_tokens` are positions of the encoder, 50 for each second of audio, and tokens of the prompt."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class TranscriptionSegment(Struct):
    """`start` and `end` are in seconds, `seek` in hundredths of them. `tokens` include those of the timestamps."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcription(Struct):
    """From `task` on, the fields are those of verbose_json."""

    text: str
    usage: DurationUsage
    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptionSegment] | UnsetType = UNSET


class Transcript:
    """The segments of one recording as they come, and what they come to in each format."""

    def __init__(self, engine: TranscriptionEngine, params: TranscriptionParams, num_frames: int) -> None:
        self._tokenizer, self._eos, self._params = engine.tokenizer, engine.model.tokens.eos, params
        self._num_frames = num_frames
        self._language: str | None = params.language
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self.segments: list[tuple[Segment, str]] = []
        self.text = ""

    def add(self, delta: TranscriptionDelta) -> str:
        """Returns what it adds to the text, which begins with no space."""
        self._language = delta.language
        self._num_prompt_tokens, self._num_generation_tokens = delta.num_prompt_tokens, delta.num_generation_tokens
        added = ""
        for segment in delta.segments:
            text = self._tokenizer.decode([token for token in segment.token_ids if token < self._eos])
            if text.strip():
                self.segments.append((segment, text))
                added += text
        if not self.text:
            added = added.lstrip()
        self.text += added
        return added

    @property
    def seconds(self) -> float:
        return self._num_frames / FRAMES_PER_SECOND

    @property
    def token_usage(self) -> TokenUsage:
        num_input = self._num_frames // 2 + self._num_prompt_tokens
        return TokenUsage(num_input, self._num_generation_tokens, num_input + self._num_generation_tokens)

    def json(self, *, is_verbose: bool) -> Transcription:
        answer = Transcription(self.text, DurationUsage(math.ceil(self.seconds)))
        if is_verbose:
            answer.task, answer.language, answer.duration = self._params.task, language_name(self._language), self.seconds
            answer.segments = [self._segment(number, segment, text) for number, (segment, text) in enumerate(self.segments)]
        return answer

    def _segment(self, number: int, segment: Segment, text: str) -> TranscriptionSegment:
        data = text.encode()
        return TranscriptionSegment(
            id=number,
            seek=segment.seek,
            start=segment.start,
            end=segment.end,
            text=text,
            tokens=segment.token_ids,
            temperature=self._params.temperature,
            avg_logprob=segment.avg_logprob,
            compression_ratio=len(data) / len(zlib.compress(data)),
            no_speech_prob=segment.no_speech_prob,
        )

    def plain(self, kind: ResponseFormat) -> str:
        """The text of the formats that are not JSON, with a line's end."""
        if kind == "text":
            return f"{self.text}\n"
        if kind == "srt":
            cues = [
                f"{number}\n{_timestamp(segment.start, ',')} --> {_timestamp(segment.end, ',')}\n{_cue(text)}\n"
                for number, (segment, text) in enumerate(self.segments, 1)
            ]
            return "\n".join(cues)
        cues = [f"{_timestamp(segment.start, '.')} --> {_timestamp(segment.end, '.')}\n{_cue(text)}\n" for segment, text in self.segments]
        return "\n".join(["WEBVTT\n", *cues])


def _cue(text: str) -> str:
    """A cue's text, in which `-->` would begin another one."""
    return text.strip().replace("-->", "->")


def _timestamp(seconds: float, separator: str) -> str:
    """HH:MM:SS and milliseconds after the separator: a comma in SRT, a point in WebVTT."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{separator}{rest % 1000:03}"


class TranscriptionTimer:
    """One request's counts, from the deltas that pass through `watch`."""

    __slots__ = ("_metrics", "_start", "model", "num_generation_tokens", "num_prompt_tokens")

    def __init__(self, metrics: RequestMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._start = arrived
        self.model: str | None = None
        self.num_prompt_tokens = self.num_generation_tokens = 0

    @property
    def summary(self) -> str:
        return f"prompt={self.num_prompt_tokens} generated={self.num_generation_tokens}"

    @property
    def fields(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": self.num_generation_tokens}
        return {"model": self.model, **counts}

    async def watch(self, deltas: AsyncGenerator[TranscriptionDelta, None]) -> AsyncGenerator[TranscriptionDelta, None]:
        """The same deltas. Closing this generator closes them."""
        reason = "abort"
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    self.num_prompt_tokens, self.num_generation_tokens = delta.num_prompt_tokens, delta.num_generation_tokens
                    reason = "stop" if delta.is_last else reason
                    yield delta
        except Exception:
            reason = "error"
            raise
        finally:
            self._metrics.prompt_tokens.observe(self.num_prompt_tokens)
            self._metrics.e2e_latency.observe(time.monotonic() - self._start)
            self._metrics.count_finished(reason)
