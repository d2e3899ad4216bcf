"""The language model of a multimodal checkpoint alone: what it says is what transformers' whole model says of text."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from penstock import LLM, SamplingParams
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.model.config import check_servable
from penstock.engine.multimodal.vision import take_apart
from tests.llm.model_directory import SETTINGS
from tests.tiny_models import tiny_config
from tests.tiny_multimodal import TEXT, VISION, picture, tiny_multimodal_model, tokenizer_with, write_multimodal_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(b"What is it?")
_CLIP: dict[str, Any] = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
# The types of multimodal models whose images are not served: those of their language models, and their vision towers.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "aya_vision": ("cohere2", {"model_type": "siglip_vision_model", **VISION}),
    "got_ocr2": ("qwen2", {**VISION, "image_size": 64, "patch_size": 16, "output_channels": 16, "mlp_dim": 32}),
    "idefics2": ("mistral", VISION),
    "janus": ("llama", VISION),
    "kimi_k25": ("deepseek_v3", VISION),
    "lfm2_vl": ("lfm2", {"model_type": "siglip2_vision_model", **VISION}),
    "llava_next_video": ("llama", _CLIP),
    "minicpmv4_6": ("qwen3_5_text", VISION),
    "ovis2": ("qwen2", {**VISION, "hidden_stride": 2}),
    "video_llama_3": ("qwen2", VISION),
    "vipllava": ("llama", _CLIP),
}
QUICK = ("kimi_k25", "lfm2_vl")  # with latents, and with recurrent layers


def write_kind(directory: Path, kind: str) -> Any:
    """What is written."""
    name, vision = KINDS[kind]
    text = tiny_config(name).to_dict() | {"vocab_size": TEXT["vocab_size"]}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        whole: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)  # type: ignore[no-untyped-call]
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.15)
    whole.save_pretrained(directory)
    tokenizer_with({}).save_pretrained(directory)
    return whole.eval()


def by_transformers(whole: Any) -> list[int]:
    said: list[int] = []
    with torch.inference_mode():
        for _ in range(8):
            logits = whole(input_ids=torch.tensor([PROMPT + said]), use_cache=False).logits
            said.append(int(logits[0, -1].argmax()))
    return said


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in QUICK)) for kind in KINDS])
def test_it_says_what_the_whole_model_says(kind: str, tmp_path: Path) -> None:
    whole = write_kind(tmp_path, kind)
    with pytest.raises(ConfigurationError, match=r"it is a multimodal model.* --language-model-only asks for its language model alone"):
        LLM(tmp_path, **SETTINGS)
    with LLM(tmp_path, **SETTINGS, language_model_only=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == by_transformers(whole)


def test_a_model_that_takes_images_then_refuses_them(tmp_path: Path) -> None:
    (write_multimodal_model(tmp_path, "llava") / "preprocessor_config.json").unlink(missing_ok=True)  # which is not needed
    with LLM(tmp_path, **SETTINGS, language_model_only=True) as llm:
        with pytest.raises(InvalidRequest, match="takes no images"):
            llm.generate({"prompt": "What is <image>?", "multi_modal_data": {"image": picture(0)}}, GREEDY)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == by_transformers(tiny_multimodal_model("llava"))


@pytest.mark.parametrize("kind", ["blip-2", "instructblip", "instructblipvideo"])
def test_language_models_behind_a_q_former_are_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="it has a Q-Former before a language model"):
        check_servable(AutoConfig.for_model(kind), language_model_only=True)


def test_the_other_parts_are_dropped() -> None:
    whole: Any = tiny_multimodal_model("llava")
    tower = weakref.ref(whole.model.vision_tower)
    _, vision = take_apart(whole, language_model_only=True)
    del whole
    assert vision is None
    assert tower() is None
