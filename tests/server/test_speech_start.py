"""A server over a model of speech: how it starts, what it refuses to start with, and what refuses the model."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from penstock import LLM
from penstock.assembly import AssembledSpeech, assemble
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins
from penstock.serving import audio
from penstock.serving.models.file import read_models_file
from penstock.serving.models.startup import served_names
from tests import tiny_speech


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_speech.speech_directory(tmp_path_factory.mktemp("speaker"), seed=3)


def assembled(directory: Path, *flags: str) -> AssembledSpeech:
    arguments = parse_arguments(["--model", str(directory), "--threads", "1", *flags])
    plugins = Plugins.start(
        arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    result = assemble(arguments, plugins)
    assert isinstance(result, AssembledSpeech)
    return result


def close(model: AssembledSpeech) -> None:
    asyncio.run(model.context.engine.stop())
    model.context.close()


def test_the_start_says_what_the_model_is(directory: Path) -> None:
    model = assembled(directory, "--runner", "transcription", "--max-num-seqs", "3", "--dtype", "bfloat16")
    assert model.summary == "a model of speech in 3 languages; windows: 3 at a time; bfloat16 on cpu; threads: 1"
    assert model.context.engine.model.dtype == torch.bfloat16
    close(model)
    assert served_names(parse_arguments(["--model", "whisper-tiny.en"])) == ("whisper-tiny.en",)


@pytest.mark.parametrize(
    "flags",
    [["--plugin", "deepseek_r1"], ["--enable-prompt-embeds"], ["--compile", "on"], ["--quantization", "int8"], ["--draft-model", "x"]],
)
def test_flags_that_only_a_model_that_generates_can_keep_are_refused(directory: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=flags[0]):
        assembled(directory, *flags)


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_stated_kind_of_model_has_to_be_right(directory: Path, runner: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"--runner {runner} is for another kind of model: {directory.name} turns speech into text"
    ):
        assembled(directory, "--runner", runner)


def test_without_libraries_for_audio_there_is_no_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "LIBRARIES", ("soundfile", "no_such_library"))
    with pytest.raises(ConfigurationError, match="takes no_such_library"):
        assembled(directory)


@pytest.mark.parametrize("model", ["whisper-tiny.en", None])
def test_it_is_refused_beside_other_models(directory: Path, tmp_path: Path, model: str | None) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f"[models.ear]\nmodel = {json.dumps(model or str(directory))}\n")
    with pytest.raises(ConfigurationError, match=r"models\.ear\.model: a model that turns speech into text is served alone"):
        read_models_file(parse_arguments(["--models", str(file)]))


def test_the_library_says_where_it_is_served(directory: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="turns speech into text, which a server of this model alone does, at /v1/audio/transcriptions"
    ):
        LLM(model=str(directory))
