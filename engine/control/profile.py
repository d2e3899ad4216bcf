"""A profile of some steps as a Chrome trace: the engine's own spans, and torch's operations in the thread of the model."""

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.engine.batch import Batch
from penstock.engine.errors import Conflict
from penstock.engine.runner import ModelRunner
from penstock.engine.scheduling.step import Step

MAX_STEPS = 1000
NOTHING: AbstractContextManager[None] = nullcontext()
STEP_ENDS_WITH, MODEL_STEP = "update", "model step"


@dataclass(slots=True)
class Recording:
    """Spans as the trace has them, but for the times, which are in nanoseconds since the epoch. `is_full` is set after the last step."""

    num_wanted: int
    num_steps: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    is_full: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, name: str, start: int, stop: int, details: dict[str, Any]) -> None:
        event = {"name": name, "cat": "penstock", "ph": "X", "pid": os.getpid(), "tid": threading.get_native_id(), "args": details}
        self.events.append(event | {"ts": start, "dur": stop - start})


_TAKING = threading.Lock()  # torch has one profiler in a process


class StepProfiler:
    """Records one profile at a time, of all engines of the process. Belongs to the engine's loop, but for the model's spans."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.recording: Recording | None = None  # while steps are wanted

    async def profile(self, num_steps: int, seconds: float) -> bytes:
        """The trace of the next steps, or of fewer where no more are computed in this time.

        Raises `Conflict` while another profile is taken.
        """
        if not _TAKING.acquire(blocking=False):
            raise Conflict("a profile is being taken already")
        try:
            return await self._profile(Recording(num_steps), seconds)
        finally:
            _TAKING.release()

    async def _profile(self, recording: Recording, seconds: float) -> bytes:
        operations, thread = OperationProfile(), self._runner.thread
        try:
            await asyncio.wrap_future(thread.submit(operations.start))
            self._runner.around_step = lambda batch: self._record_model_step(recording, batch)
            self.recording = recording
            with suppress(TimeoutError):
                await asyncio.wait_for(recording.is_full.wait(), seconds)
        finally:
            self._runner.around_step = self.recording = None
            await asyncio.wrap_future(thread.submit(operations.stop))
        return await asyncio.to_thread(_trace, operations, recording)

    @contextmanager
    def span(self, recording: Recording, name: str, step: Step | None) -> Iterator[None]:
        """A part of a step. The last one of the last step ends the recording."""
        start = time.time_ns()
        try:
            yield
        finally:
            details = {} if step is None else {"sequences": len(step.num_tokens), "tokens": sum(step.num_tokens.values())}
            recording.add(name, start, time.time_ns(), details)
            if name == STEP_ENDS_WITH:
                recording.num_steps += 1
                if recording.num_steps >= recording.num_wanted:
                    recording.is_full.set()
                    self.recording = None

    @contextmanager
    def _record_model_step(self, recording: Recording, batch: Batch) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            details = {"tokens": batch.inputs.input_ids_1T.shape[1], "sampled": len(batch.sampler_rows)}
            recording.add(MODEL_STEP, start, time.time_ns(), details)


class OperationProfile:
    """What torch computes in one thread, the one that starts and stops it."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to standard error that it starts, and that it stops
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._has_started = False

    def start(self) -> None:
        self._profile.start()
        self._has_started = True

    def stop(self) -> None:
        """Does nothing where it was not started: the client may have disconnected before."""
        if self._has_started:
            self._profile.stop()

    def trace(self) -> dict[str, Any]:
        """As torch writes it."""
        with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
            path = os.path.join(directory, "trace.json")
            self._profile.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                trace: dict[str, Any] = json.load(file)
        return trace


def _trace(operations: OperationProfile, recording: Recording) -> bytes:
    """Both in one, on the clock of torch's: microseconds since its base."""
    trace = operations.trace()
    base = int(trace.get("baseTimeNanoseconds", 0))
    for event in recording.events:
        trace["traceEvents"].append(event | {"ts": (event["ts"] - base) / 1000, "dur": event["dur"] / 1000})
    names = {event["tid"]: "model" if event["name"] == MODEL_STEP else "engine loop" for event in recording.events}
    for thread, name in names.items():
        trace["traceEvents"].append({"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}})
    trace["penstock"] = {"steps": recording.num_steps}
    return json.dumps(trace).encode()
