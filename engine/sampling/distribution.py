"""The whole distribution of one next token, from which exact sampling draws on the host."""

import enum
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.params import SamplingParams


class MaskPlace(enum.Enum):
    """Where the grammar's mask is applied to a distribution."""

    AFTER = "after"  # the model's distribution with the request's own parameters, of which the mask takes a part: the rest is lost
    BEFORE = "before"  # the distribution that a constrained token is sampled from: what the mask leaves is renormalised


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tokens that may come next, by ascending id: int64 [K], and their probabilities, float64 [K], none of which is 0.

    These add up to 1 where the mask came before, else to the probability that the mask left.
    """

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    @property
    def mass(self) -> float:
        return float(self.probs.sum())


def probabilities(logits_V: Tensor, params: SamplingParams, top_k: int | None) -> Tensor:
    """float64 [V], sum 1: temperature, then `top_k`, `min_p` and `top_p`, with the same rules for ties as sampling has.

    Float32 logits [V] as they are after penalties, biases and the like, some of them -inf. A row without a finite maximum gives NaN.
    """
    probs_V = ((logits_V - logits_V.max()) / params.temperature).double().softmax(-1)
    if top_k is not None:
        probs_V = torch.where(logits_V < logits_V.topk(top_k).values[-1], 0.0, probs_V)
        probs_V /= probs_V.sum()
    if params.min_p > 0:
        probs_V = torch.where(probs_V < params.min_p * probs_V.max(), 0.0, probs_V)
    if params.top_p < 1:
        # The smallest set that reaches top_p, with every token that ties with its last one: of the others, the likelier ones do reach it.
        descending_V = probs_V.sort(descending=True).values
        before_V = descending_V.cumsum(0) - descending_V
        last = max(0, int((before_V < params.top_p).sum()) - 1)
        probs_V = torch.where(probs_V < descending_V[last], 0.0, probs_V)
    return probs_V / probs_V.sum()


def distribution_of(probs_V: Tensor, row_W: Tensor | None) -> Distribution:
    """What the bitmask, int32 [ceil(V / 32)], leaves of the probabilities; without one, all of them."""
    probs = probs_V.cpu().numpy()
    possible = probs > 0
    if row_W is not None:
        bits = np.unpackbits(row_W.cpu().contiguous().numpy().view(np.uint8), bitorder="little")
        possible &= bits[: len(probs)].astype(bool)
    token_ids = np.flatnonzero(possible)
    return Distribution(token_ids, probs[token_ids])
