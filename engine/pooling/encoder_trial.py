"""Whether a model gives the same over a flat row as by its class's own means, tried once before it is served."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.errors import ConfigurationError
from penstock.engine.pooling.encoder_attention import FLAT_ATTENTION, register_flat_attention
from penstock.engine.pooling.encoder_batch import EncoderInput, build_encoder_batch
from penstock.engine.pooling.encoder_forward import FlatForward, Forward, PaddedForward

logger = logging.getLogger(__name__)

TRIAL_LENGTHS = (7, 4, 7)
MAX_TRIED_WINDOW = 600  # longer ones would take seconds to try
# Rounding is orders of magnitude less, wrong positions or attention across texts orders of magnitude more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def choose_forward(model: PreTrainedModel) -> Forward:
    """Flat where the model's class can be run so, else padded. Raises `ConfigurationError` where it cannot be run at all."""
    plain = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(plain)
    inputs = trial_inputs(model)
    try:
        expected = [own_states(model, text) for text in inputs]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ConfigurationError(f"{type(model).__name__} cannot be served: it takes no plain text ({error})") from error
    if model._supports_attention_backend:
        register_flat_attention()
        model.set_attn_implementation(FLAT_ATTENTION)
        flat = FlatForward.of(model)
        if _agrees(flat, model, inputs, expected):
            return flat
        model.set_attn_implementation(plain)
    logger.info("%s is computed with padding: it takes no flat batches", type(model).__name__)
    return PaddedForward.of(model)


def trial_inputs(model: PreTrainedModel) -> list[EncoderInput]:
    """Texts of a few tokens each, none of which pads, and one longer than the windows of a model that looks both ways.

    Classes may count those differently.
    """
    config = model.config.get_text_config()
    usable = [token_id for token_id in range(min(config.vocab_size, 1000)) if token_id != config.pad_token_id]
    lengths = [*TRIAL_LENGTHS, *_longer_than_windows(model)]
    picks = iter(range(sum(lengths)))
    return [EncoderInput([usable[7919 * next(picks) % len(usable)] for _ in range(length)]) for length in lengths]


def _longer_than_windows(model: PreTrainedModel) -> list[int]:
    windows = [getattr(module, "sliding_window", None) for module in model.modules() if getattr(module, "is_causal", True) is False]
    widest = max((window for window in windows if isinstance(window, int)), default=0)
    return [widest + 4] if 0 < widest <= MAX_TRIED_WINDOW else []


def own_states(model: PreTrainedModel, text: EncoderInput) -> Tensor:
    """Token vectors [L, D] as the class computes them for one text."""
    with torch.inference_mode():
        states: Tensor = model(input_ids=torch.tensor([text.token_ids], device=model.device)).last_hidden_state[0]
    return states


def _agrees(forward: Forward, model: PreTrainedModel, inputs: Sequence[EncoderInput], expected: Sequence[Tensor]) -> bool:
    batch = build_encoder_batch(inputs, model.device)
    try:
        with torch.inference_mode():
            found = batch.split(forward(batch))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        logger.debug("%s takes no flat batches: %s", type(model).__name__, error)
        return False
    return all(is_close(ours, own) for ours, own in zip(found, expected, strict=True))


def is_close(ours: Tensor, own: Tensor) -> bool:
    """Whether the two differ by rounding only."""
    scale = float(own.float().abs().max())
    return bool((ours.float() - own.float()).abs().max() <= TOLERANCE[own.dtype] * max(scale, 1e-6))
