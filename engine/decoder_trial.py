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
MAX_DEVIATION = 3e-2  # relative: what rounding to bfloat16 in other places amounts to, with room


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
    positions_1T = torch.tensor([[0, *range(PROMPT_TOKENS)]])
    rows = torch.arange(1 + PROMPT_TOKENS)
    inputs, outputs, logits_TV = _own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
    _compare("embedding", decoder.embed(ids_1T), inputs[0])
    for index, (x_TH, expected_TH) in enumerate(zip(inputs, outputs, strict=True)):
        x_TH = x_TH.float()
        normed_TH = decoder.run(x_TH, positions_1T, metadata, rows, decoder.layer(index))
        _compare(f"layer {index}", x_TH, expected_TH)
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


def _compare(part: str, given: Tensor, expected: Tensor) -> None:
    deviation = float((given.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
    if not deviation < MAX_DEVIATION:
        raise UnsuitableModel(f"its {part} gives something else (by {deviation:.1e})")
