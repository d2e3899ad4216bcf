"""One of the tokens that are sampled in a step."""

from dataclasses import dataclass

from penstock.engine.sampling.state import SamplingState
from penstock.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """The sequence's next token or, in the rows after that, the one after the first `num_drafted` tokens of its draft.

    `sampling` is the sequence's own state, or as it will be if the draft is right so far, or once the token that is pending is there.
    """

    sequence: Sequence
    sampling: SamplingState
    num_drafted: int = 0


def sampler_rows(sequence: Sequence, draft: list[int]) -> list[SamplerRow]:
    """A row for the sequence's next token and one after each token of the draft; the forks of a prompt have one each."""
    if sequence.pending_row is not None:
        return [SamplerRow(sequence, sequence.sampling.ahead_of_any())]
    rows = []
    for member in sequence.sampling_sequences:
        member.sampling.is_constrained = member.is_constrained
        rows.append(SamplerRow(member, member.sampling))
    assert not draft or len(rows) == 1
    for num_drafted, token_id in enumerate(draft, start=1):
        rows.append(SamplerRow(sequence, rows[-1].sampling.ahead(token_id), num_drafted))
    return rows
