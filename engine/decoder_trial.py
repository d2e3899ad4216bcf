"""Tries out whether native code computes what a model's own code computes, layer by layer, before it is relied on."""

import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention_metadata import AttentionMetadata
from penstock.engine.decoder_form import UnsuitableModel
from penstock.engine.kv_cache import KVCache
from penstock.engine.model_loader import LoadedModel
from penstock.engine.native_decoder import NativeDecoder

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 23  # of one sequence; another has one token
# Relative, a row's on average: what rounding in other places amounts to, with room. The default model's layers deviate by 0.8 percent, of
# 4 bits by 1.7, and without their rotary positions by 22.
MAX_DEVIATION = 3e-2
ROUNDING = 2**-8  # of a sum that a layer's own code rounds to bfloat16 twice


def install_native_decoder(loaded: LoadedModel, cache: KVCache) -> bool:
    """Puts native code in place of the model's `forward` where the model is of its form and the two agree.

    For a model that serves nobody yet: it writes to the cache.
    """
    vars(loaded.model).pop("forward", None)  # of an engine that had the model before
    try:
        decoder = NativeDecoder(loaded, cache)
        check(decoder, loaded, cache)
    except UnsuitableModel as reason:
        logger.info("The model's layers run one by one, not in one call of native code: %s.", reason)
        return False
    loaded.model.forward = decoder
    return True


@torch.inference_mode()
def check(decoder: NativeDecoder, loaded: LoadedModel, cache: KVCache) -> None:
    """Raises `UnsuitableModel` where a layer, or what comes before or after the layers, gives something else.

    Each layer gets what it got in the model's own pass, so that what rounds differently does not add up.
    """
    block_size = cache.block_size
    num_blocks = -(-PROMPT_TOKENS // block_size)
    if cache.num_blocks <= num_blocks:
        raise UnsuitableModel("the cache is too small to try it out")
    prompt_table = list(range(1, num_blocks + 1))
    metadata = AttentionMetadata.pack(
        [0, *range(block_size, block_size + PROMPT_TOKENS)],
        [0, 1, 1 + PROMPT_TOKENS],
        [1, PROMPT_TOKENS],
        [[0], prompt_table],
        num_decodes=1,
        device=loaded.device,
    )
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(loaded.vocab_size, (1, 1 + PROMPT_TOKENS), generator=generator)
    positions_1T = _trial_positions(loaded.max_model_len)
    rows = torch.arange(1 + PROMPT_TOKENS)
    inputs, outputs, logits_TV = _own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
    _compare("embedding", decoder.embed(ids_1T), inputs[0])
    for index, (before_TH, expected_TH) in enumerate(zip(inputs, outputs, strict=True)):
        x_TH = before_TH.float().clone()
        normed_TH = decoder.run(x_TH, positions_1T, metadata, rows, decoder.layer(index))
        _compare(f"layer {index}", x_TH, expected_TH, before_TH)
    _compare("head", decoder.head(normed_TH), logits_TV)


def _own_pass(
    layers: list[nn.Module], model: Any, ids_1T: Tensor, positions_1T: Tensor, metadata: AttentionMetadata
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What goes into each layer and what comes out, [T, H], and the logits [T, V]."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        hidden_1TH = args[0] if args else kwargs["hidden_states"]
        inputs.append(hidden_1TH[0])
        outputs.append(output[0])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(see, with_kwargs=True).remove)
        logits_1TV = model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, attention_metadata=metadata).logits
    return inputs, outputs, logits_1TV[0]


def _trial_positions(max_model_len: int) -> Tensor:
    """[1, T]: the nearest and the farthest, as some models treat what lies far in another way. Attention goes by the cache alone."""
    num_far = max(0, min(PROMPT_TOKENS // 2, max_model_len - PROMPT_TOKENS))
    return torch.tensor([[max_model_len - 1, *range(PROMPT_TOKENS - num_far), *range(max_model_len - num_far, max_model_len)]])


def _compare(part: str, given_TN: Tensor, expected_TN: Tensor, before_TN: Tensor | None = None) -> None:
    """By what was added to `before_TN`, row by row.

    A few numbers of a few rows can be a thousand times as large as all others. Beside these nothing that a layer does would count.
    """
    expected_TN = expected_TN.float()
    errors_TN = (given_TN.float() - expected_TN).abs()
    changes_TN = expected_TN
    if before_TN is not None:
        errors_TN = (errors_TN - expected_TN.abs() * ROUNDING).relu()
        changes_TN = expected_TN - before_TN.float()
    deviation = float((errors_TN.norm(dim=-1) / changes_TN.norm(dim=-1).clamp_min(1e-30)).mean())
    if not deviation < MAX_DEVIATION:
        raise UnsuitableModel(f"its {part} gives something else (by {deviation:.1e})")
