"""Drafters propose what comes next behind each step, such as a draft model: a smaller model with the same vocabulary."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.engine.attention.interface import flatten
from penstock.engine.batch import DraftRows, StepInputs
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model.forward import compute_logits
from penstock.engine.model.loader import LoadedModel
from penstock.engine.sampling.sampler import SamplerOutput
from penstock.engine.scheduling.step import SHORT_CHUNK
from penstock.engine.sequence import Sequence
from penstock.engine.speculation.proposers import draft_of

MIN_TOKENS = 2  # in a batch, as `ModelRunner.min_tokens`


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """What a drafter says after the first `num_known` tokens of a sequence, of which the last are `said`."""

    sequence: Sequence
    num_known: int
    said: list[int]
    draft: list[int]

    def deliver(self) -> None:
        """Offers it to the sequence's proposer, unless the sequence has gone on otherwise, as where a grammar took other tokens."""
        proposer, token_ids = draft_of(self.sequence.proposer), self.sequence.token_ids
        if proposer is not None and len(token_ids) == self.num_known and token_ids[-len(self.said) :] == self.said:
            proposer.offer(self.draft)


@dataclass(slots=True)
class Feed:
    """The tokens of one sequence in one pass, from position `first` on. `hidden_1H` is what a head gave for the token before."""

    rows: DraftRows
    token_ids: list[int]
    first: int
    hidden_1H: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.token_ids)

    @property
    def is_short(self) -> bool:
        return len(self.token_ids) <= SHORT_CHUNK

    def slots(self, first: int) -> list[int]:
        """Those of its tokens from position `first` on."""
        return self.rows.slots[first - self.rows.first : self.stop - self.rows.first]


@dataclass(slots=True)
class Drafter(ABC):
    """Computes drafts behind each step, in the thread of the model, over keys and values of its own in blocks with the same numbers.

    It computes what the model computes, so a block that the model finds in the prefix cache has been computed here as well. Rejected
    tokens are overwritten. What is missing here, as tokens of sequences that had no drafts, costs accuracy and changes no answer.

    It `computes_alone` if it needs token ids only, so that it can compute what the model computed earlier or elsewhere.
    """

    computes_alone: ClassVar[bool] = True

    cache: KVCache
    block_tables_PN: Tensor
    num_passes: int = field(default=0, init=False)

    def see(self, inputs: StepInputs) -> None:
        """Called in each step between the model's pass and sampling."""
        return

    @torch.inference_mode()
    def propose(self, drafting: list[DraftRows], samples: SamplerOutput, rows: list[int]) -> list[ModelDraft]:
        """After a step that sampled these `rows` of the sampler. The first pass has all tokens of the step, the others one each."""
        places = enumerate(zip(rows, samples.token_ids, strict=True))
        sampled = {row: token_id for place, (row, token_id) in places if place not in samples.failures}
        feeds = sorted((Feed(one, one.fed(sampled), one.first) for one in drafting), key=lambda feed: not feed.is_short)
        drafts: dict[Sequence, list[int]] = {}
        made: list[ModelDraft] = []
        wanting = [feed for feed in feeds if feed.rows.num_wanted and len(feed.token_ids) > len(feed.rows.token_ids)]
        for feed in wanting:
            drafts[feed.rows.sequence] = []
            said = feed.token_ids[len(feed.rows.token_ids) :]
            made.append(ModelDraft(feed.rows.sequence, feed.stop, said, drafts[feed.rows.sequence]))
        while feeds:
            self.num_passes += 1
            next_ids = self._run(feeds)
            following = []
            for feed, token_id in zip(feeds, next_ids, strict=True):
                draft = drafts.get(feed.rows.sequence)
                if draft is None:
                    continue
                draft.append(token_id)
                if len(draft) < feed.rows.num_wanted:
                    following.append(Feed(feed.rows, [token_id], feed.stop, feed.hidden_1H))
            feeds = following
        return made

    @abstractmethod
    def _run(self, feeds: list[Feed]) -> list[int]:
        """The most probable token after each of these, of which those of few tokens come first."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What it runs."""

    @abstractmethod
    def release(self) -> None:
        """Takes the KV cache of an engine that has stopped off the modules that the drafter runs."""


@dataclass(slots=True)
class DraftModel(Drafter):
    """Proposes what a smaller model says next, greedily."""

    loaded: LoadedModel
    vocab_size: int

    @property
    def module(self) -> nn.Module:
        return self.loaded.model

    def release(self) -> None:
        vars(self.loaded.model).pop("forward", None)
        self.cache.detach(self.loaded.model)

    def _run(self, feeds: list[Feed]) -> list[int]:
        # Attention wants decodes first.
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, context_lens, table_rows = [0], list[int](), list[int]()
        kept: list[int] = []
        num_decodes = 0
        for feed in feeds:
            first, stop = feed.first, feed.stop
            input_ids += feed.token_ids
            positions += range(first, stop)
            slots += feed.slots(first)
            if feed.is_short:
                starts += range(starts[-1] + 1, len(input_ids) + 1)
                context_lens += range(first + 1, stop + 1)
                table_rows += [feed.rows.table_row] * (stop - first)
                num_decodes += stop - first
            else:
                starts.append(len(input_ids))
                context_lens.append(stop)
                table_rows.append(feed.rows.table_row)
            kept.append(len(input_ids) - 1)
        padding = [0] * max(0, MIN_TOKENS - len(input_ids))
        attention = flatten(slots + [-1] * len(padding), starts, context_lens, table_rows, num_decodes=num_decodes)
        inputs = StepInputs.pack(attention, input_ids + padding, positions + padding, kept, [], self.block_tables_PN)
        logits_KV = compute_logits(self.loaded.model, inputs.input_ids_1T, inputs.positions_1T, inputs.attention, inputs.kept_T)
        token_ids: list[int] = logits_KV[:, : self.vocab_size].argmax(-1).tolist()
        return token_ids
