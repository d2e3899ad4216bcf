"""A step as tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.attention_metadata import AttentionMetadata
from penstock.engine.mask_filler import MaskFiller
from penstock.engine.scheduler import Step
from penstock.engine.sequence import Sequence
from penstock.engine.step_masks import StepMasks


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows [start, stop) of the kept logits that score the sequence's tokens from `first_token` on."""

    sequence: Sequence
    start: int
    stop: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What crosses to the device for one step: T flat tokens, and which of their rows are turned into logits.

    `kept_T` are the flat rows whose logits are computed. Row b of the sampler's input is kept row `sample_rows[b]`: several rows of the
    sampler may share one where sequences fork. `masks` is None where no grammar has a say; it is still being filled.
    """

    input_ids_1T: Tensor
    positions_1T: Tensor
    attention: AttentionMetadata
    kept_T: Tensor
    sample_rows: list[int]
    samplers: list[Sequence]
    prompts: list[PromptRows]
    masks: StepMasks | None
    copies: list[tuple[int, int]]


def slots_of(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    """Where the positions [start, stop) of a sequence lie in the cache."""
    return [block_table[position // block_size] * block_size + position % block_size for position in range(start, stop)]


def build_batch(step: Step, masks: MaskFiller, *, block_size: int, vocab_size: int, min_tokens: int, device: torch.device) -> Batch:
    """Pads to `min_tokens` with tokens that belong to no sequence. `masks` begins to fill those of the step."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    kept: list[int] = []
    sample_rows: list[int] = []
    samplers: list[Sequence] = []
    prompts: list[PromptRows] = []
    for sequence, num_tokens in step.num_tokens.items():
        first = sequence.num_computed_tokens
        last = first + num_tokens
        input_ids += sequence.token_ids[first:last]
        positions += range(first, last)
        slots += slots_of(sequence.block_table, first, last, block_size)
        starts.append(starts[-1] + num_tokens)
        if sequence.prompt_logprobs is not None and first < sequence.num_prompt_tokens - 1:
            num_scored = min(last, sequence.num_prompt_tokens - 1) - first
            prompts.append(PromptRows(sequence, len(kept), len(kept) + num_scored, first + 1))
            kept += range(starts[-2], starts[-2] + num_scored)
        if last == len(sequence.token_ids):
            sequences = sequence.sampling_sequences
            sample_rows += [len(kept)] * len(sequences)
            samplers += sequences
            kept.append(starts[-1] - 1)
    num_padding = max(0, min_tokens - len(input_ids))
    attention = AttentionMetadata.pack(
        slots + [-1] * num_padding,
        starts,
        [sequence.num_computed_tokens + num_tokens for sequence, num_tokens in step.num_tokens.items()],
        [sequence.block_table for sequence in step.num_tokens],
        num_decodes=sum(num_tokens == 1 for num_tokens in step.num_tokens.values()),
        device=device,
    )
    return Batch(
        input_ids_1T=torch.tensor([input_ids + [0] * num_padding], device=device),
        positions_1T=torch.tensor([positions + [0] * num_padding], device=device),
        attention=attention,
        kept_T=torch.tensor(kept, dtype=torch.long, device=device),
        sample_rows=sample_rows,
        samplers=samplers,
        prompts=prompts,
        masks=masks.begin(samplers, vocab_size, pin_memory=device.type == "cuda"),
        copies=step.copies,
    )
