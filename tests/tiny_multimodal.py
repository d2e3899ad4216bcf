"""Small, randomly initialised models of every family that takes images, as directories with tokenizer and processor."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from penstock.engine.multimodal.processor import without_video

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
LINE_BREAKS = ("\n\n", "\n\n\n", "\n\n\n\n")  # tokens, as Gemma 3 has them
VOCAB_SIZE = 256 + len(MARKERS)
IMAGE_TOKEN_ID = 256 + MARKERS.index("<image>")
SOFT_TOKEN = "<row_4_col_4>"  # of Gemma 3, whose prompts have another one for each image
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT: dict[str, Any] = {
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
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": 2},
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "llava": {
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **VISION},
        "image_seq_length": 16,
    },
}
_CONFIGS["llava_next"] = _CONFIGS["llava"] | {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_CONFIGS["llava_onevision"] = {
    "text_config": {"model_type": "qwen3", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
    "image_grid_pinpoints": _CONFIGS["llava_next"]["image_grid_pinpoints"],
}
_QWEN: dict[str, Any] = {
    "text_config": {**TEXT, "head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "video_token_id": IMAGE_TOKEN_ID + 1,
}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_CONFIGS["qwen2_5_vl"] = _QWEN | {
    "vision_config": _QWEN_VISION
    | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
}
_CONFIGS["qwen3_vl"] = {
    "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    "vision_config": _QWEN_VISION
    | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "video_token_id": IMAGE_TOKEN_ID + 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONFIGS["qwen3_vl_moe"] = _CONFIGS["qwen3_vl"] | {"text_config": _CONFIGS["qwen3_vl"]["text_config"] | _EXPERTS}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_CONFIGS["glm4v"] = {
    "text_config": {**TEXT, "rope_parameters": _PARTIAL_ROPE},
    "vision_config": VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64},
    "video_token_id": IMAGE_TOKEN_ID + 1,
}
_GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
_CONFIGS["glm4v_moe"] = _CONFIGS["glm4v"] | {"text_config": _CONFIGS["glm4v"]["text_config"] | _GLM_EXPERTS}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": _PARTIAL_ROPE,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_CONFIGS["qwen3_5"] = _CONFIGS["qwen3_vl"] | {"text_config": TEXT | _HYBRID}
_CONFIGS["qwen3_5_moe"] = _CONFIGS["qwen3_5"] | {"text_config": TEXT | _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 32}}
_CONFIGS["qwen2_vl"] = _QWEN | {"vision_config": _QWEN_VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}}
_WINDOWED: dict[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_PIXTRAL: dict[str, Any] = {"vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION}}
_CONFIGS["gemma3"] = {
    "text_config": {"model_type": "gemma3_text", **TEXT, **_WINDOWED, "query_pre_attn_scalar": 24},
    "vision_config": {"model_type": "siglip_vision_model", **VISION},
    "mm_tokens_per_image": 16,
}
_CONFIGS["mistral3"] = {"text_config": {"model_type": "mistral", **TEXT}, "spatial_merge_size": 2, **_PIXTRAL}
_CONFIGS["pixtral"] = {"text_config": {"model_type": "mistral", **TEXT}, "vision_feature_layer": -1, **_PIXTRAL}
_CONFIGS["pixtral"]["vision_feature_select_strategy"] = "full"
FAMILIES: list[str] = list(_CONFIGS)
# Whose images reach the engine as another family's do: by default their answers are compared through `LLM` alone, those of most others in
# the engine alone.
LIKE_OTHERS = ("glm4v_moe", "llava_next", "llava_onevision", "pixtral", "qwen2_vl", "qwen3_5_moe", "qwen3_vl_moe", "smolvlm")


def model_type(family: str) -> str:
    """LLaVA with Pixtral's vision tower is a family of its own here."""
    return "llava" if family == "pixtral" else family


def placeholder_id(family: str) -> int:
    """The token that images are put in the place of."""
    return 256 + MARKERS.index(SOFT_TOKEN) if family == "gemma3" else IMAGE_TOKEN_ID


def tiny_multimodal_model(family: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A float32 model on the CPU, whose next token depends on what the images show. `text` are other settings of its language model."""
    settings = _CONFIGS[family] | {"image_token_id": placeholder_id(family), "text_config": _CONFIGS[family]["text_config"] | text}
    config = AutoConfig.for_model(model_type(family), **settings)
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


def byte_backend(line_breaks: Sequence[str] = ()) -> Backend:
    """A token for each byte, for each of `line_breaks`, which are `LINE_BREAKS` or none, and for each of `MARKERS`."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(text.replace("\n", "Ċ") for text in line_breaks)]
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")][: len(line_breaks)]
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return backend


def tokenizer_with(names: dict[str, str], line_breaks: Sequence[str] = ()) -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_backend(line_breaks), eos_token="<|im_end|>", chat_template=TEMPLATE, extra_special_tokens=names
    )


def tiny_processor(family: str, line_breaks: Sequence[str] = ()) -> Any:
    """The processor of the family, with the tokenizer `byte_backend`."""
    names = {"image_token": "<image>", "video_token": "<end_of_utterance>", "context_image_token": "<image>"}
    names |= {"boi_token": "<image>", "eoi_token": "<row_4_col_3>"}
    names |= {"start_image_token": "<fake_token_around_image>", "end_image_token": "<global-img>"}
    if family == "gemma3":
        names["image_token"] = SOFT_TOKEN
    tokenizer = tokenizer_with(names, line_breaks)
    size = {"height": 16, "width": 16}
    tower = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    images: Any
    settings: dict[str, Any]
    match family:
        case "idefics3" | "smolvlm":  # whose own class differs in what it does with videos
            image_class = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
            images = image_class(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
            return Idefics3Processor(images, tokenizer, image_seq_len=4)
        case "internvl":
            images = GotOcr2ImageProcessorPil(size=size, max_patches=3)
            return without_video(InternVLProcessor)(images, tokenizer, None, image_seq_length=4)
        case "gemma3":
            return Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=16)
        case "mistral3" | "pixtral":
            images = PixtralImageProcessorPil(size={"longest_edge": 32})
            breaks = {"image_break_token": "<row_1_col_1>", "image_end_token": "<row_1_col_2>"}
            merge_size = 2 if family == "mistral3" else 1
            return pixtral_processor_class()(
                images, tokenizer, patch_size=4, spatial_merge_size=merge_size, image_token="<image>", **breaks
            )
        case "llava":
            images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
            return without_video(LlavaProcessor)(images, tokenizer, **tower)
        case "llava_next":
            pinpoints = _CONFIGS[family]["image_grid_pinpoints"]
            images = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=pinpoints)
            return without_video(LlavaNextProcessor)(images, tokenizer, **tower)
        case "llava_onevision":
            images = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=_CONFIGS[family]["image_grid_pinpoints"])
            settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
            return without_video(LlavaOnevisionProcessor)(images, tokenizer, None, **settings)
        case "glm4v" | "glm4v_moe":
            settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
            settings |= {"size": {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 32 * 32}}  # pixels, of two frames
            images = Glm4vImageProcessorPil(**settings)
            return without_video(Glm4vProcessor)(images, tokenizer, None)
        case "qwen2_5_vl" | "qwen2_vl" | "qwen3_5" | "qwen3_5_moe" | "qwen3_vl" | "qwen3_vl_moe":
            settings = {
                "patch_size": 4,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "min_pixels": 8 * 8,
                "max_pixels": 32 * 32,
            }
            processor_class = Qwen3VLProcessor if family.startswith("qwen3") else Qwen2_5_VLProcessor
            return without_video(processor_class)(Qwen2VLImageProcessorPil(**settings), tokenizer, None)
    raise AssertionError(family)


def pixtral_processor_class() -> Any:
    """transformers' own, which imports a function for sizes from a module that needs torchvision."""
    module = ModuleType("transformers.models.pixtral.image_processing_pixtral")
    vars(module).update(get_resize_output_image_size=image_processing_pil_pixtral.get_resize_output_image_size)
    sys.modules.setdefault(module.__name__, module)
    return import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def write_multimodal_model(directory: Path, family: str, seed: int = 0) -> Path:
    tiny_multimodal_model(family, seed).save_pretrained(directory)
    processor = tiny_processor(family)
    whole = [processor] if all(getattr(processor, name) is not None for name in processor.get_attributes()) else []
    for part in whole or [processor.image_processor, processor.tokenizer]:
        part.save_pretrained(directory)
    # Those whose part for videos is missing do not save themselves.
    names = {"internvl": ("image_seq_length",), "llava_onevision": ("num_image_tokens", "vision_feature_select_strategy")}
    if family in names:
        settings = {name: getattr(processor, name) for name in names[family]}
        (directory / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """Coloured noise, the same for the same seed."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())
