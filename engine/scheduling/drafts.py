"""Draft tokens of a step: they get the tokens and blocks that nothing else in it needs, and no sequence is preempted for them."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.kv_cache.blocks import KVCacheManager
from penstock.engine.scheduling.step import is_chunk
from penstock.engine.sequence import Sequence, Status
from penstock.engine.speculation.lengths import MIN_MAX_ROWS, Speculation
from penstock.engine.speculation.proposers import draft_of


@dataclass(frozen=True, slots=True)
class DraftScheduler:
    """Decides how many draft tokens the sequences of a step get. `num_tokens` are those that the step computes of each sequence."""

    speculation: Speculation
    blocks: KVCacheManager
    max_num_seqs: int

    def is_worth_waiting(self, num_tokens: Mapping[Sequence, int], num_sequences: int) -> bool:
        """Whether drafts for those that a step in flight samples from are worth waiting for its tokens; so many sequences are active."""
        limit = self._max_num_rows(num_sequences)
        if limit <= 0:
            return False
        proposers = [
            sequence.proposer
            for sequence, number in num_tokens.items()
            if sequence.status is Status.RUNNING
            and sequence.proposer is not None
            and number == sequence.num_uncomputed_tokens
            and not sequence.ends_with_next_token
        ]
        return self.speculation.is_worthwhile(proposers, limit, num_sequences=num_sequences)

    def schedule(
        self, num_tokens: Mapping[Sequence, int], num_left: int, num_running: int, *, is_weighed: bool
    ) -> dict[Sequence, list[int]]:
        """The drafts, of at most `num_left` tokens, with blocks for them.

        With `is_weighed` only if they are worth more than scheduling the next step ahead, which they prevent.
        """
        ready = {
            sequence: proposer
            for sequence, number in num_tokens.items()
            if number == sequence.num_uncomputed_tokens
            and not is_chunk(sequence, number)
            and (proposer := sequence.ready_proposer) is not None
        }
        limit = min(num_left, self._max_num_rows(len(num_tokens)))
        proposers = list(ready.values())
        if is_weighed and not self.speculation.is_worthwhile(proposers, limit, num_sequences=len(num_tokens)):
            return {}
        lengths = self.speculation.share(
            proposers,
            limit,
            num_rows=sum(num_tokens.values()),
            num_sequences=sum(number == sequence.num_uncomputed_tokens for sequence, number in num_tokens.items()),
        )
        drafts: dict[Sequence, list[int]] = {}
        for (sequence, proposer), length in zip(ready.items(), lengths, strict=True):
            room = min(self._room(sequence, num_running), sequence.max_draft_tokens)
            if min(length, room) > 0 and (draft := proposer.propose(min(length, room))):
                self._extend_blocks(sequence, num_tokens[sequence] + len(draft))
                drafts[sequence] = draft
                self.speculation.expect(proposer, len(draft))
        return drafts

    def schedule_draft_model(
        self, num_tokens: Mapping[Sequence, int], drafts: Mapping[Sequence, list[int]], num_running: int
    ) -> dict[Sequence, int]:
        """How many tokens a draft model is to propose behind the step, with blocks for them."""
        if not self.speculation.draft_cost:
            return {}
        drafting = {
            sequence: draft
            for sequence, number in num_tokens.items()
            if number == sequence.num_uncomputed_tokens
            and not sequence.forks
            and (draft := draft_of(sequence.proposer)) is not None
            and self.speculation.may_draft(draft)
        }
        num_passes = self.speculation.num_passes([draft.accuracy for draft in drafting.values()], num_sequences=len(num_tokens))
        num_wanted: dict[Sequence, int] = {}
        for sequence in drafting if num_passes else ():
            num_drafted = len(drafts.get(sequence, ()))
            room = min(self._room(sequence, num_running), sequence.max_tokens - sequence.num_output_tokens - 2) - num_drafted
            number = min(num_passes, room)
            if number > 0:
                self._extend_blocks(sequence, num_tokens[sequence] + num_drafted + number)
                num_wanted[sequence] = number
        return num_wanted

    def _max_num_rows(self, num_sequences: int) -> int:
        return max(self.max_num_seqs, MIN_MAX_ROWS) - num_sequences

    def _room(self, sequence: Sequence, num_running: int) -> int:
        """How many more tokens the sequence may have: a block is left to each that runs, for what it will certainly say."""
        num_free = self.blocks.pool.num_free // self.blocks.num_groups
        return (len(sequence.block_table) + max(0, num_free - num_running)) * self.blocks.block_size - len(sequence.token_ids)

    def _extend_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        self.blocks.extend(sequence.block_tables, -(-(sequence.num_computed_tokens + num_tokens) // self.blocks.block_size))
