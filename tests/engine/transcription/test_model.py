"""The features of a recording, whatever its length, and what of a model's files is needed."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.transcription import model as model_module
from penstock.engine.transcription.model import SpeechModel
from tests import tiny_speech
from tests.tiny_speech import recording


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_speech.speech_directory(tmp_path_factory.mktemp("speech"))


def loaded(directory: Path) -> SpeechModel:
    return SpeechModel(directory, EngineConfig(model=str(directory), num_threads=1))


def of_transformers(samples: Tensor) -> Tensor:
    extractor = tiny_speech.feature_extractor()
    features: Tensor = extractor(
        samples.numpy(), sampling_rate=16000, padding="longest", truncation=False, return_tensors="pt"
    ).input_features[0]
    return features


def test_features_are_those_of_transformers_in_parts_of_any_size(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(directory)
    for seconds in (0.3, 1.0, 2.777):
        samples = recording(4, seconds)
        assert torch.equal(model.features(samples), of_transformers(samples))
    expected = of_transformers(recording(5, 3.13))
    for size in (1, 7, 100, 312):
        monkeypatch.setattr(model_module, "FRAMES_AT_ONCE", size)
        torch.testing.assert_close(model.features(recording(5, 3.13)), expected, atol=1e-5, rtol=0)
    assert model.features(torch.zeros(159)).shape == (8, 0)
    assert model.features(torch.zeros(161)).shape == (8, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id"),
        ({"lang_to_id": None}, "lang_to_id"),
        ({"task_to_id": None}, "task_to_id"),
    ],
)
def test_a_model_whose_files_lack_tokens_is_refused(changes: dict[str, None], reason: str, directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "generation_config.json").read_text()) | changes
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=f"WhisperForConditionalGeneration cannot be served: .*{reason}"):
        loaded(tmp_path)


def test_a_model_with_other_features_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny_speech.feature_extractor(16).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"its features .* are \(16, 16000, 160, 0\.0\)"):
        loaded(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert loaded(tmp_path).features(recording(4, 1.0)).shape == (8, 100)
