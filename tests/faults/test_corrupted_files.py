"""Files that are damaged, or say what cannot be: made again where they can be, and refused by name where not."""

import json
import os
from pathlib import Path

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.engine.model import store as packaged_model
from penstock.engine.model.config import read_config
from penstock.engine.model.store import DEFAULT_MODEL, PackagedModel, packaged_model_directory
from penstock.engine.system.cache import MANIFEST, build_once
from tests.tiny_models import tiny_config, tiny_model

WEIGHTS = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


class Builder:
    """Writes a model's files, and counts how often."""

    def __init__(self) -> None:
        self.num_builds = 0

    def __call__(self, directory: Path) -> None:
        self.num_builds += 1
        (directory / "part").mkdir()
        (directory / "part" / "weights").write_bytes(WEIGHTS)


def built(directory: Path, *, verify: bool = False) -> tuple[Path, Builder]:
    builder = Builder()
    return build_once(directory, builder, verify=verify) / "part" / "weights", builder


def zero_out(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes(4096))


@pytest.mark.parametrize("damage", ["zeros", "truncated", "missing", "directory", "manifest missing", "manifest truncated"])
def test_a_damaged_model_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    weights, _ = built(directory)
    if damage == "zeros":
        zero_out(weights)
    elif damage == "truncated":
        os.truncate(weights, 5000)
    elif damage == "manifest truncated":
        os.truncate(directory / MANIFEST, 5)
    else:
        (directory / MANIFEST if damage == "manifest missing" else weights).unlink()
    if damage == "directory":
        weights.mkdir()
    assert built(directory)[1].num_builds == 1
    assert weights.read_bytes() == WEIGHTS
    assert f"The model in {directory} is damaged and made again" in caplog.text
    assert built(directory)[1].num_builds == 0
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == ["one"]


def test_a_damaged_packaged_model_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(model: PackagedModel, directory: Path) -> None:
        (directory / "weights").write_bytes(WEIGHTS)

    monkeypatch.setattr(packaged_model, "_build", build)
    weights = packaged_model_directory(DEFAULT_MODEL) / "weights"
    os.truncate(weights, 5000)
    assert packaged_model_directory(DEFAULT_MODEL) / "weights" == weights
    assert weights.read_bytes() == WEIGHTS


def test_a_damaged_model_that_cannot_be_made_again_is_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    zero_out(built(directory)[0])

    def fail(scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigurationError, match=str(directory)):
        build_once(directory, fail)


def test_what_kept_its_size_and_time_is_hashed_only_when_asked(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    weights, _ = built(directory)
    status = weights.stat()
    zero_out(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert built(directory)[1].num_builds == 0
    assert built(directory, verify=True)[1].num_builds == 1
    assert built(directory, verify=True)[1].num_builds == 0


def test_a_copied_model_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache" / "models" / "one"
    weights, _ = built(directory)
    os.utime(weights, ns=(1, 1))
    assert built(directory)[1].num_builds == 0
    monkeypatch.setattr("penstock.engine.system.cache._digest", None)  # would raise if it were called
    assert built(directory)[1].num_builds == 0
    assert json.loads((directory / MANIFEST).read_text())["files"]["part/weights"]["mtime_ns"] == 1


def test_weights_that_others_can_write_are_refused(tmp_path: Path) -> None:
    weights, _ = built(tmp_path / "cache" / "models" / "one")
    weights.chmod(0o666)
    with pytest.raises(ConfigurationError, match=f"{weights} can be written by other users"):
        built(tmp_path / "cache" / "models" / "one")


@pytest.mark.parametrize("size", [-1, 0])
@pytest.mark.parametrize("name", ["vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"])
def test_a_size_that_no_model_has_is_refused_by_name(tmp_path: Path, name: str, size: int) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    change(tmp_path / "config.json", name, size)
    with pytest.raises(ConfigurationError, match=rf"config\.json: `{name}` is {size}"):
        read_config(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_more_layers_than_tensors_are_refused_before_they_are_listed(tmp_path: Path, architecture: str) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    name = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    change(tmp_path / "config.json", name, 10**9)
    with pytest.raises(ConfigurationError, match=rf"`{name}` is 1000000000, and the weight files hold \d+ tensors"):
        read_config(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("architectures", 5), ("dtype", "float3"), ("rope_parameters", 5), ("eos_token_id", "x")])
def test_a_field_of_another_type_is_refused(tmp_path: Path, name: str, value: object) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    change(tmp_path / "config.json", name, value)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)


def change(config: Path, name: str, value: object) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
