"""The beams of one request on their way through the engine: what is decided of them, and the sequences that they are."""

from dataclasses import dataclass, field

from penstock.engine.beam_group import BeamGroup, Candidate, Continuation, Hypothesis
from penstock.engine.beam_reader import BeamReader
from penstock.engine.outputs import PromptInfo
from penstock.engine.request import Request
from penstock.engine.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class BeamSearch:
    """`sequences` are those of `group.beams`, in the same order: they run in the same batches as everybody else's, wherever they fit.

    `candidates` are the continuations of those that have been computed; once they are all there the beams are chosen anew. A beam that
    goes on twice shares its blocks with the other. All are preempted together: those that have been computed hold blocks that the last
    one may need. They come back as they first came in, the best before the others, which begin where what they share with it ends.
    """

    request: Request
    group: BeamGroup
    reader: BeamReader
    sequences: list[Sequence] = field(default_factory=list)
    candidates: dict[Sequence, list[Candidate]] = field(default_factory=dict)
    prompt: PromptInfo | None = None
    failure: str | None = None
    num_made: int = 1

    @property
    def width(self) -> int:
        """How many sequences it may come to run, and so has places for."""
        return self.group.width

    @property
    def is_ready(self) -> bool:
        """Whether every beam has been computed."""
        return len(self.candidates) == len(self.sequences)

    @property
    def best(self) -> list[Hypothesis]:
        """The answers to be given, best first; they may be fewer than were asked for."""
        return self.group.hypotheses[: self.request.params.n]

    def choose(self) -> list[Continuation]:
        """Has the beams chosen anew. Raises what a plug-in raises that reads them."""
        candidates = [self.candidates[sequence] for sequence in self.sequences]
        self.candidates.clear()
        return self.group.advance(candidates, lambda parent, token_id: self.reader.ending_of(self.sequences[parent], token_id))

    def branch(self, parent: Sequence) -> Sequence:
        """Another sequence where the parent is. It holds no blocks yet."""
        sequence = parent.branch(self.num_made, self.reader.gate_beside(parent))
        self.num_made += 1
        return sequence

    def append(self, sequence: Sequence, parent: Sequence, token_id: int) -> None:
        """The sequence, which is where the parent was, goes on."""
        if sequence.gate is not None:
            sequence.gate.advance(sequence.answer, token_id)
        sequence.answer = self.reader.answer_after(parent, token_id)
        sequence.append(token_id)

    def gather(self) -> Sequence:
        """Has the others wait on the best beam, without anything that was computed. Gives that one."""
        self.candidates.clear()
        best, *others = self.sequences
        best.forks = others
        return best
