"""Vectors in place of token embeddings, and positions of three parts, where the other steps run in native code."""

from typing import Any

import pytest
import torch

from penstock.engine.model.native import NativeDecoder
from penstock.engine.multimodal.inputs import ProcessedPrompt
from penstock.engine.multimodal.vectors import prompt_of_vectors
from penstock.engine.native.runtime import native_library
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.multimodal.test_image_equivalence import processed_prompts
from tests.engines import core_over, loaded_model, loaded_multimodal, run
from tests.tiny_models import tiny_model
from tests.tiny_multimodal import byte_backend, tiny_multimodal_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}


def test_the_vectors_of_tokens_are_computed_to_the_bit_as_the_tokens() -> None:
    loaded = loaded_model(tiny_model("llama", head_dim=64, hidden_size=64).bfloat16())
    core = core_over(loaded, enable_prefix_caching=False)
    assert isinstance(loaded.model.forward, NativeDecoder)
    prompts = [[7, 8, 9], list(range(40, 90)), [5]]
    embedding: Any = loaded.model.get_input_embeddings()
    vectors = [prompt_of_vectors(embedding(torch.tensor(prompt)), 64, "prompt") for prompt in prompts]
    for by_tokens, by_vectors in zip(run(core, prompts, max_tokens=4), run(core, vectors, max_tokens=4), strict=True):
        assert torch.equal(by_tokens.logits_TV, by_vectors.logits_TV)
    core.runner.shutdown()


@pytest.mark.parametrize(("family", "text"), [("llava", {}), ("qwen3_vl", {"rope_parameters": ROPE})])
def test_answers_to_images_are_those_of_the_models_own_code(family: str, text: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_multimodal_model(family, head_dim=64, hidden_size=64, **text).bfloat16()
    prompts: list[list[int] | ProcessedPrompt] = list(processed_prompts(family))
    loaded, tokenizer = loaded_multimodal(whole), Tokenizer(byte_backend(), {}, {})
    with monkeypatch.context() as without:
        without.setattr("penstock.engine.build.install_native_decoder", lambda *_: False)
        core = core_over(loaded, tokenizer)
        expected = run(core, prompts, max_tokens=6)
        core.runner.shutdown()
    core = core_over(loaded, tokenizer)
    assert isinstance(loaded.model.forward, NativeDecoder)
    for prompt, own in zip(prompts, expected, strict=True):
        (result,) = run(core, [prompt], max_tokens=6, forced=own.token_ids)
        deviation = (result.logits_TV - own.logits_TV).norm(dim=-1) / own.logits_TV.norm(dim=-1)
        assert float(deviation.max()) < 3e-2
    core.runner.shutdown()
