"""Multimodal models whose images are not served: their language model says of a text what the whole model says."""

from typing import Any

import pytest
import torch

from penstock.engine.errors import InvalidRequest
from penstock.engine.model.config import check_servable
from penstock.engine.multimodal.inputs import PromptImage
from penstock.engine.multimodal.vision import takes_images
from tests.engines import core_over, loaded_multimodal, run
from tests.fakes import make_request
from tests.tiny_multimodal import TEXT, TEXT_ALONE, tiny_multimodal_model

NUM_NEW_TOKENS = 12
PROMPTS = [TEXT.encode()[:length] for length in (1, 9, 40)]


@pytest.mark.parametrize("name", TEXT_ALONE)
def test_text_gets_what_the_whole_model_gives(name: str) -> None:
    whole: Any = tiny_multimodal_model(name)
    assert not takes_images(whole.config)
    check_servable(whole.config)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            while len(ids) < len(prompt) + NUM_NEW_TOKENS:
                ids.append(int(whole(input_ids=torch.tensor([ids])).logits[0, -1, :256].argmax()))
        expected.append(ids[len(prompt) :])
    core = core_over(loaded_multimodal(whole), block_size=8, max_num_batched_tokens=16)
    runs = run(core, [list(prompt) for prompt in PROMPTS], max_tokens=NUM_NEW_TOKENS, allowed_token_ids=list(range(256)))
    with pytest.raises(InvalidRequest, match="takes no images"):
        core.add(make_request("image", [1], embeds=[PromptImage([0], b"", {})]))
    core.runner.shutdown()
    assert [result.token_ids for result in runs] == expected
