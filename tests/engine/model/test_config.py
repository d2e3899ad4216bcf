import json
from pathlib import Path

import pytest

from penstock.engine.model.config import answer_tokens, read_answer_tokens
from penstock.engine.model.loader import load_model
from tests.fakes import EOS, TOKENIZER
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("generation_config", [None, {"eos_token_id": [7, 9]}, {"eos_token_id": 7}, {}], ids=str)
def test_without_the_weights_the_tokens_are_those_of_the_loaded_model(tmp_path: Path, generation_config: dict[str, object] | None) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    loaded = load_model(tmp_path, "float32", "cpu", attn_implementation="eager")
    (tmp_path / "model.safetensors").unlink()
    assert read_answer_tokens(tmp_path, TOKENIZER) == answer_tokens(loaded.vocab_size, loaded.eos_token_ids, TOKENIZER)


def test_ends_are_those_that_model_or_tokenizer_know() -> None:
    tokens = answer_tokens(TOKENIZER.vocab_size + 10, frozenset({3}), TOKENIZER)
    assert (tokens.vocab_size, tokens.stop_token_ids) == (TOKENIZER.vocab_size, frozenset({3, EOS}))
    assert answer_tokens(100, frozenset(), TOKENIZER).vocab_size == 100
