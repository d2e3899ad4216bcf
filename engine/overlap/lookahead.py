"""Which steps can be put together while the one before them is still under way."""

from penstock.engine.batch import Batch
from penstock.engine.scheduler import Scheduler, Step


def can_look_ahead(scheduler: Scheduler, step: Step, batch: Batch) -> bool:
    """Whether the step after `step`, which is under way, would be the same whatever tokens this one samples.

    All of those that run go ahead or none does: in two halves, each waiting for its own results, they would read the weights twice.
    Where somebody's next step depends on the token before it, or is worth a draft, it is better known first. A sequence with a grammar is
    let in between two steps, or it and all behind it would wait until nobody goes ahead any more.
    """
    if batch.masks is not None or batch.has_unmasked or step.drafts:
        return False
    sampling = {sampler.sequence for sampler in batch.samplers}
    going_on = [sequence for sequence in scheduler.running if not (sequence in sampling and sequence.ends_with_next_token)]
    if any(sequence.gate is not None or sequence.search is not None for sequence in going_on):
        return False
    num_places = max(0, scheduler.max_num_seqs - scheduler.num_places_taken)
    if any(sequence.gate is not None for sequence in scheduler.waiting.first(num_places)):
        return False  # it is let in when no step is under way
    if not all(sequence.is_predictable for sequence in going_on if sequence in sampling):
        return False
    newcomer = scheduler.next_to_admit
    if newcomer is not None and newcomer.gate is not None:
        return False
    if scheduler.speculation is None:
        return True
    proposers = [sequence.proposer for sequence in going_on if sequence in sampling and sequence.proposer is not None]
    return not scheduler.speculation.is_worthwhile(proposers, num_rows=len(going_on))
