"""Tries out whether native code computes what a model's own code computes, layer by layer, before it is relied on."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.metadata import AttentionMetadata
from penstock.engine.decoder.decoder_form import UnsuitableModel
from penstock.engine.decoder.native_decoder import NativeDecoder
from penstock.engine.kv_cache import KVCache
from penstock.engine.loading.model_loader import LoadedModel

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 23  # of one sequence; another has one token
# Relative, of the median row: what rounding in other places amounts to, with room. The default model's layers deviate by up to 0.7 percent,
# of 4 bits by up to 1.6, and without their rotary positions by 23 on average.
MAX_DEVIATION = 3e-2
MAX_FAR_DEVIATION = 0.1  # at the end of the context, where rounded cosines matter most to large scores
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
    )
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(loaded.vocab_size, (1, 1 + PROMPT_TOKENS), generator=generator)
    far = max(loaded.max_model_len - PROMPT_TOKENS, 0)  # some models treat what lies far in another way
    for first, limit in ((0, MAX_DEVIATION), (far, MAX_FAR_DEVIATION)):
        positions_1T = torch.tensor([[first, *range(first, first + PROMPT_TOKENS)]])  # where keys lie is a matter of the cache alone
        for part, deviation in _deviations(positions_1T, decoder, loaded, ids_1T, metadata):
            if not deviation < limit:
                raise UnsuitableModel(f"its {part} gives something else (by {deviation:.1e} from position {first} on)")


def _deviations(
    positions_1T: Tensor, decoder: NativeDecoder, loaded: LoadedModel, ids_1T: Tensor, metadata: AttentionMetadata
) -> Iterator[tuple[str, float]]:
    """For each part of the model by how much it gives something else."""
    rows = torch.arange(1 + PROMPT_TOKENS)
    inputs, outputs, logits_TV = _own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
    yield "embedding", _deviation(decoder.embed(ids_1T), inputs[0])
    for index, (before_TH, expected_TH) in enumerate(zip(inputs, outputs, strict=True)):
        x_TH = before_TH.float().clone()
        normed_TH = decoder.run(x_TH, positions_1T, metadata, rows, decoder.layer(index))
        yield f"layer {index}", _deviation(x_TH, expected_TH, before_TH)
    yield "head", _deviation(decoder.head(normed_TH), logits_TV)


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


def _deviation(given_TN: Tensor, expected_TN: Tensor, before_TN: Tensor | None = None) -> float:
    """Relative to what was added to `before_TN`, row by row.

    A few numbers of a few rows can be a thousand times as large as all others. Beside these nothing that a layer does would count. And
    where scores are large, rounding them has a few rows look elsewhere.
    """
    expected_TN = expected_TN.float()
    errors_TN = (given_TN.float() - expected_TN).abs()
    changes_TN = expected_TN
    if before_TN is not None:
        errors_TN = (errors_TN - expected_TN.abs() * ROUNDING).relu()
        changes_TN = expected_TN - before_TN.float()
    return float((errors_TN.norm(dim=-1) / changes_TN.norm(dim=-1).clamp_min(1e-30)).median())
