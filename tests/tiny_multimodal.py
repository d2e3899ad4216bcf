"""Small, randomly initialised models of every family that takes images, as directories with tokenizer and processor."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from penstock.engine.multimodal.processor import without_video

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
VOCAB_SIZE = 256 + len(MARKERS)
IMAGE_TOKEN_ID = 256 + MARKERS.index("<image>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _VISION, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _VISION, "scale_factor": 2},
    "llava": {
        "text_config": {"model_type": "qwen3", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
        "image_seq_length": 16,
    },
}
_QWEN: dict[str, Any] = {
    "text_config": {**_TEXT, "head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "video_token_id": IMAGE_TOKEN_ID + 1,
}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_CONFIGS["qwen2_5_vl"] = _QWEN | {
    "vision_config": _QWEN_VISION
    | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
}
_CONFIGS["qwen2_vl"] = _QWEN | {"vision_config": _QWEN_VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}}
FAMILIES: list[str] = list(_CONFIGS)


def tiny_multimodal_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model on the CPU, whose next token depends on what the images show."""
    config = AutoConfig.for_model(family, image_token_id=IMAGE_TOKEN_ID, **_CONFIGS[family])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    result: PreTrainedModel = model.eval()
    return result


def byte_backend() -> Backend:
    """A token for each byte and for each of `MARKERS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return backend


def tiny_processor(family: str) -> Any:
    """The processor of the family, with the tokenizer `byte_backend`."""
    names = {"image_token": "<image>", "video_token": "<end_of_utterance>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|im_end|>", chat_template=TEMPLATE, extra_special_tokens=names
    )
    size = {"height": 16, "width": 16}
    match family:
        case "idefics3" | "smolvlm":  # whose own class differs in what it does with videos
            image_class = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
            images = image_class(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
            return Idefics3Processor(images, tokenizer, image_seq_len=4)
        case "llava":
            images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
            return LlavaProcessor(images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
        case "qwen2_5_vl" | "qwen2_vl":
            settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 8 * 8, "max_pixels": 32 * 32}
            return without_video(Qwen2_5_VLProcessor)(Qwen2VLImageProcessorPil(**settings), tokenizer, None)
    raise AssertionError(family)


def write_multimodal_model(directory: Path, family: str, seed: int = 0) -> Path:
    tiny_multimodal_model(family, seed).save_pretrained(directory)
    processor = tiny_processor(family)
    whole = [processor] if all(getattr(processor, name) is not None for name in processor.get_attributes()) else []
    for part in whole or [processor.image_processor, processor.tokenizer]:
        part.save_pretrained(directory)
    return directory


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """Coloured noise, the same for the same seed."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())
