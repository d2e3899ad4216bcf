"""What came of sampling."""

from dataclasses import dataclass, field

from penstock.engine.deltas import ClientFault, TokenLogprobs

NO_TOKEN_LEFT = ClientFault("no token is left to choose from: together the constraints of this request allow none here")


@dataclass(slots=True)
class SamplerOutput:
    """One entry per row. `failures` maps a row to why it has no token; its token id and log probability then mean nothing.

    Nor do they for a row whose state wants candidates: it has the best (token id, log probability) pairs in `candidates`, best first.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def extend(self, other: "SamplerOutput") -> None:
        self.failures.update((len(self.token_ids) + row, reason) for row, reason in other.failures.items())
        self.candidates.update((len(self.token_ids) + row, pairs) for row, pairs in other.candidates.items())
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
