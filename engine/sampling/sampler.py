"""From logits to tokens, batched over the sequences of a step, with their log probabilities."""

import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import threshold

from penstock.engine.contracts.logits_processor import SequenceProcessor, take_changed
from penstock.engine.deltas import ClientFault, TokenLogprobs
from penstock.engine.native.runtime import native_library
from penstock.engine.sampling.distribution import Distribution, MaskPlace, distribution_of, probabilities
from penstock.engine.sampling.logprobs import LaunchedLogprobs, read_columns, token_logprobs, top_pairs
from penstock.engine.sampling.rows import (
    SamplingState,
    apply_bitmask,
    apply_penalties,
    choose_on_device,
    draw,
    most_probable,
    most_probable_k,
    padded_width,
)
from penstock.engine.system.memory import index_on, to_device


class ProcessorPass:
    """The rows of one step that have processors. Logits float32 [R, V] are changed in place.

    `failures` maps a row to why it has no logits: a processor of its raised. The other rows are none the worse for it.
    """

    def __init__(self, logits_RV: Tensor, processors: Sequence[Sequence[SequenceProcessor]]) -> None:
        self.logits_RV = logits_RV
        self.failures: dict[int, str] = {}
        self._remaining = {row: list(own) for row, own in enumerate(processors)}

    def run(self) -> None:
        while True:
            for row in self._remaining:
                self._run_own(row)
            rows = self._next_batch()
            if not rows:
                return
            self._run_batch([(row, self._remaining[row].pop(0)) for row in rows])

    def _run_own(self, row: int) -> None:
        """Up to the row's next batched processor."""
        remaining = self._remaining[row]
        while remaining and not remaining[0].processor.is_batched:
            member = remaining.pop(0)
            logits = self.logits_RV[row : row + 1]
            try:
                self._take(member.processor.process([member.row], logits), logits)
            except Exception as error:  # a plug-in's code: whatever it raises ends its own request
                self._fail(row, error)

    def _next_batch(self) -> list[int]:
        """The rows whose turn it is with one batched processor: one that no row has yet to come to, if there is such."""
        ready: dict[int, list[int]] = {}
        for row, remaining in self._remaining.items():
            if remaining:
                ready.setdefault(id(remaining[0].processor), []).append(row)
        later = {id(member.processor) for remaining in self._remaining.values() for member in remaining[1:]}
        return max(ready.items(), key=lambda item: (item[0] not in later, len(item[1])), default=(0, []))[1]

    def _run_batch(self, members: list[tuple[int, SequenceProcessor]]) -> None:
        rows = [row for row, _ in members]
        processor = members[0][1].processor
        index = index_on(self.logits_RV.device, rows)
        logits = self.logits_RV[index]  # a copy: where the call raises, the rows are as they were
        try:
            self._take(processor.process([member.row for _, member in members], logits), logits)
            self.logits_RV[index] = logits
        except Exception as error:  # as above; of several rows it has to be found out whose fault it is
            if len(members) == 1:
                self._fail(rows[0], error)
            else:
                for member in members:
                    self._run_batch([member])

    @staticmethod
    def _take(changed: Tensor | None, logits: Tensor) -> None:
        if changed is not None:
            take_changed(changed, logits)

    def _fail(self, row: int, error: Exception) -> None:
        self.failures[row] = f"a logits processor raised {type(error).__name__}: {error}"
        self._remaining[row].clear()


NOT_FINITE = "the model's logits are not finite"
NO_TOKEN_LEFT = ClientFault("no token is left to choose from: together the constraints of this request allow none here")
# On a CPU, a pass over more than fits its caches, or over more than malloc keeps, takes three times as long.
CPU_PASS_ELEMENTS = 2**19
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
NUM_UNIFORMS = 4  # at first: draws outside the nucleus use up more
# As in `engine/native/choice.h`.
MORE_UNIFORMS = -2


@dataclass(slots=True)
class SamplerOutput:
    """One entry per row. `failures` maps a row to why it has no token; its token id and log probability then mean nothing.

    Nor do they for a row whose state wants candidates: it has the best (token id, log probability) pairs in `candidates`, best first. Nor
    for one whose state wants the `distributions` that another draws from.
    `pressures` are in nats, of the rows whose state wants them.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    distributions: dict[int, Distribution] = field(default_factory=dict)
    pressures: dict[int, float] = field(default_factory=dict)

    def extend(self, other: "SamplerOutput") -> None:
        """Appends the rows of `other`."""
        num_rows = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.put(range(num_rows, len(self.token_ids)), other)

    def put(self, rows: Sequence[int], other: "SamplerOutput") -> None:
        """Row i of `other` becomes row rows[i], in place of what was there."""
        for place, row in enumerate(rows):
            self.token_ids[row], self.logprobs[row] = other.token_ids[place], other.logprobs[place]
        self.failures.update((rows[place], reason) for place, reason in other.failures.items())
        self.candidates.update((rows[place], pairs) for place, pairs in other.candidates.items())
        self.distributions.update((rows[place], found) for place, found in other.distributions.items())


@dataclass(frozen=True, slots=True)
class LaunchedSamples:
    """One entry per row, all of it on the device. `is_possible_B` is 0 where a row has no token; as the ids, it is int64.

    `work_BV` are the logits that were sampled from, and `reason` says of a row's raw ones and these why there is no token.
    `logprobs` are those of `logprob_rows`, None where no row wants any.
    """

    token_ids_B: Tensor
    is_possible_B: Tensor
    work_BV: Tensor
    reason: Callable[[Tensor, Tensor], str]
    logprob_rows: list[int]
    logprobs: LaunchedLogprobs | None

    def packed(self) -> Tensor:
        """What `read` is to be given: int64, in one tensor because that is one copy."""
        parts = [self.token_ids_B, self.is_possible_B]
        return torch.cat(parts if self.logprobs is None else [*parts, self.logprobs.packed_TN.flatten()])

    def read(self, packed: Tensor) -> SamplerOutput:
        """From a copy of `packed` on the CPU."""
        num_rows = len(self.token_ids_B)
        token_ids, is_possible = packed[: 2 * num_rows].view(2, num_rows).tolist()
        failed = [row for row, possible in enumerate(is_possible) if not possible]
        failures = {row: self.reason(self.work_BV[row], self.work_BV[row]) for row in failed}
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        if self.logprobs is not None:
            entries = self.logprobs.read(packed[2 * num_rows :].view(len(self.logprob_rows), -1))
            for row, entry in zip(self.logprob_rows, entries, strict=True):
                logprobs[row] = None if row in failures else entry
        return SamplerOutput(token_ids, logprobs, failures)


class Sampler:
    """Chooses the next token of every sequence.

    Order: logits processors, allowed ids, logit bias, penalties, bad words and held-off stop ids, grammar bitmask, temperature, top-k,
    top-p, min-p. Log probabilities are those of the raw logits. A row's token depends on that row and its seed alone.

    Where candidates are wanted, what comes before the temperature works on log probabilities, as in beam search of `transformers`.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._width = padded_width(vocab_size)
        self._shared_generator = random.Random(seed)
        self._rows_per_pass = max(1, CPU_PASS_ELEMENTS // self._width) if self.device.type == "cpu" else None

    def sample(
        self, logits_BV: Tensor, states: Sequence[SamplingState], bitmask_BW: Tensor | None, pending_ids_P: Tensor | None = None
    ) -> SamplerOutput:
        """Logits in any float dtype, left as they are; columns from `vocab_size` on are ignored.

        `bitmask_BW` is int32 [B, ceil(V / 32)], all ones where a row is unconstrained; None where all are. Not a number, or no token
        left, fails that row alone. `pending_ids_P` are the tokens that the `pending_row` of a state is about.
        """
        if all(state.takes_most_probable for state in states):
            greedy = greedy_tokens(logits_BV, self.vocab_size, bitmask_BW)
            if greedy is not None:
                pressures = mask_pressures(logits_BV[:, : self.vocab_size], states, bitmask_BW)
                return SamplerOutput(greedy, [None] * len(greedy), pressures=pressures)
        chosen = choose_natively(logits_BV, self.vocab_size, states, bitmask_BW, pending_ids_P, self._shared_generator)
        others = [row for row in range(len(states)) if row not in chosen]
        output = SamplerOutput([chosen.get(row, 0) for row in range(len(states))], self._logprobs(logits_BV, states, chosen))
        if others:
            rows = torch.tensor(others) if chosen else slice(None)  # all of them are not copied
            bitmask_OW = None if bitmask_BW is None else bitmask_BW[rows]
            output.put(others, self._sample_passes(logits_BV[rows], [states[row] for row in others], bitmask_OW, pending_ids_P))
        output.pressures = mask_pressures(logits_BV[:, : self.vocab_size], states, bitmask_BW)
        return output

    def _sample_passes(
        self, logits_BV: Tensor, states: Sequence[SamplingState], bitmask_BW: Tensor | None, pending_ids_P: Tensor | None
    ) -> SamplerOutput:
        """With torch, as many rows at a time as a core's cache holds."""
        output = SamplerOutput([], [])
        processed = self._run_processors(logits_BV, states)
        step = self._rows_per_pass or max(1, len(states))
        for start in range(0, len(states), step):
            rows = slice(start, start + step)
            bitmask = None if bitmask_BW is None else bitmask_BW[rows]
            output.extend(self._sample_pass(logits_BV[rows], states[rows], bitmask, processed[rows], pending_ids_P))
        return output

    def launch(
        self, logits_BV: Tensor, states: Sequence[SamplingState], bitmask_BW: Tensor | None, pending_ids_P: Tensor | None = None
    ) -> LaunchedSamples | None:
        """Like `sample`, but does not wait for the device.

        None where some row has logits processors, or wants candidates or its pressure.
        """
        if not all(state.is_predictable for state in states) or any(state.wants_pressure for state in states):
            return None
        reason = self._reason
        if bitmask_BW is None and logits_BV.is_cuda and not any(map(_has_edits, states)):
            # The kernel reads logits of any type, and the next step may overwrite these before a reason is asked for.
            work_BV, reason = logits_BV[:, : self.vocab_size], lambda *_: NOT_FINITE
        else:
            work_BV = self._float_copy(logits_BV, states)
            self._edit(work_BV, states, pending_ids_P)
            if bitmask_BW is not None:
                self._constrain(work_BV, bitmask_BW)
        token_ids_B, is_possible_B = self._choose(work_BV, states)
        asked = {row: count for row, state in enumerate(states) if (count := state.num_logprobs) is not None}
        logprobs = None
        if asked:
            rows = list(asked)
            raw_RV, ids_R = logits_BV, token_ids_B
            if len(rows) < len(states):
                index_R = to_device(torch.tensor(rows), logits_BV.device)
                raw_RV, ids_R = logits_BV[index_R], token_ids_B[index_R]
            # A row that has no token has no valid id, either.
            logprobs = LaunchedLogprobs.launch(raw_RV[:, : self.vocab_size], ids_R.clamp(0, self.vocab_size - 1), list(asked.values()))
        return LaunchedSamples(token_ids_B, is_possible_B, work_BV, reason, list(asked), logprobs)

    def _sample_pass(
        self,
        logits_BV: Tensor,
        states: Sequence[SamplingState],
        bitmask_BW: Tensor | None,
        processed: Sequence[Tensor | str | None],
        pending_ids_P: Tensor | None,
    ) -> SamplerOutput:
        work_BV = self._float_copy(logits_BV, states)
        failures: dict[int, str] = {}
        for row, result in enumerate(processed):
            if isinstance(result, Tensor):
                work_BV[row, : self.vocab_size] = result
            elif result is not None:
                failures[row] = result
        self._edit(work_BV, states, pending_ids_P)
        unmasked = {
            row: self._probabilities(work_BV[row], state) for row, state in enumerate(states) if state.mask_place is MaskPlace.AFTER
        }
        if bitmask_BW is not None:
            self._constrain(work_BV, bitmask_BW)
        token_ids, is_possible = torch.stack(self._choose(work_BV, states)).tolist()
        for row, possible in enumerate(is_possible):
            if not possible and row not in failures:
                failures[row] = self._reason(logits_BV[row], work_BV[row])
        logprobs = self._logprobs(logits_BV, states, {row: token_id for row, token_id in enumerate(token_ids) if row not in failures})
        distributions = {
            row: distribution_of(probs_V, None if bitmask_BW is None else bitmask_BW[row])
            for row, probs_V in unmasked.items()
            if row not in failures
        }
        for row, state in enumerate(states):
            if state.mask_place is MaskPlace.BEFORE and row not in failures:
                distributions[row] = distribution_of(self._probabilities(work_BV[row], state), None)
        return SamplerOutput(token_ids, logprobs, failures, self._candidates(work_BV, states, failures), distributions=distributions)

    def _probabilities(self, work_W: Tensor, state: SamplingState) -> Tensor:
        return probabilities(work_W[: self.vocab_size], state.params, state.top_k)

    def _float_copy(self, logits_BV: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Float32 [B, W] with -inf in the columns of padding."""
        work_BV = torch.empty((len(logits_BV), self._width), dtype=torch.float32, device=logits_BV.device)
        work_BV[:, : self.vocab_size] = logits_BV[:, : self.vocab_size]
        work_BV[:, self.vocab_size :] = -torch.inf
        searching = [row for row, state in enumerate(states) if state.num_candidates]
        if searching:
            temperatures = torch.tensor([states[row].params.temperature or 1.0 for row in searching], dtype=torch.float32)
            rows = slice(None) if len(searching) == len(states) else index_on(work_BV.device, searching)
            work_BV[rows] = (work_BV[rows] / to_device(temperatures, work_BV.device)[:, None]).log_softmax(-1)
        return work_BV

    def _run_processors(self, logits_BV: Tensor, states: Sequence[SamplingState]) -> list[Tensor | str | None]:
        """For each row the processed logits, [V], or why processing failed; None for rows without processors."""
        results: list[Tensor | str | None] = [None] * len(states)
        rows = [row for row, state in enumerate(states) if state.processors]
        if rows:
            own = [states[row] for row in rows]
            logits_RV = self._float_copy(logits_BV[index_on(logits_BV.device, rows)], own)[:, : self.vocab_size]
            run = ProcessorPass(logits_RV, [state.processors for state in own])
            run.run()
            for place, row in enumerate(rows):
                results[row] = run.failures.get(place, logits_RV[place])
        return results

    def _edit(self, work_BV: Tensor, states: Sequence[SamplingState], pending_ids_P: Tensor | None) -> None:
        """Applies allowed ids, logit bias, penalties, bad words and blocked stop ids."""
        for row, state in enumerate(states):
            if state.allowed_ids is not None:
                kept = work_BV[row, state.allowed_ids]
                work_BV[row] = -torch.inf
                work_BV[row, state.allowed_ids] = kept
            if state.bias_ids is not None:
                work_BV[row, state.bias_ids] += state.biases
        penalised = [(row, state.counts, state.penalties) for row, state in enumerate(states) if state.counts is not None]
        if penalised:
            penalised_rows, counts, penalties = zip(*penalised, strict=True)
            pending_R = _pending_of([states[row] for row in penalised_rows], pending_ids_P)
            apply_penalties(work_BV, penalised_rows, counts, penalties, pending_R)
        masked = [(row, token_id) for row, state in enumerate(states) for token_id in state.masked_ids()]
        if masked:
            rows, ids = to_device(torch.tensor(masked), work_BV.device).unbind(1)
            work_BV[rows, ids] = -torch.inf
        after_pending = [
            (row, state.pending_row, pending_id, token_id)
            for row, state in enumerate(states)
            for pending_id, token_id in state.masked_after_pending()
        ]
        if after_pending:
            assert pending_ids_P is not None
            rows, places, pending_ids, ids = to_device(torch.tensor(after_pending), work_BV.device).unbind(1)
            change = torch.where(pending_ids_P[places] == pending_ids, -torch.inf, 0.0)
            work_BV.index_put_((rows, ids), change, accumulate=True)

    def _constrain(self, work_BV: Tensor, bitmask_BW: Tensor) -> None:
        if bitmask_BW.is_cuda or (bitmask_BW.device.type == "cpu" and native_library() is not None):
            apply_bitmask(work_BV[:, : self.vocab_size], bitmask_BW)  # passes over ones faster than they can be looked for
            return
        rows = (bitmask_BW != -1).any(-1).nonzero()[:, 0].tolist()
        if rows:
            apply_bitmask(work_BV[:, : self.vocab_size], bitmask_BW[rows], rows)

    def _choose(self, work_BV: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, Tensor]:
        """A token for each row, and whether any was possible: int64 [B] both."""
        if work_BV.is_cuda:
            return choose_on_device(work_BV, states, self._shared_generator)
        token_ids = most_probable(work_BV)
        is_possible_B = work_BV.gather(1, token_ids[:, None])[:, 0].isfinite().long()
        is_possible = is_possible_B.tolist()
        drawn = [row for row, state in enumerate(states) if is_possible[row] and not state.takes_first]
        for rows in ([row for row in drawn if states[row].top_k is None], [row for row in drawn if states[row].top_k is not None]):
            if rows:
                logits_BV = work_BV if len(rows) == len(states) else work_BV[rows]
                token_ids[rows] = self._draw(logits_BV, [states[row] for row in rows])
        return token_ids, is_possible_B

    def _draw(self, logits_BV: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draws for rows with a temperature, which all have a top_k or all have none."""
        params = [state.params for state in states]
        top_ks = [state.top_k for state in states if state.top_k is not None]
        ids_BV = None
        if top_ks:
            logits_BV, ids_BV = most_probable_k(logits_BV, top_ks)
        # With 0 as its greatest, no row overflows at a low temperature.
        logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV.div_(torch.tensor([[row.temperature] for row in params], dtype=torch.float32, device=logits_BV.device))
        probs_BV = logits_BV.softmax(-1)
        _drop_below_min_p(probs_BV, [row.min_p for row in params])
        generators = [state.fresh_rng or self._shared_generator for state in states]
        columns = draw(probs_BV, [row.top_p for row in params], [generator.random for generator in generators])
        return columns if ids_BV is None else ids_BV.gather(1, columns[:, None])[:, 0]

    def _candidates(self, work_BV: Tensor, states: Sequence[SamplingState], failures: dict[int, str]) -> dict[int, list[tuple[int, float]]]:
        """The best tokens of the rows that want them, best first; fewer where fewer are allowed."""
        counts = {row: state.num_candidates for row, state in enumerate(states) if state.num_candidates and row not in failures}
        if not counts:
            return {}
        scores_RV = work_BV[index_on(work_BV.device, list(counts))]
        # One more than asked for: it tells whether a tie was cut.
        values, ids = read_columns(*scores_RV.topk(min(max(counts.values()) + 1, self._width)))
        tops = {
            row: top_pairs(scores_V, row_values, list(map(int, row_ids)), count)
            for (row, count), scores_V, row_values, row_ids in zip(counts.items(), scores_RV, values, ids, strict=True)
        }
        return {row: [(token_id, score) for token_id, score in pairs if score > -math.inf] for row, pairs in tops.items()}

    def _reason(self, logits_V: Tensor, work_V: Tensor) -> str:
        logits_V = logits_V[: self.vocab_size]
        if logits_V.isnan().any() or logits_V.isposinf().any():
            return NOT_FINITE
        if work_V.isnan().any() or work_V.isposinf().any():
            return "the logits are not finite after this request's penalties and logits processors"
        return NO_TOKEN_LEFT

    def _logprobs(self, logits_BV: Tensor, states: Sequence[SamplingState], token_ids: Mapping[int, int]) -> list[TokenLogprobs | None]:
        """Of the rows that want them and have a token."""
        result: list[TokenLogprobs | None] = [None] * len(states)
        asked = {row: count for row, state in enumerate(states) if (count := state.num_logprobs) is not None and row in token_ids}
        if asked:
            all_rows, step = list(asked), self._rows_per_pass or len(asked)
            for start in range(0, len(all_rows), step):
                rows = all_rows[start : start + step]
                raw_RV = logits_BV if len(rows) == len(states) else logits_BV[index_on(logits_BV.device, rows)]
                entries = token_logprobs(raw_RV[:, : self.vocab_size], [token_ids[row] for row in rows], [asked[row] for row in rows])
                for row, entry in zip(rows, entries, strict=True):
                    result[row] = entry
        return result


def mask_pressures(logits_BV: Tensor, states: Sequence[SamplingState], bitmask_BW: Tensor | None) -> dict[int, float]:
    """By row, -log(the probability of all tokens that the mask leaves), for the rows that want it: 0 where it forbids nothing probable.

    Probabilities are the model's own: the softmax of the raw logits [B, V], in float64, before anything else that a request asks for.
    """
    rows = [] if bitmask_BW is None else [row for row, state in enumerate(states) if state.wants_pressure]
    if not rows:
        return {}
    assert bitmask_BW is not None
    index_R = index_on(logits_BV.device, rows)
    logits_RV = logits_BV[index_R].float()
    total_R = logits_RV.double().logsumexp(-1)
    apply_bitmask(logits_RV, bitmask_BW[index_on(bitmask_BW.device, rows)].to(logits_RV.device))
    pressures: list[float] = (total_R - logits_RV.double().logsumexp(-1)).clamp(min=0).tolist()
    return dict(zip(rows, pressures, strict=True))


def _has_edits(state: SamplingState) -> bool:
    """Whether the row is sampled from other logits than the model's."""
    is_ruled = state.allowed_ids is not None or state.bias_ids is not None or state.counts is not None
    return is_ruled or bool(state.masked_ids() or state.masked_after_pending())


def _pending_of(states: Sequence[SamplingState], pending_ids_P: Tensor | None) -> Tensor | None:
    """The pending token of each state, -1 where it has none; None where none of them has."""
    if pending_ids_P is None or all(state.pending_row is None for state in states):
        return None
    none = len(pending_ids_P)
    places = torch.tensor([none if state.pending_row is None else state.pending_row for state in states])
    return torch.nn.functional.pad(pending_ids_P, (0, 1), value=-1)[to_device(places, pending_ids_P.device)]


def _drop_below_min_p(probs_BV: Tensor, min_ps: Sequence[float]) -> None:
    rows = [row for row, min_p in enumerate(min_ps) if min_p > 0]
    if not rows:
        return
    bounds = probs_BV[rows].amax(-1) * torch.tensor([min_ps[row] for row in rows], dtype=probs_BV.dtype, device=probs_BV.device)
    # torch's threshold vectorizes, but keeps only what exceeds its bound.
    below: list[float] = torch.nextafter(bounds, torch.zeros_like(bounds)).tolist()
    for row, bound in zip(rows, below, strict=True):
        threshold(probs_BV[row], bound, 0.0, inplace=True)


def greedy_tokens(logits_BV: Tensor, vocab_size: int, bitmask_BW: Tensor | None = None) -> list[int] | None:
    """The first index of each row's maximum among those of its first `vocab_size` logits whose bits are set; without a mask, among all.

    None where the kernel does not apply, or a row's maximum is not finite.
    """
    if not _can_read(logits_BV, bitmask_BW) or (library := native_library()) is None:  # last: the first call builds it
        return None
    token_ids = torch.empty(len(logits_BV), dtype=torch.int64)
    library.penstock_most_probable(
        token_ids.data_ptr(),
        logits_BV.data_ptr(),
        len(logits_BV),
        vocab_size,
        logits_BV.stride(0),
        logits_BV.dtype == torch.bfloat16,
        *_words(bitmask_BW),
    )
    ids: list[int] = token_ids.tolist()
    return ids if min(ids, default=0) >= 0 else None


def choose_natively(
    logits_BV: Tensor,
    vocab_size: int,
    states: Sequence[SamplingState],
    bitmask_BW: Tensor | None,
    pending_ids_P: Tensor | None,
    shared_generator: random.Random,
) -> dict[int, int]:
    """By row, the tokens that native code chooses: not of rows with rules that it does not have, nor of those without a possible token."""
    rows = [row for row, state in enumerate(states) if _is_known(state)]
    if not rows or not _can_read(logits_BV, bitmask_BW) or (library := native_library()) is None:
        return {}
    uniforms = {row: _uniforms(states[row], shared_generator) for row in rows}
    pending_ids = [] if pending_ids_P is None else pending_ids_P.tolist()
    found: dict[int, int] = {}
    num_uniforms = NUM_UNIFORMS
    while rows:
        integers, reals, counted, counts, banned = array("q"), array("d"), array("q"), array("f"), array("q")
        for row in rows:
            state = states[row]
            pending = pending_ids[state.pending_row] if pending_ids and state.pending_row is not None else -1
            own_banned = state.masked_ids() + [token_id for before, token_id in state.masked_after_pending() if before == pending]
            num_counted, penalties = (0, (1.0, 0.0, 0.0)) if state.counts is None else (len(state.counts.ids), state.penalties)
            integers.extend((row, len(counted), num_counted, len(banned), len(own_banned), pending, state.top_k or 0))
            if state.counts is not None:
                counted += state.counts.ids
                counts += state.counts.counts
            banned.extend(own_banned)
            params = state.params
            reals.extend((*penalties, 0.0 if state.takes_first else params.temperature, params.top_p, params.min_p))
            reals.extend(uniforms[row](num_uniforms))
        token_ids = array("q", bytes(8 * len(rows)))
        library.penstock_choose(
            _address(token_ids),
            logits_BV.data_ptr(),
            vocab_size,
            logits_BV.stride(0),
            logits_BV.dtype == torch.bfloat16,
            *_words(bitmask_BW),
            _address(integers),
            _address(reals),
            len(rows),
            len(reals) // len(rows),
            _address(counted),
            _address(counts),
            _address(banned),
        )
        found.update((row, token_id) for row, token_id in zip(rows, token_ids, strict=True) if token_id >= 0)
        rows = [row for row, token_id in zip(rows, token_ids, strict=True) if token_id == MORE_UNIFORMS]
        num_uniforms *= 4
    return found


def _is_known(state: SamplingState) -> bool:
    rules = (state.processors, state.num_candidates, state.mask_place)
    return not any(rules) and state.allowed_ids is None and state.bias_ids is None


def _uniforms(state: SamplingState, shared_generator: random.Random) -> Callable[[int], list[float]]:
    """Gives the first n of the row's numbers, the same at each call."""
    if state.takes_first:
        return lambda count: [0.0] * count
    generator, drawn = state.fresh_rng or shared_generator, list[float]()

    def first(count: int) -> list[float]:
        # Only one is needed without a nucleus.
        while len(drawn) < (count if state.params.top_p < 1 else 1):
            drawn.append(generator.random())
        return drawn + [0.0] * (count - len(drawn))

    return first


def _can_read(logits_BV: Tensor, bitmask_BW: Tensor | None) -> bool:
    if logits_BV.device.type != "cpu" or logits_BV.dtype not in NATIVE_DTYPES or logits_BV.stride(1) != 1:
        return False
    return bitmask_BW is None or (bitmask_BW.device.type == "cpu" and bitmask_BW.stride(1) == 1)


def _words(bitmask_BW: Tensor | None) -> tuple[int | None, int, int]:
    return (None, 0, 0) if bitmask_BW is None else (bitmask_BW.data_ptr(), bitmask_BW.shape[1], bitmask_BW.stride(0))


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
