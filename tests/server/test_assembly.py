"""Which parsers a server uses, told from the model's own files, from flags, or from both."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock import assembly
from penstock.assembly import assemble_generation
from penstock.cli.flags import parse_arguments
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError, QueueFull
from penstock.engine.scheduling.admission import QueueTime
from penstock.plugins.manager import Plugins
from penstock.serving.models import startup
from penstock.serving.models.startup import ModelFiles, system_fingerprint
from tests.tiny_models import tiny_model

TEMPLATE = """{% if tools %}<tool_call>{"name": "f", "arguments": {}}</tool_call>{% endif %}{% for message in messages %}<|im_start|>
{{ message.content.split('</think>')[-1] }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"""
FLAGS = ["--compile", "off", "--kv-cache-memory", "1MiB", "--threads", "1"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without sense, whose tokenizer and template are like Qwen3's."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>")])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("flags", "summary"),
    [
        ([], "reasoning: qwen3 (auto); tools: hermes (auto); "),
        (["--plugin", "auto"], "reasoning: qwen3 (auto); tools: hermes (auto); "),
        (["--plugin", "deepseek_r1"], "reasoning: deepseek_r1; tools: hermes (auto); "),
        (["--reasoning-parser", "deepseek-r1", "--tool-parser", "none"], "reasoning: deepseek_r1; tools: none; "),
        (["--tool-call-parser", "qwen3-coder"], "reasoning: qwen3 (auto); tools: qwen3_coder; "),
        (["--plugin", "none"], "reasoning: none; tools: none; "),
        (["--plugin", "none", "--plugin", "qwen25"], "reasoning: none; tools: hermes; "),
        (["--chat-template", "chatml"], "reasoning: qwen3 (auto); tools: hermes (auto); "),
    ],
)
def test_a_server_says_which_parsers_it_uses_and_why(model_dir: Path, flags: list[str], summary: str) -> None:
    arguments = parse_arguments([*FLAGS, "--model", str(model_dir), *flags])
    plugins = Plugins.start(
        arguments.plugins, arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    assembled = assemble_generation(arguments, plugins, ModelFiles.of(arguments))
    assert assembled.summary.startswith(summary)
    assert assembled.context.reasoning_parser is plugins.reasoning_parser
    assert assembled.context.tool_parser is plugins.tool_parser
    assembled.context.workers.shutdown()
    assembled.context.grammar_compiler.close()


@pytest.mark.parametrize(("flags", "says"), [(["--quantization", "int8"], True), (["--quantization", "none"], False), ([], False)])
def test_a_server_says_how_many_layers_are_in_few_bits(model_dir: Path, flags: list[str], says: bool) -> None:
    arguments = parse_arguments([*FLAGS, "--model", str(model_dir), *flags])
    assembled = assemble_generation(arguments, Plugins.start([]), ModelFiles.of(arguments))
    assert ("layers in Q8_0" in assembled.summary) == says
    assembled.context.workers.shutdown()
    assembled.context.grammar_compiler.close()


def test_the_fingerprint_is_that_of_version_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="a")
    assert re.fullmatch(r"fp_[0-9a-f]{10}", system_fingerprint(config))
    assert system_fingerprint(EngineConfig(model="a")) == system_fingerprint(config)
    changed = {system_fingerprint(EngineConfig(model="b")), system_fingerprint(EngineConfig(model="a", quantization="int8"))}
    monkeypatch.setattr(startup, "__version__", "0.0.0")
    assert len(changed | {system_fingerprint(config)}) == 3


def test_a_single_layer_in_few_bits_is_one_layer(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "quantized_layers", lambda model: {"Q4_K": 210, "Q6_K": 1})
    arguments = parse_arguments([*FLAGS, "--model", str(model_dir)])
    assembled = assemble_generation(arguments, Plugins.start([]), ModelFiles.of(arguments))
    assert "; 210 layers in Q4_K; 1 layer in Q6_K; " in assembled.summary
    assembled.context.workers.shutdown()
    assembled.context.grammar_compiler.close()


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("speech_to_text", "Speech2TextForConditionalGeneration", "it turns speech into text"),
        ("wav2vec2", "Wav2Vec2Model", "it turns speech into text"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "it takes audio"),
        ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("bart", "BartModel", "encoder-decoder"),
    ],
)
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_models_of_other_kinds_are_refused_before_their_weights_are_read(
    model_type: str, architecture: str, reason: str, has_tokenizer: bool, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    arguments = parse_arguments([*FLAGS, "--model", str(tmp_path)])
    with pytest.raises(ConfigurationError, match=f"{architecture} cannot be served: .*{reason}"):
        assembly.assemble(arguments, Plugins.start(arguments.plugins, arguments.without))


def test_a_model_that_generates_has_no_embeddings_to_cut_short(model_dir: Path) -> None:
    arguments = parse_arguments(["--model", str(model_dir), "--matryoshka", *FLAGS])
    with pytest.raises(ConfigurationError, match=f"--matryoshka: for models that make embeddings, and {model_dir.name} generates text"):
        assemble_generation(arguments, Plugins.start(), ModelFiles.of(arguments))


def test_the_bound_on_the_time_in_the_queue_is_the_operators(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse_arguments([*FLAGS, "--model", str(model_dir), "--max-queue-time", "4"])
    assembled = assemble_generation(arguments, Plugins.start([]), ModelFiles.of(arguments))
    queue = assembled.core.scheduler.waiting
    queue.check_admission()
    monkeypatch.setattr(QueueTime, "seconds_for", lambda *_: 4.5)
    with pytest.raises(QueueFull, match=r"the queue takes 4\.5 s; try again in 5 s"):
        queue.check_admission()
    assembled.context.workers.shutdown()
    assembled.context.grammar_compiler.close()
