"""A server over a model that turns text into numbers: what it is told from, what it refuses to start with, and its life."""

import asyncio
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from penstock.assembly import AssembledPooling, assemble
from penstock.cli.flags import build_parser, parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.store import PACKAGED_MODELS
from penstock.plugins.manager import Plugins
from penstock.server import bind, listen, run
from penstock.serving.context import PoolingContext
from penstock.serving.models.startup import served_names
from tests import encoders


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.embedding_directory(tmp_path_factory.mktemp("embedder"))


def assembled(directory: Path, *flags: str) -> AssembledPooling:
    arguments = parse_arguments(["--model", str(directory), "--threads", "1", *flags])
    plugins = Plugins.start(
        arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    result = assemble(arguments, plugins)
    assert isinstance(result, AssembledPooling)
    return result


def close(context: PoolingContext) -> None:
    async def stop() -> None:
        await context.engine.stop()

    asyncio.run(stop())
    context.close()


def test_what_a_model_is_follows_from_its_files(embedder: Path, tmp_path: Path) -> None:
    embedding = assembled(embedder)
    assert embedding.summary == "an embedding model; 32 dimensions; context: 64 tokens; float32 on cpu; threads: 1"
    scoring = assembled(encoders.cross_encoder_directory(tmp_path))
    assert scoring.summary.startswith("a cross-encoder, which scores pairs of texts; context: 64 tokens")
    for context in (embedding.context, scoring.context):
        close(context)


@pytest.mark.parametrize(
    "flags",
    [
        ["--plugin", "deepseek_r1"],
        ["--reasoning-parser", "qwen3"],
        ["--tool-parser", "hermes"],
        ["--thinking-token-budget", "8"],
        ["--compile", "on"],
        ["--quantization", "int8"],
    ],
)
def test_flags_that_only_a_model_that_generates_can_keep_are_refused(embedder: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=flags[0]):
        assembled(embedder, *flags)


def test_a_stated_kind_of_model_has_to_be_right(embedder: Path) -> None:
    close(assembled(embedder, "--runner", "pooling").context)
    with pytest.raises(ConfigurationError, match=f"another kind of model: {embedder.name} turns text into numbers"):
        assembled(embedder, "--runner", "generate")


def test_flags_that_are_kept_anyway_are_fine(embedder: Path) -> None:
    flags = ["--plugin", "none", "--kv-cache-memory", "1MiB", "--speculation", "none", "--compile", "off", "--seed", "1"]
    close(assembled(embedder, *flags).context)


def test_a_model_of_ours_is_served_by_its_short_name_too() -> None:
    assert served_names(parse_arguments(["--model", "minilm"])) == ("all-MiniLM-L6-v2", "minilm")
    assert served_names(parse_arguments(["--model", "minilm", "--served-model-name", "mine"])) == ("mine",)
    assert served_names(parse_arguments([])) == ("SmolLM2-135M-Instruct",)


def test_help_names_every_model_of_ours() -> None:
    (action,) = [action for action in build_parser()._actions if action.dest == "model"]
    assert set(PACKAGED_MODELS) <= set(re.findall(r"[\w.-]+", action.help or ""))


def test_a_server_says_what_it_serves_answers_and_ends_by_a_signal(embedder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse_arguments(["--model", str(embedder), "--threads", "1", "--served-model-name", "tiny", "--no-access-log"])
    model = assembled(embedder, "--served-model-name", "tiny")
    answers: list[int] = []

    def ask(url: str) -> None:
        body = json.dumps({"input": "Hi"}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/embeddings", body, {"Content-Type": "application/json"})) as response:
            answers.append(len(json.load(response)["data"][0]["embedding"]))

    with bind("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()

        def client() -> None:
            try:
                while not answers:
                    try:
                        ask(f"http://{host}:{port}/v1")
                    except urllib.error.HTTPError:
                        raise
                    except urllib.error.URLError:  # it does not listen yet
                        continue
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=client)
        thread.start()
        listen(listener)
        asyncio.run(run(arguments, model, listener, time.monotonic()))
        thread.join()
    assert answers == [32]
    line = capsys.readouterr().out
    summary = r"\(an embedding model; 32 dimensions; .*\)"
    assert re.fullmatch(rf"penstock \S+ serves tiny at (http://127\.0\.0\.1:\d+)/v1, with a playground at \1 {summary}\n", line)
