"""A window of audio as it is decoded: which tokens may come next, where its segments end, and where the next window begins.

The rules are those of OpenAI's Whisper (`decoding.py` and `transcribe.py`; section 4.5 of arXiv:2212.04356), as transformers' `generate`
has them for recordings longer than a window: windows follow each other by the timestamps that the model writes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.transcription.model import FRAMES_PER_TIMESTAMP, TIMESTAMP_SECONDS, SpeechTokens


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text between two timestamps, which are seconds of the recording. `token_ids` include the timestamps.

    `seek` is the frame that its window begins at. `avg_logprob` is the mean log probability of its tokens, `no_speech_prob` the
    probability that there is no speech in its window.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]
    seek: int
    avg_logprob: float
    no_speech_prob: float


@dataclass(slots=True, eq=False)
class Window:
    """Tokens of `num_frames` frames of a recording from `seek` on. `max_tokens` bounds them."""

    tokens: SpeechTokens
    seek: int
    num_frames: int
    max_tokens: int
    no_speech_prob: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_ended: bool = False
    _num_emitted: int = 0  # tokens that are in segments

    def allowed(self, logits_V: Tensor) -> Tensor:
        """The logits with those of tokens that must not come next at -inf.

        Timestamps come in pairs, but for the first one, and do not decrease. The first token is one. Where all timestamps together are
        more probable than any other token, one of them comes.
        """
        tokens, first, written = self.tokens, self.tokens.first_timestamp, self.token_ids
        allowed_V = logits_V.clone()
        allowed_V[[*tokens.suppressed, tokens.no_timestamps]] = -math.inf
        if not written:
            allowed_V[list(tokens.suppressed_first)] = -math.inf
            allowed_V[:first] = -math.inf
            if tokens.max_initial_timestamp is not None:
                allowed_V[first + tokens.max_initial_timestamp + 1 :] = -math.inf
        else:
            is_after_timestamp = written[-1] >= first
            is_after_text = len(written) > 1 and written[-2] < first
            if is_after_timestamp and is_after_text:  # a segment has ended: the next one begins, or the window ends
                allowed_V[: tokens.eos] = -math.inf
            elif is_after_timestamp:
                allowed_V[first:] = -math.inf
            last = next(token for token in reversed(written) if token >= first)
            allowed_V[first : last + (not (is_after_timestamp and is_after_text))] = -math.inf
        logprobs_V = torch.log_softmax(allowed_V, dim=-1)
        if logprobs_V[first:].logsumexp(dim=-1) > logprobs_V[:first].max():
            allowed_V[:first] = -math.inf
        return allowed_V

    def append(self, token_id: int, logprob: float) -> Segment | None:
        """Takes the next token; returns the segment that has ended before it, if it shows that one has."""
        if token_id == self.tokens.eos:
            self.has_ended = True
            return None
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.has_ended = len(self.token_ids) >= self.max_tokens
        first = self.tokens.first_timestamp
        if len(self.token_ids) > 1 and self.token_ids[-2] >= first and token_id >= first:
            return self._segment(self._step_at(self._num_emitted), self._step_at(-2), len(self.token_ids) - 1)
        return None

    def finish(self) -> tuple[list[Segment], int]:
        """The segments that are left of a window that has ended, and how many frames after its beginning the next one begins.

        What follows the last pair of timestamps is decoded again with the audio after it, unless it ends with a timestamp of its own.
        """
        first, written = self.tokens.first_timestamp, self.token_ids
        if self._num_emitted:
            if not (written[-1] >= first and written[-2] < first):
                return [], max(1, self._step_at(self._num_emitted - 1)) * FRAMES_PER_TIMESTAMP
            return [self._segment(self._step_at(self._num_emitted), self._step_at(-1), len(written))], self.num_frames
        timestamps = [token for token in written if token >= first]
        end = self.num_frames // FRAMES_PER_TIMESTAMP
        if timestamps and timestamps[-1] != first:
            end = timestamps[-1] - first
        return [self._segment(0, end, len(written))], self.num_frames

    def _step_at(self, place: int) -> int:
        return self.token_ids[place] - self.tokens.first_timestamp

    def _segment(self, first_step: int, last_step: int, end: int) -> Segment:
        part = slice(self._num_emitted, end)
        logprobs = self.logprobs[part]
        offset = self.seek * TIMESTAMP_SECONDS / FRAMES_PER_TIMESTAMP
        segment = Segment(
            start=round(offset + first_step * TIMESTAMP_SECONDS, 2),
            end=round(offset + last_step * TIMESTAMP_SECONDS, 2),
            token_ids=tuple(self.token_ids[part]),
            seek=self.seek,
            avg_logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
            no_speech_prob=self.no_speech_prob,
        )
        self._num_emitted = end
        return segment


def choose(allowed_V: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[int, float]:
    """The next token and its log probability at temperature 1: the most probable one, or one drawn at a temperature above 0."""
    logprobs_V = torch.log_softmax(allowed_V, dim=-1)
    if temperature == 0.0:
        token = int(allowed_V.argmax())
    else:
        cumulative_V = torch.softmax(allowed_V.double() / temperature, dim=-1).cumsum(dim=-1)
        drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulative_V[-1]
        token = min(int(torch.searchsorted(cumulative_V, drawn, right=True)), len(allowed_V) - 1)
    return token, float(logprobs_V[token])


def prompt_of(tokens: SpeechTokens, language: str | None, task: str, previous: Sequence[int]) -> list[int]:
    """What the decoder reads before a window's own tokens: text that precedes it, if any, and what to do."""
    prompt = [tokens.previous, *previous] if previous else []
    if not tokens.is_multilingual:
        return [*prompt, tokens.start]
    assert language is not None
    return [*prompt, tokens.start, tokens.languages[language], tokens.tasks[task]]
