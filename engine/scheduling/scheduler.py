"""Continuous batching: which sequences compute how many tokens in a step, with admission, chunked prefill and preemption.

No step is a prefill or a decode step: the computed tokens of each sequence catch up with its known ones.
"""

import bisect
from collections.abc import Set

from penstock.engine.adapters.registry import AdapterSlots, AdapterStats, names_of
from penstock.engine.kv_cache.blocks import BlockTable, KVCacheManager
from penstock.engine.kv_cache.persistence import Persistence
from penstock.engine.scheduling.admission import AssumedPace, BlockForecast, BlocksUnderway, OutputLengths, WaitingQueue, scheduling_order
from penstock.engine.scheduling.states import StateScheduler
from penstock.engine.scheduling.step import DraftScheduler, Speculation, Step, TokenBudget, is_chunk
from penstock.engine.sequence import Sequence, Status


class Scheduler:
    """Decodes first, then prompts in the order of `waiting`, under one token budget; preempts the last in order when blocks run out.

    Background sequences are computed in steps of their own. While there are others, they are paused, and preempted where those need their
    places or blocks: another request waits for the step in flight, and for no more.
    A preempted sequence gives up its blocks and computes its tokens again later; what it has said stays said. With `reserves`, a sequence
    is admitted only where blocks are expected to suffice for all that run until they end.
    """

    def __init__(
        self,
        blocks: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        waiting: WaitingQueue,
        speculation: Speculation | None = None,
        reserves: bool = True,
        persistence: Persistence | None = None,
        adapters: AdapterSlots | None = None,
        states: StateScheduler | None = None,
    ) -> None:
        self.blocks = blocks
        self.pool = blocks.pool
        self.block_size = blocks.block_size
        self.speculation = speculation
        self.persistence = persistence
        self.adapters = adapters
        self.states = states
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)  # below that, some would never get their next token
        self.waiting = waiting
        waiting.count_free = lambda: self.max_num_seqs - self.num_seqs_reserved
        waiting.assumed = AssumedPace(max_num_seqs, self.max_num_batched_tokens)
        self._drafts = None if speculation is None else DraftScheduler(speculation, blocks, max_num_seqs)
        self.weighs_drafts = False  # against scheduling the next step ahead, which a step with drafts prevents
        self.running: list[Sequence] = []  # in scheduling order
        self.num_parts = 1  # that sequences are decoded in, one step each: as many as are in flight
        self.in_flight: Set[Sequence] = frozenset()  # of the steps beside which another one is scheduled
        self.lengths = OutputLengths() if reserves else None
        self._refused: Sequence | None = None  # until a running sequence gives up its blocks, or more are free than when it was refused
        self._num_free_at_refusal = 0
        self._free_table_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def num_seqs_reserved(self) -> int:
        """Of the `max_num_seqs`: by those that run, and by the forks and beams that will run once their prompt is there."""
        searches = {sequence.search for sequence in self.running if sequence.search is not None}
        others = sum(len(sequence.self_and_forks) for sequence in self.running if sequence.search is None)
        return others + sum(search.width for search in searches)

    @property
    def pauses_background(self) -> bool:
        """Whether there is a sequence that is not in the background."""
        return bool((self.running and not self.running[0].is_background) or self.waiting.num_foreground)

    @property
    def active(self) -> list[Sequence]:
        """Those that run and are not paused."""
        if not self.running or not self.running[-1].is_background or not self.pauses_background:
            return self.running
        return [sequence for sequence in self.running if not sequence.is_background]

    @property
    def num_eligible(self) -> int:
        """How many of the waiting sequences, from the first, may be admitted."""
        return self.waiting.num_foreground if self.pauses_background else len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with its forks. Raises `QueueFull` beyond the bounds."""
        if self._may_find(sequence):  # now: a step after the arrival of many prompts would block the loop with all their hashes
            sequence.hash_blocks(self.block_size)
        self.waiting.add(sequence)
        if self.persistence is not None and self._may_find(sequence):
            sequence.load = self.persistence.begin(sequence.block_hashes, self._num_usable_blocks(sequence), sequence.request.received)

    def schedule(self, *, is_ahead: bool = False) -> Step:
        """What is to be computed next. With `is_ahead` another step is in flight, and no sequence is preempted: see `has_room`."""
        step = Step()
        self.waiting.age()
        if self.persistence is not None and self.persistence.update(len(self.running) * self.blocks.num_groups):
            self._refused = None
        if self.blocks.has_windows:
            self._free_outside_windows()
        budget = TokenBudget(self.max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.active if not self.in_flight else [one for one in self.active if one not in self.in_flight]:
            num_known = len(sequence.token_ids) + (sequence.pending_row is not None)
            (prompts if num_known - sequence.num_computed_tokens > 1 else decodes).append(sequence)
        if self.num_parts > 1:
            decodes = sorted(decodes, key=lambda one: one.waits_for_mask)[: -(-len(self.active) // self.num_parts)]
        self._schedule_decodes(decodes, step, budget)
        self._schedule_prompts(prompts, step, budget)
        # A sequence that was just preempted would only be admitted to preempt the next one.
        if self.waiting and budget.left and self.num_preemptions == num_preemptions:
            self._admit_waiting(step, budget, prompts, is_ahead=is_ahead)
        self.waiting.observe()
        # A prompt's last token is a decode like any other, and so are a few tokens; attention wants those first.
        if max(step.num_tokens.values(), default=0) > 1:
            step.num_tokens = dict(sorted(step.num_tokens.items(), key=lambda item: is_chunk(*item)))
        if self._drafts is not None:
            if not is_ahead:
                step.drafts = self._drafts.schedule(step.num_tokens, budget.left, len(self.running), is_weighed=self.weighs_drafts)
            step.num_wanted = self._drafts.schedule_draft_model(step.num_tokens, step.drafts, len(self.running))
        if self.states is not None:
            step.snapshots = self.states.advance(step.num_tokens)
        if self.persistence is not None and self.persistence.blocks_held:
            step.num_held_up += 1  # a sequence that finds no free block now may find one once these are freed
        return step

    def _schedule_decodes(self, decodes: list[Sequence], step: Step, budget: TokenBudget) -> None:
        """Gives each of these running sequences its next token, as far as the budget goes. They have one token to compute, or none."""
        # The loop that a full server spends its time in: what holds for almost all rows is looked at here, without a call.
        size, is_shared = self.block_size, self.pool.is_shared
        for sequence in decodes:
            if not budget.left:
                break
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            num_known, position = len(sequence.token_ids), sequence.num_computed_tokens
            if sequence.pending_row is not None:
                if sequence.ends_with_next_token:
                    continue
            elif position == num_known:
                continue
            if sequence.constraint is not None and sequence.waits_for_mask:
                step.num_held_up += 1
                continue
            table = sequence.block_table
            place = position // size
            budget.left -= 1
            is_own = place < len(table) and not sequence.other_tables and not is_shared(table[place])
            if is_own or self._make_room(sequence, 1, step, budget):
                step.num_tokens[sequence] = 1
                if num_known % size == 0 or sequence.table_row is None:
                    self._include(sequence, 1, step)

    def _schedule_prompts(self, prompts: list[Sequence], step: Step, budget: TokenBudget) -> None:
        """Gives running sequences with several tokens to compute as many as the budget has for each."""
        num_left, num_eligible = len(prompts), self.num_eligible
        for sequence in prompts:
            if sequence.status is not Status.RUNNING:
                continue
            if sequence.pending_row is not None and sequence.ends_with_next_token:
                continue
            if sequence.waits_for_mask:
                step.num_held_up += 1
                continue
            num_left -= 1
            num_tokens = budget.take(sequence.num_uncomputed_tokens, num_left + num_eligible)
            num_tokens = self._before_parting(sequence, budget.fit_images(sequence, num_tokens), budget)
            if num_tokens and self._make_room(sequence, num_tokens, step, budget):
                self._include(sequence, num_tokens, step)

    def _free_outside_windows(self) -> None:
        for sequence in self.running:
            if sequence.num_computed_tokens >= sequence.frees_at:
                # The last token may have to be computed again, even once a step behind it is scheduled: see `uncompute_last`.
                position, rule_of = sequence.first_to_come - 1, sequence.retention_rules(self.block_size)
                sequence.frees_at = 1 + self.blocks.free_outside_windows(sequence.block_tables, position, rule_of)
        if self.pool.num_free > self._num_free_at_refusal:
            self._refused = None

    def _admit_waiting(self, step: Step, budget: TokenBudget, prompts: list[Sequence], *, is_ahead: bool) -> None:
        """Admits waiting sequences for as long as there are places, blocks and tokens. `prompts` are the running ones under way."""
        can_preempt = not is_ahead and self._waits_for_background()
        num_seqs_left = self.max_num_seqs - self.num_seqs_reserved
        if not num_seqs_left and not can_preempt:
            return
        if can_preempt:
            self._refused = None
        forecast = self._forecast()
        underway, is_slot_wanted = BlocksUnderway(self.pool), False
        for sequence in prompts:
            underway.add(sequence.hashes_to_come(step.num_tokens.get(sequence, 0), self.block_size))
        for sequence in self.waiting.first(min(self.max_num_seqs, self.num_eligible)):  # no more can be admitted at once
            if not budget.left or (sequence.max_num_running > num_seqs_left and not can_preempt):
                break
            if sequence.waits_for_mask or sequence.is_loading:
                step.num_held_up += 1
                continue
            if is_slot_wanted and sequence.request.adapter is not None:
                continue  # else those before it might never get one
            if not self._has_slot(sequence) and not can_preempt:
                is_slot_wanted = sequence.has_aged
                continue
            if self._may_find(sequence) and self._awaits_prefix(sequence, underway):
                continue  # it is being computed, and can be shared soon
            if not (self._admit_before_background(sequence, forecast) if can_preempt else self._admit(sequence, forecast)):
                break
            num_seqs_left = self.max_num_seqs - self.num_seqs_reserved
            num_tokens = budget.take(sequence.num_uncomputed_tokens, self.num_eligible)
            num_tokens = self._before_parting(sequence, budget.fit_images(sequence, num_tokens), budget)
            self._extend_blocks(sequence, num_tokens)
            if forecast is not None:
                forecast.add(sequence)
            if num_tokens:
                self._include(sequence, num_tokens, step)
            underway.add(sequence.hashes_to_come(num_tokens, self.block_size))

    def _awaits_prefix(self, sequence: Sequence, underway: BlocksUnderway) -> bool:
        num_usable = self._num_usable_blocks(sequence)
        return underway.has_next_of(sequence, num_usable) if self.states is None else self.states.awaits(sequence, num_usable)

    def _before_parting(self, sequence: Sequence, num_tokens: int, budget: TokenBudget) -> int:
        """How many of these tokens come before beams part from the sequence: its states are only there while it is at that place."""
        if self.states is None or sequence.search is None or not sequence.forks:
            return num_tokens
        number = min(num_tokens, sequence.num_tokens_shared_by_all - sequence.num_computed_tokens)
        budget.left += num_tokens - number
        return number

    def _forecast(self) -> BlockForecast | None:
        if self.lengths is None or self.waiting.first(1) == [self._refused]:
            return None
        forecast = BlockForecast(self.lengths, self.blocks)
        for sequence in self.active:
            forecast.add(sequence)
        return forecast

    def has_room(self) -> bool:
        """Whether all that run can compute their next tokens without a block of another's, and none waits for one to be preempted."""
        if self._waits_for_background():
            return False
        active = self.active
        num_running = len(active)
        num_tokens = num_running + sum([len(sequence.token_ids) - sequence.num_computed_tokens for sequence in active])
        if (num_tokens // self.block_size + 2 * num_running) * self.blocks.num_groups <= self.pool.num_free:
            return True  # that many would be enough, however the blocks of each are filled
        wanted = ((sequence, min(sequence.num_uncomputed_tokens, self.max_num_batched_tokens)) for sequence in active)
        return sum(self._num_needed_blocks(sequence, num_tokens) for sequence, num_tokens in wanted) <= self.pool.num_free

    def publish_last_block(self, sequence: Sequence) -> None:
        """Publishes the block that ends with the sequence's last token, which was pending when the step was scheduled."""
        num_full, num_more = divmod(len(sequence.token_ids), self.block_size)
        if not num_more:
            self.save(self._publish(sequence, num_full - 1, num_full))

    def can_fork(self, parent: Sequence) -> bool:
        """Whether the forks of the sequence can run on from it: with recurrent layers, beams from where the first of them parts from it."""
        if self.states is None or parent.search is None:
            return parent.num_uncomputed_tokens == 0
        return parent.num_computed_tokens == parent.num_tokens_shared_by_all

    def fork(self, parent: Sequence) -> None:
        """The parent has been computed: its forks run on from where they part from it, those of a prompt at its end, on the same blocks."""
        for sequence in parent.forks:
            num_tokens = sequence.num_tokens_shared(parent)
            if sequence.search is not None:  # it samples from a token of its own
                num_tokens = min(num_tokens, len(sequence.token_ids) - 1)
            self._share(parent, sequence, num_tokens if self.states is None else min(num_tokens, parent.num_computed_tokens))
        parent.forks = []

    def branch(self, parent: Sequence, sequence: Sequence) -> None:
        """The sequence has said what the parent has, and runs on from there."""
        self._share(parent, sequence, parent.num_computed_tokens)

    def num_blocks_for(self, num_prompt: int, num_tokens: int, width: int) -> int:
        """How many blocks `width` sequences of so many tokens may come to hold, where they share no more than the prompt."""
        num_shared = num_prompt // self.block_size
        num_apart = width * (-(-num_tokens // self.block_size) - num_shared)
        return self._max_blocks_held(num_shared * self.block_size) + num_apart * self.blocks.num_groups

    def uncompute_last(self, sequence: Sequence) -> None:
        """Makes the last token be computed again, over itself: it could not be sampled from, and its logits are gone.

        Recurrent layers cannot return to earlier states: with them, the sequence is preempted.
        """
        if self.states is None:
            sequence.num_computed_tokens -= 1
        else:
            self._preempt(sequence)

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives up what was computed of a running sequence beyond its first `num_tokens` tokens: others follow on those now."""
        assert self.states is None, "recurrent layers cannot return to earlier states"
        if num_tokens < len(sequence.token_ids):
            self.blocks.shorten(sequence.block_tables, num_tokens, sequence.retention_rules(self.block_size))
            sequence.num_blocks_sent = min(sequence.num_blocks_sent, len(sequence.block_table))
            sequence.num_blocks_found = min(sequence.num_blocks_found, len(sequence.block_table))
            del sequence.block_hashes[num_tokens // self.block_size :]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Drops all but the first `num_tokens` tokens of a running sequence. The last of these is computed again, for its logits.

        Where earlier states are gone, or blocks that have left a window, the sequence is preempted.
        """
        has_earlier = self.states is None and not self.blocks.has_windows
        if has_earlier:
            self.rewind(sequence, num_tokens)
        del sequence.token_ids[num_tokens:]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens - 1)
        if not has_earlier:
            del sequence.block_hashes[num_tokens // self.block_size :]
            self._preempt(sequence)

    def keep_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Accepts computed draft tokens: the sequence's first `num_tokens` tokens need not be computed again."""
        first = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_tokens)
        self.save(self._publish(sequence, first, sequence.num_computed_tokens // self.block_size))

    def save(self, blocks: list[int]) -> None:
        """Has published blocks written behind, where the cache persists. They have been computed."""
        if self.persistence is not None:
            self.persistence.save(blocks)

    def drop(self, sequence: Sequence, step: Step) -> None:
        """Takes a sequence out of a step that is in flight already: what the step computes for it is computed again."""
        del step.num_tokens[sequence]
        step.dropped.add(sequence)

    def unpublish_blocks(self, step: Step) -> None:
        """Unpublishes the blocks that a failed step was to fill, and gives up its snapshots."""
        self.pool.unpublish(step.still_promised(self.pool))
        if self.states is not None:
            self.states.discard(step.snapshots)

    def cancel_step(self, step: Step) -> None:
        """Cancels a step whose predecessor failed: its sequences that have not ended are preempted."""
        self.unpublish_blocks(step)
        for sequence in step.num_tokens:
            if sequence.status is Status.RUNNING:
                self._preempt(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes the sequence out, wherever it is, and frees its blocks. Forks that still wait on it are finished as well."""
        was = sequence.status
        sequence.status = Status.FINISHED
        self._release_blocks(sequence)
        if was is Status.RUNNING:
            self._leave(sequence)
            if self.lengths is not None and sequence.search is None:
                self.lengths.add(sequence.num_output_tokens)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.persistence is not None and sequence.load is not None:
            self.persistence.loader.cancel(sequence.load)
        for fork in sequence.forks:
            fork.status = Status.FINISHED
        sequence.forks = []

    def check_integrity(self) -> None:
        """Asserts that no block is lost and that every sequence holds exactly the blocks its computed tokens need."""
        sequences = [*self.running, *self.waiting]
        assert len(sequences) == len(set(sequences))
        for sequence in sequences:
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed_tokens
            assert sequence.num_computed_tokens <= len(sequence.token_ids)
        assert all(sequence.status is Status.WAITING and not sequence.block_table for sequence in self.waiting)
        assert all(sequence.status is Status.RUNNING for sequence in self.running)
        assert self.running == sorted(self.running, key=scheduling_order)
        rows = [sequence.table_row for sequence in sequences if sequence.table_row is not None]
        assert sorted(rows + self._free_table_rows) == list(range(self.max_num_seqs)), "a row of the block tables is lost or in use twice"
        assert all(sequence.num_blocks_sent <= len(sequence.block_table) for sequence in sequences)
        self.waiting.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity(each.request.adapter for each in self.running if each.request.adapter is not None)
        if self.states is not None:
            self.states.check_integrity(self.running)
        others = [] if self.persistence is None else self.persistence.blocks_held
        self.blocks.check_integrity(((sequence.block_tables, sequence.first_to_come) for sequence in self.running), others)

    def _share(self, parent: Sequence, sequence: Sequence, num_tokens: int) -> None:
        """Lets the sequence run on from the parent's first `num_tokens` tokens."""
        sequence.block_tables = self.blocks.share(parent.block_tables, -(-num_tokens // self.block_size))
        sequence.block_hashes = parent.block_hashes[: num_tokens // self.block_size]
        sequence.num_computed_tokens = num_tokens
        sequence.num_cached_tokens = parent.num_cached_tokens
        sequence.queue_seconds = parent.queue_seconds
        sequence.has_aged = parent.has_aged
        sequence.num_blocks_found = len(sequence.block_table)
        if self.states is not None:
            self.states.share(parent, sequence)
        self._run(sequence)

    def _include(self, sequence: Sequence, num_tokens: int, step: Step) -> None:
        step.num_tokens[sequence] = num_tokens
        if sequence.table_row is None:
            sequence.table_row = self._free_table_rows.pop()
        first = sequence.num_computed_tokens // self.block_size
        last = min(sequence.num_computed_tokens + num_tokens, len(sequence.token_ids)) // self.block_size
        step.promised |= {block: self.pool.generation(block) for block in self._publish(sequence, first, last)}

    def _publish(self, sequence: Sequence, first: int, last: int) -> list[int]:
        """Publishes the sequence's blocks [first, last), and returns those that were not before."""
        if not self.pool.enable_prefix_caching or first == last:
            return []
        sequence.hash_blocks(self.block_size)
        published = self.blocks.publish(sequence.block_tables, sequence.block_hashes, first, last)
        if self.pool.events is not None and published:
            self.blocks.record_stored(published, sequence.block_tables, sequence.block_hashes, sequence.token_ids, sequence.adapter_name)
        if sequence.request.retention is not None:  # what is evicted first is not written to disk either
            self.blocks.retain(sequence.block_tables, first, last, sequence.retention_rules(self.block_size))
        return published

    def wants_drafts(self, step: Step) -> bool:
        """Whether drafts for the sequences that this step, which is in flight, samples from are worth waiting for its tokens."""
        return self._drafts is not None and self._drafts.is_worth_waiting(step.num_tokens, len(self.active))

    def _exclude(self, sequence: Sequence, step: Step, budget: TokenBudget) -> None:
        budget.left += step.num_tokens.pop(sequence, 0)
        held = {block for table in sequence.block_tables for block in table.held}
        step.copies = [copy for copy in step.copies if copy[1] not in held]
        self.pool.unpublish([block for block in step.promised if block in held])
        step.promised = {block: generation for block, generation in step.promised.items() if block not in held}

    def adapter_stats(self) -> AdapterStats | None:
        """None where no sequence can have an adapter."""
        if self.adapters is None:
            return None
        running, waiting = (names_of(one.request.adapter for one in sequences) for sequences in (self.running, self.waiting))
        return AdapterStats(running, waiting, self.adapters.num_slots)

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether the model has a place for the sequence's adapter, or it has none."""
        adapter = sequence.request.adapter
        return adapter is None or self.adapters is None or self.adapters.has_room_for(adapter)

    def _leave(self, sequence: Sequence) -> None:
        """It runs no longer."""
        self.running.remove(sequence)
        if self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.release(sequence.request.adapter)

    def _run(self, sequence: Sequence) -> None:
        if self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.take(sequence.request.adapter)
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=scheduling_order)

    def _may_find(self, sequence: Sequence) -> bool:
        # The prompt's log probabilities take its computation.
        return self.pool.enable_prefix_caching and sequence.prompt_logprobs is None

    def _num_usable_blocks(self, sequence: Sequence) -> int:
        """How many blocks need not be computed where they are found. Their hashes are known then."""
        sequence.hash_blocks(self.block_size)
        return sequence.num_reusable_tokens // self.block_size

    def _admit(self, sequence: Sequence, forecast: BlockForecast | None) -> bool:
        """Moves a waiting sequence to the running ones, on the blocks that hold its beginning already, if it fits and will fit."""
        if sequence is self._refused:
            return False
        cached = self._cached_blocks(sequence)
        num_cached = len(cached[0])
        if not self._fits(sequence, cached) or not self._will_fit(sequence, cached, forecast):
            self._refused, self._num_free_at_refusal = sequence, self.pool.num_free
            return False
        sequence.block_tables = self.blocks.share(cached, num_cached)
        sequence.num_computed_tokens = num_cached * self.block_size
        if self.states is not None:
            self.states.begin(sequence, sequence.num_blocks_found)
        sequence.num_blocks_found = num_cached
        if sequence.queue_seconds is None:  # later, what it finds is what it left behind itself when it was preempted
            sequence.queue_seconds = self.waiting.seconds_waited(sequence)
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_prefix_queries += len(sequence.token_ids) * self._may_find(sequence)
            self.num_prefix_hits += sequence.num_cached_tokens
        self.waiting.admit(sequence)
        self._run(sequence)
        return True

    def _waits_for_background(self) -> bool:
        """Whether a sequence waits that background sequences, which run, may be preempted for."""
        return bool(self.running and self.running[-1].is_background and self.waiting.num_foreground)

    def _admit_before_background(self, sequence: Sequence, forecast: BlockForecast | None) -> bool:
        """As `_admit`, with the place and the blocks of background sequences, which are preempted from the last on until they suffice."""
        while (
            sequence.max_num_running > self.max_num_seqs - self.num_seqs_reserved
            or not self._has_slot(sequence)
            or not self._admit(sequence, forecast)
        ):
            if not self.running or not self.running[-1].is_background:
                return False
            self._preempt(self.running[-1])
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[BlockTable]:
        num_usable = self._num_usable_blocks(sequence) if self._may_find(sequence) else 0
        if sequence.search is not None and sequence.forks and (self.blocks.has_windows or self.states is not None):
            # Of what is shared, a token is left to compute, behind which the others part from it.
            num_usable = min(num_usable, (sequence.num_tokens_shared_by_all - (self.states is not None)) // self.block_size)
        if self.blocks.has_windows and sequence.search is not None and (first := sequence.search.first_to_come) is not None:
            num_usable = min(num_usable, first // self.block_size)  # what it may come back to must not have left a window
        cached = self.blocks.find(sequence.block_hashes, num_usable)
        return cached if self.states is None else self.states.up_to_snapshot(sequence, cached, self.blocks)

    def _fits(self, sequence: Sequence, cached: list[BlockTable]) -> bool:
        """Whether all it knows fits into the free blocks, where these are cached."""
        num_tokens = num_shared = len(sequence.token_ids)
        num_apart = 0
        if sequence.search is not None and sequence.forks:  # beams come back with what they have said
            num_shared = sequence.num_tokens_shared_by_all // self.block_size * self.block_size
            num_apart = sum(self._num_blocks_apart(fork, sequence) for fork in sequence.forks)
            num_apart += -(-(num_tokens - num_shared) // self.block_size)
        needed = self._max_blocks_held(num_shared) + num_apart * self.blocks.num_groups
        needed -= sum(len(table.held) for table in cached)
        return needed <= self.pool.num_free - self._num_unreferenced(cached)

    def _will_fit(self, sequence: Sequence, cached: list[BlockTable], forecast: BlockForecast | None) -> bool:
        """Whether all that run, this sequence too, are expected to find blocks until they end."""
        if forecast is None or not self.running:
            return True
        num_used = self.pool.num_blocks - self.pool.num_free + self._num_unreferenced(cached)
        return forecast.fits(sequence, cached, num_used, self.pool.num_blocks)

    def _num_unreferenced(self, tables: list[BlockTable]) -> int:
        return sum(self.pool.num_unreferenced(table.held) for table in tables)

    def _max_blocks_held(self, num_tokens: int) -> int:
        return self.blocks.max_blocks_held(num_tokens, self.max_num_batched_tokens)

    def _num_blocks_apart(self, fork: Sequence, parent: Sequence) -> int:
        return -(-len(fork.token_ids) // self.block_size) - fork.num_tokens_shared(parent) // self.block_size

    def _make_room(self, sequence: Sequence, num_tokens: int, step: Step, budget: TokenBudget) -> bool:
        """Gives the sequence the blocks that its next tokens need, at the expense of the last in order; False where that is itself."""
        num_needed = self._num_needed_blocks(sequence, num_tokens)
        if not num_needed:
            return True
        while num_needed > self.pool.num_free:
            if self.persistence is not None and self.persistence.loader.give_up():
                continue
            victim = self.running[-1]
            for member in self._preempted_with(victim):
                self._exclude(member, step, budget)
            self._preempt(victim)
            if sequence.status is not Status.RUNNING:
                budget.left += num_tokens
                return False
            num_needed = self._num_needed_blocks(sequence, num_tokens)
        position = sequence.num_computed_tokens // self.block_size
        if position < len(sequence.block_table) and self.pool.is_shared(sequence.block_table[position]):
            step.copies += self.blocks.copy_on_write(sequence.block_tables, position)
            sequence.num_blocks_sent = min(sequence.num_blocks_sent, position)
        self._extend_blocks(sequence, num_tokens)
        return True

    def _num_needed_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        # What holds for the blocks of one group of layers holds for those of all.
        position = sequence.num_computed_tokens // self.block_size
        is_copied = position < len(sequence.block_table) and self.pool.is_shared(sequence.block_table[position])
        num_blocks = -(-(sequence.num_computed_tokens + num_tokens) // self.block_size)
        num_new = max(0, num_blocks - len(sequence.block_table))  # drafts may have left it more than it needs
        return (num_new + is_copied) * self.blocks.num_groups

    def _extend_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        self.blocks.extend(sequence.block_tables, -(-(sequence.num_computed_tokens + num_tokens) // self.block_size))

    def _preempt(self, sequence: Sequence) -> None:
        """Takes its blocks from the sequence, which waits again; from a beam, with all of its search."""
        self.num_preemptions += 1
        for member in self._preempted_with(sequence):
            self._leave(member)
            self._release_blocks(member)
            member.num_computed_tokens = 0
            member.status = Status.WAITING
        first = sequence if sequence.search is None else sequence.search.gather()
        self.waiting.put_back(first)

    def _preempted_with(self, sequence: Sequence) -> list[Sequence]:
        search = sequence.search
        return [sequence] if search is None else [running for running in self.running if running.search is search]

    def _release_blocks(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_tables, sequence.retention_rules(self.block_size))
        if self.states is not None:
            self.states.release(sequence)
        sequence.num_blocks_sent = sequence.num_blocks_found = sequence.frees_at = 0
        self._refused = None
        if sequence.table_row is not None:
            self._free_table_rows.append(sequence.table_row)
            sequence.table_row = None
