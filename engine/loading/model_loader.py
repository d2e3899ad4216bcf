"""A model directory turned into a model on its device, checked before its weights are read."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from penstock.engine.attention import interface
from penstock.engine.config import Dtype, QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import LayerKV, kv_layout
from penstock.engine.loading.context_length import max_model_len
from penstock.engine.loading.model_config import eos_token_ids, read_config
from penstock.engine.loading.pretrained import DTYPES, load_pretrained
from penstock.engine.loading.servable import check_servable
from penstock.engine.quantization import (
    StoredWeightsConfig,
    forget_config,
    put_in_stored,
    quantize_plain,
    quantized_layers,
    quantized_names,
    resolve_quantization,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in eval mode and without gradients, and what the engine needs to know of it.

    `eos_token_ids` end an answer by the model's configs; the tokenizer may know more. `max_model_len` counts prompt and answer. `dtype` is
    of activations and of weights that are not in few bits; `quantization` is what was asked for, or `none` where `auto` came to that.
    """

    directory: Path
    model: PreTrainedModel
    config: PretrainedConfig
    generation_config: GenerationConfig
    kv_layout: list[LayerKV]
    eos_token_ids: frozenset[int]
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    quantization: QuantizationMode = "none"

    @property
    def vocab_size(self) -> int:
        """The width of the logits, which may exceed the number of tokens that the tokenizer knows."""
        return int(self.config.vocab_size)


def load_model(
    directory: Path,
    dtype: Dtype = "auto",
    device: str = "auto",
    *,
    max_len: int | None = None,
    quantization: QuantizationMode = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str = interface.IMPLEMENTATION,
) -> LoadedModel:
    """Loads a local model directory; `resolve_model` finds it. `max_len` lowers the model's own context length.

    Raises `ConfigurationError` naming what is in the way of a model that cannot be served, before its weights are read; or where none of
    them can be quantized as asked.
    """
    interface.register()
    config = read_config(directory, trust_remote_code)
    layout = check_servable(config, trust_remote_code)
    context = max_model_len(config, max_len)
    _check_weight_files(directory)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, config.dtype if isinstance(config.dtype, torch.dtype) else None)
    mode = resolve_quantization(quantization, torch_device)
    stored = StoredWeightsConfig(quantized_names(directory))
    options: dict[str, Any] = {"quantization_config": stored} if stored.names else {}
    model = load_pretrained(
        AutoModelForCausalLM,
        directory,
        config,
        torch_dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        **options,
    )
    if stored.names:
        forget_config(model)
        put_in_stored(model, directory, stored.places, mode, torch_dtype)
    quantize_plain(model, mode)
    if mode in ("int4", "int8") and not quantized_layers(model):
        raise ConfigurationError(f"--quantization {quantization}: this model has no layers that can be quantized here: use auto or none")
    torch.nn.Module.to(model, torch_device)
    return LoadedModel(
        directory=directory,
        model=model.train(False).requires_grad_(False),
        config=model.config,
        generation_config=model.generation_config,
        kv_layout=layout,
        eos_token_ids=eos_token_ids(config, model.generation_config),
        max_model_len=context,
        dtype=torch_dtype,
        device=torch_device,
        quantization=mode,
    )


def in_memory(model: PreTrainedModel, max_model_len: int) -> LoadedModel:
    """What `load_model` makes of a directory, of a model that is on its device and in its type already. The model itself is changed."""
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    return LoadedModel(
        directory=Path(),
        model=model.train(False).requires_grad_(False),
        config=model.config,
        generation_config=model.generation_config,
        kv_layout=kv_layout(model.config),
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        dtype=model.dtype,
        device=model.device,
    )


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises `ConfigurationError` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"--device {device} is not a device: use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device {device} is not supported: use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    return resolved


def resolve_dtype(dtype: Dtype, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """`auto` is the stored type on a GPU, and on a CPU bfloat16 where it has instructions for it, else float32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigurationError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        wanted = stored or torch.bfloat16
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.float16 if wanted == torch.bfloat16 and not has_bfloat16 else wanted
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; where it does not, bfloat16 is slower than float32."""
    abilities = torch.cpu.get_capabilities()
    return any(abilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _check_weight_files(directory: Path) -> None:
    """Raises `ConfigurationError` naming the weight files that are not there."""
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{index} is not an index of weight files: {error}") from error
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        hint = "" if index.is_file() else "; weights in other formats than safetensors are not read"
        raise ConfigurationError(f"{directory} lacks {', '.join(missing)}{hint}")
