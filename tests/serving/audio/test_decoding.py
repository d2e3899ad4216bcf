"""Audio files of every format become samples of one channel at 16 kHz, or a refusal that names the field."""

import io
import random
from typing import Any

import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped]

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.serving import audio
from penstock.serving.audio import MAX_CHANNELS, check_libraries, decode_audio

FORMATS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("WAVEX", "PCM_16"),
    ("RF64", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
]


def tone(rate: int, seconds: float = 1.0, frequency: float = 440.0) -> Any:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)


def file_of(samples: Any, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def pitch(samples: Any) -> float:
    """The strongest frequency."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.fft.rfftfreq(len(samples), 1 / 16000)[spectrum.argmax()])


@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
@pytest.mark.parametrize(("rate", "channels"), [(48000, 2), (16000, 1), (8000, 1)])
def test_a_tone_keeps_its_pitch_its_length_and_its_loudness(kind: str, subtype: str, rate: int, channels: int) -> None:
    samples = np.stack([tone(rate)] * channels, axis=1)
    decoded = decode_audio(file_of(samples, rate, kind, subtype), "file").numpy()
    assert decoded.dtype == np.float32
    assert len(decoded) == pytest.approx(16000, abs=2500 if kind in ("MP3", "OGG") else 2)
    middle = decoded[4000:12000]
    assert pitch(middle) == pytest.approx(440, abs=3)
    assert float(np.sqrt((middle**2).mean())) == pytest.approx(0.5 / 2**0.5, rel=0.05)


def test_channels_are_averaged() -> None:
    samples = np.stack([tone(16000), -tone(16000)], axis=1)
    assert abs(decode_audio(file_of(samples, 16000, "FLAC"), "file")).max() < 1e-3


def test_what_is_no_audio_is_refused() -> None:
    wav = file_of(tone(16000), 16000)
    aiff = file_of(tone(16000), 16000, "AIFF")
    for data in (b"", b"RIFF", b"{}", b"\x89PNG\r\n", bytes(1000), aiff, b"RIFF\0\0\0\0AVI " + bytes(100)):
        with pytest.raises(InvalidRequest, match="is no audio in one of the formats WAV, FLAC") as refused:
            decode_audio(data, "file")
        assert refused.value.param == "file"
    for data in (wav[:20], b"fLaC" + bytes(200), b"OggS" + bytes(200), b"ID3" + bytes(200)):
        with pytest.raises(InvalidRequest) as refused:
            decode_audio(data, "file")
        assert refused.value.param == "file"


def test_damage_is_a_refusal_or_other_samples() -> None:
    rng, num_refused = random.Random(3), 0
    files = [file_of(tone(16000, 0.5), 16000, kind, subtype) for kind, subtype in FORMATS]
    for _ in range(200):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[rng.randrange(len(data) // 2, len(data)) :]
        try:
            decoded = decode_audio(bytes(data), "file")
        except InvalidRequest as error:
            num_refused += error.param == "file"
        else:
            assert np.isfinite(decoded.numpy()).all()
    assert 0 < num_refused < 200


def test_the_bounds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"shorter than 0\.1 seconds"):
        decode_audio(file_of(tone(16000, 0.09), 16000), "file")
    with pytest.raises(InvalidRequest, match=f"may have {MAX_CHANNELS}"):
        decode_audio(file_of(np.zeros((1600, MAX_CHANNELS + 1)), 16000), "file")
    with pytest.raises(InvalidRequest, match="2000 samples a second, and may have 4000 to 192000"):
        decode_audio(file_of(tone(2000), 2000), "file")
    endless = tone(16000)
    endless[100] = np.inf
    with pytest.raises(InvalidRequest, match="no finite numbers"):
        decode_audio(file_of(endless, 16000, "WAV", "FLOAT"), "file")
    monkeypatch.setattr(audio, "MAX_SECONDS", 2)
    assert len(decode_audio(file_of(tone(16000, 2.0), 16000), "file")) == 32000
    for kind in ("WAV", "MP3"):
        with pytest.raises(InvalidRequest, match="longer than 2 seconds"):
            decode_audio(file_of(tone(16000, 2.2), 16000, kind), "file")


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_libraries()
    monkeypatch.setattr(audio, "LIBRARIES", ("soundfile", "no_such_library"))
    with pytest.raises(ConfigurationError, match=r"takes no_such_library: run `pip install 'penstock\[audio\]'`"):
        check_libraries()
