"""The engine of models that turn speech into text: recordings in, segments out, their windows computed in batches."""

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig, PinThreads
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.loop import LivingEngine, done
from penstock.engine.native.runtime import model_thread, num_model_threads
from penstock.engine.scheduling.admission import Pace, retry_seconds
from penstock.engine.system.memory import is_device_lost
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.transcription.model import Segment, SpeechModel, Window, choose, prompt_of

SpeechTask = Literal["transcribe", "translate"]
FRAMES_PER_SECOND = 100
MAX_SECONDS = 3600  # of one recording, whose features take 115 MB
MAX_SECONDS_HELD = 4 * MAX_SECONDS  # of all recordings that the engine has
WINDOW_FAILED = "the model failed while it computed this recording; the error has been logged"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TranscriptionParams:
    """How to transcribe. `language` is a code such as `en`; None: the model detects it. `prompt` is text that precedes the recording.

    At temperature 0 the most probable tokens are taken. Above, draws depend on the `seed` alone, if there is one.
    """

    task: SpeechTask = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionDelta:
    """What a step added to a recording's text. Counts are those of the recording so far; `is_last` where nothing comes after it."""

    segments: list[Segment]
    language: str | None
    num_prompt_tokens: int
    num_generation_tokens: int
    is_last: bool = False


@dataclass(slots=True, eq=False)
class Recording:
    """A recording that is transcribed: what of it has been decoded, and where its deltas go."""

    features_MT: Tensor
    params: TranscriptionParams
    previous: list[int]
    generator: torch.Generator | None
    deltas: "asyncio.Queue[TranscriptionDelta | Exception]"
    language: str | None
    priority: int = 0
    seek: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    has_ended: bool = False  # or was aborted

    @property
    def num_frames(self) -> int:
        return self.features_MT.shape[1]

    def delta(self, segments: list[Segment], *, is_last: bool = False) -> TranscriptionDelta:
        return TranscriptionDelta(segments, self.language, self.num_prompt_tokens, self.num_generation_tokens, is_last)


@dataclass(slots=True, eq=False)
class _Row:
    """A window that runs, in the slot of the cache that is its place among them."""

    recording: Recording
    window: Window
    num_prompt_tokens: int = 0
    segments: list[Segment] = field(default_factory=list)  # since the last step


@dataclass(frozen=True, slots=True)
class TranscriptionStats:
    """The first two are of this moment, the others have counted since the start."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_windows: int
    num_steps: int


class TranscriptionEngine(LivingEngine):
    """Runs a `SpeechModel` for as many clients as there are. Everything but the model's own thread is on one event loop: no locks.

    Windows of different recordings are encoded in one batch and decoded together; one that has ended makes room in the next step. The
    windows of one recording follow each other, and between two of them those of others have their turn.
    """

    def __init__(
        self, model: SpeechModel, tokenizer: Tokenizer, *, max_waiting: int, num_threads: int, pin_threads: PinThreads = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.num_threads = num_threads
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, Recording]] = []  # a heap: priority, arrival of the window
        self._arrivals: Iterator[int] = itertools.count()
        self._rows: list[_Row] = []
        self._num_frames_held = 0
        self._pace = Pace()
        self._thread = model_thread(model.device, num_threads, pin_threads)
        self._wake = asyncio.Event()
        self._num_prompt_tokens = self._num_generation_tokens = self._num_windows = self._num_steps = 0

    async def start(self) -> None:
        """Begins to serve. An engine is started once: the thread that its model runs in ends with it."""
        self._life.begin(self._run, "transcription-engine")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Takes no more recordings, goes on with those that it has for `drain_seconds`, then ends them."""
        self._life.is_accepting = False
        if self._life.has_begun:
            if not await self._life.drain(drain_seconds, lambda: self._has_work):
                logger.warning("%d recordings were cut off by the shutdown", len(self._open()))
            await self._life.end()
            self._end_all("the server is shutting down")
        await asyncio.to_thread(self._thread.shutdown)

    def stats(self) -> TranscriptionStats:
        counts = (self._num_prompt_tokens, self._num_generation_tokens, self._num_windows, self._num_steps)
        num_running = sum(not (row.window.has_ended or row.recording.has_ended) for row in self._rows)
        return TranscriptionStats(num_running, self._num_waiting(), *counts)

    def check_admission(self, priority: int = 0) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where a recording would be refused whatever it is, and whatever its priority."""
        self._life.check_accepting()
        self._check_room(0)

    def check(self, params: TranscriptionParams) -> None:
        """Raises `InvalidRequest` for what this model cannot do."""
        tokens = self.model.tokens
        if not tokens.is_multilingual:
            if params.language not in (None, "en"):
                raise InvalidRequest(f"this model knows English alone, and `language` is {params.language!r}", "language")
            if params.task == "translate":
                raise InvalidRequest("this model knows English alone, and translates nothing", "model")
        elif params.language is not None and params.language not in tokens.languages:
            known = ", ".join(sorted(tokens.languages))
            raise InvalidRequest(f"`language` is {params.language!r}, and this model knows {known}", "language")

    async def transcribe(
        self, features_MT: Tensor, params: TranscriptionParams, *, priority: int = 0
    ) -> AsyncGenerator[TranscriptionDelta, None]:
        """The segments of a recording as they end, from its `SpeechModel.features`. Closing the generator aborts it.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable` at once, `GenerationFailed` where the model fails.
        """
        self._life.check_accepting()
        self.check(params)
        num_frames = features_MT.shape[1]
        if num_frames > MAX_SECONDS * FRAMES_PER_SECOND:
            raise InvalidRequest(f"the recording is longer than {MAX_SECONDS} seconds", "file")
        self._check_room(num_frames)
        recording = Recording(
            features_MT,
            params,
            previous=self._previous(params.prompt),
            generator=self._generator(params),
            deltas=asyncio.Queue(),
            language=params.language if self.model.tokens.is_multilingual else "en",
            priority=priority,
        )
        if num_frames == 0:
            yield recording.delta([], is_last=True)
            return
        self._num_frames_held += num_frames
        self._push(recording)
        self._wake.set()
        try:
            while True:
                delta = await recording.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.is_last:
                    return
        finally:
            recording.has_ended = True
            self._num_frames_held -= num_frames

    def _previous(self, prompt: str) -> list[int]:
        """The tokens of the text before the recording: the last ones, as many as may be in a window's prompt (`decoding.py`)."""
        if not prompt.strip():
            return []
        token_ids = self.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False)
        text = [token for token in token_ids if token < self.model.tokens.eos]
        return text[-(self.model.max_length // 2 - 1) :]

    def _generator(self, params: TranscriptionParams) -> torch.Generator | None:
        if params.temperature == 0.0:
            return None
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        return generator

    def _push(self, recording: Recording) -> None:
        heapq.heappush(self._waiting, (recording.priority, next(self._arrivals), recording))

    def _open(self) -> list[Recording]:
        recordings = [*(row.recording for row in self._rows), *(entry[-1] for entry in self._waiting)]
        return [recording for recording in recordings if not recording.has_ended]

    def _num_waiting(self) -> int:
        return sum(not entry[-1].has_ended for entry in self._waiting)

    @property
    def _has_work(self) -> bool:
        return bool(self._open())

    def _check_room(self, num_frames: int) -> None:
        """Raises `QueueFull` where too many recordings wait, or where all of them are too long to have another one of this length."""
        if len(self._waiting) >= self._max_waiting and self._num_waiting() < self._max_waiting:
            self._waiting = [entry for entry in self._waiting if not entry[-1].has_ended]
            heapq.heapify(self._waiting)
        is_too_long = self._num_frames_held + num_frames > MAX_SECONDS_HELD * FRAMES_PER_SECOND
        if len(self._waiting) >= self._max_waiting or is_too_long:
            num_left = sum(recording.num_frames - recording.seek for recording in self._open())
            seconds = retry_seconds(self._pace.seconds_for(num_left))
            message = f"{self._num_waiting()} recordings are waiting, and {num_left // FRAMES_PER_SECOND} seconds of audio are left"
            raise QueueFull(f"{message}; try again in {seconds} s", seconds)

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)  # callers that have just had an answer may send more
                removed = [place for place, row in enumerate(self._rows) if row.recording.has_ended or row.window.has_ended]
                num_kept = len(self._rows) - len(removed)
                added = self._next_rows(self.model.num_windows - num_kept)
                if not num_kept and not added:
                    self._rows = []
                    self._life.idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                moves = self._remove(removed)
                self._rows += added
                await self._step(moves, len(added))
        except Exception:  # a defect of our own, or the device is lost: there is no going on, and no client may be left waiting
            logger.exception("The engine has failed")
            self._end_all(ENGINE_FAILED)

    def _next_rows(self, number: int) -> list[_Row]:
        rows: list[_Row] = []
        while self._waiting and len(rows) < number:
            *_, recording = heapq.heappop(self._waiting)
            if not recording.has_ended:
                num_frames = min(self.model.window_frames, recording.num_frames - recording.seek)
                rows.append(_Row(recording, Window(self.model.tokens, recording.seek, num_frames, max_tokens=0)))
        return rows

    def _remove(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Takes rows out, and puts the last ones in their places; returns which slots move where."""
        moves = []
        for place in reversed(places):
            last = len(self._rows) - 1
            if place != last:
                self._rows[place] = self._rows[last]
                moves.append((last, place))
            self._rows.pop()
        return moves

    async def _step(self, moves: Sequence[tuple[int, int]], num_added: int) -> None:
        rows, started = self._rows, time.monotonic()
        future = self._thread.submit(self._compute, rows, moves, num_added)
        await done(future)
        try:
            future.result()
        except Exception as error:  # whatever the model raised: it ends these recordings and nothing else
            if is_device_lost(error):
                raise
            logger.exception("A step of %d windows failed", len(rows))
            self._life.num_failed_steps += 1
            self._rows = []
            for row in rows:
                self._fail(row.recording, GenerationFailed(WINDOW_FAILED))
            return
        self._life.num_failed_steps = 0
        self._num_steps += 1
        num_frames = 0
        for row in rows:
            num_frames += self._update(row)
        now = time.monotonic()
        self._pace.add(num_frames, now - started, now)

    def _update(self, row: _Row) -> int:
        """Sends what the step has added to a window. Where that has ended, the next one waits; returns how many frames are done with."""
        recording, window, segments = row.recording, row.window, row.segments
        row.segments = []
        recording.num_generation_tokens += 1
        self._num_generation_tokens += 1
        if row.num_prompt_tokens:
            recording.num_prompt_tokens += row.num_prompt_tokens
            self._num_prompt_tokens += row.num_prompt_tokens
            self._num_windows += 1
            row.num_prompt_tokens = 0
        num_frames = 0
        if window.has_ended:
            last, num_frames = window.finish()
            segments = segments + last
            recording.seek += num_frames
        is_last = recording.seek >= recording.num_frames
        if segments or is_last:
            recording.deltas.put_nowait(recording.delta(segments, is_last=is_last))
        if window.has_ended and not is_last and not recording.has_ended:
            self._push(recording)
        return num_frames

    def _compute(self, rows: Sequence[_Row], moves: Sequence[tuple[int, int]], num_added: int) -> None:
        """One more token of each window, in the model's thread; the last `num_added` windows are new."""
        for source, target in moves:
            self.model.cache.move(source, target)
        num_kept = len(rows) - num_added
        if num_added:
            self._begin(rows[num_kept:], range(num_kept, len(rows)))
        if num_kept:
            kept = rows[:num_kept]
            token_ids = [row.window.token_ids[-1] for row in kept]
            positions = [self.model.max_length - row.window.max_tokens + len(row.window.token_ids) - 1 for row in kept]
            self._sample(kept, self.model.step(token_ids, positions))

    def _begin(self, rows: Sequence[_Row], slots: Sequence[int]) -> None:
        model = self.model
        model.encode([row.recording.features_MT[:, row.window.seek : row.window.seek + row.window.num_frames] for row in rows], slots)
        unknown = [place for place, row in enumerate(rows) if row.recording.language is None]
        if unknown:
            tokens = list(model.tokens.languages.values())
            logits_BV, _ = model.prefill([[model.tokens.start]] * len(unknown), [slots[place] for place in unknown])
            codes = list(model.tokens.languages)
            for place, best in zip(unknown, logits_BV[:, tokens].argmax(dim=-1).tolist(), strict=True):
                rows[place].recording.language = codes[best]
        prompts = [self._prompt(row.recording) for row in rows]
        logits_BV, starts_BV = model.prefill(prompts, slots)
        no_speech_B = torch.softmax(starts_BV, dim=-1)[:, model.tokens.no_speech].tolist()
        for row, prompt, probability in zip(rows, prompts, no_speech_B, strict=True):
            row.window.max_tokens = model.max_length - len(prompt)
            row.window.no_speech_prob = probability
            row.num_prompt_tokens = len(prompt)
        self._sample(rows, logits_BV)

    def _prompt(self, recording: Recording) -> list[int]:
        return prompt_of(self.model.tokens, recording.language, recording.params.task, recording.previous)

    def _sample(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        for row, logits_V in zip(rows, logits_BV, strict=True):
            token, logprob = choose(row.window.allowed(logits_V), row.recording.params.temperature, row.recording.generator)
            segment = row.window.append(token, logprob)
            if segment is not None:
                row.segments.append(segment)

    def _end_all(self, reason: str) -> None:
        for recording in self._open():
            self._fail(recording, EngineUnavailable(reason))
        self._rows, self._waiting = [], []
        self._life.idle.set()

    def _fail(self, recording: Recording, error: Exception) -> None:
        if not recording.has_ended:
            recording.has_ended = True
            recording.deltas.put_nowait(error)


def build_transcription_engine(directory: Path, tokenizer: Tokenizer, config: EngineConfig) -> TranscriptionEngine:
    """Loads the model and puts an engine around it. Raises `ConfigurationError` for what cannot be served."""
    torch.set_num_threads(1)  # of this thread: the model's has its own
    model = SpeechModel(directory, config)
    return TranscriptionEngine(
        model,
        tokenizer,
        max_waiting=config.max_waiting_requests,
        num_threads=num_model_threads(config),
        pin_threads=config.pin_threads,
    )
