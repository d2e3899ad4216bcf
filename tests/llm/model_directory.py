"""A small model of random weights on the disk, as a user's would be: one token per byte, a chat template, and markers like Qwen3's."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.tiny_models import tiny_model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools[0].function.name }}</tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
SETTINGS: dict[str, Any] = {"dtype": "float32", "compile": "off", "kv_cache_memory": "4MiB", "threads": 1, "max_model_len": 256, "seed": 0}


def write_model(directory: Path, name: str = "qwen3", **config: Any) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tiny_model(name, **{"vocab_size": backend.get_vocab_size(), **config}).save_pretrained(directory)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
