"""The beams of one request on their way through the engine: what is decided of them, and the sequences that they are."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.beams.group import BeamGroup, Candidate, Continuation, Ending, Hypothesis
from penstock.engine.beams.search import BeamReader
from penstock.engine.deltas import PromptInfo
from penstock.engine.request import Request
from penstock.engine.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class BeamSearch:
    """`sequences` are those of `group.beams`, in the same order: they run in the same batches as everybody else's, wherever they fit.

    `candidates` are the continuations of those that have been computed; once they are all there the beams are chosen anew. A beam that
    goes on twice shares its blocks with the other. All are preempted together: those that have been computed hold blocks that the last
    one may need. They come back as they first came in, the best before the others, which begin where what they share with it ends.
    `outputs` are those of the answers that are kept, by their tokens.
    """

    request: Request
    group: BeamGroup
    reader: BeamReader
    sequences: list[Sequence] = field(default_factory=list)
    candidates: dict[Sequence, list[Candidate]] = field(default_factory=dict)
    prompt: PromptInfo | None = None
    failure: str | None = None
    num_made: int = 1
    outputs: dict[tuple[int, ...], dict[str, "Tensor"]] = field(default_factory=dict)

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
        continuations = self.group.advance(candidates, lambda parent, token_id: self.reader.ending_of(self.sequences[parent], token_id))
        self._keep_outputs()
        return continuations

    def give_up(self, ending: Ending) -> None:
        """Takes the beams for answers as they are."""
        self.group.give_up(ending)
        self._keep_outputs()

    def outputs_of(self, hypothesis: Hypothesis) -> dict[str, "Tensor"]:
        """The named outputs that were asked for, of all its tokens."""
        return self.outputs.get(tuple(hypothesis.token_ids), {})

    def _keep_outputs(self) -> None:
        """Of the answers that are kept. They end where one of the beams is, or one token after it."""
        if not self.request.outputs:
            return
        beams = {tuple(sequence.token_ids[sequence.num_prompt_tokens :]): sequence.outputs for sequence in self.sequences}
        kept = {}
        for hypothesis in self.group.hypotheses:
            said = tuple(hypothesis.token_ids)
            beam = beams.get(said) or beams.get(said[:-1])
            if said in self.outputs:
                kept[said] = self.outputs[said]
            elif beam is not None:
                kept[said] = beam.generated.first(len(said))
        self.outputs = kept

    def branch(self, parent: Sequence) -> Sequence:
        """Another sequence where the parent is. It holds no blocks yet."""
        sequence = parent.branch(self.num_made, self.reader.gate_beside(parent))
        self.num_made += 1
        return sequence

    def gather(self) -> Sequence:
        """Has the others wait on the best beam, without anything that was computed. Gives that one."""
        self.candidates.clear()
        best, *others = self.sequences
        best.forks = others
        return best
